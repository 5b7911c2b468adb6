"""Captioned pictures on disk: one reader per layout, all giving the same records and one report.

A reader (`readers.py`) only says which picture has which captions. What holds for every layout (one
record per picture, missing files, splits, duplicates) is done once, after it.
"""

import hashlib
import os
from bisect import bisect_left
from collections import Counter, defaultdict
from pathlib import Path

from vlattn.data.entities import with_phrases
from vlattn.data.readers import (
    LAYOUTS,
    SPLITS,
    Entry,
    Source,
    at_top,
    find_files,
    pictures_below,
)
from vlattn.data.records import DataError, Record, Report
from vlattn.data.scenes import SPLITS as SCENES
from vlattn.data.scenes import scenes
from vlattn.data.shards import ShardImage, find_shards, read_shards, split_of


def read_records(
    path: str | os.PathLike,
    layout: str = "auto",
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
) -> tuple[list[Record], Report]:
    """Read a captioned data set; its pictures are found, but not opened.

    Phrases of the layout `flickr8k` come from an `entities.jsonl` beside it; see `with_phrases`.

    The data set's own splits hold. Without any, a hash of its name draws the split of each picture
    (and of its copies), so that pictures that are added later move no other.

    Args:
        path: a folder, a table file, a pattern or a URL of tar files (see `find_shards`), or
            "scenes" for the built-in data set.
        layout: a name in `LAYOUTS`, or "auto" to look at what is there.
        image_column: column of a table that names the picture, where that is no common name.
        caption_column: column of a table that holds the caption, likewise.

    Raises:
        DataError: for an unknown layout, a missing path or column, or where nothing can be read.
        SourceLost: shards of a URL cannot be reached.
    """
    if layout not in ("auto", "scenes", "webdataset", *LAYOUTS):
        valid = ", ".join(("auto", "scenes", "webdataset", *LAYOUTS))
        raise DataError(f"layout must be one of {valid}; got {layout!r}")
    if layout == "scenes" or (layout == "auto" and str(path) == "scenes"):
        return _scenes()
    if layout == "webdataset" or (layout == "auto" and _is_sharded(path)):
        return _webdataset(path)
    root = Path(path).resolve()
    if not root.exists():
        raise DataError(f"there is no file or folder {str(root)!r}")
    layout, files = find_files(root, layout)
    source = Source(root, image_column, caption_column, [], [])
    entries = list(LAYOUTS[layout].read(files, source))
    captions, names = _gather(entries, source)
    if not captions:
        reasons = Counter(reason for _, reason in source.skipped).most_common(3)
        why = ", ".join(f"{reason} ({count:,})" for reason, count in reasons) or "no captions found"
        raise DataError(f"nothing to read in {str(root)!r} as layout {layout}: {why}")
    first = _first_of_same_bytes(names)
    own_splits = all(split for _, split in captions)  # _gather leaves none or all without one
    drawn = {} if own_splits else _draw({file: names[first[file]] for file in names})
    records, alike = [], defaultdict(list)
    for (file, split), texts in captions.items():
        records.append(Record(file, tuple(texts), split or drawn[file], name=names[file]))
        alike[first[file]].append((names[file], records[-1].split))
    for boxes in at_top(source.folder, "entities.jsonl")[: layout == "flickr8k"]:
        records = with_phrases(records, boxes)
        found = sum(any(phrases) for record in records for phrases in record.phrases)
        source.notes.append(f"{boxes.name} has phrases of {found:,} of them")
    duplicates = tuple(tuple(group) for group in alike.values() if len(group) > 1)
    title = f"{root} (layout {layout}, {sum(len(e.captions) for e in entries):,} captions)"
    title = "; ".join((title, *source.notes))
    skipped = tuple(source.skipped)
    return records, Report(title, *_count(records), skipped, duplicates, own_splits)


def _count(records: list[Record]) -> tuple[dict[str, int], dict[str, int]]:
    """Images and captions per split."""
    images, captions = Counter(), Counter()
    for record in records:
        images[record.split] += 1
        captions[record.split] += len(record.captions)
    order = [split for split in SCENES if split in images]
    return {split: images[split] for split in order}, {split: captions[split] for split in order}


def _scenes() -> tuple[list[Record], Report]:
    records = [record for split in SCENES for record in scenes(split)]
    return records, Report("scenes (built in)", *_count(records))


def _is_sharded(path: str | os.PathLike) -> bool:
    """Whether shards are named, or in a folder that is of no other layout."""
    root = Path(path)
    other = root.is_dir() and any(layout.find(root) for layout in LAYOUTS.values())
    return not other and bool(find_shards(path))


