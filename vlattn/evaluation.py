"""Running a captioner over a data set: features of every picture, and the captions it writes.

N patches, D width of the encoder.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from vlattn import metrics
from vlattn.captioner import Captioner
from vlattn.data.dataset import Batch, CaptionDataset, collate
from vlattn.data.records import Record
from vlattn.files import write_aside


@torch.inference_mode()
def write_captions(
    captioner: Captioner,
    dataset: CaptionDataset,
    *,
    num_beams: int = 3,
    max_len: int = 30,
    length_penalty: float = 1.0,
    num_workers: int = 0,
) -> dict[str, str]:
    """The caption of each picture by its record's name; unreadable pictures have none.

    Args:
        dataset: what to write about; its captions are not looked at.
        num_beams, max_len, length_penalty: see `Captioner.generate`.
        num_workers: processes that decode pictures ahead.
    """
    written = {}
    for batch in _batches(dataset, "captions", 100, num_workers):
        features = captioner.features(batch.images.to(captioner.device))
        found = captioner.generate(
            features, num_beams=num_beams, max_len=max_len, length_penalty=length_penalty
        )
        for index, (best, *_) in zip(batch.indices, found):
            text = captioner.tokenizer.decode(best.tokens)
            written[dataset.records[index].name] = text
    return written


def score_captions(written: dict[str, str], records: Sequence[Record]) -> metrics.Scores:
    """Score captions, as `write_captions` gives them, against those of the records."""
    references = {r.name: list(r.captions) for r in records if r.name in written}
    return metrics.score(written, references)


@torch.inference_mode()
def encode_pictures(
    captioner: Captioner, dataset: CaptionDataset, path: Path, *, num_workers: int = 0
) -> np.ndarray:
    """Features of a frozen encoder for every picture, computed once and kept in a file.

    Returns:
        (pictures, N, D) float16, read in place from `path`; NaN where a picture is unreadable.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows, columns = captioner.encoder.grid_size
        shape = (len(dataset), rows * columns, captioner.encoder.dim)
        with write_aside(path) as aside:
            kept = np.lib.format.open_memmap(aside, "w+", dtype=np.float16, shape=shape)
            kept[:] = np.nan
            for batch in _batches(dataset, f"encoding {path.stem}", 32, num_workers):
                features = captioner.encode(batch.images.to(captioner.device))
                kept[list(batch.indices)] = features.tokens.half().cpu().numpy()
            kept.flush()
    features = np.load(path, mmap_mode="r")
    if len(features) != len(dataset):
        raise ValueError(f"{path} holds {len(features)} pictures, the data set {len(dataset)}")
    return features


def _batches(
    dataset: CaptionDataset, title: str, batch_size: int, num_workers: int
) -> Iterator[Batch]:
    """The pictures in order, with a bar; those that cannot be read are named and left out."""
    loader = DataLoader(
        dataset,
        batch_size,
        collate_fn=collate,
        num_workers=num_workers,
        generator=torch.Generator(),  # the global random numbers stay as they are
    )
    with tqdm(total=len(dataset), desc=title, unit="img", leave=False) as bar:
        for batch in loader:
            for reason in batch.skipped:
                bar.write(f"skipped: {reason}")
            if batch.indices:
                yield batch
            bar.update(len(batch.indices) + len(batch.skipped))
