"""Every layout gives the same records, and nothing is left out without a line in the report."""

import hashlib
import json
import time
from pathlib import Path

import pytest
from PIL import Image

from vlattn.data import layouts
from vlattn.data.layouts import read_records
from vlattn.data.readers import LAYOUTS
from vlattn.data.records import DataError, Record, Report

FLICKR8K = Path(__file__).parents[1] / "../shared/data/flickr8k"


def picture(path: Path) -> None:
    """A small picture of noise, another one for each path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = hashlib.shake_128(bytes(path)).digest(8 * 5 * 3)
    Image.frombytes("RGB", (8, 5), noise).save(path)


def captions(records: list[Record]) -> dict[str, tuple[str, ...]]:
    return {record.name: record.captions for record in records}


def names(records: list[Record], split: str) -> set[str]:
    return {record.name for record in records if record.split == split}


def flickr8k(root: Path, pictures: int, *, lists: dict[str, list[str]] | None = None) -> list[str]:
    """A data set in Flickr8k's form with five captions a picture."""
    found = [f"{i}_ab.jpg" for i in range(pictures)]
    text = root / "Flickr8k_text"
    text.mkdir()
    lines = [f"{name}#{k}\t{name} seen {k} times .\n" for name in found for k in range(5)]
    (text / "Flickr8k.token.txt").write_text("".join(lines))
    (text / "Flickr8k.lemma.token.txt").write_text("".join(lines).upper())
    for split, members in (lists or {}).items():
        (text / f"Flickr_8k.{split}Images.txt").write_text("\n".join(members) + "\n")
    for name in found:
        picture(root / "Flicker8k_Dataset" / name)
    return found


# Flickr8k


def test_flickr8k_keeps_its_own_splits_and_reports_pictures_in_none(tmp_path):
    a, b, c, d = (f"{i}_ab.jpg" for i in range(4))
    flickr8k(tmp_path, 4, lists={"train": [a, b], "dev": [], "test": [c, "gone.jpg"]})
    records, report = read_records(tmp_path)
    assert [(r.name, r.split, len(r.captions)) for r in records] == [
        (a, "train", 5),
        (b, "train", 5),
        (c, "test", 5),
    ]
    assert records[0].captions[1] == f"{a} seen 1 times ."
    assert records[0].image.is_file()
    assert (report.images, report.captions) == ({"train": 2, "test": 1}, {"train": 10, "test": 5})
    assert (d, "in no split") in report.skipped
    assert ("gone.jpg", "in a split, but without captions") in report.skipped


def test_flickr8k_reports_bad_lines_missing_files_and_pictures_without_a_caption(tmp_path):
    first, second, third = flickr8k(tmp_path, 3)
    token = tmp_path / "Flickr8k_text/Flickr8k.token.txt"
    lines = token.read_text().replace(f"{third}#", "third.jpg#")
    token.write_text(f"{lines}no tab here\n{first}#5\t   \n")
    records, report = read_records(tmp_path)
    assert set(captions(records)) == {first, second}
    assert set(report.skipped) == {
        ("Flickr8k.token.txt line 16", "no tab after the name"),
        (first, "empty caption"),
        ("third.jpg", "no such file"),
        (f"Flicker8k_Dataset/{third}", "without a caption"),
    }


def test_all_of_flickr8k_is_read_in_seconds():
    if not FLICKR8K.is_dir():
        pytest.skip("needs the shared Flickr8k, which is not here")
    start = time.perf_counter()
    records, report = read_records(FLICKR8K)
    assert time.perf_counter() - start < 10
    assert report.images == {"train": 6000, "dev": 1000, "test": 1000}
    assert report.captions == {"train": 30000, "dev": 5000, "test": 5000}
    assert len(report.skipped) == 91
    assert {reason for _, reason in report.skipped} == {"in no split"}
    assert len({record.name for record in records}) == len(records) == 8000


# Karpathy's splits, and COCO


def karpathy_row(name: str, split: str, *texts, **more) -> dict:
    return {"filename": name, "split": split, "sentences": [{"raw": t} for t in texts], **more}


