"""Phrases with boxes in the texts about a picture, and the maps of the words that they are made of.

L layers, H heads, gh, gw grid of patches.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from vlattn.captioner import Captioner
from vlattn.data.records import Phrase, Record
from vlattn.encoder import PatchFeatures
from vlattn.images import Box, Geometry, ImageError, open_image


class Mention(NamedTuple):
    """A phrase in a text: which of its words, and the boxes of what they name."""

    kind: str
    words: tuple[int, ...]
    boxes: tuple[Box, ...]


class Text(NamedTuple):
    """A text about a picture, its tokens, those of each word, and its phrases with boxes."""

    text: str
    tokens: list[int]
    spans: list[tuple[int, int]]
    mentions: tuple[Mention, ...]


def reference_texts(captioner: Captioner, record: Record) -> list[Text]:
    """The captions of a record that have a phrase with boxes, and are not too long to read."""
    return [
        text
        for caption, phrases in zip(record.captions, record.phrases)
        if (text := _text(captioner, caption, phrases)).mentions
    ]


def generated_texts(captioner: Captioner, record: Record, caption: str) -> list[Text]:
    """A caption that was written, as a list of it if it names a reference phrase with boxes.

    A phrase counts where it equals, lower-cased, one of the references; the boxes are then those of
    all reference phrases of that text. Of phrases that overlap the longest counts.
    """
    kinds: dict[str, str] = {}
    boxes: dict[str, dict[Box, None]] = defaultdict(dict)
    for reference, phrases in zip(record.captions, record.phrases):
        for phrase in phrases:
            name = reference[phrase.start : phrase.end].lower()
            kinds[name] = phrase.kind
            boxes[name] |= dict.fromkeys(phrase.boxes)
    found: list[Phrase] = []
    for name in sorted(boxes, key=len, reverse=True):
        for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", caption, re.IGNORECASE):
            start, end = match.span()
            if all(end <= other.start or start >= other.end for other in found):
                found.append(Phrase(start, end, kinds[name], tuple(boxes[name])))
    text = _text(captioner, caption, found)
    return [text] if text.mentions else []


def _text(captioner: Captioner, caption: str, phrases: Sequence[Phrase]) -> Text:
    tokenizer = captioner.tokenizer
    tokens = tokenizer.encode(caption)
    if len(tokens) >= captioner.config.max_len:
        return Text(caption, [], [], ())
    (offsets,) = tokenizer.offsets([caption])
    spans = [(word.first, word.last) for word in tokenizer.words(tokens)]
    places = [(offsets[first][0], offsets[last - 1][1]) for first, last in spans]
    mentions = []
    for phrase in phrases:
        words = [i for i, (a, b) in enumerate(places) if a < phrase.end and b > phrase.start]
        if words and phrase.boxes:
            mentions.append(Mention(phrase.kind, tuple(words), phrase.boxes))
    return Text(caption, tokens, spans, tuple(mentions))


class Pictured(NamedTuple):
    """A picture's geometry, and per text attention and relevance of its words.

    Both are (words, L, H, gh, gw).
    """

    index: int
    geometry: Geometry
    maps: list[tuple[Tensor, Tensor]]


def read_maps(
    captioner: Captioner, records: Sequence[Record], texts: Sequence[Sequence[Text]]
) -> Iterator[Pictured]:
    """The maps of every text's words, teacher-forced; the texts of a picture share its memory.

    Args:
        texts: of each record; pictures without any, and those that cannot be read, are left out.
    """
    wanted = [i for i, of_picture in enumerate(texts) if of_picture]
    with tqdm(total=len(wanted), desc="grounding", unit="img", leave=False) as bar:
        for start in range(0, len(wanted), 16):
            indices, pictures = [], []
            for i in wanted[start : start + 16]:
                try:
                    pictures.append(open_image(records[i].image))
                    indices.append(i)
                except ImageError as error:
                    bar.write(f"skipped: {error}")
            if pictures:
                features, geometries = captioner.read_pictures(pictures)
                maps = _maps(captioner, features, [texts[i] for i in indices])
                for i, geometry, of_picture in zip(indices, geometries, maps):
                    yield Pictured(i, geometry, of_picture)
            bar.update(len(wanted[start : start + 16]))


@torch.inference_mode()
def _maps(
    captioner: Captioner, features: PatchFeatures, texts: list[Sequence[Text]]
) -> list[list[tuple[Tensor, Tensor]]]:
    most = max(map(len, texts))
    nothing = Text("", [], [], ())
    rows = [
        [*text.tokens, captioner.tokenizer.eos_id]
        for of_picture in texts
        for text in [*of_picture, *[nothing] * (most - len(of_picture))]
    ]
    read = captioner.read_texts(captioner.pad_texts(rows), features)
    both = torch.stack([read.weights, read.relevance], dim=1)
    both = both.float().cpu().permute(0, 4, 1, 2, 3, 5)  # (R, T, 2, L, H, N)
    both = both.unflatten(-1, features.grid_size).unflatten(0, (len(texts), most))
    return [
        [
            torch.stack([maps[first:last].mean(0) for first, last in text.spans]).unbind(1)
            for maps, text in zip(of_picture, of_texts)
        ]
        for of_picture, of_texts in zip(both, texts)
    ]
