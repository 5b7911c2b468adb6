"""Beam search and sampling against loops over all texts."""

import math
import zlib
from itertools import pairwise

import numpy as np
import pytest
import torch

from vlattn.generation import (
    beam_search,
    keep_likeliest,
    likeliest,
    sample,
    without_repeats,
)

PAD, BOS, EOS, A, B, C = range(6)
VOCAB = 6
COMMON = {"bos_id": BOS, "eos_id": EOS, "banned": [PAD, BOS]}


class Toy:
    """A model whose logits are a function of (picture, text so far)."""

    def __init__(self, logits, pictures):
        self.logits, self.calls = logits, 0
        self.texts = [(picture,) for picture in pictures]

    def __call__(self, tokens, rows):
        self.calls += 1
        if self.calls == 1:
            assert set(tokens.tolist()) == {BOS}
            new = [()] * len(rows)
        else:
            new = [(token,) for token in tokens.tolist()]
        self.texts = [self.texts[row] + token for row, token in zip(rows.tolist(), new)]
        return torch.stack([self.logits(text[0], text[1:]) for text in self.texts])


def random_logits(picture, text):
    generator = torch.Generator().manual_seed(zlib.crc32(repr((picture, text)).encode()))
    logits = 2 * torch.randn(VOCAB, generator=generator)
    return logits.index_add(0, torch.tensor([EOS]), torch.tensor([-1.0]))


def every_text(logits, picture, max_len, length_penalty, text=(), total=0.0):
    """(tokens, score, finished) of each text that the model can write."""
    found = []
    logprobs = logits(picture, text).double().log_softmax(-1)
    for token in (EOS, A, B, C):
        sum_ = total + float(logprobs[token])
        length = len(text) + 1
        if token == EOS:
            found.append(([*text], sum_ / length**length_penalty, True))
        elif length == max_len:
            found.append(([*text, token], sum_ / length**length_penalty, False))
        else:
            found += every_text(logits, picture, max_len, length_penalty, (*text, token), sum_)
    return found


def same(found, expected):
    assert [h.tokens for h in found] == [tokens for tokens, _, _ in expected]
    assert [h.finished for h in found] == [finished for _, _, finished in expected]
    np.testing.assert_allclose([h.score for h in found], [s for _, s, _ in expected], rtol=1e-4)


@pytest.mark.parametrize("length_penalty", [0, 0.6, 1.0, 2.5])
def test_a_beam_as_wide_as_all_texts_finds_what_a_search_of_all_texts_finds(length_penalty):
    texts = [
        sorted(
            every_text(random_logits, picture, 4, length_penalty),
            key=lambda text: (not text[2], -text[1]),
        )
        for picture in range(3)
    ]
    wide = len(texts[0])
    options = {"max_len": 4, "num_beams": wide, "length_penalty": length_penalty}
    everything = beam_search(Toy(random_logits, range(3)), 3, num_return=wide, **COMMON, **options)
    few = beam_search(Toy(random_logits, range(3)), 3, num_return=3, **COMMON, **options)
    for picture in range(3):
        same(everything[picture], texts[picture])
        same(few[picture], texts[picture][:3])


def test_one_beam_is_greedy_decoding():
    beams = beam_search(Toy(random_logits, range(7)), 7, max_len=4, num_beams=1, **COMMON)
    drawn = sample(Toy(random_logits, range(7)), 7, max_len=4, temperature=0, **COMMON)
    for picture, (found,) in enumerate(beams):
        text, total = [], 0.0
        while len(text) < 4 and EOS not in text:
            logprobs = random_logits(picture, tuple(text)).log_softmax(-1)
            text.append(max((EOS, A, B, C), key=lambda token: logprobs[token]))
            total += float(logprobs[text[-1]])
        expected = ([token for token in text if token != EOS], total / len(text), EOS in text)
        same([found, drawn[picture]], [expected, expected])
    assert {found.finished for (found,) in beams} == {True, False}


