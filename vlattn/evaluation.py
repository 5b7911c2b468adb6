"""The captions that a captioner writes about a data set, and their scores."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from vlattn import metrics
from vlattn.captioner import Captioner
from vlattn.data.dataset import Batch, CaptionDataset, collate
from vlattn.data.records import Record


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
