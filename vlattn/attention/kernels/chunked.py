"""Additive scores in plain PyTorch, a piece of the pairs at a time: any device, no compiler.

    tanh(q + k) = 1 - 2 r,  r = 1 / (1 + exp(2q) exp(2k))

The exponentials are taken once per query and once per key; a pair costs a product and a reciprocal,
in a buffer that a processor's caches hold.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from vlattn.attention.kernels import reference
from vlattn.attention.kernels.operator import additive_operator

# Up to this size of a query's or key's number its exponentials are finite in the type.
LARGEST = {torch.float32: 43.0, torch.float64: 350.0}
BUFFER = {"cpu": 2**19}  # numbers of the buffer
ELSEWHERE = 2**24


def factors(query: Tensor, key: Tensor) -> bool:
    """Whether exp(2q) and exp(2k) are within the range of their type, everywhere."""
    if query.numel() == 0 or key.numel() == 0:
        return True
    largest = LARGEST[query.dtype]
    return not bool((query.abs().amax() > largest) | (key.abs().amax() > largest))


def _pieces(query: Tensor, key: Tensor) -> Iterator[tuple[tuple[slice, int], slice, Tensor]]:
    """(pictures and a head, queries, r of these queries and all keys (B', T', N, D)), by pieces."""
    batch, heads, num_queries, dim = query.shape
    num_keys = key.size(2)
    factored = factors(query, key)
    if factored:
        query, key = (2 * query).exp_(), (2 * key).exp_()
    room = BUFFER.get(query.device.type, ELSEWHERE)
    rows = min(max(room // max(num_keys * dim, 1), 1), max(batch * num_queries, 1))
    step = max(min(rows, num_queries), 1)  # queries of a piece
    pictures = max(rows // step, 1)
    one = query.new_ones(())
    buffer = query.new_empty(pictures, step, num_keys, dim)
    for head in range(heads):
        for first in range(0, batch, pictures):
            where = slice(first, min(first + pictures, batch)), head
            for start in range(0, num_queries, step):
                part = slice(start, min(start + step, num_queries))
                r = buffer[: where[0].stop - first, : part.stop - start]
                left, right = query[where][:, part, None], key[where][:, None]
                if factored:
                    torch.addcmul(one, left, right, out=r).reciprocal_()
                else:
                    torch.add(left, right, out=r).tanh_().sub_(1).mul_(-0.5)
                yield where, part, r


def scores(query: Tensor, key: Tensor, score_weight: Tensor) -> Tensor:
    found = query.new_empty(*query.shape[:3], key.size(2))
    totals = score_weight.sum(-1)
    for where, part, r in _pieces(query, key):
        head = where[1]
        torch.sub(totals[head], r @ score_weight[head], alpha=2, out=found[where][:, part])
    return found


def gradients(
    grad: Tensor, query: Tensor, key: Tensor, score_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    to_query, to_key = query.new_empty(query.shape), key.new_zeros(key.shape)
    to_weight, half = torch.zeros_like(score_weight), query.new_tensor(0.5)
    for where, part, r in _pieces(query, key):
        piece = grad[where][:, part]  # (B', T', N)
        tanh = torch.sub(half, r, out=r)  # half of it
        to_weight[where[1]] += 2 * (piece.flatten() @ tanh.flatten(0, 2))
        slope = torch.addcmul(half / 2, tanh, tanh, value=-1, out=tanh)  # a quarter of it
        to_query[where][:, part] = (piece[:, :, None] @ slope).squeeze(2)
        to_key[where] += slope.mul_(piece[..., None]).sum(1)
    weight = 4 * score_weight[:, None]
    return to_query * weight, to_key * weight, to_weight


_of_many_queries = additive_operator("chunked", scores, gradients)


def additive_scores(query: Tensor, key: Tensor, score_weight: Tensor) -> Tensor:
    """One query stores no more than the keys do: the score written out is then the faster one."""
    if query.size(2) == 1:
        return reference.additive_scores(query, key, score_weight)
    return _of_many_queries(query, key, score_weight)