@pytest.mark.parametrize(("num_beams", "num_return"), [(4, 4), (50, 7), (2, 1)])
def test_a_batch_gives_what_each_picture_gives_alone(num_beams, num_return):
    """Beams were numbered beam by beam instead of picture by picture, and texts of one picture went
    to another; or all beams of a picture held the same text (F1)."""
    options = {"max_len": 6, "num_beams": num_beams, "num_return": num_return, **COMMON}
    together = beam_search(Toy(random_logits, range(3)), 3, **options)
    for picture, found in enumerate(together):
        (alone,) = beam_search(Toy(random_logits, [picture]), 1, **options)
        same(found, alone)
        texts = [(tuple(h.tokens), h.finished) for h in found]
        assert len(texts) == num_return == len(set(texts))
    assert len({tuple(found[0].tokens) for found in together}) == 3


def test_fewer_texts_where_the_model_can_write_no_more():
    """With more beams than the vocabulary had words, the search failed (F1)."""
    options = {"max_len": 2, "num_beams": 40, "num_return": 40, **COMMON}
    (found,) = beam_search(Toy(random_logits, [0]), 1, **options)
    everything = every_text(random_logits, 0, max_len=2, length_penalty=1.0)
    assert sorted(h.tokens for h in found) == sorted(tokens for tokens, _, _ in everything)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    ("banned", "max_len"), [([PAD, BOS, EOS], 5), ([PAD, BOS, EOS], 1), ([PAD, BOS], 5)]
)
def test_the_best_unfinished_text_where_none_ends(num_beams, banned, max_len):
    """With no finished text the search took the best of an empty list (F2)."""

    def endless(picture, text):
        return random_logits(picture, text).index_fill(0, torch.tensor(EOS), -40.0)

    options = {"bos_id": BOS, "eos_id": EOS, "banned": banned, "max_len": max_len}
    found = beam_search(Toy(endless, range(2)), 2, num_beams=num_beams, **options)
    drawn = sample(Toy(endless, range(2)), 2, **options)
    for hypothesis in [*(best for (best,) in found), *drawn]:
        assert not hypothesis.finished and len(hypothesis.tokens) == max_len
        assert math.isfinite(hypothesis.score)


def short_or_long(picture, text):
    """[A] has log-probability -1.0, end included, and [B, C, C] has -1.2; else [A] * n, no end."""
    step = -(1.2 + math.log(0.39)) / 3
    likely = {
        (): {A: -0.5, B: math.log(0.39)},
        (A,): {EOS: -0.5},
        (B,): {C: step},
        (B, C): {C: step},
        (B, C, C): {EOS: step},
    }.get(text, {A: math.log(0.999)})
    rest = math.log((1 - sum(map(math.exp, likely.values()))) / (VOCAB - len(likely)) + 1e-12)
    return torch.tensor([likely.get(token, rest) for token in range(VOCAB)])


@pytest.mark.parametrize("num_beams", [2, 3, 8])
def test_larger_length_penalties_favour_longer_texts(num_beams):
    """The penalty worked in the direction opposite to its documentation (F3).

    The formula says that [B, C, C] wins where -1.2 / 4**p > -1.0 / 2**p, p > log2(1.2) = 0.263.
    """
    for penalty in (0, 0.1, 0.2, 0.26, 0.266, 0.3, 0.5, 1.0, 2.0, 5.0):
        toy = Toy(short_or_long, [0])
        options = {"num_beams": num_beams, "length_penalty": penalty}
        ((best,),) = beam_search(toy, 1, max_len=6, **COMMON, **options)
        if penalty > math.log2(1.2):
            assert best.tokens == [B, C, C] and best.score == pytest.approx(-1.2 / 4**penalty)
        else:
            assert best.tokens == [A] and best.score == pytest.approx(-1.0 / 2**penalty)


