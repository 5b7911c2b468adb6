"""What a mask hides has no say: not in outputs, not in weights, not in gradients."""

import pytest
import torch
import torch.nn.functional as F
from conftest import MODULES
from torch import Tensor, nn

from vlattn.attention import (
    CrossAttention,
    ScaledDotProductAttention,
    additive_attention,
    causal_mask,
    length_mask,
    scaled_dot_product_attention,
)

B, H, T, N, D, D_V = 2, 4, 5, 7, 3, 6
KINDS = tuple(MODULES)
SHAPES = ((T, N), (B, 1, N), (B, T, N), (B, H, T, N))
BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(kind: str, **options) -> CrossAttention:
    options = {"hidden_dim": 12, "num_heads": H, "num_kv_heads": 2, **options}
    return MODULES[kind](16, 10, 18, **options).double()


def inputs(queries: int = T, keys: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(
        torch.randn(B, length, dim, dtype=torch.float64)
        for length, dim in ((queries, 16), (keys, 10), (keys, 18))
    )


def heads() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projected queries, keys and values, and the score weight of additive attention."""
    shapes = ((B, H, T, D), (B, 2, N, D), (B, 2, N, D_V), (H, D))
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def call(kind: str, query, key, value, score_weight, mask=None, **options):
    if kind.startswith("additive"):
        options = {"backend": MODULES[kind].backend, **options}
        return additive_attention(query, key, value, score_weight, mask, **options)
    return scaled_dot_product_attention(query, key, value, mask, **options)


def random_mask(shape: tuple[int, ...]) -> Tensor:
    """No row is empty or full."""
    mask = torch.rand(shape) < 0.5
    mask[..., 1], mask[..., 4] = True, False
    return mask


def gradients(output: Tensor, attn: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """Of a loss that weighs each number of the output differently; anomalies raise."""
    slope = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return list(torch.autograd.grad((output * slope).sum(), [*tensors, *attn.parameters()]))


# Making masks


@pytest.mark.parametrize("queries, keys", [(5, 7), (7, 5), (5, 5), (1, 7), (0, 7), (5, 0)])
def test_causal_mask_ends_in_the_corner_where_writing_goes_on(queries, keys):
    """Elsewhere it was aligned top-left, and a cached step saw the first key alone."""
    mask = causal_mask(queries, keys)
    assert mask.dtype == torch.bool and mask.shape == (queries, keys)
    for t in range(queries):
        for n in range(keys):
            assert mask[t, n] == (n - keys <= t - queries)


def test_causal_mask_is_as_drawn():
    drawn = {(3, 3): ["100", "110", "111"], (2, 4): ["1110", "1111"]}
    for shape, rows in drawn.items():
        assert causal_mask(*shape).tolist() == [[c == "1" for c in row] for row in rows]
    assert torch.equal(causal_mask(3), causal_mask(3, 3))


def test_length_mask_marks_the_first_places():
    lengths = torch.tensor([2, 0, 3])
    rows = ["11000", "00000", "11100"]
    expected = torch.tensor([[c == "1" for c in row] for row in rows])
    assert torch.equal(length_mask(lengths, 5), expected)
    assert torch.equal(length_mask(lengths), expected[:, :3])


# Shapes and types


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_hides_what_it_says(kind, shape):
    """Each row over the keys left to it is each row over all keys under the mask."""
    query, key, value, score_weight = heads()
    mask = random_mask(shape)
    output, weights = call(kind, query, key, value, score_weight, mask, need_weights=True)
    full = mask if len(shape) == 4 else mask.view(-1, 1, *shape[-2:])
    full = full.expand(B, H, T, N)
    assert (weights[~full] == 0).all()
    for b in range(B):
        for h in range(H):
            for t in range(T):
                row = slice(b, b + 1), slice(h, h + 1)
                kv = slice(b, b + 1), slice(h // 2, h // 2 + 1), full[b, h, t]
                expected_output, expected_weights = call(
                    kind,
                    query[(*row, slice(t, t + 1))],
                    key[kv],
                    value[kv],
                    score_weight[h, None],
                    need_weights=True,
                )
                torch.testing.assert_close(output[b, h, t], expected_output[0, 0, 0])
                torch.testing.assert_close(
                    weights[b, h, t, full[b, h, t]], expected_weights[0, 0, 0]
                )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_keys_have_no_say_and_visible_keys_do(kind, shape):
    """Elsewhere masks of the other polarity or type hid nothing, or the exact opposite."""
    attn, (query, key, value), mask = build(kind), inputs(), random_mask(shape)
    before = attn(query, key, value, mask)[0]
    for n, moves in ((4, False), (1, True)):
        other_key, other_value = key.clone(), value.clone()
        other_key[:, n] += 3
        other_value[:, n] -= 2
        after = attn(query, other_key, other_value, mask)[0]
        changed = (before != after).any(-1)
        assert changed.all() if moves else not changed.any()


@pytest.mark.parametrize("kind", KINDS)
def test_mask_over_keys_needs_its_query_axis(kind):
    attn, tensors, mask = build(kind), inputs(), random_mask((B, N))
    for query in (tensors[0], tensors[0][:, 0]):
        with pytest.raises(
            ValueError, match=r"got \(2, 7\); for a mask over keys, pass mask\[:, None\]"
        ):
            attn(query, *tensors[1:], mask)
        attn(query, *tensors[1:], mask[:, None])


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_queries_as_samples_reads_two_axes_as_queries_and_keys(kind):
    """(B, N) and (T, N) are one shape then; (B, 1, N) says which is meant."""
    attn, tensors, mask = build(kind), inputs(queries=B), random_mask((B, N))
    torch.testing.assert_close(attn(*tensors, mask), attn(*tensors, mask.expand(B, B, N)))
    over_keys = attn(*tensors, mask[:, None])[0]
    torch.testing.assert_close(over_keys, attn(*tensors, mask[:, None].expand(B, B, N))[0])
    assert not torch.allclose(over_keys, attn(*tensors, mask)[0])


@pytest.mark.parametrize(
    "shape", [(N,), (N, T), (1, N), (B, T), (3, T, N), (H, T, N), (B, 1, T, N), (1, 1, T, N)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_shapes_are_refused(kind, shape):
    message = r"mask must have shape \(T, N\) = \(5, 7\), \(B, 1, N\) = \(2, 1, 7\), .* got \("
    with pytest.raises(ValueError, match=message) as error:
        build(kind)(*inputs(), torch.ones(shape, dtype=torch.bool))
    assert str(error.value).endswith(f"got {shape}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_numeric_masks_are_refused(kind, shape):
    """Elsewhere a float mask of zeros and ones was added to the scores, and hid nothing."""
    attn, tensors, mask = build(kind), inputs(), random_mask(shape)
    zero_minus_inf = torch.zeros(shape).masked_fill(~mask, -torch.inf)
    for wrong in (mask.long(), mask.to(torch.uint8), mask.float(), mask.half(), zero_minus_inf):
        with pytest.raises(TypeError, match=rf"mask must be boolean .* got {wrong.dtype}"):
            attn(*tensors, wrong)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_polarity_is_the_inverse_of_multihead_attentions(causal, padded):
    ours = ScaledDotProductAttention(16, num_heads=H).double()
    theirs = nn.MultiheadAttention(16, H, batch_first=True).double()
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([linear.weight for linear in projections]))
        theirs.in_proj_bias.copy_(torch.cat([linear.bias for linear in projections]))
        theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x = torch.randn(B, T, 16, dtype=torch.float64)
    real = length_mask(torch.tensor([3, 5]), T) if padded else torch.ones(B, T, dtype=torch.bool)
    order = causal_mask(T) if causal else torch.ones(T, T, dtype=torch.bool)
    expected = theirs(x, x, x, key_padding_mask=~real, attn_mask=~order, average_attn_weights=False)
    torch.testing.assert_close(ours(x, x, x, real[:, None] & order, need_weights=True), expected)


def test_polarity_is_that_of_pytorchs_function():
    query, key, value, _ = heads()
    mask = random_mask((B, H, T, N))
    expected = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, mask)[0], expected)


# Rows that may attend to nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_picture_without_visible_patches_gives_zeros(kind, num_kv_heads, training, dtype):
    """Elsewhere its row became NaN and spread over the whole batch."""
    attn = build(kind, num_kv_heads=num_kv_heads).to(dtype).train(training)
    tensors = [x.to(dtype).requires_grad_() for x in inputs()]
    mask = torch.tensor([False, True])[:, None, None].expand(B, 1, N)
    output, weights = attn(*tensors, mask, need_weights=True)
    assert (weights[0] == 0).all()
    assert torch.equal(output[0], attn.out_proj.bias.expand(T, -1))
    alone_output, alone_weights = attn(*(x[1:] for x in tensors), need_weights=True)
    torch.testing.assert_close(output[1:], alone_output)
    torch.testing.assert_close(weights[1:], alone_weights)
    for grad in gradients(output, attn, *tensors):
        assert grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_causal_and_padding_masks_may_hide_a_row_together(kind):
    """Left padding: the first queries see padding alone."""
    attn, query = build(kind), inputs()[0]
    key, value = inputs(keys=T)[1:]
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    mask = causal_mask(T) & real[:, None]
    tensors = [x.requires_grad_() for x in (query, key, value)]
    output, weights = attn(*tensors, mask, need_weights=True)
    assert (weights[0, :, :2] == 0).all()
    assert torch.equal(output[0, :2], attn.out_proj.bias.expand(2, -1))
    torch.testing.assert_close(weights.sum(-1), mask.any(-1)[:, None].double().expand(-1, H, -1))
    alone = attn(query[:1, 2:], key[:1, 2:], value[:1, 2:], causal_mask(3), need_weights=True)
    torch.testing.assert_close(output[:1, 2:], alone[0])
    torch.testing.assert_close(weights[:1, :, 2:, 2:], alone[1])
    assert all(grad.isfinite().all() for grad in gradients(output, attn, *tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_sees_nothing_is_zero_and_leaves_the_others(kind):
    tensors = [tensor.requires_grad_() for tensor in heads()]
    mask = torch.ones(B, H, T, N, dtype=torch.bool)
    mask[:, 2] = False
    output, weights = call(kind, *tensors, mask, need_weights=True)
    free_output, free_weights = call(kind, *tensors, need_weights=True)
    others = [0, 1, 3]
    assert (output[:, 2] == 0).all() and (weights[:, 2] == 0).all()
    torch.testing.assert_close(output[:, others], free_output[:, others])
    torch.testing.assert_close(weights[:, others], free_weights[:, others])
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        output.square().sum().backward()
    assert tensors[0].grad[:, 2].abs().max() == 0
    assert tensors[0].grad[:, others].abs().min() > 0


# Whatever lies under the mask


def spoil(x: Tensor, places: tuple, bad: float) -> Tensor:
    """One bad number in each of the places, so that it is not found by its first feature."""
    x = x.clone()
    x[places][..., -2] = bad
    return x


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", ["key", "value", "both"])
@pytest.mark.parametrize("project_value", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_numbers_hidden_from_all_reach_nothing(kind, project_value, place, bad):
    """A weight of zero is not enough: zero times NaN is NaN, in the weighted sum and in the
    gradients of the projections too."""
    attn = build(kind, project_value=project_value)
    query, key, value = inputs()
    mask = length_mask(torch.tensor([4, N]), N)[:, None]
    hidden = 0, slice(4, None)
    spoiled = {
        "key": (spoil(key, hidden, bad), value),
        "value": (key, spoil(value, hidden, bad)),
        "both": (spoil(key, hidden, bad), spoil(value, hidden, bad)),
    }[place]
    results = []
    for k, v in ((key, value), spoiled):
        tensors = [x.detach().requires_grad_() for x in (query, k, v)]
        output, weights = attn(*tensors, mask, need_weights=True)
        results.append([output, weights, *gradients(output, attn, *tensors)])
        with torch.no_grad():
            torch.testing.assert_close(attn(*tensors, mask, need_weights=True), (output, weights))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_last_token_reaches_no_row_before_it(kind, bad):
    """Self-attention over a text whose last token is spoiled: the causal mask hides it from every
    row but its own, so the loss of the other rows has the gradients of a clean text."""
    attn = MODULES[kind](16, hidden_dim=12, num_heads=H, num_kv_heads=2).double()
    clean = torch.randn(B, T, 16, dtype=torch.float64)
    results = []
    for x in (clean, spoil(clean, (slice(None), -1), bad)):
        x.requires_grad_()
        output, weights = attn(x, x, mask=causal_mask(T), need_weights=True)
        grads = gradients(output[:, :-1], attn, x)
        results.append([output[:, :-1], weights[:, :, :-1], *grads])
    torch.testing.assert_close(results[1], results[0])
    assert output[:, -1].isnan().all() and weights[:, :, -1].isnan().all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_key_is_seen_by_exactly_the_rows_that_may_see_it(kind, bad):
    """A spoiled number is not hidden from who asked for it: it shows, as it does without a mask."""
    tensors, mask = heads(), random_mask((B, H, T, N))
    expected = call(kind, *tensors, mask)[0]
    tensors[1][1, 1, 3, 0] = bad
    output = call(kind, *tensors, mask)[0]
    sees = mask[..., 3].clone()
    sees[0] = sees[:, :2] = False  # key head 1 of sample 1 belongs to query heads 2 and 3
    assert torch.equal(output.isnan().all(-1), sees)
    torch.testing.assert_close(output[~sees], expected[~sees])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_query_of_a_row_that_sees_nothing_reaches_nothing(kind, bad):
    attn, (query, key, value) = build(kind), inputs()
    mask = torch.ones(B, T, N, dtype=torch.bool)
    mask[1, 2:] = False
    results = []
    for q in (query, spoil(query, (1, slice(2, None)), bad)):
        tensors = [x.detach().requires_grad_() for x in (q, key, value)]
        output, weights = attn(*tensors, mask, need_weights=True)
        results.append([output, weights, *gradients(output, attn, *tensors)])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_largest_numbers_under_the_mask_reach_nothing(kind, dtype):
    """Finite, but their products are not."""
    query, key, value, score_weight = (x.to(dtype) for x in heads())
    mask = random_mask((T, N))
    query.requires_grad_()  # both times: in half precision learning takes other products
    expected = call(kind, query, key, value, score_weight, mask)[0]
    key[:, :, 4] = torch.finfo(dtype).max
    value[:, :, 4] = -torch.finfo(dtype).max
    output = call(kind, query, key, value, score_weight, mask)[0]
    torch.testing.assert_close(output, expected)
    output.float().sum().backward()
    assert query.grad.isfinite().all()
