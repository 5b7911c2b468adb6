"""Additive scores in plain PyTorch, a piece of the pairs at a time: any device, no compiler.

    tanh(q + k) = 1 - 2 r,  r = 1 / (1 + exp(2q) exp(2k))

The exponentials are taken once per query and once per key; a pair costs a product and a reciprocal,
in a buffer that stays in the processor's cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from vlattn.attention.kernels.operator import additive_operator

# Up to this size of a query's or key's number its exponentials are finite in the type.
LARGEST = {torch.float32: 43.0, torch.float64: 350.0}
BUFFER = {"cpu": 2**17}  # numbers of the buffer
ELSEWHERE = 2**24


def factors(query: Tensor, key: Tensor) -> bool:
    """Whether exp(2q) and exp(2k) are within the range of their type, everywhere."""
    if query.numel() == 0 or key.numel() == 0:
        return True
    largest = LARGEST[query.dtype]
    return not bool((query.abs().amax() > largest) | (key.abs().amax() > largest))


def _pieces(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """(row of B * H, queries, r of these queries and all keys (T', N, D)), piece by piece."""
    _, num_queries, dim = query.shape
    num_keys = key.size(1)
    factored = factors(query, key)
    if factored:
        query, key = (2 * query).exp(), (2 * key).exp()
    room = BUFFER.get(query.device.type, ELSEWHERE)
    step = min(max(room // max(num_keys * dim, 1), 1), max(num_queries, 1))
    buffer = query.new_empty(step, num_keys, dim)
    for row in range(len(query)):
        for start in range(0, num_queries, step):
            part = slice(start, min(start + step, num_queries))
            r = buffer[: part.stop - start]
            if factored:
                torch.mul(query[row, part, None], key[row], out=r).add_(1).reciprocal_()
            else:
                torch.add(query[row, part, None], key[row], out=r).tanh_().sub_(1).mul_(-0.5)
            yield row, part, r


def scores(query: Tensor, key: Tensor, score_weight: Tensor) -> Tensor:
    batch, heads, num_queries, _ = query.shape
    found = query.new_empty(batch * heads, num_queries, key.size(2))
    totals = score_weight.sum(-1)
    for row, part, r in _pieces(query.flatten(0, 1), key.flatten(0, 1)):
        weight = score_weight[row % heads]
        torch.sub(totals[row % heads], r @ weight, alpha=2, out=found[row, part])
    return found.unflatten(0, (batch, heads))


def gradients(
    grad: Tensor, query: Tensor, key: Tensor, score_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.size(1)
    grad = grad.flatten(0, 1)
    to_query, to_key = query.new_empty(query.shape), key.new_zeros(key.shape)
    to_weight, half = torch.zeros_like(score_weight), query.new_tensor(0.5)
    for row, part, r in _pieces(query.flatten(0, 1), key.flatten(0, 1)):
        b, h = divmod(row, heads)
        piece = grad[row, part]  # (T', N)
        tanh = torch.sub(half, r, out=r)  # half of it
        to_weight[h] += 2 * (piece[:, None] @ tanh).sum((0, 1))
        slope = torch.addcmul(half / 2, tanh, tanh, value=-1, out=tanh)  # a quarter of it
        to_query[b, h, part] = (piece[:, None] @ slope).squeeze(1)
        to_key[b, h] += slope.mul_(piece[..., None]).sum(0)
    weight = 4 * score_weight[:, None]
    return to_query * weight, to_key * weight, to_weight


additive_scores = additive_operator("chunked", scores, gradients)