def test_a_wider_beam_never_finds_a_worse_text():
    for penalty in (0, 0.2, 0.3, 1.0, 3.0):
        scores = []
        for num_beams in range(1, 9):
            options = {"num_beams": num_beams, "length_penalty": penalty}
            ((best,),) = beam_search(Toy(short_or_long, [0]), 1, max_len=6, **COMMON, **options)
            scores.append(best.score)
        assert all(wide >= narrow - 1e-6 for narrow, wide in pairwise(scores))


def test_the_search_ends_when_nothing_left_can_win():
    """It ended with the first text to finish, the shortest, or else with the last step (F3)."""
    for penalty, calls in ((0, 2), (1.0, 4)):
        toy = Toy(short_or_long, [0])
        options = {"num_beams": 2, "length_penalty": penalty}
        beam_search(toy, 1, max_len=30, **COMMON, **options)
        assert toy.calls == calls


@pytest.mark.parametrize("penalty", [-0.1, 10.5, 1000, math.nan, math.inf])
def test_length_penalties_out_of_range_are_refused(penalty):
    with pytest.raises(ValueError, match="length_penalty must be 0 to 10, got"):
        beam_search(
            Toy(random_logits, [0]), 1, max_len=30, num_beams=2, length_penalty=penalty, **COMMON
        )


def test_the_largest_length_penalty_is_no_number_too_large():
    options = {"max_len": 200, "num_beams": 2, "length_penalty": 10}
    ((best,),) = beam_search(Toy(short_or_long, [0]), 1, **COMMON, **options)
    assert best.tokens == [B, C, C] and best.score == pytest.approx(-1.2 / 4**10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 0}, "max_len must be at least 1, got 0"),
        ({"max_len": 3, "num_beams": 0}, "num_beams must be at least 1, got 0"),
        ({"max_len": 3, "num_return": 4}, "num_return must be 1 to num_beams=3, got 4"),
        ({"max_len": 3, "num_return": 0}, "num_return must be 1 to num_beams=3, got 0"),
    ],
)
def test_beam_search_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        beam_search(Toy(random_logits, [0]), 1, **COMMON, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0 and finite, got -1"),
        ({"temperature": math.nan}, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": math.inf}, "temperature must be at least 0 and finite, got inf"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"max_len": 0}, "max_len must be at least 1, got 0"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
    ],
)
def test_sampling_refuses(options, message):
    """Bad values gave NaN probabilities, or filtered every token (F5)."""
    with pytest.raises(ValueError, match=message):
        sample(Toy(random_logits, [0]), 1, **{"max_len": 4} | options, **COMMON)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e-8},
        {"temperature": 1e-300},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"top_k": 1, "top_p": 1e-9, "temperature": 5.0},
    ],
)
def test_sampling_at_the_edges_is_greedy(options):
    """Dividing by a temperature near zero overflowed, and a top-p near zero kept no token (F5)."""
    greedy = beam_search(Toy(random_logits, range(5)), 5, max_len=6, num_beams=1, **COMMON)
    drawn = sample(Toy(random_logits, range(5)), 5, max_len=6, **options, **COMMON)
    same(drawn, [best for (best,) in greedy])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, None),
        (1.0, None, 1.0),
        (1.0, 99, None),
        (0.5, None, None),
        (3.0, 3, None),
        (1.0, None, 0.75),
        (1.5, 3, 0.6),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature, top_k, top_p):
    """Top-p 1 and a top-k above the vocabulary are no filter; one token always survives (F5)."""
    logits = torch.tensor([9.0, 9.0, 0.3, 1.1, 0.2, -0.6])  # the first two are banned
    number = 4000
    drawn = sample(
        lambda tokens, rows: logits.expand(number, -1),
        number,
        max_len=1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator().manual_seed(0),
        **COMMON,
    )
    weights = {token: math.exp(float(logits[token]) / temperature) for token in (EOS, A, B, C)}
    ranked = sorted(weights, key=weights.get, reverse=True)[:top_k]
    kept, mass = [], 0.0
    for token in ranked:
        if top_p is None or mass < top_p:
            kept.append(token)
        mass += weights[token] / sum(weights[t] for t in ranked)
    tokens = [EOS if h.finished else h.tokens[0] for h in drawn]
    for token in range(VOCAB):
        share = weights[token] / sum(weights[t] for t in kept) if token in kept else 0.0
        deviation = math.sqrt(share * (1 - share) / number)
        assert abs(tokens.count(token) / number - share) <= 4 * deviation


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 2}, {"temperature": 1e-8}])
def test_half_precision_logits_with_one_near_the_largest_number(options):
    """The softmax of such logits overflowed to NaN (F5)."""
    logits = torch.zeros(VOCAB, dtype=torch.float16)
    logits[B] = 60_000

    def step(tokens, rows):
        return logits.expand(len(tokens), -1)

    drawn = sample(step, 20, max_len=3, **options, **COMMON)
    assert all(h.tokens == [B] * 3 and h.score == 0.0 for h in drawn)
    (found,) = beam_search(step, 1, max_len=3, num_beams=4, **COMMON)
    assert found[0].finished  # [], at -60000: finished texts come first
    logits[B], logits[PAD] = 0, 60_000  # a banned one
    assert all(set(h.tokens) <= {A, B, C} for h in sample(step, 20, max_len=3, **options, **COMMON))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(value):
    """A model whose training had diverged ended in an error about an empty list."""
    step = Toy(lambda picture, text: torch.full((VOCAB,), value), [0])
    for write in (beam_search, sample):
        with pytest.raises(ValueError, match="the model's logits are NaN or infinite"):
            write(step, 1, max_len=3, **COMMON)


