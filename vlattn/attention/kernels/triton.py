"""Additive attention on the GPU: tiles of queries and keys, online softmax, no pair stored.

After Dao et al., "FlashAttention", NeurIPS 2022, with the additive score in the place of the dot
product. With e = exp(2q) exp(2k) the tanh of a pair is 1 - 2 / (1 + e), and two features share a
division. The backward pass computes the scores again, from the inputs and the softmax's logarithm.

B batch, H query heads, G key/value heads, T queries, N keys, D head size, D_v value head size.
Queries and keys are read with the features first, (B, H, D, T) and (B, G, D, N), D even. A row that
is not finite is read as zeros, and a query that may attend to one has NaN for its output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vlattn.attention.kernels.operator import refuse_second_derivative

QUERIES, KEYS = 32, 32  # of a tile
SMALL = 20  # numbers up to this have exponentials whose product is finite


@triton.jit
def _feature(x, d, place, length, finite):
    """Twice the feature d at these places, in float32."""
    number = tl.load(x + d * length + place, mask=finite, other=0.0)
    return 2 * number.to(tl.float32)


@triton.jit
def _one_plus_exp(q, k, small):
    """1 + exp(q + k) of a tile, bounded such that the product of two is finite."""
    if small:
        e = tl.exp(q)[:, None] * tl.exp(k)[None, :]
    else:
        e = tl.exp(tl.minimum(q[:, None] + k[None, :], 41.0))
    return 1 + tl.minimum(e, 1e18)


@triton.jit
def _scores(q, k, weight, t, n, T, N, D, use_t, use_n, small, BT: tl.constexpr, BN: tl.constexpr):
    """The scores of a tile (BT, BN)."""
    reciprocals = tl.zeros((BT, BN), tl.float32)
    total = 0.0
    for d in range(0, D, 2):
        w0, w1 = tl.load(weight + d), tl.load(weight + d + 1)
        q0, q1 = _feature(q, d, t, T, use_t), _feature(q, d + 1, t, T, use_t)
        k0, k1 = _feature(k, d, n, N, use_n), _feature(k, d + 1, n, N, use_n)
        a, b = _one_plus_exp(q0, k0, small), _one_plus_exp(q1, k1, small)
        reciprocals += (w0 * b + w1 * a) / (a * b)
        total += w0 + w1
    return total - 2 * reciprocals


@triton.jit
def _allowed(mask, t, n, T, N, mask_t, mask_n, HAS_MASK: tl.constexpr):
    """Which pairs of a tile may attend."""
    inside = (t < T)[:, None] & (n < N)[None, :]
    if HAS_MASK:
        place = t.to(tl.int64)[:, None] * mask_t + n.to(tl.int64)[None, :] * mask_n
        inside = inside & (tl.load(mask + place, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _usable(fine, small, row, place, length):
    """Which rows of a tile are finite, and whether all of them are small."""
    inside = place < length
    use = tl.load(fine + row * length + place, mask=inside, other=0) != 0
    return use, tl.min(tl.load(small + row * length + place, mask=inside, other=1), 0) != 0


@triton.jit
def _kept(p, seed, row, t, n, T, N, dropout_p):
    """Weights after dropout; the same numbers are drawn in every pass."""
    drawn = tl.rand(tl.load(seed), (row * T + t[:, None]) * N + n[None, :])
    return tl.where(drawn >= dropout_p, p / (1 - dropout_p), 0.0)


@triton.jit
def _forward(
    q, k, v, weight, mask, fine_q, fine_k, small_q, small_k, out, logsum, weights, seed, dropout_p,
    H, GROUPS, T, N, D, DV, mask_b, mask_h, mask_t, mask_n,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, WEIGHTS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)  # of B * H
    kv_row = row // GROUPS
    t, dv = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BV)
    q += row * D * T
    k += kv_row * D * N
    weight += row % H * D
    mask += row // H * mask_b + row % H * mask_h
    use_t, small_t = _usable(fine_q, small_q, row, t, T)
    top = tl.full((BT,), float("-inf"), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    spoiled = tl.zeros((BT,), tl.int32)
    sums = tl.zeros((BT, BV), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        use_n, small_n = _usable(fine_k, small_k, kv_row, n, N)
        small = small_n & small_t
        allowed = _allowed(mask, t, n, T, N, mask_t, mask_n, HAS_MASK)
        fine = use_t[:, None] & use_n[None, :]
        spoiled = tl.maximum(spoiled, tl.max((allowed & (fine == 0)).to(tl.int32), 1))
        s = _scores(q, k, weight, t, n, T, N, D, use_t, use_n, small, BT, BN)
        s = tl.where(allowed, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(s - shift[:, None])
        past = tl.exp(top - shift)
        total = total * past + tl.sum(p, 1)
        if DROPOUT:
            p = _kept(p, seed, row, t, n, T, N, dropout_p)
        value = tl.load(
            v + (kv_row * N + n[:, None]) * DV + dv[None, :],
            mask=use_n[:, None] & (dv < DV)[None, :],
            other=0.0,
        ).to(tl.float32)
        sums = sums * past[:, None] + tl.dot(p, value, input_precision="ieee")
        top = new_top
    empty = total == 0
    log = tl.where(empty | (spoiled != 0), float("inf"), top + tl.log(tl.where(empty, 1.0, total)))
    sums = tl.where(
        spoiled[:, None] != 0, float("nan"), sums / tl.where(empty, 1.0, total)[:, None]
    )
    place = (row * T + t[:, None]) * DV + dv[None, :]
    tl.store(out + place, sums, mask=(t < T)[:, None] & (dv < DV)[None, :])
    tl.store(logsum + row * T + t, log, mask=t < T)
    if WEIGHTS:
        for start in range(0, N, BN):
            n = start + tl.arange(0, BN)
            use_n, small_n = _usable(fine_k, small_k, kv_row, n, N)
            allowed = _allowed(mask, t, n, T, N, mask_t, mask_n, HAS_MASK)
            s = _scores(q, k, weight, t, n, T, N, D, use_t, use_n, small_n & small_t, BT, BN)
            p = tl.where(allowed, tl.exp(s - log[:, None]), 0.0)
            p = tl.where(spoiled[:, None] != 0, float("nan"), p)
            place = (row * T + t[:, None]) * N + n[None, :]
            tl.store(weights + place, p, mask=(t < T)[:, None] & (n < N)[None, :])


@triton.jit
def _score_gradient(
    q, k, v, weight, mask, grad_out, grad_weights, row, t, n, use_t, use_n, small, log, delta,
    seed, dropout_p, T, N, D, DV, mask_t, mask_n,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, WEIGHTS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile's scores, its weights after dropout, the output's gradient."""
    dv = tl.arange(0, BV)
    s = _scores(q, k, weight, t, n, T, N, D, use_t, use_n, small, BT, BN)
    allowed = _allowed(mask, t, n, T, N, mask_t, mask_n, HAS_MASK)
    p = tl.where(allowed, tl.exp(s - log[:, None]), 0.0)
    value = tl.load(
        v + n[:, None] * DV + dv[None, :], mask=use_n[:, None] & (dv < DV)[None, :], other=0.0
    ).to(tl.float32)
    grad = tl.load(
        grad_out + (row * T + t[:, None]) * DV + dv[None, :],
        mask=(t < T)[:, None] & (dv < DV)[None, :],
        other=0.0,
    ).to(tl.float32)
    to_p = tl.dot(grad, tl.trans(value), input_precision="ieee")
    kept = p
    if DROPOUT:
        to_p = _kept(to_p, seed, row, t, n, T, N, dropout_p)
        kept = _kept(p, seed, row, t, n, T, N, dropout_p)
    if WEIGHTS:
        inside = (t < T)[:, None] & (n < N)[None, :]
        place = (row * T + t[:, None]) * N + n[None, :]
        to_p += tl.load(grad_weights + place, mask=inside, other=0.0).to(tl.float32)
    return p * (to_p - delta[:, None]), kept, grad


