"""Records to batches: the captions of a picture packed into one row beside its pixels.

B pictures, T tokens of a row, S_h, S_w sides of the input, N patches, D width of the encoder.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vlattn.captioner import PackedTokens
from vlattn.data.layouts import Record
from vlattn.images import ImageError, Preprocess, open_image
from vlattn.tokenizer import Tokenizer


class Batch(NamedTuple):
    """What one training pass reads.

    Args:
        indices: which of the records the rows are.
        images: (B, 3, S_h, S_w) pixels, or (B, N, D) features of a frozen encoder.
        packed: the captions, see `PackedTokens`.
        targets: (K,) the token that follows each of the K real ones in `packed`, row by row.
        skipped: why pictures that belong here could not be read, a line each.
    """

    indices: tuple[int, ...]
    images: Tensor
    packed: PackedTokens
    targets: Tensor
    skipped: tuple[str, ...]

    def to(self, device: torch.device) -> "Batch":
        packed = PackedTokens(*(x.to(device) for x in self.packed))
        return self._replace(
            images=self.images.to(device), packed=packed, targets=self.targets.to(device)
        )


class Example(NamedTuple):
    """A record's index, its pixels or features or what is wrong with the picture, its captions."""

    index: int
    image: Tensor | ImageError
    captions: list[list[int]]


class CaptionDataset(Dataset):
    """Pictures with their tokenised captions.

    Args:
        records: what to read, in order.
        tokenizer: encodes the captions.
        preprocess: makes pixels of pictures; the one that the captioner keeps.
        max_len: longest caption in tokens, begin included; longer ones are cut and not ended.
        captions_per_image: of a picture with more captions, the first so many.
        features: (pictures, N, D) features to read in place of the pictures.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: Tokenizer,
        preprocess: Preprocess,
        *,
        max_len: int,
        captions_per_image: int = 5,
        features: np.ndarray | None = None,
    ):
        self.records, self.preprocess, self.features = records, preprocess, features
        kept = [record.captions[:captions_per_image] for record in records]
        ids = iter(tokenizer.encode_batch([text for texts in kept for text in texts]))
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        self.captions = [[[bos, *next(ids), eos][: max_len + 1] for _ in texts] for texts in kept]
        self.truncated = sum(c[-1] != eos for captions in self.captions for c in captions)
        self.lengths = [sum(len(c) - 1 for c in captions) for captions in self.captions]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Example:
        """A record's example; its captions run from begin to end token."""
        if self.features is not None:
            return Example(index, torch.from_numpy(self.features[index]), self.captions[index])
        try:
            pixels, _ = self.preprocess(open_image(self.records[index].image))
        except ImageError as error:
            return Example(index, error, [])
        return Example(index, pixels, self.captions[index])


def collate(examples: Sequence[Example]) -> Batch:
    """Pack examples into a batch; pictures that could not be read are left out and named."""
    skipped = tuple(str(e.image) for e in examples if isinstance(e.image, ImageError))
    examples = [e for e in examples if not isinstance(e.image, ImageError)]
    rows = [_pack(e.captions) for e in examples]
    longest = max((len(row[0]) for row in rows), default=0)
    tokens, places, segments, targets = (
        torch.tensor([row[i] + [0] * (longest - len(row[i])) for row in rows]).long()
        for i in range(4)
    )
    return Batch(
        indices=tuple(e.index for e in examples),
        images=torch.stack([e.image for e in examples]) if examples else torch.empty(0),
        packed=PackedTokens(tokens, places, segments),
        targets=targets[segments > 0],
        skipped=skipped,
    )


def _pack(captions: list[list[int]]) -> tuple[list[int], ...]:
    """Inputs, places, segments and targets of one row: the targets are one token ahead."""
    inputs, places, segments, targets = [], [], [], []
    for number, caption in enumerate(captions, start=1):
        inputs += caption[:-1]
        targets += caption[1:]
        places += range(len(caption) - 1)
        segments += [number] * (len(caption) - 1)
    return inputs, places, segments, targets


def epoch_batches(
    lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int, window: int = 16
) -> list[list[int]]:
    """A random order of one epoch in batches whose rows are of like length, to save padding.

    Args:
        lengths: of each row.
        window: batches that are sorted together.

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
