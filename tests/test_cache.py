"""Writing with the cache, in any steps, is reading the whole text at once."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from vlattn.attention import ATTENTIONS, CrossAttention, KeyValue, KVCache, causal_mask
from vlattn.attention.cache import quantise
from vlattn.decoder import TextDecoder

R, T, DIM = 2, 7, 12
KINDS = tuple(ATTENTIONS)
STEPS = ((1,) * 7, (3, 4), (1, 6), (2, 1, 3, 1))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def attention(kind: str) -> CrossAttention:
    return ATTENTIONS[kind](DIM, hidden_dim=24, num_heads=6, num_kv_heads=3).double()


def decoder(kind: str) -> TextDecoder:
    return (
        TextDecoder(11, dim=DIM, depth=3, num_heads=6, num_kv_heads=2, attention=kind)
        .double()
        .eval()
    )


def new(rows: int, tokens: int) -> KeyValue:
    return KeyValue(torch.randn(rows, 3, tokens, 4), torch.randn(rows, 3, tokens, 5))


def cache(layers: int = 1) -> KVCache:
    return KVCache([new(R, 9)] * layers)


def in_steps(read, x: Tensor, steps: tuple[int, ...]) -> list:
    return [read(part) for part in x.split(steps, dim=1)]


# Steps


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_steps_is_attention_over_the_whole(kind, steps):
    """Elsewhere cached steps took the causal mask from the wrong corner."""
    attn, x = attention(kind), torch.randn(R, T, DIM, dtype=torch.float64)
    kept = cache()

    def read(part: Tensor):
        kv = kept.append(0, attn.project_kv(part))
        return attn.attend(part, kv, causal_mask(part.size(1), kv.key.size(2)), need_weights=True)

    parts = in_steps(read, x, steps)
    output, weights = attn(x, x, mask=causal_mask(T), need_weights=True)
    torch.testing.assert_close(torch.cat([part[0] for part in parts], dim=1), output)
    start = 0
    for _, part in parts:
        end = start + part.size(2)
        torch.testing.assert_close(part, weights[:, :, start:end, :end])
        start = end
    assert len(kept) == T


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_decoder_in_steps_is_the_whole_pass(kind, steps):
    """Hidden states, logits and the maps of every layer."""
    model, memory = decoder(kind), torch.randn(R, 9, DIM, dtype=torch.float64)
    tokens = torch.randint(11, (R, T))
    hidden, weights = model(tokens, model.start(memory), need_weights=True)
    kept = model.start(memory)
    with torch.no_grad():
        parts = in_steps(lambda part: model(part, kept, need_weights=True), tokens, steps)
    stepped = torch.cat([part.hidden for part in parts], dim=1)
    torch.testing.assert_close(stepped, hidden)
    torch.testing.assert_close(model.logits(stepped), model.logits(hidden))
    torch.testing.assert_close(torch.cat([part.weights for part in parts], dim=3), weights)
    assert weights.shape == (R, 3, 6, T, 9) and len(kept) == T


# Rows


@pytest.mark.parametrize("kind", KINDS)
def test_captions_of_one_picture_share_its_memory(kind):
    """Three captions of each of two pictures, against each caption with a memory of its own."""
    model, memory = decoder(kind), torch.randn(R, 9, DIM, dtype=torch.float64)
    tokens = torch.randint(11, (3 * R, T))
    shared = model.start(memory)
    repeated = model.start(memory.repeat_interleave(3, dim=0))
    assert shared.memory(0).key.size(0) == R and repeated.memory(0).key.size(0) == 3 * R
    with torch.no_grad():
        for part in tokens.split((3, 1, 3), dim=1):
            torch.testing.assert_close(
                model(part, shared, need_weights=True), model(part, repeated, need_weights=True)
            )


@pytest.mark.parametrize("kind", KINDS)
def test_reordered_rows_go_on_from_the_rows_they_continue(kind):
    """Beam search: one row per picture becomes three beams of each, then beams swap."""
    model, memory = decoder(kind), torch.randn(R, 9, DIM, dtype=torch.float64)
    first, second, third = torch.randint(11, (R, 2)), *torch.randint(11, (2, 3 * R, 1))
    grow, swap = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([2, 0, 0, 3, 5, 4])
    kept = model.start(memory)
    with torch.no_grad():
        model(first, kept)
        kept.reorder(grow)
        model(second, kept)
        kept.reorder(swap)
        stepped = model(third, kept, need_weights=True)
        written = torch.cat([torch.cat([first[grow], second], dim=1)[swap], third], dim=1)
        whole = model(written, model.start(memory), need_weights=True)
    torch.testing.assert_close(stepped.hidden, whole.hidden[:, -1:])
    torch.testing.assert_close(stepped.weights, whole.weights[:, :, :, -1:])


def test_reorder_of_an_empty_cache_does_nothing():
    kept = cache(layers=2)
    kept.reorder(torch.tensor([0, 0, 1]))
    added = new(3, 2)
    assert torch.equal(kept.append(0, added).key, added.key)


# Storage

BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.int8: 1}


@pytest.mark.parametrize("num_kv_heads", [6, 2, 1])
@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_formula(kind, dtype, num_kv_heads):
    """2 * N * dim * layers * bytes, times the key/value heads over the heads; int8 has scales."""
    model = TextDecoder(11, dim=24, depth=3, num_heads=6, num_kv_heads=num_kv_heads, attention=kind)
    kept = model.start(torch.randn(R, 9, 24), cache_dtype=dtype)
    for tokens in ((R, 4), (R, 1), (R, 1)):
        with torch.no_grad():
            model(torch.randint(11, tokens), kept)
    held = R * (9 + len(kept))
    expected = 2 * held * 24 * 3 * BYTES[dtype] * num_kv_heads // 6
    if dtype == torch.int8:
        expected += 2 * held * num_kv_heads * 3 * 4  # a float32 of each head and token
    assert len(kept) == 6 and kept.nbytes == expected


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 0), (torch.bfloat16, 1e-2), (torch.float16, 1e-3), (torch.int8, 1e-2)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_stored_small_stays_close(kind, dtype, error):
    """Relative error of the logits, token by token, with beams that swap on the way."""
    model = TextDecoder(50, dim=96, depth=2, num_heads=6, num_kv_heads=3, attention=kind).eval()
    memory, tokens = torch.randn(R, 9, 96), torch.randint(50, (3 * R, T))
    full, small = model.start(memory), model.start(memory, cache_dtype=dtype)
    with torch.no_grad():
        for part in tokens.split(1, dim=1):
            rows = torch.arange(3 * R).flip(0)
            for kept in (full, small):
                if len(kept):
                    kept.reorder(rows)
            wanted, found = (model.logits(model(part, kept).hidden) for kept in (full, small))
            assert (found - wanted).norm() <= error * wanted.norm()
    assert small.nbytes <= full.nbytes and small.memory(0).key.dtype == torch.float32


def test_int8_is_within_half_a_step_of_each_head_and_token():
    x = torch.randn(2, 3, 5, 16) * torch.logspace(-30, 6, 5)[:, None]
    numbers, scales = quantise(x)
    assert numbers.dtype == torch.int8 and scales.shape == (2, 3, 5, 1)
    assert ((numbers * scales - x).abs() <= 0.501 * scales).all()
    assert (numbers.abs().amax(-1) == 127).all()
    assert quantise(torch.zeros(2, 4))[0].eq(0).all()


def test_other_storage_is_refused():
    with pytest.raises(ValueError, match=r"one of float32, bfloat16, float16, int8, got .*float64"):
        KVCache([new(R, 9)], dtype=torch.float64)


# Room


def test_append_returns_all_that_was_added():
    kept, parts = cache(layers=2), [new(R, tokens) for tokens in (2, 1, 1, 5, 3)]
    for i, part in enumerate(parts, start=1):
        for layer in (0, 1):
            held = kept.append(layer, part)
            for name in ("key", "value"):
                expected = torch.cat([getattr(part, name) for part in parts[:i]], dim=2)
                assert torch.equal(getattr(held, name), expected)
        assert len(kept) == held.key.size(2)


def test_room_doubles_so_that_a_step_copies_no_past():
    kept, places = cache(), []
    for _ in range(65):
        places.append(kept.append(0, new(R, 1)).key.data_ptr())
    moves = sum(a != b for a, b in pairwise(places))
    assert moves <= 7


def test_what_was_returned_before_stays_as_it_was():
    """Neither later tokens, nor other rows in the same room, write over it."""
    kept, returned, copies = cache(), [], []
    for step in range(9):
        held = kept.append(0, new(R, 2))
        returned += held
        copies += [x.clone() for x in held]
        if step % 3 == 2:
            kept.reorder(torch.tensor([1, 0]))
    assert all(torch.equal(x, copy) for x, copy in zip(returned, copies))


def test_rows_that_came_from_one_row_go_apart():
    kept, first = KVCache([new(1, 9)]), new(1, 3)
    kept.append(0, first)
    kept.append(0, new(1, 1))
    kept.reorder(torch.tensor([0, 0, 0]))
    second = new(3, 1)
    held = kept.append(0, second)
    for row in range(3):
        assert torch.equal(held.key[row, :, :3], first.key[0])
        assert torch.equal(held.key[row, :, 4:], second.key[row])
        assert torch.equal(held.value[row, :, 4:], second.value[row])


def test_pictures_without_rows_are_dropped():
    kept, first = cache(), new(2 * R, 3)
    kept.append(0, first)
    memory = kept.memory(0)
    kept.reorder(torch.tensor([3, 2, 3]))
    assert torch.equal(kept.memory(0).key, memory.key[1:])
    assert torch.equal(kept.memory(0).value, memory.value[1:])
    held = kept.append(0, new(3, 1))
    assert torch.equal(held.key[:, :, :3], first.key[[3, 2, 3]])


def test_two_caches_that_begin_with_the_same_tensors_go_apart():
    start = new(R, 2)
    copies = KeyValue(*(x.clone() for x in start))
    one, other = cache(), cache()
    one.append(0, start)
    other.append(0, start)
    added = new(R, 1)
    one.append(0, added)
    held = other.append(0, new(R, 1))
    assert not torch.equal(held.key[:, :, 2:], added.key)
    assert torch.equal(held.key[:, :, :2], copies.key) and torch.equal(start.value, copies.value)


@pytest.mark.parametrize("rows", [1, 3])
def test_other_rows_than_before_are_refused(rows):
    kept = cache()
    kept.append(0, new(R, 4))
    with pytest.raises(ValueError, match=f"new must have the 2 rows of the cache, got {rows}"):
        kept.append(0, new(rows, 1))
