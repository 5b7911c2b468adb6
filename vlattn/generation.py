"""Writing captions: greedy, sampling and beam search over any step function.

B pictures, K beams, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]
"""`step(tokens (R,), rows (R,)) -> logits (R, V)`: row i continues what row `rows[i]` of the last
call wrote, with `tokens[i]`."""


class Hypothesis(NamedTuple):
    """Tokens without begin and end, their score, and whether the end token was reached."""

    tokens: list[int]
    score: float
    finished: bool


class _Beam(NamedTuple):
    """A text that goes on, its log-probability, and the row of the last call that it continues."""

    tokens: list[int]
    total: float
    row: int


def beam_search(
    step: Step,
    batch_size: int,
    *,
    bos_id: int,
    eos_id: int,
    banned: Sequence[int],
    max_len: int,
    num_beams: int = 3,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] | None = None,
    no_repeat_ngram: int | None = None,
    num_return: int = 1,
) -> list[list[Hypothesis]]:
    """Beam search; one beam is greedy decoding.

    The score of a text of n tokens, its end token counted, is `sum(log p) / n ** length_penalty`:
    0 ranks by probability, which favours short texts, and the larger the value, the longer the
    texts that win. A text that ends gives up its beam; a picture is done when no beam is left, or
    when none that is left could still be among the `num_return` best.

    With `early_stopping` the rules are those of the transformers library's `generate`: the beam of
    a text that ends goes to the next best text; a picture is done when it has `num_beams` ended
    texts (True), and no text that goes on has a better score than the worst of them, as it is
    (False) or with the same log-probability at `max_len` ("never"); texts cut at `max_len` count
    as ended.

    Args:
        step: the model, one token at a time.
        batch_size: number of pictures B; their rows are apart, so that none depends on another.
            All that are not done have the same number of rows, one picture after the other.
        bos_id, eos_id: begin and end tokens.
        banned: tokens that are never written.
        max_len: most tokens of a text, its end token counted.
        num_beams: beams per picture, K.
        length_penalty: 0 to 10.
        no_repeat_ngram: no text has a run of so many tokens twice, as in "a dog and a dog and".
        num_return: texts wanted per picture, at most `num_beams`.

    Returns:
        per picture at most `num_return` different texts (fewer where the vocabulary allows no
        more), best first; unfinished ones only after all finished ones unless they count as ended.
    """
    _check_at_least("max_len", max_len, 1)
    _check_at_least("num_beams", num_beams, 1)
    if no_repeat_ngram is not None:
        _check_at_least("no_repeat_ngram", no_repeat_ngram, 1)
    if not 0 <= length_penalty <= 10:  # a power of the length: more goes past what floats hold
        raise ValueError(f"length_penalty must be 0 to 10, got {length_penalty}")
    if early_stopping not in (None, True, False, "never"):
        raise ValueError(
            f"early_stopping must be True, False, 'never' or None, got {early_stopping!r}"
        )
    if not 1 <= num_return <= num_beams:
        raise ValueError(f"num_return must be 1 to num_beams={num_beams}, got {num_return}")
    refill = early_stopping is not None
    wanted = num_beams if refill else num_return
    found: list[list[Hypothesis]] = [[] for _ in range(batch_size)]
    beams = [[_Beam([], 0.0, picture)] for picture in range(batch_size)]  # best first
    banned = torch.tensor(banned, dtype=torch.long)
    for length in range(1, max_len + 1):
        last, penalty = length == max_len, float(length) ** length_penalty
        live = [picture for picture in range(batch_size) if beams[picture]]
        if not live:
            break
        width = max(len(beams[picture]) for picture in live)
        rows = [beam for picture in live for beam in _filled(beams[picture], width)]
        tokens = torch.tensor([beam.tokens[-1] if beam.tokens else bos_id for beam in rows])
        logprobs = _logprobs(step(tokens, torch.tensor([beam.row for beam in rows])), banned)
        if no_repeat_ngram is not None:
            texts = torch.tensor([beam.tokens for beam in rows], dtype=torch.long)
            logprobs = without_repeats(logprobs, texts, no_repeat_ngram)
        looked = num_beams * (2 if refill and not last else 1)
        logprobs, words = (x.cpu() for x in likeliest(logprobs, looked))  # (R, k)
        totals = logprobs + torch.tensor([beam.total for beam in rows])[:, None]
        totals = totals.reshape(len(live), -1)  # (pictures, width * k)
        totals, places = totals.topk(min(looked, totals.size(1)))
        words = words.reshape(len(live), -1).gather(1, places).tolist()
        parents = (places // logprobs.size(1) + width * torch.arange(len(live))[:, None]).tolist()

        for picture, *candidates in zip(live, totals.tolist(), words, parents):
            free = num_beams if refill else num_beams - len(found[picture])
            texts = []
            for rank, (total, token, row) in enumerate(zip(*candidates)):
                if total == -math.inf or len(texts) == free or (not refill and rank == free):
                    break
                if token != eos_id:
                    texts.append(_Beam([*rows[row].tokens, token], total, row))
                elif rank < free:
                    found[picture].append(Hypothesis(rows[row].tokens, total / penalty, True))
            best = sorted(found[picture], key=lambda h: -h.score)[:num_beams]
            if texts and len(best) >= wanted and not last:
                horizon = penalty if early_stopping is False else float(max_len) ** length_penalty
                if early_stopping is True or texts[0].total / horizon <= best[wanted - 1].score:
                    texts = []
            found[picture], beams[picture] = best, texts
    for picture, texts in enumerate(beams):
        found[picture] += [Hypothesis(b.tokens, b.total / penalty, False) for b in texts]
        found[picture].sort(key=lambda h: (not refill and not h.finished, -h.score))
    return [best[:num_return] for best in found]


def _filled(beams: list[_Beam], width: int) -> list[_Beam]:
    """As many beams as asked for; those that are added can never win."""
    return beams + [beams[0]._replace(total=-math.inf)] * (width - len(beams))


def sample(
    step: Step,
    batch_size: int,
    *,
    bos_id: int,
    eos_id: int,
    banned: Sequence[int],
    max_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    no_repeat_ngram: int | None = None,
    num_samples: int = 1,
    generator: torch.Generator | None = None,
) -> list[Hypothesis]:
    """Draw texts of each picture, token by token; those of a picture stand together.

    Args:
        temperature: divides the logits; 0 always takes the likeliest token (greedy decoding).
        top_k: draw from the k likeliest tokens (Fan et al., ACL 2018).
        top_p: draw from the fewest likeliest tokens that together have this probability (nucleus
            sampling, Holtzman et al., ICLR 2020).
        num_samples: texts per picture.
        generator: source of the random numbers.

    The others are those of `beam_search`. The score is the mean log-probability per token, under
    the model's own distribution, as that of `beam_search` with its default penalty.
    """
    _check_at_least("max_len", max_len, 1)
    _check_at_least("num_samples", num_samples, 1)
    if no_repeat_ngram is not None:
        _check_at_least("no_repeat_ngram", no_repeat_ngram, 1)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
    if top_k is not None:
        _check_at_least("top_k", top_k, 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    banned = torch.tensor(banned, dtype=torch.long)
    number = batch_size * num_samples
    texts = torch.full((number, max_len), eos_id)
    totals, lengths = torch.zeros(number), torch.zeros(number, dtype=torch.long)
    live = torch.arange(number)  # texts that go on
    rows, tokens = torch.arange(batch_size), torch.full((batch_size,), bos_id)
    places = live // num_samples  # the row of each
    for length in range(max_len):
        logprobs = _logprobs(step(tokens, rows), banned).cpu()[places]  # (live, V)
        if no_repeat_ngram is not None:
            logprobs = without_repeats(logprobs, texts[live, :length], no_repeat_ngram)
        if temperature == 0:
            tokens = logprobs.argmax(-1)
        else:
            behind = (logprobs - logprobs.amax(-1, keepdim=True)).double()  # 0 for the likeliest
            kept = keep_likeliest(behind / temperature, top_k, top_p)
            tokens = torch.multinomial(kept.softmax(-1), 1, generator=generator).squeeze(1)
        totals[live] += logprobs.gather(1, tokens[:, None]).squeeze(1)
        lengths[live] += 1
        texts[live, length] = tokens
        on = tokens != eos_id
        live, rows, tokens = live[on], places[on], tokens[on]
        if len(live) == 0:
            break
        chosen, places = _as_many_of_each(live // num_samples)
        rows, tokens = rows[chosen], tokens[chosen]
    ended = torch.ones(number, dtype=torch.bool).index_fill(0, live, False)
    scores = totals / lengths
    return [
        Hypothesis(text[: length - end], score, end)
        for text, length, score, end in zip(
            texts.tolist(), lengths.tolist(), scores.tolist(), ended.tolist()
        )
    ]


def _as_many_of_each(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Texts of pictures (n,), in order, as rows with the same number for each picture.

    Returns:
        (rows,) which text a row is, a picture's first one where it has too few; and (n,) the row of
        each text.
    """
    _, counts = pictures.unique_consecutive(return_counts=True)
    slots = torch.arange(int(counts.max()))
    real = slots < counts[:, None]  # (pictures, slots)
    chosen = (counts.cumsum(0) - counts)[:, None] + slots * real
    return chosen.flatten(), real.flatten().nonzero().squeeze(1)


