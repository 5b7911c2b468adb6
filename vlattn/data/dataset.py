"""Records to batches: the captions of a picture packed into one row beside its pixels.

B pictures, T tokens of a row, S_h, S_w sides of the input, P tokens before the patches, N patches,
D width of the encoder.
"""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vlattn.data.records import Phrase, Record
from vlattn.data.shards import READERS, ShardImage
from vlattn.images import Box, ImageError, Preprocess, boxes_in_view, open_image, view_of
from vlattn.network import PackedTokens
from vlattn.tokenizer import Tokenizer

if TYPE_CHECKING:
    from vlattn.features import KeptFeatures


class Batch(NamedTuple):
    """What one training pass reads.

    Args:
        indices: which of the records the rows are.
        images: (B, 3, S_h, S_w) pixels, or (B, P + N, D) features of a frozen encoder.
        packed: the captions, see `PackedTokens`.
        targets: (K,) the token that follows each of the K real ones in `packed`, row by row.
        regions: (K, N) share of each patch that the boxes of the target's phrase cover, or where
            it has no boxes those of the token before; zeros where neither has any; None unless the
            data set has a grid.
        skipped: why pictures that belong here could not be read, a line each.
    """

    indices: tuple[int, ...]
    images: Tensor
    packed: PackedTokens
    targets: Tensor
    regions: Tensor | None
    skipped: tuple[str, ...]

    def to(self, device: torch.device) -> "Batch":
        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)  # at once, where the memory is pinned

        return self._replace(
            images=move(self.images),
            packed=PackedTokens(*map(move, self.packed)),
            targets=move(self.targets),
            regions=None if self.regions is None else move(self.regions),
        )


class Example(NamedTuple):
    """A record's index, its pixels or features or what is wrong with the picture, its captions.

    `regions` has a row for each target of its captions, as in `Batch`.
    """

    index: int
    image: Tensor | ImageError
    captions: list[list[int]]
    regions: Tensor | None = None


class CaptionDataset(Dataset):
    """Pictures with their tokenised captions.

    Args:
        records: what to read, in order.
        tokenizer: encodes the captions.
        preprocess: makes pixels of pictures; the one that the captioner keeps.
        max_len: longest caption in tokens, begin included; longer ones are cut and not ended.
        captions_per_image: most captions of a picture per epoch; one with more takes turns.
        views: of each picture, of which every epoch takes the next; see `view_of`.
        features: `features[index, view]` is read in place of the picture, (P + N, D) or None where
            it could not be read.
        grid_size: (gh, gw) of the regions to read, where they are wanted.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: Tokenizer,
        preprocess: Preprocess,
        *,
        max_len: int,
        captions_per_image: int = 5,
        views: int = 1,
        features: "KeptFeatures | None" = None,
        grid_size: tuple[int, int] | None = None,
    ):
        self.records, self.preprocess, self.features = records, preprocess, features
        self.captions_per_image, self.grid_size = captions_per_image, grid_size
        self.views, self.number = views, 0
        ids = iter(tokenizer.encode_batch([text for r in records for text in r.captions]))
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        self.captions = [
            [[bos, *next(ids), eos][: max_len + 1] for _ in r.captions] for r in records
        ]
        self.chosen = [range(len(r.captions)) for r in records]  # which of its captions are read
        self.phrases = [] if grid_size is None else _phrases(records, tokenizer)
        self.truncated = sum(c[-1] != eos for captions in self.captions for c in captions)

    def epoch(self, number: int) -> "CaptionDataset":
        """The same pictures with the captions and views of an epoch, counted from 0."""
        turn = copy.copy(self)
        turn.number = number
        count = self.captions_per_image
        turn.chosen = [
            range(len(captions))
            if len(captions) <= count
            else [(number * count + index + i) % len(captions) for i in range(count)]
            for index, captions in enumerate(self.captions)
        ]
        return turn

    def lengths(self) -> list[int]:
        """Tokens of each picture's row."""
        return [
            sum(len(captions[k]) - 1 for k in chosen)
            for captions, chosen in zip(self.captions, self.chosen)
        ]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:
        """A record's example; its captions run from begin to end token."""
        view = (self.number + index) % self.views
        try:
            image = self.pixels(index, view) if self.features is None else self._kept(index, view)
        except ImageError as error:
            return Example(index, error, [])
        captions = [self.captions[index][k] for k in self.chosen[index]]
        return Example(index, image, captions, self._regions(index, view))

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """A batch's examples; pictures in shards, often behind a network, are read together."""
        if self.features is not None or not isinstance(self.records[0].image, ShardImage):
            return [self[i] for i in indices]
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self.__getitem__, indices))

    def pixels(self, index: int, view: int) -> Tensor:
        """(3, S_h, S_w) of a view of a picture.

        Raises:
            ImageError: the picture cannot be read.
        """
        return self.preprocess(view_of(open_image(self.records[index].image), view))[0]

    def _kept(self, index: int, view: int) -> Tensor:
        features = self.features[index, view]
        if features is None:
            raise ImageError(f"{self.records[index].name!r} could not be read when encoded")
        return torch.from_numpy(features)

    def _regions(self, index: int, view: int) -> Tensor | None:
        """(targets, N) of the captions that are read, one after the other."""
        if self.grid_size is None:
            return None
        rows = [np.zeros((0, self.grid_size[0] * self.grid_size[1]), np.float32)]
        for k in self.chosen[index]:
            num_targets = len(self.captions[index][k]) - 1
            regions = np.zeros((num_targets, rows[0].shape[1]), np.float32)
            for first, last, boxes in self.phrases[index][k]:
                regions[first:last] = _coverage(boxes, view, self.grid_size)
            after = ~regions[1:].any(1) & regions[:-1].any(1)  # a phrase has just been read
            regions[1:][after] = regions[:-1][after]
            rows.append(regions)
        return torch.from_numpy(np.concatenate(rows))


