"""Attention over projected heads: queries, keys and values in, (output, weights) out.

B batch, H query heads, H_kv key/value heads, T queries, N keys, D head size, D_v value head size.
"""

import importlib.util
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vlattn.attention.kernels import chunked, compiled, reference
from vlattn.attention.masks import check_heads, expand_mask

BACKENDS = ("auto", "reference", "chunked", "compiled", "triton")
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "auto": compiled.additive_scores_if_possible,
    "reference": reference.additive_scores,
    "chunked": chunked.additive_scores,
    "compiled": compiled.additive_scores,
}
# Whether the CPU multiplies matrices in bfloat16 by instructions of its own.
HAS_FAST_BF16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
FEW_QUERIES = 8  # those of one step of writing: a word of each beam or sample
HAS_TRITON = importlib.util.find_spec("triton") is not None


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    backend: Literal["auto", "reference", "chunked", "compiled", "triton"] = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attention with the score `score_weight . tanh(query + key)`.

    Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", ICLR 2015.

    Args:
        query: (B, H, T, D).
        key: (B, H_kv, N, D); neighbouring query heads share one key/value head.
        value: (B, H_kv, N, D_v).
        score_weight: (H, D).
        mask: boolean, True = may attend: (T, N), (B, 1, N), (B, T, N) or (B, H, T, N).
        dropout_p: share of the weights that is dropped before the weighted sum.
        need_weights: also return the weights.
        backend: how it is computed. "reference" writes the score out, and stores B*H*T*N*D numbers;
            the others store none of them, and have no second derivative: "chunked" is plain
            PyTorch, "compiled" needs a C++ compiler, "triton" a GPU. "auto" is the fastest one
            that the device has.

    Returns:
        output (B, H, T, D_v), and weights (B, H, T, N): after the softmax, before dropout; None
        unless asked for. A row with nothing to attend has zero weights and a zero output.
    """
    check_heads(query, key, value)
    heads, head_dim = query.size(1), query.size(-1)
    if score_weight.shape != (heads, head_dim):
        raise ValueError(
            f"score_weight must have shape (H, D) = {(heads, head_dim)}, "
            f"got {tuple(score_weight.shape)}"
        )
    if backend not in BACKENDS:
        names = ", ".join(BACKENDS)
        raise ValueError(f"backend must be one of {names}, got {backend!r}")
    device = query.device.type
    if backend == "auto" and device != "cpu":
        backend = "triton" if device == "cuda" and HAS_TRITON else "chunked"
    if backend == "triton":
        from vlattn.attention.kernels import triton

        mask = expand_mask(mask, (*query.shape[:3], key.size(2)))
        return triton.additive_attention(
            query, key, value, score_weight, mask, dropout_p, need_weights
        )
    score = SCORES[backend]

    def attend(query, key, value, mask):
        scores = score(query, key, score_weight)
        return _weighted_sum(scores, value, mask, dropout_p, need_weights)

    return _guarded(query, key, value, mask, attend)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention with the score `query . key / sqrt(D)`.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017. Arguments and results are those of
    `additive_attention`.
    """
    check_heads(query, key, value)
    scale = query.size(-1) ** -0.5
    fused = not need_weights and _fused_is_faster(query)

    def attend(query, key, value, mask):
        if fused:
            return _fused(query, key, value, mask, dropout_p), None
        scores = (query * scale) @ key.transpose(-1, -2)
        return _weighted_sum(scores, value, mask, dropout_p, need_weights)

    return _guarded(query, key, value, mask, attend)


def _weighted_sum(
    scores: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores (B, H, T, N) -> masked softmax -> dropout -> weighted sum, and the weights."""
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)  # a row with nothing to attend
    output = F.dropout(weights, dropout_p) @ value.to(weights.dtype)  # (B, H, T, D_v)
    return output.to(value.dtype), weights.to(value.dtype) if need_weights else None


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float
) -> Tensor:
    """PyTorch's one call, with zeros for a row with nothing to attend."""
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p)
    empty = ~mask.any(-1, keepdim=True)
    output = F.scaled_dot_product_attention(query, key, value, mask | empty, dropout_p)
    return output.masked_fill(empty, 0.0)


def _guarded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attend: Callable
) -> tuple[Tensor, Tensor | None]:
    """`attend(query, key, value, mask)` for as many heads each, and a mask of four axes.

    What lies under the mask may be anything. Zero times NaN is NaN, also in the backward pass, so
    what is not finite is set to zero before it meets a product.
    """
    groups = query.size(1) // max(key.size(1), 1)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    mask = expand_mask(mask, (*query.shape[:3], key.size(2)))
    if mask is None or known_finite(query, key, value):
        return attend(query, key, value, mask)
    finite_query = _finite_rows(query)  # (B, H, T, 1)
    finite_key = _finite_rows(key) & _finite_rows(value)  # (B, H, N, 1)
    query = query.masked_fill(~finite_query, 0.0)
    key, value = (x.masked_fill(~finite_key, 0.0) for x in (key, value))
    output, weights = attend(query, key, value, mask)
    # A row that may attend to such a number shows it, as it would without a mask.
    spoiled = (mask & ~(finite_query & finite_key.transpose(2, 3))).any(-1, keepdim=True)
    output = output.masked_fill(spoiled, torch.nan)
    return output, None if weights is None else weights.masked_fill(spoiled, torch.nan)


def _fused_is_faster(query: Tensor) -> bool:
    """Whether PyTorch's one call beats the products written out; see benchmarks/attention.py.

    It does, but in half precision on a CPU: there it lays out keys and values anew, which takes up
    to nine times as long as one word's look at them; and its backward pass does not use fast
    bfloat16 products.
    """
    if query.device.type != "cpu" or query.dtype not in (torch.bfloat16, torch.float16):
        return True
    learns = torch.is_grad_enabled() and query.requires_grad
    return query.size(2) > FEW_QUERIES and not (learns and HAS_FAST_BF16)


def known_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite, where looking is cheap: a GPU would have to wait for it."""
    if torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in tensors):
        return False
    return all(bool(_total(x.detach()).isfinite()) for x in tensors)


def _total(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """A sum that is finite only if every number is."""
    return x.sum(dim, keepdim=dim is not None, dtype=torch.promote_types(x.dtype, torch.float32))


def _finite_rows(x: Tensor) -> Tensor:
    """(..., D) -> (..., 1): whether all numbers of a row are finite."""
    return _total(x.detach(), (-1,)).isfinite()