@triton.jit
def _query_gradient(
    q, k, v, weight, mask, fine_q, fine_k, small_q, small_k, logsum, delta, grad_out, grad_weights,
    to_q, to_weight, seed, dropout_p,
    H, GROUPS, T, N, D, DV, mask_b, mask_h, mask_t, mask_n,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, WEIGHTS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """to_q (B * H, D, T), and to_weight (B * H, tiles of queries, D); both start as zeros."""
    row = tl.program_id(1).to(tl.int64)
    kv_row = row // GROUPS
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    q += row * D * T
    k += kv_row * D * N
    v += kv_row * N * DV
    weight += row % H * D
    mask += row // H * mask_b + row % H * mask_h
    to_q += row * D * T
    to_weight += (row * tl.num_programs(0) + tl.program_id(0)) * D
    use_t, small_t = _usable(fine_q, small_q, row, t, T)
    log = tl.load(logsum + row * T + t, mask=t < T, other=float("inf"))
    shift = tl.load(delta + row * T + t, mask=t < T, other=0.0)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        use_n, small_n = _usable(fine_k, small_k, kv_row, n, N)
        small = small_n & small_t
        to_s, _, _ = _score_gradient(
            q, k, v, weight, mask, grad_out, grad_weights, row, t, n, use_t, use_n, small, log,
            shift, seed, dropout_p, T, N, D, DV, mask_t, mask_n,
            HAS_MASK, DROPOUT, WEIGHTS, BT, BN, BV,
        )  # fmt: skip
        for d in range(D):
            r = 1 / _one_plus_exp(_feature(q, d, t, T, use_t), _feature(k, d, n, N, use_n), small)
            slope = 4 * tl.load(weight + d) * tl.sum(to_s * (r - r * r), 1)
            held = tl.load(to_q + d * T + t, mask=t < T, other=0.0)
            tl.store(to_q + d * T + t, held + slope, mask=t < T)
            tl.store(to_weight + d, tl.load(to_weight + d) + tl.sum(to_s * (1 - 2 * r)))


@triton.jit
def _key_gradient(
    q, k, v, weight, mask, fine_q, fine_k, small_q, small_k, logsum, delta, grad_out, grad_weights,
    to_k, to_v, seed, dropout_p,
    H, GROUPS, T, N, D, DV, mask_b, mask_h, mask_t, mask_n,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, WEIGHTS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """to_k (B * G, D, N), which starts as zeros, and to_v (B * G, N, D_v)."""
    kv_row = tl.program_id(1).to(tl.int64)  # of B * G
    n, dv = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BV)
    k += kv_row * D * N
    v += kv_row * N * DV
    to_k += kv_row * D * N
    use_n, small_n = _usable(fine_k, small_k, kv_row, n, N)
    sums = tl.zeros((BN, BV), tl.float32)
    for head in range(GROUPS):
        row = kv_row * GROUPS + head
        row_q, row_weight = q + row * D * T, weight + row % H * D
        row_mask = mask + row // H * mask_b + row % H * mask_h
        for start in range(0, T, BT):
            t = start + tl.arange(0, BT)
            use_t, small_t = _usable(fine_q, small_q, row, t, T)
            small = small_t & small_n
            log = tl.load(logsum + row * T + t, mask=t < T, other=float("inf"))
            shift = tl.load(delta + row * T + t, mask=t < T, other=0.0)
            to_s, kept, grad = _score_gradient(
                row_q, k, v, row_weight, row_mask, grad_out, grad_weights, row, t, n, use_t, use_n,
                small, log, shift, seed, dropout_p, T, N, D, DV, mask_t, mask_n,
                HAS_MASK, DROPOUT, WEIGHTS, BT, BN, BV,
            )  # fmt: skip
            sums += tl.dot(tl.trans(kept), grad, input_precision="ieee")
            for d in range(D):
                r = 1 / _one_plus_exp(
                    _feature(row_q, d, t, T, use_t), _feature(k, d, n, N, use_n), small
                )
                slope = 4 * tl.load(row_weight + d) * tl.sum(to_s * (r - r * r), 0)
                held = tl.load(to_k + d * N + n, mask=n < N, other=0.0)
                tl.store(to_k + d * N + n, held + slope, mask=n < N)
    place = (kv_row * N + n[:, None]) * DV + dv[None, :]
    tl.store(to_v + place, sums, mask=(n < N)[:, None] & (dv < DV)[None, :])


def _rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features first, D even; which rows are finite; which are small enough for an exponential."""
    finite = x.isfinite().all(-1)
    small = x.abs().amax(-1) <= SMALL
    first = torch.nn.functional.pad(x, (0, x.size(-1) % 2)).transpose(2, 3).contiguous()
    return first, finite, small


class _Launch:
    """What every kernel of one attention is called with."""

    def __init__(self, query, key, value, score_weight, mask, dropout_p, seed, need_weights):
        self.shape = (*query.shape[:3], key.size(2))
        _, heads, num_queries, num_keys = self.shape
        self.kv_heads, value_dim = key.size(1), value.size(3)
        self.query, finite_query, small_query = _rows(query)
        self.key, finite_key, small_key = _rows(key)
        finite_key &= value.isfinite().all(-1)
        weight = torch.nn.functional.pad(score_weight, (0, score_weight.size(1) % 2)).float()
        self.dim = weight.size(1)
        strides = (0, 0, 0, 0) if mask is None else mask.expand(self.shape).stride()
        self.tensors = (
            *(self.query, self.key, value.contiguous(), weight.contiguous()),
            finite_query if mask is None else mask,  # never read without a mask
            *(finite_query, finite_key, small_query, small_key),
        )
        self.seed, self.dropout_p = seed, dropout_p
        groups = heads // self.kv_heads
        self.sizes = (heads, groups, num_queries, num_keys, self.dim, value_dim, *strides)
        self.constants = {
            **{"HAS_MASK": mask is not None, "DROPOUT": dropout_p > 0, "WEIGHTS": need_weights},
            **{"BT": QUERIES, "BN": KEYS, "BV": max(triton.next_power_of_2(value_dim), 16)},
        }

    def __call__(self, kernel, grid: tuple[int, int], *tensors: Tensor) -> None:
        arguments = (*self.tensors, *tensors, self.seed, self.dropout_p, *self.sizes)
        if 0 not in grid:
            kernel[grid](*arguments, **self.constants)


@torch.library.custom_op("vlattn::additive_attention_triton", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights (no number unless asked for), logarithm of the softmax's sum (B, H, T)."""
    launch = _Launch(query, key, value, score_weight, mask, dropout_p, seed, need_weights)
    batch, heads, num_queries, _ = launch.shape
    output = value.new_empty(batch, heads, num_queries, value.size(3))
    weights = query.new_empty(launch.shape if need_weights else 0)
    logsum = query.new_empty(launch.shape[:3], dtype=torch.float32)
    grid = (triton.cdiv(num_queries, QUERIES), batch * heads)
    launch(_forward, grid, output, logsum, weights)
    return output, weights, logsum


@_attention.register_fake
def _(query, key, value, score_weight, mask, seed, dropout_p, need_weights):
    shape = (*query.shape[:3], key.size(2))
    return (
        value.new_empty(*shape[:3], value.size(3)),
        query.new_empty(shape if need_weights else 0),
        query.new_empty(shape[:3], dtype=torch.float32),
    )


@torch.library.custom_op("vlattn::additive_attention_triton_backward", mutates_args=())
def _attention_backward(
    grad_output: Tensor,
    grad_weights: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    output: Tensor,
    weights: Tensor,
    logsum: Tensor,
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    launch = _Launch(query, key, value, score_weight, mask, dropout_p, seed, need_weights)
    batch, heads, num_queries, num_keys = launch.shape
    delta = (grad_output.float() * output.float()).sum(-1)
    if need_weights:
        delta += (grad_weights.float() * weights.float()).sum(-1)
    delta.masked_fill_(logsum.isinf(), 0.0)  # rows that attend to nothing, or to what is not finite
    blocks = triton.cdiv(num_queries, QUERIES)
    to_query, to_key = (
        torch.zeros_like(x, dtype=torch.float32) for x in (launch.query, launch.key)
    )
    to_weight = to_query.new_zeros(batch, heads, blocks, launch.dim)
    to_value = torch.empty_like(value, memory_format=torch.contiguous_format)
    given = (logsum, delta, grad_output.contiguous(), grad_weights.contiguous())
    launch(_query_gradient, (blocks, batch * heads), *given, to_query, to_weight)
    grid = (triton.cdiv(num_keys, KEYS), batch * launch.kv_heads)
    launch(_key_gradient, grid, *given, to_key, to_value)
    dim = query.size(3)
    return (
        to_query.transpose(2, 3)[..., :dim].to(query.dtype).contiguous(),
        to_key.transpose(2, 3)[..., :dim].to(key.dtype).contiguous(),
        to_value,
        to_weight.sum((0, 2))[:, :dim].to(score_weight.dtype).contiguous(),
    )


@_attention_backward.register_fake
def _(grad_output, grad_weights, query, key, value, score_weight, *rest):
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (query, key, value, score_weight)
    )


def _save(ctx, inputs, output):
    *tensors, ctx.dropout_p, ctx.need_weights = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_output, grad_weights, _):
    grads = _attention_backward(
        grad_output, grad_weights, *ctx.saved_tensors, ctx.dropout_p, ctx.need_weights
    )
    return (*grads, None, None, None, None)


_attention.register_autograd(_backward, setup_context=_save)
_attention_backward.register_autograd(refuse_second_derivative("triton"))


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_weight: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """`vlattn.attention.additive_attention` on checked arguments; the mask has four axes."""
    seed = torch.randint(2**31 - 1, (1,), device=query.device)
    output, weights, _ = _attention(
        query, key, value, score_weight, mask, seed, dropout_p, need_weights
    )
    return output, weights if need_weights else None