def _phrases(
    records: Sequence[Record], tokenizer: Tokenizer
) -> list[list[list[tuple[int, int, tuple[Box, ...]]]]]:
    """Per record and caption, the first and last target of phrases, and their boxes."""
    offsets = iter(tokenizer.offsets([text for r in records for text in r.captions]))
    return [
        [
            [(*_targets(next_offsets, phrase), phrase.boxes) for phrase in phrases if phrase.boxes]
            for phrases, next_offsets in zip(r.phrases or [()] * len(r.captions), offsets)
        ]
        for r in records
    ]


def _targets(offsets: list[tuple[int, int]], phrase: Phrase) -> tuple[int, int]:
    """The first token of a phrase, and one past the last."""
    inside = [i for i, (a, b) in enumerate(offsets) if a < phrase.end and b > phrase.start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def collate(examples: Sequence[Example]) -> Batch:
    """Pack examples into a batch; pictures that could not be read are left out and named."""
    skipped = tuple(str(e.image) for e in examples if isinstance(e.image, ImageError))
    examples = [e for e in examples if not isinstance(e.image, ImageError)]
    packed, targets = pack([e.captions for e in examples])
    return Batch(
        indices=tuple(e.index for e in examples),
        images=torch.stack([e.image for e in examples]) if examples else torch.empty(0),
        packed=packed,
        targets=targets,
        regions=torch.cat([e.regions for e in examples])
        if examples and examples[0].regions is not None
        else None,
        skipped=skipped,
    )


@lru_cache(256)  # the captions of a picture name the same boxes
def _coverage(boxes: tuple[Box, ...], view: int, grid_size: tuple[int, int]) -> np.ndarray:
    """(N,) share of each patch of a view that the largest part of one of the boxes covers."""
    (height, width), covered = grid_size, np.zeros(grid_size, np.float32)
    rows, columns = np.arange(height), np.arange(width)
    for x0, y0, x1, y1 in boxes_in_view(boxes, view):
        down = np.minimum(rows + 1, y1 * height) - np.maximum(rows, y0 * height)
        across = np.minimum(columns + 1, x1 * width) - np.maximum(columns, x0 * width)
        inside = np.maximum(down, 0)[:, None] * np.maximum(across, 0)
        covered = np.maximum(covered, inside, dtype=np.float32)
    return covered.ravel()


def pack(captions: Sequence[Sequence[Sequence[int]]]) -> tuple[PackedTokens, Tensor]:
    """The captions of each picture in one row, and the K targets, each one token ahead.

    Args:
        captions: per picture, the tokens of each caption from begin to end token.
    """
    rows = [_pack_row(texts) for texts in captions]
    longest = max((len(row[0]) for row in rows), default=1)
    tokens, places, segments, targets = (
        torch.tensor([row[i] + [0] * (longest - len(row[i])) for row in rows])
        .long()
        .reshape(len(rows), longest)
        for i in range(4)
    )
    return PackedTokens(tokens, places, segments), targets[segments > 0]


def _pack_row(captions: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
    """Inputs, places, segments and targets of one picture."""
    inputs, places, segments, targets = [], [], [], []
    for number, caption in enumerate(captions, start=1):
        inputs += caption[:-1]
        targets += caption[1:]
        places += range(len(caption) - 1)
        segments += [number] * (len(caption) - 1)
    return inputs, places, segments, targets


def epoch_batches(
    lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int, window: int
) -> list[list[int]]:
    """A random order of one epoch in batches whose rows are of like length, to save padding.

    Args:
        lengths: of each row.
        window: batches that are sorted together; with 1 lengths do not matter.

    Returns:
        indices, batch by batch; the same for the same arguments.
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), window * batch_size):
        near = sorted(order[start : start + window * batch_size], key=lengths.__getitem__)
        batches += [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled]
