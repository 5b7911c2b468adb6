"""Captioned pictures on disk: one reader per layout, all giving the same records and one report.

A reader only says which picture has which captions. What holds for every layout (one record per
picture, missing files, splits, duplicates) is done once, after it.
"""

import csv
import hashlib
import io
import json
import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vlattn.data.records import DataError, Record, Report
from vlattn.data.scenes import SPLITS as SCENES
from vlattn.data.scenes import scenes

PICTURES = frozenset(
    ".jpg .jpeg .jpe .png .gif .webp .avif .bmp .tif .tiff .ppm .pgm .pbm .jp2".split()
)
TABLES = (".csv", ".tsv", ".jsonl")
# Columns are compared without case, spaces and punctuation; the first name that is there is taken.
IMAGE_COLUMNS = tuple("filename image imagepath imagefile imagename img path filepath file".split())
CAPTION_COLUMNS = tuple("text caption captions sentence sentences description comment".split())
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "val", "valid", "validation"), "dev"),
    **dict.fromkeys(("test", "testing"), "test"),
}


class _Entry(NamedTuple):
    """Captions of one picture as a reader found them; `split` as written, or empty."""

    name: str
    file: Path
    captions: list[str]
    split: str = ""


class _Source(NamedTuple):
    """What is read, as the user says, and the growing list of (name, reason) of what is skipped."""

    root: Path
    image_column: str | None
    caption_column: str | None
    skipped: list[tuple[str, str]]


def read_records(
    path: str | os.PathLike,
    layout: str = "auto",
    *,
    image_column: str | None = None,
    caption_column: str | None = None,
) -> tuple[list[Record], Report]:
    """Read a captioned data set; its pictures are found, but not opened.

    The data set's own splits hold. Without any, a hash of its name draws the split of each picture
    (and of its copies), so that pictures that are added later move no other.

    Args:
        path: a folder, a table file, or "scenes" for the built-in data set.
        layout: a name in `LAYOUTS`, or "auto" to look at what is there.
        image_column: column of a table that names the picture, where that is no common name.
        caption_column: column of a table that holds the caption, likewise.

    Raises:
        DataError: for an unknown layout, a missing path or column, or where nothing can be read.
    """
    if layout not in ("auto", "scenes", *LAYOUTS):
        valid = ", ".join(("auto", "scenes", *LAYOUTS))
        raise DataError(f"layout must be one of {valid}; got {layout!r}")
    if layout == "scenes" or (layout == "auto" and str(path) == "scenes"):
        return _scenes()
    root = Path(path).resolve()
    if not root.exists():
        raise DataError(f"there is no file or folder {str(root)!r}")
    layout, files = _look(root, layout)
    source = _Source(root, image_column, caption_column, [])
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
    duplicates = tuple(tuple(group) for group in alike.values() if len(group) > 1)
    title = f"{root} (layout {layout}, {sum(len(e.captions) for e in entries):,} captions)"
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


# ---- the same for every layout ----


def _gather(
    entries: list[_Entry], source: _Source
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


def _locate(entries: list[_Entry], source: _Source) -> dict[Path, Path]:
    """Where the pictures are: as written or, where no folder is written, in the one that has it."""
    # Not Path.is_file, which raises on names that are too long.
    files = {e.file: e.file for e in entries if os.path.isfile(e.file)}  # noqa: PTH113
    bare = {e.file for e in entries if e.file not in files and e.name == e.file.name}
    root = source.root
    if not bare and root.is_file():
        return files
    present = _pictures(root if root.is_dir() else root.parent)
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


def _pictures(root: Path) -> list[Path]:
    """Every picture file below, through links too; hidden files and folders are left alone."""
    pictures, seen = [], set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link back up
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if name[0] != ".")
        named = [Path(folder, name) for name in sorted(files) if name[0] != "."]
        pictures += [file for file in named if file.suffix.lower() in PICTURES]
    return pictures


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


# ---- one finder and one reader per layout ----


def _look(root: Path, layout: str) -> tuple[str, list[Path]]:
    """The layout, the first whose files are there if "auto", and its files."""
    tried = LAYOUTS if layout == "auto" else {layout: LAYOUTS[layout]}
    for name, candidate in tried.items():
        if files := candidate.find(root):
            return name, files
    wanted = "; ".join(f"no {candidate.sign}" for candidate in tried.values())
    raise DataError(f"no captions found in {str(root)!r}: {wanted}")


def _token_files(root: Path) -> list[Path]:
    found = [*_at_top(root, "*.token.txt"), *_at_top(root, "*.token")]
    return [file for file in found if ".lemma." not in file.name][:1]


def _flickr8k(files: list[Path], source: _Source) -> Iterator[_Entry]:
    """Lines of `name#k<TAB>caption`; beside it one list of names per split."""
    captions, splits = defaultdict(list), defaultdict(list)
    for number, line in enumerate(_read_text(files[0]).split("\n"), 1):
        name, tab, caption = line.partition("\t")
        if tab:
            captions[name.rpartition("#")[0] or name].append(caption)
        elif line.strip():
            source.skipped.append((f"{files[0].name} line {number}", "no tab after the name"))
    for split in ("train", "dev", "test"):
        for file in files[0].parent.glob(f"*{split}Images.txt"):
            for name in dict.fromkeys(map(str.strip, _read_text(file).split("\n"))):
                splits[name].append(split)
                if name and name not in captions:
                    source.skipped.append((name, "in a split, but without captions"))
    for name, texts in captions.items():
        for split in splits.get(name, [""]):
            yield _Entry(name, source.root / name, texts, split)


