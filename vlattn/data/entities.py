"""Boxes of the phrases of captions: Flickr30k Entities, one JSON object a line for each picture.

Plummer et al., "Flickr30k Entities: Collecting Region-to-Phrase Correspondences", ICCV 2015.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlattn.data.records import DataError, Phrase, Record


def with_phrases(records: Sequence[Record], path: str | os.PathLike) -> list[Record]:
    """The records with the phrases that a file has for their captions.

    Pictures are matched by file name, captions by their letters and digits; a caption that is not
    in the file has no phrases.

    Args:
        path: a file of lines with `image`, `boxes` (entity -> list of x0, y0, x1, y1 in fractions
            of width and height) and `sentences` (`caption`, and `phrases` with `entity`, `kind`,
            and `start` and `end` in characters).

    Raises:
        DataError: the file cannot be read, or has none of these captions.
    """
    found = _read(Path(path))
    new, count = [], 0
    for record in records:
        sentences = found.get(record.name.rpartition("/")[2], {})
        phrases = []
        for caption in record.captions:
            given = sentences.get(_letters(caption))
            count += given is not None
            phrases.append(_moved(*given, caption) if given else ())
        new.append(record._replace(phrases=tuple(phrases)))
    if not count:
        raise DataError(f"{str(path)!r} has phrases for none of the captions")
    return new


def _read(path: Path) -> dict[str, dict[str, tuple[str, tuple[Phrase, ...]]]]:
    """By picture and by letters of the caption: the caption as written there, and its phrases."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found[row["image"]] = {
                _letters(s["caption"]): (s["caption"], _phrases(s, row["boxes"]))
                for s in row["sentences"]
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{str(path)!r} line {number} must hold image, boxes and sentences: {error!r}"
            ) from error
    return found


def _phrases(sentence: dict[str, Any], boxes: dict[str, Any]) -> tuple[Phrase, ...]:
    return tuple(
        Phrase(
            int(phrase["start"]),
            int(phrase["end"]),
            str(phrase["kind"]),
            tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in boxes[entity])
            if (entity := phrase["entity"]) in boxes
            else (),
        )
        for phrase in sentence["phrases"]
    )


def _letters(text: str) -> str:
    """What captions are compared by."""
    return "".join(char for char in text if char.isalnum()).casefold()


def _moved(caption: str, phrases: tuple[Phrase, ...], other: str) -> tuple[Phrase, ...]:
    """The phrases of a caption in another one of the same letters."""
    if other == caption:
        return phrases
    places = [i for i, char in enumerate(other) if char.isalnum()]
    moved = []
    for phrase in phrases:
        first, last = (sum(map(str.isalnum, caption[:n])) for n in (phrase.start, phrase.end))
        if first < last <= len(places):
            moved.append(phrase._replace(start=places[first], end=places[last - 1] + 1))
    return tuple(moved)
