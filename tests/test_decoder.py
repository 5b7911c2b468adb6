"""The text decoder: one text, read whole, in steps, among others, or packed into one row."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from vlattn.attention import causal_mask
from vlattn.decoder import NORMS, TextDecoder, rotate

B, T, N, V = 2, 6, 5, 11
DIM, HEADS, DEPTH = 24, 6, 2
STYLES = [
    {"norm_first": norm_first, "norm": norm, "positions": positions, "attention": attention}
    for norm_first, norm, positions, attention in product(
        (True, False), ("layer", "rms"), ("learned", "rotary"), ("additive", "scaled_dot_product")
    )
]
styles = pytest.mark.parametrize(
    "style", STYLES, ids=lambda style: "-".join(map(str, style.values()))
)
KINDS = ("additive", "scaled_dot_product")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def decoder(**options) -> TextDecoder:
    sizes = {"dim": DIM, "depth": DEPTH, "num_heads": HEADS, "num_kv_heads": 3, "max_len": 9}
    model = TextDecoder(V, **{**sizes, **options}).double().eval()
    with torch.no_grad():  # places count, and no norm is one that does nothing
        for name, parameter in model.named_parameters():
            if name == "positions":
                parameter.mul_(50)
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def pictures(number: int = B) -> Tensor:
    return torch.randn(number, N, DIM, dtype=torch.float64)


def texts(rows: int = B, length: int = T) -> Tensor:
    return torch.randint(V, (rows, length))


def read(model: TextDecoder, tokens: Tensor, memory: Tensor, **options):
    return model(tokens, model.start(memory), need_weights=True, **options)


# In steps, and in the order of time


@styles
def test_token_by_token_is_the_whole_pass(style):
    model, memory, tokens = decoder(**style), pictures(), texts()
    whole = read(model, tokens, memory)
    assert whole.hidden.shape == (B, T, DIM) and whole.weights.shape == (B, DEPTH, HEADS, T, N)
    cache = model.start(memory)
    with torch.no_grad():
        for t in range(T):
            step = model(tokens[:, t, None], cache, need_weights=True)
            torch.testing.assert_close(step.hidden, whole.hidden[:, t, None])
            torch.testing.assert_close(step.weights, whole.weights[:, :, :, t, None])


@styles
def test_later_tokens_do_not_reach_back(style):
    model, memory, tokens = decoder(**style), pictures(), texts()
    before = read(model, tokens, memory)
    for t in range(1, T):
        other = tokens.clone()
        other[:, t:] = (other[:, t:] + 3) % V
        after = read(model, other, memory)
        torch.testing.assert_close(after.hidden[:, :t], before.hidden[:, :t])
        torch.testing.assert_close(after.weights[:, :, :, :t], before.weights[:, :, :, :t])
        assert (after.hidden[:, t:] != before.hidden[:, t:]).any(-1).all()


@styles
def test_places_count(style):
    """The same words in another order are another text, for what they end in too."""
    model, memory = decoder(**style), pictures()
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    moved = tokens[:, [1, 0, 2, 3]]
    assert not torch.allclose(
        read(model, tokens, memory).hidden[:, -1], read(model, moved, memory).hidden[:, -1]
    )


# Rows


@styles
def test_captions_of_one_picture_are_each_caption_alone(style):
    model, memory, tokens = decoder(**style), pictures(), texts(3 * B)
    together = read(model, tokens, memory)
    assert together.weights.shape == (3 * B, DEPTH, HEADS, T, N)
    for row in range(3 * B):
        alone = read(model, tokens[row, None], memory[row // 3, None])
        torch.testing.assert_close(together.hidden[row, None], alone.hidden)
        torch.testing.assert_close(together.weights[row, None], alone.weights)


@pytest.mark.parametrize("rows", [1, 3])
def test_captions_of_no_whole_number_per_picture_are_refused(rows):
    """Three captions of two pictures were once cut in the middle without a word, where the number
    of their tokens was even."""
    model = decoder()
    with pytest.raises(ValueError, match=f"multiple of the 2 pictures in the cache, got {rows}"):
        model(texts(rows, 4), model.start(pictures()))


@styles
def test_packed_captions_are_each_caption_alone(style):
    """Captions of one picture in one row: places begin again, and none sees the others."""
    model, memory = decoder(**style), pictures()
    lengths = ((3, 5, 2), (4, 1, 4))
    tokens = torch.zeros(B, 12, dtype=torch.long)
    places, segments = torch.zeros_like(tokens), torch.zeros_like(tokens)
    captions = []
    for b in range(B):
        start = 0
        for number, length in enumerate(lengths[b], start=1):
            part = slice(start, start + length)
            tokens[b, part], places[b, part] = texts(1, length)[0], torch.arange(length)
            segments[b, part] = number
            captions.append((b, part))
            start += length
    mask = (segments[:, :, None] == segments[:, None]) & causal_mask(12)
    packed = read(model, tokens, memory, places=places, mask=mask)
    for b, part in captions:
        alone = read(model, tokens[b, None, part], memory[b, None])
        torch.testing.assert_close(packed.hidden[b, None, part], alone.hidden)
        torch.testing.assert_close(packed.weights[b, None, :, :, part], alone.weights)


@styles
def test_prefixes_of_different_lengths_go_on_as_each_alone(style):
    """Two texts of two and four tokens, padded on the left, each written on by one token: padding
    sees nothing and is not seen, and is not counted by places."""
    model, memory = decoder(**style), pictures()
    tokens = texts(B, 5)
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    places = (real.cumsum(1) - 1).clamp(min=0)
    mask = real[:, None] & causal_mask(5)
    cache = model.start(memory)
    with torch.no_grad():
        prefix = model(tokens[:, :4], cache, places=places[:, :4], mask=mask[:, :4, :4])
        step = model(tokens[:, 4:], cache, places=places[:, 4:], mask=mask[:, 4:])
    hidden = torch.cat([prefix.hidden, step.hidden], dim=1)
    assert hidden.isfinite().all()
    for b, start in enumerate((2, 0)):
        alone = read(model, tokens[b, None, start:], memory[b, None])
        torch.testing.assert_close(hidden[b, None, start:], alone.hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_no_pictures_or_no_tokens_give_nothing(kind):
    model = decoder(attention=kind)
    for number, length in ((0, 4), (B, 0)):
        hidden, weights = read(model, texts(number, length), pictures(number))
        assert hidden.shape == (number, length, DIM)
        assert weights.shape == (number, DEPTH, HEADS, length, N)


# Parts


@pytest.mark.parametrize("norm_first", [True, False])
def test_blocks_are_pytorchs_decoder_layers(norm_first):
    model = decoder(num_kv_heads=None, norm_first=norm_first)
    x, memory = torch.randn(B, T, DIM, dtype=torch.float64), pictures()
    model.positions.data.zero_()
    tokens, model.embed.weight.data[:T] = torch.arange(T).expand(B, T), x[0]
    expected = x[:1].expand(B, T, DIM)
    for block in model.blocks:
        theirs = nn.TransformerDecoderLayer(
            DIM, HEADS, 4 * DIM, dropout=0.0, batch_first=True, norm_first=norm_first
        ).double()
        theirs.activation = nn.GELU(approximate="tanh")
        state = {}
        for name, attn in (("self_attn", block.self_attn), ("multihead_attn", block.cross_attn)):
            projections = (attn.q_proj, attn.k_proj, attn.v_proj)
            state[f"{name}.in_proj_weight"] = torch.cat([linear.weight for linear in projections])
            state[f"{name}.in_proj_bias"] = torch.cat([linear.bias for linear in projections])
            state |= {f"{name}.out_proj.{k}": v for k, v in attn.out_proj.state_dict().items()}
        parts = {
            "linear1": block.mlp[0],
            "linear2": block.mlp[2],
            "norm1": block.norm1,
            "norm2": block.norm2,
            "norm3": block.norm3,
        }
        for name, part in parts.items():
            state |= {f"{name}.{k}": v for k, v in part.state_dict().items()}
        theirs.load_state_dict(state)
        expected = theirs(expected, memory, tgt_mask=~causal_mask(T))
    torch.testing.assert_close(read(model, tokens, memory).hidden, model.norm(expected))
    assert isinstance(model.norm, nn.LayerNorm) == norm_first


def test_rotary_positions_turn_each_pair_by_its_own_rate():
    x, places = torch.randn(B, 3, T, 8), torch.tensor([[0, 1, 2, 5, 6, 7], [0, 0, 3, 4, 0, 1]])
    turned = rotate(x, places)
    for b, h, t in product(range(B), range(3), range(T)):
        for i in range(4):
            pair = complex(x[b, h, t, i], x[b, h, t, i + 4])
            angle = float(places[b, t]) * 10_000 ** -(i / 4)
            pair *= complex(math.cos(angle), math.sin(angle))
            expected = torch.tensor([pair.real, pair.imag])
            torch.testing.assert_close(turned[b, h, t, [i, i + 4]], expected)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_positions_are_relative(kind):
    model = decoder(positions="rotary", attention=kind)
    memory, tokens = pictures(), texts()
    places = torch.arange(T)[None]
    moved = read(model, tokens, memory, places=places + 4)
    torch.testing.assert_close(
        moved, read(model, tokens, memory, places=places), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_products_with_the_embeddings_or_a_head(tied):
    model = decoder(tie_embeddings=tied)
    hidden = torch.randn(B, T, DIM, dtype=torch.float64)
    table = model.embed.weight if tied else model.head.weight
    expected = torch.stack([hidden @ row for row in table], dim=-1)
    torch.testing.assert_close(model.logits(hidden), expected)
    assert ("head.weight" in model.state_dict()) != tied


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9])
@pytest.mark.parametrize("bias", [True, False])
def test_logits_of_a_few_rows_are_those_of_a_whole_text(rows, bias):
    """Without gradients the product with a large vocabulary is computed another way."""
    model = TextDecoder(2500, dim=DIM, num_heads=2, head_bias=bias)
    if bias:
        torch.nn.init.normal_(model.head_bias)
    hidden = torch.randn(rows, DIM)
    expected = model.logits(hidden[None])[0]
    with torch.no_grad():
        logits = model.logits(hidden)
    assert logits.is_contiguous()
    torch.testing.assert_close(logits, expected)


# Training


@styles
def test_every_parameter_gets_a_gradient(style):
    model = decoder(**style, tie_embeddings=False).train()
    tokens = torch.arange(V)[:9].expand(B, 9)
    hidden = model(tokens, model.start(pictures())).hidden
    model.logits(hidden).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # The same number for every key moves no softmax: the bias of dot-product keys may be idle.
        assert name.endswith("k_proj.bias") or parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_asking_for_the_weights_changes_nothing(kind):
    model = decoder(attention=kind, dropout=0.2, attention_dropout=0.3)
    memory, tokens = pictures(), texts()
    for training in (False, True):
        model.train(training)
        hidden = []
        for need_weights in (False, True):
            torch.manual_seed(3)
            output = model(tokens, model.start(memory), need_weights=need_weights)
            assert (output.weights is not None) == need_weights
            hidden.append(output.hidden)
        torch.testing.assert_close(*hidden, atol=1e-12, rtol=0)  # float64
        torch.testing.assert_close(output.weights.sum(-1), torch.ones_like(output.weights[..., 0]))


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_off_in_eval(kind, name):
    model = decoder(attention=kind, **{name: 0.7})
    twin = decoder(attention=kind)
    twin.load_state_dict(model.state_dict())
    memory, tokens = pictures(), texts()
    expected = read(twin, tokens, memory).hidden
    assert torch.equal(read(model, tokens, memory).hidden, expected)
    assert not torch.allclose(read(model.train(), tokens, memory).hidden, expected)


@styles
def test_two_builds_with_one_seed_are_equal_and_finite(style):
    builds = []
    for _ in range(2):
        torch.manual_seed(5)
        builds.append(TextDecoder(V, dim=DIM, depth=DEPTH, num_heads=HEADS, **style).state_dict())
    for name, tensor in builds[0].items():
        assert torch.equal(tensor, builds[1][name]) and tensor.isfinite().all(), name


# Errors


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_texts_longer_than_max_len_are_refused(positions):
    """Elsewhere writing past the table of positions crashed, or went on without places."""
    model, memory = decoder(positions=positions), pictures()
    read(model, texts(length=9), memory)
    with pytest.raises(ValueError, match="tokens must not go past max_len=9, got 10"):
        read(model, texts(length=10), memory)
    cache = model.start(memory)
    with torch.no_grad():
        model(texts(length=8), cache)
        with pytest.raises(ValueError, match="max_len=9, got 10"):
            model(texts(length=2), cache)
        model(texts(length=1), cache)  # what was refused left no trace
        assert len(cache) == 9
        with pytest.raises(ValueError, match="max_len=9, got 10"):
            model(texts(length=1), cache)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention": "dot"}, "attention must be one of additive, scaled_dot_product, got 'dot'"),
        ({"norm": "batch"}, "norm must be one of layer, rms, got 'batch'"),
        ({"positions": "sine"}, "positions must be one of learned, rotary, got 'sine'"),
        ({"num_heads": 5}, "hidden_dim must be divisible by num_heads, got hidden_dim=24"),
        ({"num_kv_heads": 4}, "num_heads must be divisible by num_kv_heads"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        decoder(**options)
    assert list(NORMS) == ["layer", "rms"]


def test_rotary_positions_need_pairs():
    """A head of odd size failed in the middle of the first pass, with a word on tensor sizes."""
    with pytest.raises(ValueError, match="even size of one head, got dim=24, num_heads=8"):
        decoder(num_heads=8, num_kv_heads=None, positions="rotary")


def test_weights_of_chosen_layers_are_those_of_all():
    model, memory, tokens = decoder(), pictures(), texts()
    whole = read(model, tokens, memory)
    some = model(tokens, model.start(memory), need_weights=[1])
    torch.testing.assert_close(some.weights, whole.weights[:, [1]])
    torch.testing.assert_close(some.hidden, whole.hidden)
    with pytest.raises(ValueError, match=r"layers from 0 to \d+, got \[9\]"):
        model(tokens, model.start(memory), need_weights=[9])
