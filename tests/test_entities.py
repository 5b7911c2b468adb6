"""Phrases and boxes of `entities.jsonl`: matched by text, wherever the file's own text differs."""

import json

import pytest
from PIL import Image

from vlattn.data.entities import with_phrases
from vlattn.data.layouts import read_records
from vlattn.data.records import DataError, Phrase, Record

BOXES = {"7": [[0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 1, 1]], "9": [[0, 0, 0.5, 0.25]]}
SENTENCES = [
    {
        "caption": "Two dogs , one with a ball .",
        "phrases": [
            {"entity": "7", "kind": "animals", "start": 0, "end": 8},
            {"entity": "0", "kind": "notvisual", "start": 11, "end": 14},
            {"entity": "9", "kind": "other", "start": 20, "end": 26},
        ],
    },
    {"caption": "A caption of its own .", "phrases": []},
]
ROW = {"image": "x.jpg", "size": [60, 40], "boxes": BOXES, "sentences": SENTENCES}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("Two dogs , one with a ball .", ("Two dogs", "one", "a ball")),
        (" two DOGS, one  with a  ball", ("two DOGS", "one", "a  ball")),
    ],
)
def test_phrases_are_found_in_other_spellings_of_the_caption(tmp_path, caption, words):
    path = write(tmp_path / "e.jsonl", ROW | {"image": "other.jpg"}, ROW)
    record = Record("?", ("Something else .", caption), name="folder/x.jpg")
    (found,) = with_phrases([record], path)
    nothing, phrases = found.phrases
    assert nothing == ()
    assert tuple(caption[p.start : p.end] for p in phrases) == words
    assert [p.kind for p in phrases] == ["animals", "notvisual", "other"]
    assert [len(p.boxes) for p in phrases] == [2, 0, 1]
    assert phrases[2].boxes == ((0.0, 0.0, 0.5, 0.25),)


def test_flickr8k_takes_the_phrases_that_lie_beside_it(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "pictures").mkdir()
    for name in ("x.jpg", "y.jpg"):
        Image.new("RGB", (6, 4), "red" if name == "x.jpg" else "blue").save(
            tmp_path / "pictures" / name
        )
    lines = ["x.jpg#0\tA dog .", "x.jpg#1\tTwo dogs, one with a ball .", "y.jpg#0\tA cat ."]
    (tmp_path / "text" / "Flickr8k.token.txt").write_text("\n".join(lines))
    write(tmp_path / "entities.jsonl", ROW)
    records, report = read_records(tmp_path)
    assert "entities.jsonl has phrases of 1 of them" in str(report)
    x, y = sorted(records, key=lambda record: record.name)
    assert [len(phrases) for phrases in x.phrases] == [0, 3] and y.phrases == ((),)
    assert x.phrases[1][0] == Phrase(0, 8, "animals", tuple(map(tuple, BOXES["7"])))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\n", "line 1 must hold image, boxes and sentences"),
        (json.dumps(ROW) + "\n[1]\n", "line 2 must hold image, boxes and sentences"),
        (json.dumps(ROW) + "\n{", "line 2 must hold image"),
        (json.dumps(ROW | {"boxes": {"7": [[1, 2]]}}), "line 1 must hold image"),
        (json.dumps(ROW | {"image": "z.jpg"}), "has phrases for none of the captions"),
        ("", "has phrases for none of the captions"),
    ],
)
def test_files_of_no_use(tmp_path, content, message):
    path = tmp_path / "e.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        with_phrases([Record("?", ("Two dogs , one with a ball .",), name="x.jpg")], path)


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read '.*none.jsonl'"):
        with_phrases([Record("?", ("A dog .",), name="x.jpg")], tmp_path / "none.jsonl")