@pytest.mark.parametrize("given", ["folder", "file"])
def test_karpathys_file_has_all_splits(tmp_path, given):
    """Pictures of two folders have one name; restval was lost without a word (D3)."""
    for name in ("a.jpg", "b.jpg", "val2014/c.jpg", "train2014/c.jpg"):
        picture(tmp_path / name)
    rows = [
        karpathy_row("a.jpg", "train", "one ring", "a ring"),
        karpathy_row("b.jpg", "restval", "two rings"),
        karpathy_row("c.jpg", "val", "three rings", filepath="val2014"),
        karpathy_row("c.jpg", "test", "four rings", filepath="train2014"),
        karpathy_row("gone.jpg", "test", "no ring"),
        karpathy_row("a.jpg", "train", None),
        karpathy_row("b.jpg", "test"),
        {"split": "train"},
    ]
    file = tmp_path / "dataset_flickr8k.json"
    file.write_text(json.dumps({"images": rows, "dataset": "flickr8k"}))
    records, report = read_records(tmp_path if given == "folder" else file)
    assert captions(records) == {
        "a.jpg": ("one ring", "a ring"),
        "b.jpg": ("two rings",),
        "val2014/c.jpg": ("three rings",),
        "train2014/c.jpg": ("four rings",),
    }
    assert [record.split for record in records] == ["train", "train", "dev", "test"]
    assert "layout karpathy" in report.source
    assert report.source.endswith("; restval counts as train, 1 images")
    assert set(report.skipped) == {
        ("a.jpg", "empty caption"),
        ("b.jpg", "empty caption"),
        ("gone.jpg", "no such file"),
        ("dataset_flickr8k.json image 8", "no filename or sentences"),
    }


def test_coco_has_a_file_for_each_split(tmp_path):
    images = {"train": [(1, "one.jpg"), (2, "two.jpg")], "val": [(7, "seven.jpg"), (8, "gone.jpg")]}
    annotations = {
        "train": [(1, "a ring"), (2, "two rings"), (1, "one ring")],
        "val": [(7, "seven rings"), (8, "no ring"), (9, "of no picture")],
    }
    for split, pictures in images.items():
        for _, name in pictures:
            if name != "gone.jpg":
                picture(tmp_path / f"{split}2017" / name)
        content = {
            "images": [{"id": i, "file_name": name} for i, name in pictures],
            "annotations": [{"image_id": i, "caption": c} for i, c in annotations[split]],
        }
        content["images"] += [{"id": 5}, {"id": 6, "file_name": f"{split}.jpg"}]
        file = tmp_path / "annotations" / f"captions_{split}2017.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    records, report = read_records(tmp_path)
    assert captions(records) == {
        "one.jpg": ("a ring", "one ring"),
        "two.jpg": ("two rings",),
        "seven.jpg": ("seven rings",),
    }
    assert names(records, "train") == {"one.jpg", "two.jpg"}
    assert names(records, "dev") == {"seven.jpg"}
    assert set(report.skipped) == {
        ("gone.jpg", "no such file"),
        *(("captions_" + split + "2017.json image 3", "names no picture") for split in images),
        *((f"{split}.jpg", "without a caption") for split in images),
        ("captions_val2017.json caption of image 9", "no such image"),
    }


@pytest.mark.parametrize("layout", ["karpathy", "coco"])
@pytest.mark.parametrize("content", ["[", "[]", "{}", '{"images": 5, "annotations": 5}'])
def test_json_that_is_no_data_set_is_one_line(tmp_path, layout, content):
    name = "dataset_a.json" if layout == "karpathy" else "captions_train.json"
    (tmp_path / name).write_text(content)
    with pytest.raises(
        DataError, match=rf"{name}' must be JSON with a list '(images|annotations)'"
    ):
        read_records(tmp_path, layout)


# Tables


