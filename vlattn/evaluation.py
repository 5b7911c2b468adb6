"""The captions that a captioner writes about a data set, and their scores."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from vlattn import metrics
from vlattn.captioner import Captioner
from vlattn.data.dataset import Batch, CaptionDataset, Example, collate
from vlattn.data.records import Record
from vlattn.files import write_json

NEVER_LAST = frozenset(
    "a an the of in on at to for by from with into onto over and or but is are was were be being "
    "his her its their while as through behind near beside between under".split()
)


@torch.inference_mode()
def write_captions(
    captioner: Captioner,
    dataset: CaptionDataset,
    *,
    ensemble: Sequence[Captioner] = (),
    num_beams: int = 3,
    max_len: int = 30,
    length_penalty: float = 1.0,
    no_repeat_ngram: int | None = None,
    num_workers: int = 0,
) -> dict[str, str]:
    """The caption of each picture by its record's name; unreadable pictures have none.

    Args:
        dataset: what to write about; its captions are not looked at.
        ensemble, num_beams, max_len, length_penalty, no_repeat_ngram: see `Captioner.generate`.
        num_workers: processes that decode pictures ahead.
    """
    written = {}
    with picture_bar(len(dataset), "captions") as bar:
        for batch in picture_batches(dataset, bar, 100, num_workers):
            features = captioner.features(batch.images.to(captioner.device))
            found = captioner.generate(
                features,
                ensemble=ensemble,
                num_beams=num_beams,
                max_len=max_len,
                length_penalty=length_penalty,
                no_repeat_ngram=no_repeat_ngram,
            )
            for index, (best, *_) in zip(batch.indices, found):
                text = captioner.tokenizer.decode(best.tokens)
                written[dataset.records[index].name] = text
    return written


def score_captions(written: dict[str, str], records: Sequence[Record]) -> metrics.Scores:
    """Score captions, as `write_captions` gives them, against those of the records."""
    references = {r.name: list(r.captions) for r in records if r.name in written}
    return metrics.score(written, references)


class Habits(NamedTuple):
    """What scores do not show about captions.

    Args:
        different: share of the captions that are different texts.
        commonest: the text that most pictures got.
        its_share: how many of them.
        cut_short: share that ends in a word that cannot end a sentence, such as "a" or "with".
    """

    different: float
    commonest: str
    its_share: float
    cut_short: float

    @classmethod
    def of(cls, written: Mapping[str, str]) -> "Habits":
        texts = Counter(written.values())
        ((commonest, count),) = texts.most_common(1)
        last = [(metrics.tokenize(text) or [""])[-1] for text in written.values()]
        return cls(
            len(texts) / len(written),
            commonest,
            count / len(written),
            sum(word in NEVER_LAST for word in last) / len(written),
        )

    @property
    def is_collapsed(self) -> bool:
        """Whether most pictures got the same text."""
        return self.its_share > 0.5 and self.different < 1

    def __str__(self) -> str:
        return (
            f"{self.different:.1%} different texts, {self.its_share:.1%} "
            f"{self.commonest!r}, {self.cut_short:.1%} end in a function word"
        )


def write_results(folder: Path, written: Mapping[str, str], scores: metrics.Scores) -> None:
    """`captions.json` in COCO's result format, and `scores.json` with those of each picture."""
    folder.mkdir(parents=True, exist_ok=True)
    results = [{"image_id": name, "caption": text} for name, text in written.items()]
    per_image = {
        name: {key: None if math.isnan(value) else value for key, value in values.items()}
        for name, values in scores.per_image.items()
    }
    write_json(folder / "captions.json", results)
    write_json(folder / "scores.json", per_image)


def picture_bar(total: int, title: str) -> tqdm:
    """The bar that `picture_batches` counts on, which goes when it is closed."""
    return tqdm(total=total, desc=title, unit="img", leave=False)


def picture_batches(
    dataset: Dataset[Example], bar: tqdm, batch_size: int, num_workers: int
) -> Iterator[Batch]:
    """The pictures in order, counted by a bar; those that cannot be read are named and left out."""
    loader = DataLoader(
        dataset,
        batch_size,
        collate_fn=collate,
        num_workers=num_workers,
        generator=torch.Generator(),  # the global random numbers stay as they are
    )
    for batch in loader:
        for reason in batch.skipped:
            bar.write(f"skipped: {reason}")
        if batch.indices:
            yield batch
        bar.update(len(batch.indices) + len(batch.skipped))
