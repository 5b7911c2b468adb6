"""Both attentions against loops, against PyTorch, and against themselves in other clothes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import MODULES
from torch import Tensor, nn

from vlattn.attention import (
    ATTENTIONS,
    AdditiveAttention,
    CrossAttention,
    ScaledDotProductAttention,
    additive_attention,
    causal_mask,
    scaled_dot_product_attention,
)

B, T, N, D, D_V = 2, 5, 7, 4, 3
KINDS = tuple(MODULES)
HEADS = ((6, 6), (6, 3), (6, 1))  # query heads and key/value heads: full, grouped, multi-query
SIZES = {"query_dim": 24, "key_dim": 12, "value_dim": 20, "hidden_dim": 18, "out_dim": 16}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(kind: str, **options) -> CrossAttention:
    """An attention of 24-sized queries, 12-sized keys, 20-sized values and 16-sized outputs."""
    return MODULES[kind](**{**SIZES, "num_heads": 6, **options}).double()


def inputs(batch: int = B, queries: int = T, keys: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, queries, 24, dtype=torch.float64),
        torch.randn(batch, keys, 12, dtype=torch.float64),
        torch.randn(batch, keys, 20, dtype=torch.float64),
    )


def heads(num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projected queries, keys and values, and the score weight of additive attention."""
    return (
        torch.randn(B, num_heads, T, D, dtype=torch.float64),
        torch.randn(B, num_kv_heads, N, D, dtype=torch.float64),
        torch.randn(B, num_kv_heads, N, D_V, dtype=torch.float64),
        torch.randn(num_heads, D, dtype=torch.float64),
    )


def call(kind: str, query, key, value, score_weight, mask=None, **options):
    if kind.startswith("additive"):
        options = {"backend": MODULES[kind].backend, **options}
        return additive_attention(query, key, value, score_weight, mask, **options)
    return scaled_dot_product_attention(query, key, value, mask, **options)


