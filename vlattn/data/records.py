"""A captioned picture, and the report on a data set of them."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from vlattn.images import Box


class DataError(ValueError):
    """A data set that cannot be read; the message says where and why."""


class Phrase(NamedTuple):
    """The characters start..end of a caption, and where in the picture they are.

    It has no `boxes` where it is not visible.
    """

    start: int
    end: int
    kind: str
    boxes: tuple[Box, ...]


class Record(NamedTuple):
    """One picture with its captions.

    `image` is whatever `open_image` takes; `phrases` has one tuple per caption, or is empty; `name`
    is the picture's name in the data set, unique within its split.
    """

    image: Any
    captions: tuple[str, ...]
    split: str = "train"
    phrases: tuple[tuple[Phrase, ...], ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Report:
    """What was read and what was not; its text is what people see before training.

    Args:
        source: the data set and its layout.
        images: how many per split.
        captions: how many per split.
        skipped: (name, reason) of everything left out.
        duplicates: groups of (name, split) that are the same file, or files with the same bytes.
        own_splits: whether the data set has its own splits; if not, they were drawn.
    """

    source: str
    images: dict[str, int]
    captions: dict[str, int]
    skipped: tuple[tuple[str, str], ...] = ()
    duplicates: tuple[tuple[tuple[str, str], ...], ...] = ()
    own_splits: bool = True

    def __str__(self) -> str:
        lines = [self.source]
        for split, count in self.images.items():
            lines.append(f"  {split:10} {count:7,} images {self.captions[split]:9,} captions")
        if not self.own_splits:
            lines.append("  (no splits given: drawn by picture name, 80 % / 10 % / 10 %)")
        reasons = defaultdict(list)
        for name, reason in self.skipped:
            reasons[reason].append(name)
        ranked = sorted(reasons.items(), key=lambda item: -len(item[1]))
        lines += [f"skipped {len(names):,}, {why}: {_some(names)}" for why, names in ranked[:8]]
        if ranked[8:]:
            lines.append(f"skipped {sum(len(n) for _, n in ranked[8:]):,} for other reasons")
        leaks, twins = [], []
        for group in self.duplicates:
            leak = len({split for _, split in group}) > 1
            (leaks if leak else twins).append(" = ".join(f"{name} ({s})" for name, s in group))
        if leaks:
            lines.append(f"WARNING, same picture in two splits, {len(leaks):,}: {_some(leaks)}")
        if twins:
            lines.append(f"same picture under two names, {len(twins):,}: {_some(twins)}")
        return "\n".join(lines)


def _some(names: list[str], shown: int = 3) -> str:
    """The first few, each on one line and not too long, and how many more."""
    first = [name if name.isprintable() else repr(name)[1:-1] for name in names[:shown]]
    text = ", ".join(name if len(name) <= 80 else f"{name[:77]}..." for name in first)
    return text if len(names) <= shown else f"{text} and {len(names) - shown:,} more"
