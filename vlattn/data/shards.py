"""Captioned pictures in tar files, as the webdataset library and img2dataset write them.

Shards are read in place, on a disk or behind a URL: a list of where each picture lies is made once,
so that pictures come in any order, to any process, and training resumes as with a folder.
"""

import json
import os
import random
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tqdm import tqdm

from vlattn.data.readers import CAPTION_COLUMNS, PICTURES, SPLITS
from vlattn.data.records import DataError
from vlattn.data.remote import RemoteShard
from vlattn.files import write_json

READERS = 16  # shards, or pictures of them, that are read at a time


@dataclass(frozen=True)
class ShardImage:
    """A picture in a tar file that is not compressed; read when it is opened."""

    shard: Path | RemoteShard
    offset: int
    size: int
    name: str

    def read(self) -> bytes:
        with self.shard.open("rb", buffering=0) as file:
            file.seek(self.offset)
            return file.read(self.size)


class Index(NamedTuple):
    """What a shard holds.

    Args:
        samples: (name, offset, size, captions) of its pictures.
        skipped: (name, reason) of what is left out.
    """

    samples: list[tuple[str, int, int, list[str]]]
    skipped: list[tuple[str, str]]


def find_shards(path: str | os.PathLike) -> list[Path | RemoteShard]:
    """The shards that a path names: a tar file, a folder of them, a URL, or a pattern.

    In a pattern {000..127} counts, {train,dev} lists, and *, ? and [] are as in a shell; in that of
    a URL, braces alone.
    """
    text = os.fspath(path)
    if re.match(r"\w+://", text):
        return [RemoteShard(url) for url in _expand(text)]
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
    """The names that a pattern with braces stands for, in order, each once."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return [pattern]
    first, dots, last = braces[1].partition("..")
    if dots and first.isdigit() and last.isdigit():
        choices = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    else:
        choices = braces[1].split(",")
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return list(dict.fromkeys(x for choice in choices for x in _expand(before + choice + after)))


def read_shards(shards: Sequence[Path | RemoteShard]) -> list[Index]:
    """The index of each shard; those of a URL are kept in the user's cache folder.

    Every process begins elsewhere, and finds there what others have read by then.

    Raises:
        DataError: a file is no tar file.
        SourceLost: a shard of a URL cannot be reached.
    """
    order = random.SystemRandom().sample(range(len(shards)), len(shards))
    with (
        ThreadPoolExecutor(READERS) as pool,
        tqdm(total=len(shards), desc="reading shards", unit="shard", leave=False) as bar,
    ):
        found = {}
        for i, index in zip(order, pool.map(_kept_index, [shards[i] for i in order])):
            found[i] = index
            bar.update()
    return [found[i] for i in range(len(shards))]


def _kept_index(shard: Path | RemoteShard) -> Index:
    if isinstance(shard, Path):
        return read_shard(shard)
    file = shard.index_file()
    if file.is_file():
        return Index(**json.loads(file.read_text(encoding="utf-8")))
    index = read_shard(shard)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, index._asdict())
    return index


def read_shard(shard: Path | RemoteShard) -> Index:
    """Read a shard once, from its start to its end.

    A sample is what has one path but for its last suffix, in any case: `a.v2.jpg` and `a.v2.txt`.
    Captions are the lines of a `.txt`, or what a `.json` has under one of `CAPTION_COLUMNS`.
    """
    members: dict[str, dict[str, tarfile.TarInfo]] = defaultdict(dict)
    texts: dict[str, list[str]] = {}
    found = Index([], [])
    try:
        with shard.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                path = PurePosixPath(member.name)
                key, suffix = str(path.with_suffix("")), path.suffix.lower()
                if suffix in members[key]:
                    found.skipped.append((member.name, "its name is there twice"))
                    continue
                members[key][suffix] = member
                if suffix == ".txt" or (suffix == ".json" and ".txt" not in members[key]):
                    texts[key] = _captions(tar.extractfile(member).read(), suffix)
    except tarfile.TarError as error:
        raise DataError(f"{shard} is not a tar file without compression: {error}") from error
    for key, sample in members.items():
        pictures = sorted(sample.keys() & PICTURES)
        fields = ", ".join(sorted(sample))
        if len(pictures) != 1:
            found.skipped.append((key, f"needs one picture, has {fields}"))
        elif not texts.get(key):
            found.skipped.append((key, f"without a caption, has {fields}"))
        else:
            member = sample[pictures[0]]
            found.samples.append((member.name, member.offset_data, member.size, texts[key]))
    return found


def _captions(content: bytes, suffix: str) -> list[str]:
    text = content.decode("utf-8-sig", "replace")
    if suffix == ".txt":
        texts = text.splitlines()
    else:
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        values = values if isinstance(values, dict) else {}
        found = next((values[name] for name in CAPTION_COLUMNS if name in values), [])
        texts = found if isinstance(found, list) else [found]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def split_of(shard: Path | RemoteShard) -> str:
    """The split that a shard's name begins with, as in `val-0003.tar`, or none."""
    return SPLITS.get(re.split(r"[^a-z]", shard.name.lower())[0], "")
