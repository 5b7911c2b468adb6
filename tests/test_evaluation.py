"""Running a captioner over a data set."""

import json

import pytest
import torch

from vlattn.captioner import Captioner
from vlattn.config import CaptionerConfig
from vlattn.data.dataset import CaptionDataset
from vlattn.data.records import Record
from vlattn.evaluation import Habits, score_captions, write_captions, write_results
from vlattn.features import encode_pictures

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


def test_captions_from_kept_features_leave_out_damaged_pictures(frozen, some, tmp_path, capsys):
    """A damaged picture of the dev split ended training at the first evaluation: its features,
    NaN, went into the search for a caption."""
    data = dataset(frozen, some)
    expected = write_captions(frozen, data)
    data.features = encode_pictures(frozen, data, tmp_path)
    written = write_captions(frozen, data)
    assert written.keys() == expected.keys() == {"z.png", "a.png", "m.png"}
    assert "'bad.png' could not be read" in capsys.readouterr().out


def test_habits_count_what_scores_do_not_show():
    written = {
        "a": "a dog runs with",
        "b": "a dog runs on the",
        "c": "a dog runs",
        "d": "a dog runs",
        "e": "",
    }
    habits = Habits.of(written)
    assert habits == Habits(0.8, "a dog runs", 0.4, 0.4) and not habits.is_collapsed
    assert str(habits) == (
        "80.0% different texts, 40.0% 'a dog runs', 40.0% end in a function word"
    )
    assert Habits.of({"a": "x", "b": "x", "c": "x", "d": "y"}).is_collapsed
    assert not Habits.of({"a": "a lone picture"}).is_collapsed


def test_results_are_in_cocos_format_and_scores_per_picture(tmp_path):
    records = [
        Record(None, ("a red ring", "one ring"), name="x.png"),
        Record(None, ("a blue star",), name="é.png"),
    ]
    written = {"x.png": "a red ring", "é.png": "a blue cross"}
    write_results(tmp_path / "new" / "folder", written, score_captions(written, records))
    captions, scores = (
        json.loads((tmp_path / "new" / "folder" / name).read_text(encoding="utf-8"))
        for name in ("captions.json", "scores.json")
    )
    assert captions == [{"image_id": k, "caption": text} for k, text in written.items()]
    assert scores.keys() == written.keys()
    assert scores["x.png"]["bleu_1"] == pytest.approx(1) and scores["é.png"]["bleu_1"] < 1
