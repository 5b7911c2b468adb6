"""Features of a frozen encoder that are kept on disk."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from vlattn import features
from vlattn.captioner import Captioner
from vlattn.config import CaptionerConfig
from vlattn.data.dataset import CaptionDataset, collate
from vlattn.data.records import Record
from vlattn.features import encode_pictures
from vlattn.images import Preprocess

CONFIG = CaptionerConfig(
    encoder="timm:test_vit", image_size=(64, 96), dim=32, depth=1, num_heads=2
)  # timm's own tiny model for tests


@pytest.fixture(scope="module")
def frozen(tokenizer):
    torch.manual_seed(0)
    return Captioner(CONFIG, tokenizer).eval()


@pytest.fixture
def some(photos, tmp_path):
    """Photos in files, one in memory, a damaged one and one that is not there among them."""
    paths = [tmp_path / f"{name}.png" for name in ("z", "bad", "a", "none")]
    photos[0].save(paths[0])
    paths[1].write_bytes(b"no picture")
    photos[1].save(paths[2])
    return [Record(x, ("a red ring",), name=f"{i}.png") for i, x in enumerate([*paths, photos[2]])]


def dataset(captioner, records, **options):
    return CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=64, **options)


def encoded(captioner, data, index, view):
    with torch.no_grad():
        return captioner.encode(data.pixels(index, view)[None]).tokens[0]


@pytest.fixture
def count(monkeypatch):
    """How many pictures each call of the encoder was given."""
    calls = []
    encode = Captioner.encode

    def counting(self, pixels):
        calls.append(len(pixels))
        return encode(self, pixels)

    monkeypatch.setattr(Captioner, "encode", counting)
    return calls


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("views", [1, 3])
def test_features_are_those_of_the_encoder(frozen, some, tmp_path, capsys, views, num_workers):
    data = dataset(frozen, some, views=views)
    state = torch.get_rng_state()
    kept = encode_pictures(frozen, data, tmp_path / "kept", num_workers=num_workers)
    assert torch.equal(torch.get_rng_state(), state)  # training goes on as if without
    assert len(kept) == 5
    for view in range(views):
        assert kept[1, view] is None and kept[3, view] is None
        for index in (0, 2, 4):
            found = torch.tensor(kept[index, view])
            assert found.dtype == torch.float16
            expected = encoded(frozen, data, index, view)
            torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    shown = capsys.readouterr().out
    assert "bad.png" in shown and "cannot read '3.png'" in shown


def test_nothing_is_computed_twice(frozen, some, tmp_path, count):
    first = encode_pictures(frozen, dataset(frozen, some[:3]), tmp_path / "kept")
    assert sum(count) == 2
    again = encode_pictures(frozen, dataset(frozen, some[::-1], views=2), tmp_path / "kept")
    assert sum(count) == 2 + 4  # a new picture, and the mirror images of three
    np.testing.assert_array_equal(again[4, 0], first[0, 0])
    encode_pictures(frozen, dataset(frozen, some, views=2), tmp_path / "kept")
    assert sum(count) == 6


def test_features_of_anything_else_are_never_taken(
    frozen, some, photos, tmp_path, tokenizer, count
):
    """The content of a picture, the weights of the encoder and their precision, the preprocessing:
    each is new."""
    folder = tmp_path / "kept"
    encode_pictures(frozen, dataset(frozen, some[:1]), folder)
    photos[2].save(some[0].image)  # another picture under the same name
    changed = encode_pictures(frozen, dataset(frozen, some[:1]), folder)
    expected = encoded(frozen, dataset(frozen, some[:1]), 0, 0)
    torch.testing.assert_close(torch.tensor(changed[0, 0]).float(), expected, rtol=1e-2, atol=1e-2)
    assert sum(count) == 3  # the expected one is counted too
    torch.manual_seed(1)
    other = Captioner(CONFIG, tokenizer).eval()
    encode_pictures(other, dataset(other, some[:1]), folder)
    assert sum(count) == 4
    other.preprocess = Preprocess(size=(64, 96), mode="pad", mean=(0.1, 0.2, 0.3))
    encode_pictures(other, dataset(other, some[:1]), folder)
    assert sum(count) == 5
    with torch.autocast("cpu", torch.bfloat16):
        encode_pictures(other, dataset(other, some[:1]), folder)
        encode_pictures(other, dataset(other, some[:1]), folder)
    assert sum(count) == 6


def test_what_was_written_before_a_failure_counts(frozen, some, tmp_path, monkeypatch, count):
    monkeypatch.setattr(features, "ROWS", 2)
    monkeypatch.setattr(features, "BATCH_SIZE", 1)
    write, calls = np.save, []

    def full(file, array):
        calls.append(len(array))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(file, array)

    data = dataset(frozen, some, views=2)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(OSError, match="No space left"):
            encode_pictures(frozen, data, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2  # a file and its keys
    count.clear()
    encode_pictures(frozen, data, tmp_path / "kept")
    assert sum(count) == 4


def test_programs_that_encode_at_once_share_the_work(frozen, some, tmp_path, monkeypatch, count):
    """Three runs were started together, and each encoded all pictures."""
    monkeypatch.setattr(features, "ROWS", 1)
    data = dataset(frozen, some, views=2)
    encode, waiting = Captioner.encode, [True]

    def beside_another(self, pixels):
        if waiting and waiting.pop():
            encode_pictures(frozen, data, tmp_path / "kept")
        return encode(self, pixels)

    monkeypatch.setattr(Captioner, "encode", beside_another)
    kept = encode_pictures(frozen, data, tmp_path / "kept")
    assert sum(count) == 6 + 1  # all by the other one, and what was begun
    assert all(kept[index, view] is not None for index in (0, 2, 4) for view in (0, 1))


def test_workers_read_the_files_themselves(frozen, some, tmp_path):
    data = dataset(frozen, some)
    data.features = encode_pictures(frozen, data, tmp_path / "kept")
    ways = [
        [b.images for b in DataLoader(data, 2, collate_fn=collate, num_workers=n)] for n in (0, 2)
    ]
    assert all(map(torch.equal, *ways))


def test_features_of_no_pictures(frozen, tmp_path):
    """A data set without a dev split."""
    assert len(encode_pictures(frozen, dataset(frozen, []), tmp_path / "kept")) == 0