def _webdataset(path: str | os.PathLike) -> tuple[list[Record], Report]:
    """Splits are those that the shards' names begin with, where any does."""
    shards = find_shards(path)
    if not shards:
        raise DataError(f"there are no shards (.tar) in {str(path)!r}")
    found, skipped = [], []
    for shard, index in zip(shards, read_shards(shards)):
        split = split_of(shard)
        for name, offset, size, captions in index.samples:
            image = ShardImage(shard, offset, size, f"{shard.name}/{name}")
            found.append((split, image, captions))
        skipped += [(f"{shard.name}/{name}", reason) for name, reason in index.skipped]
    if not found:
        raise DataError(f"no captioned pictures in the {len(shards):,} shards of {str(path)!r}")
    own_splits = any(split for split, _, _ in found)
    drawn = {} if own_splits else _draw({image: image.name for _, image, _ in found})
    records = []
    for split, image, captions in found:
        if split or not own_splits:
            records.append(Record(image, tuple(captions), split or drawn[image], name=image.name))
        else:
            skipped.append((image.name, "in no split"))
    captions = sum(len(record.captions) for record in records)
    title = f"{path} (layout webdataset, {len(shards):,} shards, {captions:,} captions)"
    return records, Report(title, *_count(records), tuple(skipped), (), own_splits)


# ---- the same for every layout ----


def _gather(
    entries: list[Entry], source: Source
) -> tuple[dict[tuple[Path, str], list[str]], dict[Path, str]]:
    """Captions by (file, split), and names by file; the split is "" where there are none."""
    files = _locate(entries, source)
    splits = [entry.split.strip() or _folder_split(entry.name) for entry in entries]
    has_splits = any(splits)
    captions, names, refused = defaultdict(list), {}, {}
    for entry, split in zip(entries, splits):
        file = files.get(entry.file)
        if file is None:
            refused[entry.name, "no such file"] = None
        elif has_splits and not split:
            refused[entry.name, "in no split"] = None
        elif split and split.lower() not in SPLITS:
            refused[entry.name, f"unknown split {split!r}"] = None
        else:
            for text in map(str.strip, entry.captions):
                if text:
                    captions[file, SPLITS.get(split.lower(), "")].append(text)
                    names.setdefault(file, entry.name)
                else:
                    source.skipped.append((entry.name, "empty caption"))
    source.skipped.extend(refused)  # each picture once, in order
    return captions, names


def _locate(entries: list[Entry], source: Source) -> dict[Path, Path]:
    """Where the pictures are: as written or, where no folder is written, in the one that has it."""
    # Not Path.is_file, which raises on names that are too long.
    files = {e.file: e.file for e in entries if os.path.isfile(e.file)}  # noqa: PTH113
    bare = {e.file for e in entries if e.file not in files and e.name == e.file.name}
    root = source.root
    if not bare and root.is_file():
        return files
    present = pictures_below(source.folder)
    places = defaultdict(list)
    for picture in present:
        places[picture.name].append(picture)
    files |= {file: places[file.name][0] for file in bare if len(places[file.name]) == 1}
    if root.is_dir():
        for file in sorted(set(present) - set(files.values())):
            source.skipped.append((file.relative_to(root).as_posix(), "without a caption"))
    return files


def _folder_split(name: str) -> str:
    folder, below, _ = name.partition("/")
    return folder if below and folder.lower() in SPLITS else ""


def _first_of_same_bytes(names: dict[Path, str]) -> dict[Path, Path]:
    """For each file, the first by name among those with the same bytes.

    Size and last bytes tell nearly all files apart, so that few are read in full.
    """
    groups = [list(names)]
    for key in (lambda f: f.stat().st_size, lambda f: _digest(f, 64), _digest):
        finer = []
        for group in groups:
            alike = defaultdict(list)
            for file in group:
                alike[key(file)].append(file)
            finer += [same for same in alike.values() if len(same) > 1]
        groups = finer
    first = {file: file for file in names}
    for group in groups:
        first.update(dict.fromkeys(group, min(group, key=names.__getitem__)))
    return first


def _digest(file: Path, last: int | None = None) -> bytes:
    """Of all bytes or the last ones; a file that cannot be read is like no other."""
    try:
        with file.open("rb") as stream:
            if last is not None:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - last))
            return hashlib.blake2b(stream.read()).digest()
    except OSError:
        return os.fsencode(file)


def _draw(names: dict[Path, str]) -> dict[Path, str]:
    """Splits 80 / 10 / 10 by a hash of the name; from three pictures on, none is empty."""
    places = {}
    for file, name in names.items():
        digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        places[file] = int.from_bytes(digest, "big") / 2**64
    order = sorted(set(places.values()))
    if len(order) < 3:
        return dict.fromkeys(names, "train")
    test = min(max(bisect_left(order, 0.9), 2), len(order) - 1)
    dev = min(max(bisect_left(order, 0.8), 1), test - 1)
    return {
        file: "train" if place < order[dev] else "dev" if place < order[test] else "test"
        for file, place in places.items()
    }