def test_csv_quirks_leave_captions_as_written(tmp_path):
    """A byte-order mark ended up in the first column's name, and quotes in captions (D1)."""
    folder = tmp_path / "our pictures 图片"
    written = {
        "a b.jpg": "plain",
        "二.jpg": "a red, round ball",
        "c.jpg": 'a sign that says "stop"',
        "d.jpg": "one line\nanother line",
        "e.jpg": "a\ttab",
        "f.jpg": 'a 6" pipe',
    }
    for name in written:
        picture(folder / "sub folder" / name)
    rows = [
        "IMAGE Path,Caption",
        "sub folder/a b.jpg,  plain ",
        'sub folder/二.jpg,"a red, round ball"',
        'sub folder/c.jpg,"a sign that says ""stop"""',
        'sub folder/d.jpg,"one line\nanother line"',
        "sub folder/e.jpg,a\ttab",
        'sub folder\\f.jpg,a 6" pipe',
    ]
    (folder / "table.csv").write_bytes(("\ufeff" + "\r\n".join(rows)).encode())
    records, report = read_records(folder)
    assert captions(records) == {f"sub folder/{name}": (text,) for name, text in written.items()}
    assert "(layout table, 6 captions)" in str(report)
    assert report.skipped == ()


def test_jsonl_with_mark_blank_and_broken_lines(tmp_path):
    """One line cut short ended the reading of a whole file, without saying where (D1)."""
    for name in ("a.jpg", "b.jpg"):
        picture(tmp_path / name)
    lines = [
        json.dumps({"file_name": "a.jpg", "text": "line\u2028separator"}),
        '{"file_name": "b.jpg", "te',
        "[1, 2]",
        json.dumps({"file_name": "b.jpg", "text": ["two", "captions", None]}),
        json.dumps({"text": "of nothing"}),
        "",
    ]
    (tmp_path / "list.jsonl").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    records, report = read_records(tmp_path / "list.jsonl")
    assert captions(records) == {"a.jpg": ("line\u2028separator",), "b.jpg": ("two", "captions")}
    assert set(report.skipped) == {
        ("list.jsonl line 2", "not a JSON object"),
        ("list.jsonl line 3", "not a JSON object"),
        ("list.jsonl line 5", "names no picture"),
        ("b.jpg", "empty caption"),
    }


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("t.tsv", 'image\tcaption\na.jpg\t"Hi" said one\na.jpg\t"open\n'),  # quotes are text
        ("t.tsv", 'image\tcaption\na.jpg\t"""Hi"" said one"\na.jpg\t"""open"\n'),  # quoted
        ("t.csv", 'image;caption\na.jpg;"""Hi"" said one"\na.jpg;"""open"\n'),
        ("t.csv", 'image_name| number| comment\na.jpg| 0| "Hi" said one\na.jpg| 1| "open\n'),
        ("captions.txt", 'image,caption\na.jpg,"""Hi"" said one"\na.jpg,"""open"\n'),
    ],
)
def test_delimiters_and_quotes_are_found_by_looking(tmp_path, file, content):
    (tmp_path / file).write_text(content)
    picture(tmp_path / "Images/a.jpg")
    records, report = read_records(tmp_path)
    assert captions(records) == {"a.jpg": ('"Hi" said one', '"open')}
    assert report.skipped == ()


def test_columns_can_be_named(tmp_path):
    picture(tmp_path / "a.jpg")
    (tmp_path / "t.csv").write_text("Photo No,Says,caption\na.jpg,this,not this\n")
    records, _ = read_records(tmp_path, image_column="photo no", caption_column="Says")
    assert captions(records) == {"a.jpg": ("this",)}
    with pytest.raises(DataError, match=r"no image column in .*t\.csv.*Photo No.*image_column"):
        read_records(tmp_path)
    with pytest.raises(DataError, match=r"no column 'Said' in .*'Says'.*: give caption_column"):
        read_records(tmp_path, image_column="photo no", caption_column="Said")


def test_a_row_with_too_many_values_is_reported(tmp_path):
    picture(tmp_path / "a.jpg")
    (tmp_path / "t.csv").write_text("image,caption\na.jpg,a man, sitting\na.jpg,a man\n")
    records, report = read_records(tmp_path)
    assert captions(records) == {"a.jpg": ("a man",)}
    assert report.skipped == (("t.csv line 2", "more values than columns"),)