def test_the_likeliest_token_stays_in_every_row():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -torch.inf, -torch.inf], [1.0, 1.0, 1.0]])
    for top_k, top_p in ((1, None), (None, 1e-9), (1, 1e-9), (9, 1.0)):
        kept = keep_likeliest(logits, top_k, top_p)
        assert torch.equal(kept.amax(1), logits.amax(1))
    assert torch.equal(keep_likeliest(logits, 9, 1.0), logits)
    assert keep_likeliest(logits, 2, None)[0].tolist() == [-torch.inf, 3.0, 1.0]


def test_sampling_is_reproducible_and_ends_each_text_once():
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return sample(Toy(random_logits, range(9)), 9, max_len=7, generator=generator, **COMMON)

    drawn = run(3)
    assert drawn == run(3) != run(4)
    assert {h.finished for h in drawn} == {True, False}
    for picture, hypothesis in enumerate(drawn):
        text = [*hypothesis.tokens, *[EOS] * hypothesis.finished]
        assert EOS not in hypothesis.tokens and len(text) <= 7
        total = sum(
            float(random_logits(picture, tuple(text[:i])).log_softmax(-1)[token])
            for i, token in enumerate(text)
        )
        assert hypothesis.score == pytest.approx(total / len(text), rel=1e-4)


# ---- repeats ----


def has_repeat(text, size):
    runs = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
    return len(set(runs)) < len(runs)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_run_of_tokens_comes_twice(size):
    """Captions went on as "a a a" to the end (X22); here without the option they do."""

    def logits(picture, text):
        return torch.tensor([0.0, 0.0, -4.0, 3.0, 2.0, 1.0]).roll(picture % 2)

    ways = {
        "greedy": lambda **o: beam_search(Toy(logits, [0, 2]), 2, num_beams=1, **o),
        "beam": lambda **o: beam_search(Toy(logits, [0, 2]), 2, num_beams=3, num_return=2, **o),
        "sampled": lambda **o: [
            sample(Toy(logits, [0] * 9), 9, generator=torch.Generator().manual_seed(0), **o)
        ],
    }
    for way in ways.values():
        free = [h.tokens for found in way(max_len=20, **COMMON) for h in found]
        assert any(has_repeat(text, size) for text in free)
        kept = [h.tokens for f in way(max_len=20, no_repeat_ngram=size, **COMMON) for h in f]
        assert kept and not any(has_repeat(text, size) for text in kept)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_without_repeats_equals_a_loop(size):
    texts = torch.randint(3, (5, 8))
    logprobs = torch.randn(5, 4)
    expected = logprobs.clone()
    for row, text in enumerate(texts.tolist()):
        for token in range(4):
            longer = [*text, token]
            new = tuple(longer[-size:])
            seen = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
            if new in seen:
                expected[row, token] = -torch.inf
    assert torch.equal(without_repeats(logprobs, texts, size), expected)


