"""Running a captioner over a data set."""

import numpy as np
import pytest
import torch

from vlattn.captioner import Captioner
from vlattn.config import CaptionerConfig
from vlattn.data.dataset import CaptionDataset
from vlattn.data.records import Record
from vlattn.evaluation import encode_pictures, write_captions

ENCODER = "timm:test_vit"  # timm's own tiny model for tests


def dataset(captioner, records, **options):
    return CaptionDataset(records, captioner.tokenizer, captioner.preprocess, max_len=64, **options)


@pytest.fixture(scope="module")
def frozen(tokenizer):
    """A captioner whose encoder is of timm and does not learn."""
    torch.manual_seed(0)
    config = CaptionerConfig(encoder=ENCODER, image_size=(64, 96), dim=32, depth=1, num_heads=2)
    return Captioner(config, tokenizer).eval()


@pytest.fixture
def some(photos):
    """Photos with a damaged one among them; the names are not the order."""
    pictures = zip(("z.png", "bad.png", "a.png", "m.png"), (photos[0], b"", *photos[1:]))
    return [Record(image, ("a red ring",), name=name) for name, image in pictures]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_captions_are_those_of_caption_by_name(captioner, photos, some, num_workers, capsys):
    """References of one picture were compared with the caption of another."""
    options = {"num_beams": 4, "max_len": 12, "length_penalty": 0.5}
    written = write_captions(
        captioner, dataset(captioner, some), num_workers=num_workers, **options
    )
    expected = [caption.text for caption in captioner.caption(photos, **options)]
    assert written == dict(zip(("z.png", "a.png", "m.png"), expected))
    assert "skipped: cannot read image bytes: it is empty" in capsys.readouterr().out


def test_captions_do_not_depend_on_the_references(captioner, some):
    """Captions were scored that had been written with the references in view (X25)."""
    swapped = [record._replace(captions=("a blue star and a cross",)) for record in some]
    one, other = (write_captions(captioner, dataset(captioner, r)) for r in (some, swapped))
    assert one == other


def test_a_set_without_a_readable_picture_has_no_captions(captioner):
    bad = [Record(b"", ("a ring",), name=str(i)) for i in range(3)]
    assert write_captions(captioner, dataset(captioner, bad)) == {}
    assert write_captions(captioner, dataset(captioner, [])) == {}


def test_features_are_kept_once_and_used(frozen, some, tmp_path):
    path = tmp_path / "features" / "dev.npy"
    data = dataset(frozen, some)
    state = torch.get_rng_state()
    features = encode_pictures(frozen, data, path)
    assert torch.equal(torch.get_rng_state(), state)  # training goes on as if without
    assert features.dtype == np.float16 and len(features) == 4
    assert np.isnan(features[1]).all()
    for i in (0, 2, 3):
        with torch.no_grad():
            expected = frozen.encode(data[i].image[None]).tokens[0]
        torch.testing.assert_close(
            torch.tensor(features[i]).float(), expected, rtol=1e-2, atol=1e-2
        )
    content = path.read_bytes()
    again = encode_pictures(frozen, data, path)
    np.testing.assert_array_equal(again, features)
    assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]


def test_captions_from_kept_features_leave_out_damaged_pictures(frozen, some, tmp_path, capsys):
    """A damaged picture of the dev split ended training at the first evaluation: its features,
    NaN, went into the search for a caption."""
    data = dataset(frozen, some)
    expected = write_captions(frozen, data)
    data.features = encode_pictures(frozen, data, tmp_path / "dev.npy")
    written = write_captions(frozen, data)
    assert written.keys() == expected.keys() == {"z.png", "a.png", "m.png"}
    assert "'bad.png' could not be read" in capsys.readouterr().out


def test_features_of_another_data_set_are_refused(frozen, some, tmp_path):
    encode_pictures(frozen, dataset(frozen, some), tmp_path / "dev.npy")
    with pytest.raises(ValueError, match=r"dev.npy holds 4 pictures, the data set 3"):
        encode_pictures(frozen, dataset(frozen, some[:3]), tmp_path / "dev.npy")


def test_features_of_no_pictures(frozen, tmp_path):
    """A data set without a dev split."""
    assert len(encode_pictures(frozen, dataset(frozen, []), tmp_path / "dev.npy")) == 0


def test_an_encoding_that_fails_leaves_no_file(frozen, some, tmp_path, monkeypatch):
    """Half-written features of a run that was stopped were taken for whole ones."""
    monkeypatch.setattr(frozen, "encode", lambda pixels: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        encode_pictures(frozen, dataset(frozen, some), tmp_path / "dev.npy")
    assert list(tmp_path.iterdir()) == []
