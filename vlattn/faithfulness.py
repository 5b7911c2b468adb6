"""Whether the model needs what its maps mark: a word's log-probability as patches are hidden.

Insertion and deletion curves, after Petsiuk et al., "RISE: Randomized Input Sampling for
Explanation of Black-box Models", BMVC 2018. What is hidden is taken out of the memory, so that
cross-attention cannot look there; no boxes are needed.

B words, one of each picture, K patches that are left, T tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlattn.captioner import Captioner
from vlattn.data.records import Record
from vlattn.generation import Hypothesis
from vlattn.images import ImageError, open_image
from vlattn.network import token_logprobs

SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)
NAMES = ("deletion", "deletion_random", "insertion", "insertion_random")
LEAST_LETTERS = 3  # of a word: articles and signs need no picture
BATCH_SIZE = 8


class Curves(NamedTuple):
    """Mean log-probability of the words, in nats.

    Args:
        words: how many.
        whole: with the whole picture.
        values: (4, shares) by `NAMES`: with that share of the patches hidden, the hottest of the
            word's map or random ones; and with that share alone shown, likewise.
    """

    words: int
    whole: float
    values: np.ndarray

    def summary(self) -> dict[str, Any]:
        """JSON values; the gains are means over the shares, of the map over random patches."""
        deletion, deletion_random, insertion, insertion_random = self.values
        return {
            "words": self.words,
            "shares": list(SHARES),
            "whole": self.whole,
            **{name: curve.tolist() for name, curve in zip(NAMES, self.values)},
            "deletion_gain": float((deletion_random - deletion).mean()),
            "insertion_gain": float((insertion - insertion_random).mean()),
        }


@torch.inference_mode()
def hide_patches(
    captioner: Captioner,
    records: Sequence[Record],
    captions: dict[str, str],
    *,
    most: int = 200,
    seed: int = 0,
) -> Curves | None:
    """The curves of one word, drawn at random, of each of some captions.

    Args:
        captions: by the record's name, as `write_captions` gives them.
        most: captions, the first ones.
        seed: of the words and of the random patches.

    Returns:
        None where no caption has a word of `LEAST_LETTERS` letters.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = [record for record in records if captions.get(record.name)][:most]
    measured = [
        _curves(captioner, chosen[start : start + BATCH_SIZE], captions, generator)
        for start in range(0, len(chosen), BATCH_SIZE)
    ]
    values = torch.cat(measured) if measured else torch.empty(0)
    if not len(values):
        return None
    whole, *rest = values.double().mean(0).tolist()
    return Curves(len(values), whole, np.array(rest).reshape(len(SHARES), len(NAMES)).T)


def _curves(
    captioner: Captioner,
    records: Sequence[Record],
    captions: dict[str, str],
    generator: torch.Generator,
) -> Tensor:
    """(B, 1 + shares * 4): the whole picture, then share by share the values of `NAMES`."""
    pictures, texts, words = [], [], []
    for record in records:
        text = captioner.tokenizer.encode(captions[record.name])[: captioner.config.max_len - 1]
        spans = captioner.tokenizer.words(text)
        long = [i for i, span in enumerate(spans) if len(span.text.strip()) >= LEAST_LETTERS]
        if not long:
            continue
        try:
            pictures.append(open_image(record.image))
        except ImageError:
            continue
        texts.append(Hypothesis(text, 0.0, False))
        words.append(long[int(torch.randint(len(long), (), generator=generator))])
    if not pictures:
        return torch.empty(0, 1 + len(SHARES) * len(NAMES))
    features, geometries = captioner.read_pictures(pictures)
    explained = captioner.explain_texts(texts, features, pictures, geometries)
    maps = torch.stack([caption.attention[i] for caption, i in zip(explained, words)]).flatten(1)
    hottest = maps.argsort(descending=True, dim=1)  # (B, N)
    shuffled = torch.rand(maps.shape, generator=generator).argsort(dim=1)
    memory = captioner.memory(features)
    prefix, patches = memory[:, : features.num_prefix], memory[:, features.num_prefix :]
    whole = torch.tensor([c.words[i].logprob for c, i in zip(explained, words)])[:, None]
    columns = [whole]
    for share in SHARES:
        count = min(max(1, round(share * maps.size(1))), maps.size(1) - 1)
        kept = [order[:, count:] for order in (hottest, shuffled)]
        shown = [order[:, :count] for order in (hottest, shuffled)]
        for left in (*kept, *shown):
            index = left[:, :, None].expand(-1, -1, memory.size(2)).to(memory.device)
            seen = torch.cat([prefix, patches.gather(1, index)], dim=1)
            columns.append(_logprobs(captioner, seen, texts, words))
    return torch.cat(columns, dim=1)


def _logprobs(
    captioner: Captioner, memory: Tensor, texts: Sequence[Hypothesis], words: Sequence[int]
) -> Tensor:
    """(B, 1) of a word of each text with what is left of the memory (B, K, D)."""
    tokenizer, decoder = captioner.tokenizer, captioner.decoder
    tokens = captioner.pad_texts([text.tokens for text in texts]).to(captioner.device)
    hidden, _ = decoder(tokens[:, :-1], decoder.start(memory))
    logprobs = token_logprobs(decoder.logits(hidden), tokens[:, 1:]).cpu()  # (B, T)
    spans = [tokenizer.words(text.tokens)[i] for text, i in zip(texts, words)]
    return torch.stack([row[s.first : s.last].sum() for row, s in zip(logprobs, spans)])[:, None]
