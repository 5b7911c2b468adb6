"""Readers of captioned data sets, one per layout: which picture has which captions.

What holds for every layout is in `layouts.py`.
"""

import csv
import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vlattn.data.records import DataError

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


class Entry(NamedTuple):
    """Captions of one picture as a reader found them; `split` as written, or empty."""

    name: str
    file: Path
    captions: list[str]
    split: str = ""


class Source(NamedTuple):
    """What is read, as the user says; `skipped` collects (name, reason), `notes` anything else."""

    root: Path
    image_column: str | None
    caption_column: str | None
    skipped: list[tuple[str, str]]
    notes: list[str]

    @property
    def folder(self) -> Path:
        """The one that was given, or that of the file that was given."""
        return self.root if self.root.is_dir() else self.root.parent


def pictures_below(root: Path) -> list[Path]:
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


# ---- one finder and one reader per layout ----


def find_files(root: Path, layout: str) -> tuple[str, list[Path]]:
    """The layout, the first whose files are there if "auto", and its files."""
    tried = LAYOUTS if layout == "auto" else {layout: LAYOUTS[layout]}
    for name, candidate in tried.items():
        if files := candidate.find(root):
            return name, files
    wanted = "; ".join(f"no {candidate.sign}" for candidate in tried.values())
    raise DataError(f"no captions found in {str(root)!r}: {wanted}")


def _token_files(root: Path) -> list[Path]:
    found = [*at_top(root, "*.token.txt"), *at_top(root, "*.token")]
    return [file for file in found if ".lemma." not in file.name][:1]


def _flickr8k(files: list[Path], source: Source) -> Iterator[Entry]:
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
            yield Entry(name, source.root / name, texts, split)


def _karpathy_files(root: Path) -> list[Path]:
    return _given_or_at_top(root, "dataset*.json")[:1]


def _karpathy(files: list[Path], source: Source) -> Iterator[Entry]:
    """Karpathy and Fei-Fei, CVPR 2015: all splits in one file."""
    rest = 0
    for number, row in enumerate(_json_list(files[0], "images"), 1):
        name, sentences = row.get("filename"), row.get("sentences")
        if not isinstance(name, str) or not isinstance(sentences, list):
            source.skipped.append((f"{files[0].name} image {number}", "no filename or sentences"))
            continue
        split = str(row.get("split") or "")
        rest += split == "restval"
        folder = row.get("filepath")
        if isinstance(folder, str) and (source.folder / folder / name).is_file():
            name = f"{folder}/{name}"
        captions = [s.get("raw") if isinstance(s, dict) else None for s in sentences]
        captions = [caption if isinstance(caption, str) else "" for caption in captions] or [""]
        yield Entry(name, source.folder / name, captions, "train" if split == "restval" else split)
    if rest:
        source.notes.append(f"restval counts as train, {rest:,} images")


def _coco_files(root: Path) -> list[Path]:
    return _given_or_at_top(root, "*captions_*.json")


def _coco(files: list[Path], source: Source) -> Iterator[Entry]:
    """COCO's annotations, one file for each split, which its name tells."""
    for file in files:
        split = next((SPLITS[name] for name in SPLITS if f"_{name}" in file.stem.lower()), "")
        captions = defaultdict(list)
        for row in _json_list(file, "annotations"):
            caption = row.get("caption")
            captions[row.get("image_id")].append(caption if isinstance(caption, str) else "")
        for number, row in enumerate(_json_list(file, "images"), 1):
            name = row.get("file_name")
            if not isinstance(name, str):
                source.skipped.append((f"{file.name} image {number}", "names no picture"))
            elif row.get("id") not in captions:
                source.skipped.append((name, "without a caption"))
            else:
                yield Entry(name, source.folder / name, captions.pop(row["id"]), split)
        for number in captions:
            source.skipped.append((f"{file.name} caption of image {number}", "no such image"))


def _json_list(file: Path, name: str) -> list[dict[str, Any]]:
    """The objects of a list in a JSON file."""
    try:
        content = json.loads(_read_text(file))
        return [row for row in content[name] if isinstance(row, dict)]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{str(file)!r} must be JSON with a list {name!r}") from error


def _metadata_files(root: Path) -> list[Path]:
    return [file for suffix in TABLES for file in at_top(root, f"metadata{suffix}")]


def _imagefolder(files: list[Path], source: Source) -> Iterator[Entry]:
    """Hugging Face's form: one table beside the pictures, or one per folder."""
    for file in files:
        folder = file.parent.relative_to(source.root)
        for entry in _read_table(file, source):
            yield entry._replace(name=(folder / entry.name).as_posix())


def _pictures_with_text(root: Path) -> list[Path]:
    return [picture for picture in pictures_below(root) if picture.with_suffix(".txt").is_file()]


def _sidecar(files: list[Path], source: Source) -> Iterator[Entry]:
    """One caption per line."""
    for picture in files:
        lines = _read_text(picture.with_suffix(".txt")).strip().split("\n")
        captions = [line for line in lines if line.strip()] or [""]
        yield Entry(picture.relative_to(source.root).as_posix(), picture, captions)


def _table_files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    return sorted(f for f in root.iterdir() if f.suffix in TABLES or f.name == "captions.txt")


def _table(files: list[Path], source: Source) -> Iterator[Entry]:
    """One table with an image and a caption column, or one per split."""
    per_split = all(file.stem.lower() in SPLITS for file in files)  # train.csv, test.csv
    if len(files) > 1 and not per_split:
        found = ", ".join(file.name for file in files)
        raise DataError(f"several tables in {str(source.root)!r}: give the path of one of {found}")
    for file in files:
        for entry in _read_table(file, source):
            yield entry._replace(split=entry.split or (file.stem if per_split else ""))


class Layout(NamedTuple):
    """How to recognise a layout, in words and by the files that hold its captions, and read it."""

    sign: str
    find: Callable[[Path], list[Path]]
    read: Callable[[list[Path], Source], Iterator[Entry]]


LAYOUTS = {
    "flickr8k": Layout("Flickr8k.token.txt", _token_files, _flickr8k),
    "karpathy": Layout("dataset_*.json", _karpathy_files, _karpathy),
    "coco": Layout("captions_*.json", _coco_files, _coco),
    "imagefolder": Layout("metadata.csv or metadata.jsonl", _metadata_files, _imagefolder),
    "sidecar": Layout("x.txt beside x.jpg", _pictures_with_text, _sidecar),
    "table": Layout("table (.csv, .tsv or .jsonl)", _table_files, _table),
}


def at_top(root: Path, pattern: str) -> list[Path]:
    """Files in the folder itself or one below."""
    return sorted(root.glob(pattern)) + sorted(root.glob(f"*/{pattern}"))


def _given_or_at_top(root: Path, pattern: str) -> list[Path]:
    if root.is_file():
        return [root] if root.match(pattern) else []
    return at_top(root, pattern)


# ---- tables ----


def _read_table(file: Path, source: Source) -> Iterator[Entry]:
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
            yield Entry(name, path, captions, str(row.get(split) or ""))
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


def _read_jsonl(file: Path, source: Source) -> list[tuple[str, dict[str, Any]]]:
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


def _read_csv(file: Path, source: Source) -> list[tuple[str, dict[str, Any]]]:
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
