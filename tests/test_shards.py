"""Pictures in tar files are the pictures that were put there, each with its own captions."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from vlattn.data.layouts import read_records
from vlattn.data.records import DataError
from vlattn.data.shards import find_shards
from vlattn.images import open_image


def png(colour):
    stream = io.BytesIO()
    Image.new("RGB", (3, 2), colour).save(stream, "png")
    return stream.getvalue()


def write_shard(path, *members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            content = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path):
    write_shard(
        tmp_path / "train-000.tar",
        ("a.v2.png", png("red")),
        ("a.v2.txt", "red\na red one\n"),
        ("train.v1/b.PNG", png("blue")),
        ("train.v1/b.Txt", "blue"),
        ("c.png", png("lime")),
        ("lone.png", png("black")),
    )
    write_shard(
        tmp_path / "train-001.tar",
        ("c.txt", "a caption of no picture"),
        ("d.png", png("yellow")),
        ("d.json", json.dumps({"caption": "yellow", "width": 3})),
        ("d.json", json.dumps({"caption": "another"})),
    )
    write_shard(tmp_path / "val-000.tar", ("a.v2.png", png("white")), ("a.v2.txt", "white"))
    return tmp_path


def test_pictures_keep_their_captions(folder):
    """Dots in names split the key in the wrong place, and pairs were made across samples (D2)."""
    records, report = read_records(folder)
    found = {r.captions: (r.split, open_image(r.image).getpixel((0, 0))) for r in records}
    assert found == {
        ("red", "a red one"): ("train", (255, 0, 0)),
        ("blue",): ("train", (0, 0, 255)),
        ("yellow",): ("train", (255, 255, 0)),
        ("white",): ("dev", (255, 255, 255)),
    }
    assert report.images == {"train": 3, "dev": 1} and report.captions == {"train": 4, "dev": 1}
    assert dict(report.skipped) == {
        "train-000.tar/c": "without a caption, has .png",
        "train-000.tar/lone": "without a caption, has .png",
        "train-001.tar/c": "needs one picture, has .txt",
        "train-001.tar/d.json": "its name is there twice",
    }


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("train-{000..001}.tar", ["train-000", "train-001"]),
        ("{val,train}-000.tar", ["val-000", "train-000"]),
        ("{train-{000..001},val-000}.tar", ["train-000", "val-000", "train-001"]),
        ("train-*.tar", ["train-000", "train-001"]),
        ("val-000.tar", ["val-000"]),
        (".", ["train-000", "train-001", "val-000"]),
    ],
)
def test_patterns_of_shards(folder, pattern, names):
    assert [shard.stem for shard in find_shards(folder / pattern)] == names


def test_shards_without_a_split_are_drawn_by_name(tmp_path):
    for number in range(2):
        members = [(f"{number}{i}.{kind}", x) for i in range(9) for kind, x in SAMPLE]
        write_shard(tmp_path / f"{number:05}.tar", *members)
    records, report = read_records(tmp_path, "webdataset")
    again, _ = read_records(tmp_path / "{00000..00001}.tar")
    assert [r.split for r in records] == [r.split for r in again]
    assert set(report.images) == {"train", "dev", "test"} and len(records) == 18
    assert not report.own_splits


SAMPLE = (("png", png("red")), ("txt", "red"))


def test_what_is_no_shard_is_said(folder, tmp_path):
    (folder / "train-002.tar").write_bytes(b"no tar file" * 99)
    for path, layout, message in (
        (folder / "train-002.tar", "auto", "is not a tar file without compression"),
        (folder / "train-{000..009}.tar", "auto", "there is no shard .*train-003.tar"),
        (folder / "other", "webdataset", "there are no shards"),
    ):
        with pytest.raises(DataError, match=message):
            read_records(path, layout)


def test_training_reads_shards(folder, make_captioner):
    from vlattn.data.dataset import CaptionDataset, collate

    captioner = make_captioner()
    records, _ = read_records(folder)
    data = CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=9)
    batch = collate([data[i] for i in range(len(data))])
    assert len(batch.images) == 4 and not batch.skipped
    expected = [captioner.preprocess(open_image(r.image))[0].numpy() for r in records]
    np.testing.assert_array_equal(batch.images.numpy(), np.stack(expected))