def test_a_broken_table_is_an_error_with_its_place(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text('image,caption\na.jpg,"never closed\nb.jpg,x\n')
    with pytest.raises(DataError, match=r"t\.csv' line 3: unexpected end of data"):
        read_records(table)
    table.write_bytes("image,caption\na.jpg,un café".encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot read .*t\.csv': 'utf-8' codec can't decode"):
        read_records(table)


def test_one_table_per_split_and_a_split_column(tmp_path):
    for name in ("a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg"):
        picture(tmp_path / name)
    (tmp_path / "train.csv").write_text("image,caption\na.jpg,x\n")
    (tmp_path / "val.csv").write_text("image,caption\nb.jpg,x\n")
    records, report = read_records(tmp_path)
    assert {r.name: r.split for r in records} == {"a.jpg": "train", "b.jpg": "dev"}
    assert "drawn" not in str(report)
    rows = ["image,caption,Split", "a.jpg,x,TEST", "b.jpg,x,validation", "c.jpg,x,train"]
    (tmp_path / "all.csv").write_text("\n".join([*rows, "d.jpg,x,", "e.jpg,x,holdout"]))
    records, report = read_records(tmp_path / "all.csv")
    assert [(r.name, r.split) for r in records] == [
        ("a.jpg", "test"),
        ("b.jpg", "dev"),
        ("c.jpg", "train"),
    ]
    assert report.skipped == (("d.jpg", "in no split"), ("e.jpg", "unknown split 'holdout'"))


# Folders


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_imagefolder_merges_rows_and_takes_splits_from_folders(tmp_path, kind):
    for split, name in [("train", "a.jpg"), ("train", "b.jpg"), ("test", "a.jpg")]:
        picture(tmp_path / split / name)
    rows = [("a.jpg", "one"), ("b.jpg", "two"), ("a.jpg", "three")]
    for split, part in [("train", rows), ("test", rows[:1])]:
        lines = [json.dumps({"file_name": name, "text": text}) for name, text in part]
        if kind == "csv":
            lines = ["file_name,text", *(f"{name},{text}" for name, text in part)]
        (tmp_path / split / f"metadata.{kind}").write_text("\n".join(lines))
    records, report = read_records(tmp_path)
    assert [(r.name, r.split, r.captions) for r in records] == [
        ("test/a.jpg", "test", ("one",)),
        ("train/a.jpg", "train", ("one", "three")),
        ("train/b.jpg", "train", ("two",)),
    ]
    assert "layout imagefolder, 4 captions" in str(report)


def test_imagefolder_with_one_file_for_all_folders(tmp_path):
    for name in ("train/a.jpg", "dev/a.jpg"):
        picture(tmp_path / name)
    (tmp_path / "metadata.csv").write_text("file_name,text\ntrain/a.jpg,x\n./dev//a.jpg,y\n")
    records, _ = read_records(tmp_path)
    assert [(r.split, r.captions) for r in records] == [("train", ("x",)), ("dev", ("y",))]


def test_sidecar_reads_a_caption_per_line(tmp_path):
    for name in ("a.v2.JPG", "sub/b.png", "lonely.jpg", "empty.jpg", ".hidden/c.jpg"):
        picture(tmp_path / name)
    (tmp_path / "a.v2.txt").write_bytes(b"\xef\xbb\xbf one \r\n\r\ntwo\r\n")
    (tmp_path / "sub/b.txt").write_text("three")
    (tmp_path / "empty.txt").write_text(" \n")
    records, report = read_records(tmp_path)
    assert captions(records) == {"a.v2.JPG": ("one", "two"), "sub/b.png": ("three",)}
    assert report.skipped == (("lonely.jpg", "without a caption"), ("empty.jpg", "empty caption"))


def test_folders_behind_links_are_read_and_loops_end(tmp_path):
    picture(tmp_path / "disk/pictures/a.jpg")
    data = tmp_path / "data"
    data.mkdir()
    (data / "captions.csv").write_text("image,caption\na.jpg,x\n")
    (data / "pictures").symlink_to(tmp_path / "disk/pictures", target_is_directory=True)
    (data / "loop").symlink_to(data, target_is_directory=True)
    records, report = read_records(data)
    assert captions(records) == {"a.jpg": ("x",)}
    assert report.skipped == ()


def test_a_bare_name_that_fits_two_pictures_is_not_guessed(tmp_path):
    for name in ("one/a.jpg", "two/a.jpg", "two/b.jpg"):
        picture(tmp_path / name)
    (tmp_path / "t.csv").write_text("image,caption\na.jpg,x\nb.jpg,y\n")
    records, report = read_records(tmp_path)
    assert captions(records) == {"b.jpg": ("y",)}
    assert ("a.jpg", "no such file") in report.skipped


@pytest.mark.parametrize("name", ["x" * 300, "nul\0.jpg", "/", "folder.jpg", "http://x.y/a.jpg"])
def test_a_name_that_is_no_file_is_skipped(tmp_path, name):
    (tmp_path / "folder.jpg").mkdir()
    picture(tmp_path / "a.jpg")
    rows = [{"image": "a.jpg", "caption": "x"}, {"image": name, "caption": "y"}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    records, report = read_records(tmp_path)
    assert captions(records) == {"a.jpg": ("x",)}
    assert report.skipped == ((name, "no such file"),)


# Splits and duplicates


def test_a_drawn_split_is_by_picture_and_moves_nothing_when_pictures_are_added(tmp_path):
    """A split drawn by row put captions of one picture on both sides (D4)."""
    all_names = flickr8k(tmp_path, 120)
    records, report = read_records(tmp_path)
    assert all(len(record.captions) == 5 for record in records)
    parts = {split: names(records, split) for split in ("train", "dev", "test")}
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == 120
    assert 80 < len(parts["train"]) < 110 and len(parts["dev"]) > 3 and len(parts["test"]) > 3
    assert "drawn by picture name" in str(report)

    token = tmp_path / "Flickr8k_text/Flickr8k.token.txt"
    lines = token.read_text().splitlines()
    token.write_text("\n".join(line for line in lines[::-1] if int(line.split("_")[0]) % 3))
    fewer, _ = read_records(tmp_path)
    assert len(fewer) == 80
    assert {r.name: r.split for r in fewer}.items() <= {r.name: r.split for r in records}.items()
    assert set(captions(fewer)) < set(all_names)


@pytest.mark.parametrize("pictures", [1, 2])
def test_one_or_two_pictures_are_not_split(tmp_path, pictures):
    flickr8k(tmp_path, pictures)
    _, report = read_records(tmp_path)
    assert report.images == {"train": pictures}


def test_no_split_is_empty_from_three_pictures_on(tmp_path):
    for count in range(3, 12):
        root = tmp_path / str(count)
        root.mkdir()
        flickr8k(root, count)
        _, report = read_records(root)
        assert set(report.images) == {"train", "dev", "test"}


def test_a_picture_in_two_splits_is_named(tmp_path):
    """One picture under two ids was trained on and tested on, and nobody noticed (D4)."""
    picture(tmp_path / "a.jpg")
    (tmp_path / "copy of a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes())
    for name in ("b.jpg", "c.jpg"):
        picture(tmp_path / name)
    rows = [
        "a.jpg,x,train",
        "copy of a.jpg,y,test",
        "b.jpg,x,train",
        "./b.jpg,z,dev",
        "c.jpg,x,dev",
    ]
    (tmp_path / "t.csv").write_text("\n".join(["image,caption,split", *rows]))
    records, report = read_records(tmp_path)
    assert len(records) == 5
    assert set(report.duplicates) == {
        (("a.jpg", "train"), ("copy of a.jpg", "test")),
        (("b.jpg", "train"), ("b.jpg", "dev")),
    }
    warning = str(report).splitlines()[-1]
    assert warning.startswith("WARNING, same picture in two splits, 2: a.jpg (train) = copy of a")


def test_copies_are_drawn_into_the_same_split_and_named(tmp_path):
    flickr8k(tmp_path, 40)
    folder = tmp_path / "Flicker8k_Dataset"
    for i in range(0, 40, 4):
        (folder / f"{i + 1}_ab.jpg").write_bytes((folder / f"{i}_ab.jpg").read_bytes())
    records, report = read_records(tmp_path)
    assert len(report.duplicates) == 10
    assert all(a[1] == b[1] for a, b in report.duplicates)
    assert str(report).splitlines()[-1].startswith("same picture under two names, 10: ")
    assert len(records) == 40


def test_one_path_written_in_two_ways_is_one_picture(tmp_path):
    picture(tmp_path / "sub/a.jpg")
    rows = ["image,caption", "sub/a.jpg,x", "./sub/../sub/a.jpg,y", "sub\\a.jpg,z"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    records, report = read_records(tmp_path)
    assert captions(records) == {"sub/a.jpg": ("x", "y", "z")}
    assert report.duplicates == ()


def test_a_picture_that_cannot_be_read_is_like_no_other(tmp_path, monkeypatch):
    flickr8k(tmp_path, 3)
    folder = tmp_path / "Flicker8k_Dataset"
    (folder / "1_ab.jpg").write_bytes((folder / "0_ab.jpg").read_bytes())
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "1_ab.jpg":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    records, report = read_records(tmp_path)
    assert len(records) == 3 and report.duplicates == ()


# The report and the errors


def test_the_report_is_short_and_plain():
    skipped = [(f"{i}.jpg", "no such file") for i in range(15)]
    skipped += [(f"odd\x1b[31m{i}\n.jpg", f"unknown split {i}") for i in range(30)]
    leak = (("a.jpg", "train"), ("b.jpg", "test"))
    report = Report(
        "data (layout table, 9 captions)",
        {"train": 1234, "dev": 5, "test": 6},
        {"train": 6170, "dev": 25, "test": 30},
        tuple(skipped),
        (leak, *[((f"{i}.jpg", "dev"), (f"{i}b.jpg", "dev")) for i in range(900)]),
        own_splits=False,
    )
    lines = str(report).splitlines()
    assert len(lines) <= 20 and all(line.isprintable() and len(line) < 300 for line in lines)
    assert lines[1].split() == ["train", "1,234", "images", "6,170", "captions"]
    assert "skipped 15, no such file: 0.jpg, 1.jpg, 2.jpg and 12 more" in lines
    assert "skipped 23 for other reasons" in lines
    assert "WARNING, same picture in two splits, 1: a.jpg (train) = b.jpg (test)" in lines


def test_errors_say_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"there is no file or folder '.*nowhere'"):
        read_records(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"layout must be one of auto, scenes, .*'foo'"):
        read_records(tmp_path, "foo")
    with pytest.raises(
        DataError, match=r"no captions found in .*: no Flickr8k\.token\.txt; no dataset"
    ):
        read_records(tmp_path)
    picture(tmp_path / "a.jpg")
    for layout in LAYOUTS:
        with pytest.raises(DataError, match="no captions found in") as error:
            read_records(tmp_path, layout)
        assert LAYOUTS[layout].sign in str(error.value)
    (tmp_path / "one.csv").write_text("image,caption\nb.jpg,x\nc.jpg,x\na.jpg,\n")
    with pytest.raises(
        DataError, match=r"nothing to read in .* as layout table: no such file \(2\), empty caption"
    ):
        read_records(tmp_path)
    (tmp_path / "two.csv").write_text("image,caption\na.jpg,x\n")
    with pytest.raises(DataError, match=r"several tables in .*one of one\.csv, two\.csv"):
        read_records(tmp_path)
    (tmp_path / "one.csv").write_text("")
    with pytest.raises(DataError, match="as layout table: no captions found"):
        read_records(tmp_path / "one.csv")


def test_scenes_are_a_data_set_like_any_other(monkeypatch):
    made = {
        split: [Record("picture", ("a b", "c"), split, name=split)]
        for split in ("train", "dev", "test", "test_novel")
    }
    monkeypatch.setattr(layouts, "scenes", made.__getitem__)
    records, report = read_records("scenes")
    assert [record.split for record in records] == ["train", "dev", "test", "test_novel"]
    assert report.images == dict.fromkeys(made, 1)
    assert report.captions == dict.fromkeys(made, 2)