def test_repeats_of_no_size_are_refused():
    for search in (beam_search, sample):
        with pytest.raises(ValueError, match="no_repeat_ngram must be at least 1, got 0"):
            search(Toy(random_logits, [0]), 1, max_len=3, no_repeat_ngram=0, **COMMON)


@pytest.mark.parametrize(("vocab_size", "count"), [(6, 4), (6, 9), (13_001, 3), (13_001, 5)])
def test_likeliest_is_the_topk_of_each_row(vocab_size, count):
    logprobs = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0))
    logprobs[1, -1] = 9.0  # behind the last whole block
    values, tokens = likeliest(logprobs, count)
    expected = logprobs.topk(min(count, vocab_size))
    assert torch.equal(values, expected.values) and torch.equal(tokens, expected.indices)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_pictures_that_are_done_are_computed_no_more(num_beams):
    def logits(picture, text):
        end = torch.full((VOCAB,), -30.0).index_fill(0, torch.tensor(EOS), 0.0)
        return end if picture == 1 and text else random_logits(picture, text) - 50 * end.exp()

    sizes, toy = [], Toy(logits, range(3))

    def step(tokens, rows):
        sizes.append(len(rows))
        return toy(tokens, rows)

    beam_search(step, 3, max_len=4, num_beams=num_beams, **COMMON)
    assert sizes == [3, 3 * num_beams, 2 * num_beams, 2 * num_beams]


def test_drawn_texts_that_have_ended_are_computed_no_more():
    """All rows of a batch were computed to the end of its longest text. Picture 1's texts end at
    once, and of the four texts of another picture those that begin with A end after it."""

    def logits(picture, text):
        if picture == 1:
            likely = {EOS: 0.0}
        elif text[-1:] == (A,):
            likely = {EOS: 0.0}
        else:
            likely = {A: 0.0, B: 0.0}
        return torch.tensor([likely.get(token, -1e4) for token in range(VOCAB)])

    sizes, toy = [], Toy(logits, range(3))

    def step(tokens, rows):
        sizes.append(len(rows))
        return toy(tokens, rows)

    generator = torch.Generator().manual_seed(0)
    drawn = sample(step, 3, max_len=5, num_samples=4, generator=generator, **COMMON)
    assert [h.tokens for h in drawn[4:8]] == [[]] * 4 and all(h.finished for h in drawn[4:8])
    sizes_wanted = [3]
    for length in range(1, 5):  # tokens before the step
        alive = [
            sum(len(h.tokens) + h.finished > length for h in drawn[i : i + 4]) for i in (0, 4, 8)
        ]
        sizes_wanted.append(max(alive) * sum(n > 0 for n in alive))
    assert sizes == [size for size in sizes_wanted if size]
    assert sizes[1] == 8 > sizes[-1]
    for hypothesis in drawn[:4] + drawn[8:]:  # B, B, ..., A
        *before, last = hypothesis.tokens
        assert before == [B] * len(before) and (last == A or len(before) == 4)
        chances = len(hypothesis.tokens)
        total = chances * math.log(0.5)
        assert hypothesis.score == pytest.approx(total / (chances + hypothesis.finished))


def test_rules_of_stopping_that_are_none_are_refused():
    with pytest.raises(ValueError, match="early_stopping must be True, False, 'never' or None"):
        beam_search(Toy(random_logits, [0]), 1, max_len=3, early_stopping="soon", **COMMON)