def loops(kind: str, query, key, value, score_weight, mask=None) -> tuple[Tensor, Tensor]:
    """One pair of a query and a key after the other; the mask has all four axes."""
    num_heads, groups = query.size(1), query.size(1) // key.size(1)
    outputs, weights = [], []
    for b in range(query.size(0)):
        for h in range(num_heads):
            for t in range(query.size(2)):
                scores = []
                for n in range(key.size(2)):
                    q, k = query[b, h, t], key[b, h // groups, n]
                    if kind.startswith("additive"):
                        scores.append(
                            sum(v * (a + b).tanh() for v, a, b in zip(score_weight[h], q, k))
                        )
                    else:
                        scores.append(sum(a * b for a, b in zip(q, k)) / math.sqrt(len(q)))
                seen = [n for n in range(len(scores)) if mask is None or mask[b, h, t, n]]
                total = sum(scores[n].exp() for n in seen)
                row = [
                    scores[n].exp() / total if n in seen else 0 * scores[n]
                    for n in range(len(scores))
                ]
                weights.append(torch.stack(row))
                outputs.append(sum(w * value[b, h // groups, n] for n, w in enumerate(row)))
    shape = query.shape[:3]
    return torch.stack(outputs).unflatten(0, shape), torch.stack(weights).unflatten(0, shape)


def module_loops(attn: CrossAttention, query, key, value, mask=None) -> tuple[Tensor, Tensor]:
    """Projections of one vector at a time around `loops`."""

    def project(linear: nn.Module, x: Tensor, num_heads: int) -> Tensor:
        rows = []
        for sample in x:
            for vector in sample:
                if isinstance(linear, nn.Linear):
                    vector = linear.weight @ vector
                    vector = vector if linear.bias is None else vector + linear.bias
                rows.append(vector)
        rows = torch.stack(rows).unflatten(0, x.shape[:2])
        return torch.stack(rows.chunk(num_heads, dim=-1), dim=1)

    kind = "additive" if isinstance(attn, AdditiveAttention) else "scaled_dot_product"
    output, weights = loops(
        kind,
        project(attn.q_proj, query, attn.num_heads),
        project(attn.k_proj, key, attn.num_kv_heads),
        project(attn.v_proj, value, attn.num_kv_heads),
        getattr(attn, "score_weight", None),
        mask,
    )
    joined = torch.cat([output[:, h] for h in range(attn.num_heads)], dim=-1)
    return project(attn.out_proj, joined, 1)[:, 0], weights


def random_mask(num_heads: int) -> Tensor:
    """A mask of all four axes in which each query sees the first key and some others."""
    mask = torch.rand(B, num_heads, T, N) < 0.5
    mask[..., 0] = True
    return mask


# The truth: loops


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_heads, num_kv_heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_functions_are_the_formula_pair_by_pair(kind, num_heads, num_kv_heads, masked):
    tensors = heads(num_heads, num_kv_heads)
    mask = random_mask(num_heads) if masked else None
    output, weights = call(kind, *tensors, mask, need_weights=True)
    assert output.shape == (B, num_heads, T, D_V) and weights.shape == (B, num_heads, T, N)
    torch.testing.assert_close((output, weights), loops(kind, *tensors, mask))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_formula(kind):
    tensors = [tensor.requires_grad_() for tensor in heads(6, 3)]
    used = tensors if kind.startswith("additive") else tensors[:3]
    mask = random_mask(6)
    slope = torch.randn(B, 6, T, D_V, dtype=torch.float64)
    fast = torch.autograd.grad(call(kind, *tensors, mask)[0], used, slope)
    slow = torch.autograd.grad(loops(kind, *tensors, mask)[0], used, slope)
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_heads, num_kv_heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_modules_are_the_formula_pair_by_pair(kind, num_heads, num_kv_heads, masked):
    """All four sizes differ: other libraries refuse or crash on keys unlike the queries."""
    attn = build(kind, num_heads=num_heads, num_kv_heads=num_kv_heads)
    tensors, mask = inputs(), random_mask(num_heads) if masked else None
    output, weights = attn(*tensors, mask, need_weights=True)
    assert output.shape == (B, T, 16) and weights.shape == (B, num_heads, T, N)
    torch.testing.assert_close((output, weights), module_loops(attn, *tensors, mask))


@pytest.mark.parametrize("options", [{"bias": False}, {"project_value": False}, {"num_heads": 1}])
@pytest.mark.parametrize("kind", KINDS)
def test_options_are_the_formula_too(kind, options):
    options = {"num_heads": 2, **options}
    attn, tensors = build(kind, **options), inputs()
    output, weights = attn(*tensors, need_weights=True)
    torch.testing.assert_close((output, weights), module_loops(attn, *tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_textbook_form_is_the_plain_weighted_sum_of_the_values(kind):
    attn = build(kind, out_dim=None, num_heads=1, project_value=False, project_out=False)
    query, key, value = inputs()
    output, weights = attn(query, key, value, need_weights=True)
    expected = torch.stack(
        [
            torch.stack([sum(w * v for w, v in zip(weights[b, 0, t], value[b])) for t in range(T)])
            for b in range(B)
        ]
    )
    assert output.shape == (B, T, 20)
    torch.testing.assert_close(output, expected)
    names = {name.split(".")[0] for name, _ in attn.named_parameters()}
    assert names == {"q_proj", "k_proj"} | (
        {"score_weight"} if kind.startswith("additive") else set()
    )


def test_additive_score_is_bahdanaus():
    """v . tanh(W_q q + W_k k + b): one bias, and it counts."""
    attn = build("additive", num_heads=1)
    query, key, value = inputs()
    weights = attn(query, key, value, need_weights=True)[1]
    w_q, w_k, b = attn.q_proj.weight, attn.k_proj.weight, attn.q_proj.bias
    assert attn.k_proj.bias is None
    scores = [attn.score_weight[0] @ (w_q @ query[1, 2] + w_k @ k + b).tanh() for k in key[1]]
    torch.testing.assert_close(weights[1, 0, 2], torch.stack(scores).softmax(0))


# Agreement with PyTorch


@pytest.mark.parametrize("num_heads, num_kv_heads", HEADS)
def test_dot_product_agrees_with_pytorchs_function(num_heads, num_kv_heads):
    query, key, value, _ = heads(num_heads, num_kv_heads)
    for mask in (None, random_mask(num_heads), causal_mask(T, N)):
        expected = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        torch.testing.assert_close(
            scaled_dot_product_attention(query, key, value, mask)[0], expected
        )


def test_dot_product_agrees_with_multihead_attention_of_the_same_weights():
    ours = ScaledDotProductAttention(24, 12, 20, num_heads=6).double()
    theirs = nn.MultiheadAttention(24, 6, kdim=12, vdim=20, batch_first=True).double()
    with torch.no_grad():
        theirs.q_proj_weight.copy_(ours.q_proj.weight)
        theirs.k_proj_weight.copy_(ours.k_proj.weight)
        theirs.v_proj_weight.copy_(ours.v_proj.weight)
        projections = (ours.q_proj, ours.k_proj, ours.v_proj)
        theirs.in_proj_bias.copy_(torch.cat([linear.bias for linear in projections]))
        theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    tensors = inputs()
    expected = theirs(*tensors, average_attn_weights=False)
    torch.testing.assert_close(ours(*tensors, need_weights=True), expected)


# Shapes


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 12, "vdim": 20}])
def test_from_torch_is_the_same_attention(sizes, bias):
    theirs = nn.MultiheadAttention(24, 6, bias=bias, batch_first=True, **sizes).double().eval()
    ours = ScaledDotProductAttention.from_torch(theirs)
    query, key, value = torch.randn(B, T, 24), torch.randn(B, N, 12), torch.randn(B, N, 20)
    if not sizes:
        key, value = torch.randn(2, B, N, 24)
    tensors = [x.double() for x in (query, key, value)]
    mask = torch.rand(T, N) < 0.6
    mask[:, 0] = True
    output, weights = theirs(*tensors, attn_mask=~mask, average_attn_weights=False)
    found_output, found_weights = ours(*tensors, mask, need_weights=True)
    torch.testing.assert_close(found_output, output)
    torch.testing.assert_close(found_weights, weights)
    assert not ours.training


def test_from_torch_refuses_keys_of_its_own():
    with pytest.raises(ValueError, match="must have add_bias_kv=False and add_zero_attn=False"):
        ScaledDotProductAttention.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_default_to_the_one_before(kind):
    attn = MODULES[kind](24, num_heads=3)
    assert (attn.q_proj.in_features, attn.k_proj.in_features, attn.v_proj.in_features) == (24,) * 3
    assert (attn.q_proj.out_features, attn.out_proj.out_features) == (24, 24)
    attn = MODULES[kind](24, 12, num_heads=3)
    assert (attn.k_proj.in_features, attn.v_proj.in_features) == (12, 12)
    assert (attn.q_proj.out_features, attn.out_proj.out_features) == (24, 24)


def test_heads_default_to_one_for_additive_and_eight_for_dot_product():
    assert AdditiveAttention(24).num_heads == 1
    assert ScaledDotProductAttention(24).num_heads == 8


@pytest.mark.parametrize("kind", KINDS)
def test_key_is_the_value_where_that_is_omitted(kind):
    attn = build(kind, value_dim=None)
    query, key, _ = inputs()
    torch.testing.assert_close(attn(query, key), attn(query, key, key))


@pytest.mark.parametrize("batch, keys", [(B, N), (1, N), (B, 1), (1, 1)])
@pytest.mark.parametrize("num_heads", [6, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_decoder_state_has_no_query_axis(kind, num_heads, batch, keys):
    attn = build(kind, num_heads=num_heads)
    query, key, value = inputs(batch, T, keys)
    mask = torch.rand(batch, 1, keys) < 0.7
    output, weights = attn(query[:, 2], key, value, mask, need_weights=True)
    assert output.shape == (batch, 16) and weights.shape == (batch, num_heads, keys)
    every_output, every_weights = attn(query, key, value, mask, need_weights=True)
    torch.testing.assert_close(output, every_output[:, 2])
    torch.testing.assert_close(weights, every_weights[:, :, 2])
    assert attn(query[:, 2], key, value)[1] is None


@pytest.mark.parametrize("kind", KINDS)
def test_keys_projected_once_serve_many_queries(kind):
    attn = build(kind, num_kv_heads=2)
    query, key, value = inputs()
    kv = attn.project_kv(key, value)
    assert kv.key.shape == (B, 2, N, 3) and kv.value.shape == (B, 2, N, 3)
    mask = random_mask(6)
    whole = attn(query, key, value, mask, need_weights=True)
    torch.testing.assert_close(attn.attend(query, kv, mask, need_weights=True), whole)
    for t in range(T):
        output, weights = attn.attend(query[:, t], kv, mask[:, :, t, None], need_weights=True)
        torch.testing.assert_close(output, whole[0][:, t])
        torch.testing.assert_close(weights, whole[1][:, :, t])


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_values_as_they_are_are_split_over_the_heads(kind, num_kv_heads):
    attn = build(
        kind,
        hidden_dim=12,
        out_dim=None,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        project_value=False,
        project_out=False,
    )
    query, key, value = inputs()
    output, weights = attn(query, key, value, need_weights=True)
    parts = value.chunk(num_kv_heads, dim=-1)
    expected = [weights[:, h] @ parts[h // (4 // num_kv_heads)] for h in range(4)]
    torch.testing.assert_close(output, torch.cat(expected, dim=-1))


@pytest.mark.parametrize("batch, queries, keys", [(3, 3, 3), (1, 5, 7), (2, 1, 7), (2, 5, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_distributions_over_the_keys(kind, batch, queries, keys):
    """Elsewhere equal sizes hid a batch x batch broadcast or a softmax over the wrong axis, and a
    bare squeeze ate a batch of one."""
    attn, (query, key, value) = build(kind), inputs(batch, queries, keys)
    output, weights = attn(query, key, value, need_weights=True)
    assert output.shape == (batch, queries, 16) and weights.shape == (batch, 6, queries, keys)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    order = torch.randperm(keys)
    moved = attn(query, key[:, order], value[:, order], need_weights=True)
    torch.testing.assert_close(moved, (output, weights[..., order]))
    for b in range(batch):
        alone = attn(query[b, None], key[b, None], value[b, None], need_weights=True)
        torch.testing.assert_close(alone, (output[b, None], weights[b, None]))
    if keys > 1:
        assert weights.std(-1).min() > 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch, queries, keys", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_gives_nothing_out(kind, batch, queries, keys, masked):
    """No pictures, no words or no patches: elsewhere the process crashed."""
    attn = build(kind, num_kv_heads=3)
    tensors = [x.requires_grad_() for x in inputs(batch, queries, keys)]
    mask = torch.ones(batch, 6, queries, keys, dtype=torch.bool) if masked else None
    output, weights = attn(*tensors, mask, need_weights=True)
    assert output.shape == (batch, queries, 16) and weights.shape == (batch, 6, queries, keys)
    if keys == 0:  # nothing to sum: the bias of the output is left
        torch.testing.assert_close(output, attn.out_proj.bias.expand_as(output))
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in [*tensors, *attn.parameters()])


# Weights on request


def assert_same_output(kind: str, one: Tensor, two: Tensor) -> None:
    """With and without weights: dot-product attention may be one call, or products written out."""
    if kind.startswith("additive"):
        assert torch.equal(one, two)
    else:
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


@pytest.mark.parametrize("length", [8, 600])
@pytest.mark.parametrize("hide_a_head", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_asking_for_the_weights_changes_nothing(kind, causal, padded, hide_a_head, length):
    """Elsewhere the path with weights forgot the causal mask, or only one of the paths gave NaN."""
    queries = 8 if length == 8 or kind.startswith("additive") else 600
    query = torch.randn(2, 2, queries, 3)
    key, value = torch.randn(2, 2, length, 3), torch.randn(2, 2, length, 5)
    score_weight = torch.randn(2, 3)
    mask = torch.ones(2, 2, queries, length, dtype=torch.bool)
    if causal:
        mask &= causal_mask(queries, length)
    if padded:
        mask[0, :, :, length - 3 :] = False
    if hide_a_head:
        mask[:, 1] = False
    mask = mask if causal or padded or hide_a_head else None
    outputs = []
    for with_grad in (False, True):
        for need_weights in (False, True):
            with torch.set_grad_enabled(with_grad):
                output, weights = call(
                    kind, query, key, value, score_weight, mask, need_weights=need_weights
                )
            assert (weights is not None) == need_weights
            outputs.append(output)
    for output in outputs:
        assert_same_output(kind, output, outputs[0])
    assert outputs[0].isfinite().all()
    sums = torch.ones(2, 2, queries) if mask is None else mask.any(-1).float()
    torch.testing.assert_close(weights.sum(-1), sums)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_chosen_heads_are_those_of_all(kind, masked):
    attn, tensors = build(kind, num_kv_heads=3), inputs()
    mask = random_mask(6) if masked else None
    output, weights = attn(*tensors, mask, need_weights=True)
    some_output, some = attn(*tensors, mask, need_weights=[4, 1])
    torch.testing.assert_close(some, weights[:, [4, 1]])
    torch.testing.assert_close(some_output, output)
    with pytest.raises(ValueError, match=r"heads from 0 to 5, got \[6\]"):
        attn(*tensors, need_weights=[6])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_asking_changes_nothing_in_training_either(kind, training):
    attn, tensors = build(kind, dropout=0.4).train(training), inputs()
    outputs = []
    for need_weights in (False, True):
        torch.manual_seed(3)
        outputs.append(attn(*tensors, random_mask(6), need_weights=need_weights)[0])
    assert_same_output(kind, *outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_off_in_eval(kind):
    """Elsewhere attention kept dropping after `eval()`."""
    attn, tensors = build(kind, dropout=0.9).eval(), inputs()
    twin = build(kind, dropout=0.0)
    twin.load_state_dict(attn.state_dict())
    first, second = attn(*tensors)[0], attn(*tensors)[0]
    assert torch.equal(first, second) and torch.equal(first, twin(*tensors)[0])
    assert not torch.allclose(attn.train()(*tensors)[0], first)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_before_dropout(kind):
    """Elsewhere the weights handed out in training were the dropped ones, with rows above 1."""
    attn, tensors = build(kind, dropout=0.9), inputs()
    weights = attn.train()(*tensors, need_weights=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert torch.equal(weights, attn.eval()(*tensors, need_weights=True)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_drops_weights(kind):
    query, key, value, score_weight = heads(6, 3)
    torch.manual_seed(3)
    output, weights = call(kind, query, key, value, score_weight, dropout_p=0.4, need_weights=True)
    torch.manual_seed(3)
    dropped = F.dropout(weights, 0.4)
    assert (dropped == 0).any() and not (weights == 0).any()
    torch.testing.assert_close(output, dropped @ value.repeat_interleave(2, dim=1))


# Grouped queries


@pytest.mark.parametrize("num_kv_heads", [2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads_equal_a_twin_with_repeated_weights(kind, num_kv_heads):
    """Neighbouring query heads share a key head, the order of PyTorch and LLaMA: elsewhere heads
    were tiled (0 1 0 1) instead of repeated (0 0 1 1), and loaded weights gave nonsense."""
    grouped = build(kind, hidden_dim=12, num_heads=4, num_kv_heads=num_kv_heads)
    twin = build(kind, hidden_dim=12, num_heads=4)
    state = copy.deepcopy(grouped.state_dict())
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        if name in state:
            per_head = state[name].unflatten(0, (num_kv_heads, 3))
            state[name] = per_head.repeat_interleave(4 // num_kv_heads, dim=0).flatten(0, 1)
    twin.load_state_dict(state)
    tensors, mask = inputs(), random_mask(4)
    torch.testing.assert_close(
        grouped(*tensors, mask, need_weights=True), twin(*tensors, mask, need_weights=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_first_key_head_belongs_to_the_first_two_query_heads(kind):
    query, key, value, score_weight = heads(4, 2)
    before = call(kind, query, key, value, score_weight)[0]
    key[:, 0] = value[:, 0] = 0
    after = call(kind, query, key, value, score_weight)[0]
    changed = (before != after).any(-1).any(-1).any(0)
    assert changed.tolist() == [True, True, False, False]


# Values only: layouts, precision, seeds


def layouts(x: Tensor) -> list[Tensor]:
    """The same numbers: transposed, every second column of a wider tensor, reversed batch."""
    wide = torch.full((*x.shape[:-1], 2 * x.size(-1)), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    transposed = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    outer = x.transpose(0, 1).contiguous().transpose(0, 1)
    views = [transposed, wide[..., ::2], outer]
    assert not any(view.is_contiguous() for view in views)
    return views


@pytest.mark.parametrize("kind", KINDS)
def test_memory_layout_does_not_matter(kind):
    """Elsewhere strided or expanded inputs gave wrong numbers without an error."""
    tensors, mask = heads(6, 3), random_mask(6)
    expected = call(kind, *tensors, mask, need_weights=True)
    for place in range(3):
        for view in layouts(tensors[place]):
            changed = [view if i == place else x for i, x in enumerate(tensors)]
            torch.testing.assert_close(call(kind, *changed, mask, need_weights=True), expected)
    twice = torch.zeros(B, 6, T, 2 * N, dtype=torch.bool)
    twice[..., ::2] = mask
    for view in (mask.transpose(-1, -2).contiguous().transpose(-1, -2), twice[..., ::2]):
        torch.testing.assert_close(call(kind, *tensors, view, need_weights=True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_inputs_equal_their_copies(kind):
    attn = build(kind, num_kv_heads=2)
    query, key, value = (x[:1].expand(3, -1, -1) for x in inputs())
    mask = (torch.rand(1, 1, N) < 0.7).expand(3, T, N)
    one_key = key[:, :1].expand(-1, N, -1)
    for k in (key, one_key):
        expected = attn(*(x.contiguous() for x in (query, k, value, mask)), need_weights=True)
        torch.testing.assert_close(attn(query, k, value, mask, need_weights=True), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_take_strided_inputs(kind):
    attn, tensors = build(kind), inputs()
    expected = attn(*tensors, need_weights=True)
    for views in zip(*(layouts(x) for x in tensors)):
        torch.testing.assert_close(attn(*views, need_weights=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_close(kind, dtype):
    """Elsewhere a constant fill under the mask overflowed in half precision."""
    attn, tensors = build(kind).float(), [x.float() for x in inputs()]
    mask = torch.ones(B, 1, N, dtype=torch.bool)
    mask[0, :, 4:] = False
    output, weights = attn(*tensors, mask, need_weights=True)
    half_output, half_weights = copy.deepcopy(attn).to(dtype)(
        *(x.to(dtype) for x in tensors), mask, need_weights=True
    )
    assert half_output.dtype == dtype
    torch.testing.assert_close(half_output.float(), output, rtol=0.02, atol=0.02)
    torch.testing.assert_close(half_weights.float(), weights, rtol=0.02, atol=0.02)
    assert (half_weights[0, :, :, 4:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_takes_keys_that_were_projected_outside_of_it(kind):
    """Elsewhere keys kept in float32 clashed with queries in bfloat16."""
    attn, (query, key, value) = build(kind).float(), (x.float() for x in inputs())
    mask = torch.ones(B, 1, N, dtype=torch.bool)
    mask[1, :, 2:] = False
    output, weights = attn(query, key, value, mask, need_weights=True)
    kv = attn.project_kv(key, value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = attn(query, key, value, mask, need_weights=True)
        cached = attn.attend(query, kv, mask, need_weights=True)
    for near_output, near_weights in (inside, cached):
        torch.testing.assert_close(near_output.float(), output, rtol=0.02, atol=0.02)
        torch.testing.assert_close(near_weights.float(), weights, rtol=0.02, atol=0.02)
        assert (near_weights[1, :, :, 2:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind):
    attn = build(kind, num_kv_heads=3)
    attn(*inputs(), random_mask(6))[0].square().sum().backward()
    for name, parameter in attn.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # The same number for every key moves no softmax: the bias of dot-product keys is idle.
        assert name == "k_proj.bias" or parameter.grad.abs().min() > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_two_builds_with_one_seed_are_equal_and_finite(kind):
    builds = []
    for _ in range(2):
        torch.manual_seed(5)
        builds.append(build(kind).state_dict())
    assert builds[0].keys() == builds[1].keys()
    for name, tensor in builds[0].items():
        assert torch.equal(tensor, builds[1][name]) and tensor.isfinite().all(), name


def test_kinds_are_found_by_name():
    assert ATTENTIONS == {
        "additive": AdditiveAttention,
        "scaled_dot_product": ScaledDotProductAttention,
    }
    with pytest.raises(TypeError, match="abstract"):
        CrossAttention(24, None, None)


# Errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options, message",
    [
        ({"hidden_dim": 20}, "hidden_dim must be divisible .* hidden_dim=20, num_heads=6"),
        ({"num_kv_heads": 4}, "num_heads must be divisible .* num_heads=6, num_kv_heads=4"),
        ({"project_value": False}, "value_dim must be divisible .* value_dim=20, num_kv_heads=6"),
        ({"project_out": False}, "out_dim without an output projection .* 18, got 16"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"key_dim": 0}, "key_dim must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        build(kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("query", (2, 5, 23), r"query must have shape \(B, T, query_dim\) with query_dim=24, got"),
        ("query", (24,), r"query must have shape .* got \(24,\)"),
        ("key", (7, 12), r"key must have shape \(B, N, key_dim\) with key_dim=12, got \(7, 12\)"),
        ("value", (2, 7, 21), r"value must have shape \(B, N, value_dim\) with value_dim=20, got"),
        ("value", (2, 8, 20), r"key and value must agree in batch and length, got .* \(2, 8, 20\)"),
        (
            "query",
            (3, 5, 24),
            r"query and key must agree in batch and head size, got \(3, 6, 5, 3\)",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(kind, name, shape, message):
    tensors = dict(zip(("query", "key", "value"), inputs()))
    tensors[name] = torch.randn(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        build(kind)(**tensors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("query", (6, 5, 4), r"query must have shape \(B, H, T, D\), got \(6, 5, 4\)"),
        ("value", (2, 3, 8, 3), r"key and value must agree in batch, heads and length, got"),
        ("query", (2, 6, 5, 3), r"query and key must agree in batch and head size, got"),
        ("query", (2, 4, 5, 4), r"query heads must be divisible by .* key heads, got 4 and 3"),
        ("query", (2, 1, 5, 4), r"query heads must be divisible by .* key heads, got 1 and 3"),
    ],
)
def test_heads_that_do_not_fit_are_refused(kind, name, shape, message):
    tensors = dict(zip(("query", "key", "value", "score_weight"), heads(6, 3)))
    tensors[name] = torch.randn(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        call(kind, **tensors)


def test_score_weight_and_backend_are_checked():
    *tensors, score_weight = heads(6, 3)
    with pytest.raises(ValueError, match=r"score_weight .* \(H, D\) = \(6, 4\), got \(3, 4\)"):
        additive_attention(*tensors, score_weight[:3])
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*reference.*, got 'fast'"):
        additive_attention(*tensors, score_weight, backend="fast")
    torch.testing.assert_close(
        additive_attention(*tensors, score_weight, backend="reference"),
        additive_attention(*tensors, score_weight),
    )