def _metadata_files(root: Path) -> list[Path]:
    return [file for suffix in TABLES for file in _at_top(root, f"metadata{suffix}")]


def _imagefolder(files: list[Path], source: _Source) -> Iterator[_Entry]:
    """Hugging Face's form: one table beside the pictures, or one per folder."""
    for file in files:
        folder = file.parent.relative_to(source.root)
        for entry in _read_table(file, source):
            yield entry._replace(name=(folder / entry.name).as_posix())


def _pictures_with_text(root: Path) -> list[Path]:
    return [picture for picture in _pictures(root) if picture.with_suffix(".txt").is_file()]


def _sidecar(files: list[Path], source: _Source) -> Iterator[_Entry]:
    """One caption per line."""
    for picture in files:
        lines = _read_text(picture.with_suffix(".txt")).strip().split("\n")
        captions = [line for line in lines if line.strip()] or [""]
        yield _Entry(picture.relative_to(source.root).as_posix(), picture, captions)


def _table_files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    return sorted(f for f in root.iterdir() if f.suffix in TABLES or f.name == "captions.txt")


def _table(files: list[Path], source: _Source) -> Iterator[_Entry]:
    """One table with an image and a caption column, or one per split."""
    per_split = all(file.stem.lower() in SPLITS for file in files)  # train.csv, test.csv
    if len(files) > 1 and not per_split:
        found = ", ".join(file.name for file in files)
        raise DataError(f"several tables in {str(source.root)!r}: give the path of one of {found}")
    for file in files:
        for entry in _read_table(file, source):
            yield entry._replace(split=entry.split or (file.stem if per_split else ""))


class _Layout(NamedTuple):
    """How to recognise a layout, in words and by the files that hold its captions, and read it."""

    sign: str
    find: Callable[[Path], list[Path]]
    read: Callable[[list[Path], _Source], Iterator[_Entry]]


LAYOUTS = {
    "flickr8k": _Layout("Flickr8k.token.txt", _token_files, _flickr8k),
    "imagefolder": _Layout("metadata.csv or metadata.jsonl", _metadata_files, _imagefolder),
    "sidecar": _Layout("x.txt beside x.jpg", _pictures_with_text, _sidecar),
    "table": _Layout("table (.csv, .tsv or .jsonl)", _table_files, _table),
}


def _at_top(root: Path, pattern: str) -> list[Path]:
    """Files in the folder itself or one below."""
    return sorted(root.glob(pattern)) + sorted(root.glob(f"*/{pattern}"))


# ---- tables ----


def _read_table(file: Path, source: _Source) -> Iterator[_Entry]:
    rows = (_read_jsonl if file.suffix.lower() == ".jsonl" else _read_csv)(file, source)
    if not rows:
        return
    headers = list(dict.fromkeys(header for _, row in rows for header in row))
    image = _column(file, headers, "image", source.image_column, IMAGE_COLUMNS)
    caption = _column(file, headers, "caption", source.caption_column, CAPTION_COLUMNS)
    split = next((header for header in headers if _plain(header) == "split"), None)
    for where, row in rows:
        name, texts = row.get(image), row.get(caption)
        if isinstance(name, str) and name.strip():
            name = name.strip().replace("\\", "/")
            path = Path(os.path.normpath(file.parent / name))  # one picture, one path
            texts = texts if isinstance(texts, list) else [texts]
            captions = [text if isinstance(text, str) else "" for text in texts]
            yield _Entry(name, path, captions, str(row.get(split) or ""))
        else:
            source.skipped.append((where, "names no picture"))


def _column(
    file: Path, headers: list[str], what: str, given: str | None, common: tuple[str, ...]
) -> str:
    plain = {_plain(header): header for header in reversed(headers)}
    for name in (given,) if given else common:
        if _plain(name) in plain:
            return plain[_plain(name)]
    wanted = f"column {given!r}" if given else f"{what} column"
    raise DataError(f"no {wanted} in {str(file)!r}, only {headers}: give {what}_column")


def _plain(header: str) -> str:
    return "".join(filter(str.isalnum, header.casefold()))


def _read_jsonl(file: Path, source: _Source) -> list[tuple[str, dict[str, Any]]]:
    """Each row with the place it comes from."""
    rows = []
    for number, line in enumerate(_read_text(file).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            where = f"{file.name} line {number}"
            if isinstance(row, dict):
                rows.append((where, row))
            else:
                source.skipped.append((where, "not a JSON object"))
    return rows


def _read_csv(file: Path, source: _Source) -> list[tuple[str, dict[str, Any]]]:
    """Each row with the place it comes from."""
    text = _read_text(file)
    delimiter = max("\t,;|", key=text.partition("\n")[0].count)
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        lines = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=delimiter,
            quoting=quoting,
            skipinitialspace=True,
            strict=True,
        )
        try:
            numbered = [(lines.line_num, fields) for fields in lines if fields]
            break
        except csv.Error as error:
            if delimiter in ",;" or quoting == csv.QUOTE_NONE:  # with tabs, few writers quote
                raise DataError(f"{str(file)!r} line {lines.line_num}: {error}") from error
    rows = []
    for number, fields in numbered[1:]:
        where = f"{file.name} line {number}"
        if len(fields) > len(numbered[0][1]):
            source.skipped.append((where, "more values than columns"))
        else:
            rows.append((where, dict(zip(numbered[0][1], fields))))
    return rows


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise DataError(f"cannot read {str(file)!r}: {error}") from error