def _logprobs(logits: Tensor, banned: Tensor) -> Tensor:
    """(R, V) under the model's own distribution, and -inf for banned tokens."""
    logprobs = logits.float().log_softmax(-1)
    if logprobs.amax(-1).isnan().any():
        raise ValueError("the model's logits are NaN or infinite: so are its weights or its input")
    return logprobs.index_fill_(1, banned.to(logits.device), -torch.inf)


def likeliest(logprobs: Tensor, count: int, *, block: int = 256) -> tuple[Tensor, Tensor]:
    """The largest of each row (R, V), largest first, and their tokens: both (R, count or V).

    Where the vocabulary is large, only the blocks with the largest values are looked into.
    """
    num_blocks, rest = divmod(logprobs.size(1), block)
    if num_blocks < 16 * count:
        return logprobs.topk(min(count, logprobs.size(1)))
    blocks = logprobs[:, : num_blocks * block].unflatten(1, (num_blocks, block))
    chosen = blocks.amax(-1).topk(count).indices  # (R, count)
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, block)).flatten(1)
    values, places = torch.cat([inside, logprobs[:, num_blocks * block :]], dim=1).topk(count)
    tokens = torch.arange(block, device=chosen.device) + chosen[..., None] * block
    after = torch.arange(rest, device=chosen.device) + num_blocks * block
    tokens = torch.cat([tokens.flatten(1), after.expand(len(chosen), -1)], dim=1)
    return values, tokens.gather(1, places)


def without_repeats(logprobs: Tensor, texts: Tensor, size: int) -> Tensor:
    """(R, V) with -inf for what would end a run of `size` tokens that texts (R, t) have already."""
    if texts.size(1) < size:
        return logprobs
    runs = texts.unfold(1, size, 1)  # (R, runs, size)
    last = texts[:, None, texts.size(1) - size + 1 :]  # (R, 1, size - 1)
    repeats = (runs[..., :-1] == last).all(-1)  # (R, runs)
    rows, which = repeats.nonzero(as_tuple=True)
    logprobs = logprobs.clone()
    logprobs[rows, runs[rows, which, -1]] = -torch.inf
    return logprobs


def keep_likeliest(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Logits (R, V) with all but the likeliest at -inf; the likeliest of a row always stays."""
    if top_k is not None:
        least = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, dims=-1)  # probability of all likelier ones
        before[:, 0] = 0.0
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, before >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


def _check_at_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
