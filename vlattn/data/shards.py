"""Captioned pictures in tar files, as the webdataset library and img2dataset write them.

Shards on disk are read in place: a list of where each picture lies is made once, so that pictures
come in any order, to any process, and training resumes as with a folder.
"""

import json
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath

from vlattn.data.readers import CAPTION_COLUMNS, PICTURES, SPLITS
from vlattn.data.records import DataError


@dataclass(frozen=True)
class ShardImage:
    """A picture in a tar file that is not compressed; read when it is opened."""

    shard: Path
    offset: int
    size: int
    name: str

    def read(self) -> bytes:
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def find_shards(path: str | os.PathLike) -> list[Path]:
    """The shards that a path names: a tar file, a folder of them, or a pattern.

    In a pattern {000..127} counts, {train,dev} lists, and *, ? and [] are as in a shell.
    """
    text = os.fspath(path)
    if re.match(r"\w+://", text):
        raise DataError(f"shards are read in place: download those of {text} first")
    if Path(text).is_dir():
        return sorted(Path(text).glob("*.tar"))
    found = []
    for name in _expand(text):
        file = Path(name)
        if file.suffix == ".tar":
            matches = [file] if file.is_file() else sorted(file.parent.glob(file.name))
            if not matches:
                raise DataError(f"there is no shard {name}")
            found += matches
    return found


def _expand(pattern: str) -> list[str]:
    """The names that a pattern with braces stands for, in order."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] for part in parts]
    for i in range(1, len(parts), 2):
        first, dots, last = parts[i].partition("..")
        if dots and first.isdigit() and last.isdigit():
            numbers = range(int(first), int(last) + 1)
            choices[i] = [str(number).zfill(len(first)) for number in numbers]
        else:
            choices[i] = parts[i].split(",")
    return ["".join(names) for names in product(*choices)]


def read_shard(
    shard: Path, skipped: list[tuple[str, str]]
) -> Iterator[tuple[ShardImage, list[str]]]:
    """The pictures of a shard with their captions.

    A sample is what has one path but for its last suffix, in any case: `a.v2.jpg` and `a.v2.txt`.
    Captions are the lines of a `.txt`, or what a `.json` has under one of `CAPTION_COLUMNS`.

    Args:
        skipped: collects (name, reason) of what is left out.

    Raises:
        DataError: the file is no tar file.
    """
    samples: dict[str, dict[str, tarfile.TarInfo]] = defaultdict(dict)
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                path = PurePosixPath(member.name)
                sample, suffix = samples[str(path.with_suffix(""))], path.suffix.lower()
                if suffix in sample:
                    skipped.append((f"{shard.name}/{member.name}", "its name is there twice"))
                else:
                    sample[suffix] = member
    except tarfile.TarError as error:
        raise DataError(f"{shard} is not a tar file without compression: {error}") from error
    with shard.open("rb") as file:
        for key, sample in samples.items():
            name = f"{shard.name}/{key}"
            pictures = sorted(sample.keys() & PICTURES)
            if len(pictures) != 1:
                fields = ", ".join(sorted(sample))
                skipped.append((name, f"needs one picture, has {fields}"))
                continue
            captions = _captions(file, sample)
            if not captions:
                skipped.append((name, f"without a caption, has {', '.join(sorted(sample))}"))
                continue
            member = sample[pictures[0]]
            name = f"{shard.name}/{member.name}"
            yield ShardImage(shard, member.offset_data, member.size, name), captions


def _captions(file, sample: dict[str, tarfile.TarInfo]) -> list[str]:
    def content(suffix: str) -> str:
        file.seek(sample[suffix].offset_data)
        return file.read(sample[suffix].size).decode("utf-8-sig", "replace")

    texts = []
    if ".txt" in sample:
        texts = content(".txt").splitlines()
    elif ".json" in sample:
        try:
            values = json.loads(content(".json"))
        except ValueError:
            values = None
        values = values if isinstance(values, dict) else {}
        found = next((values[name] for name in CAPTION_COLUMNS if name in values), [])
        texts = found if isinstance(found, list) else [found]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def split_of(shard: Path) -> str:
    """The split that a shard's name begins with, as in `val-0003.tar`, or none."""
    return SPLITS.get(re.split(r"[^a-z]", shard.name.lower())[0], "")
