"""Model folders: in half the size, in the package, and their licence notes."""

import pytest
import torch
from safetensors.torch import load_file

from vlattn import model_folder
from vlattn.captioner import Captioner
from vlattn.model_folder import licence_note


def test_a_model_stored_in_float16_is_loaded_in_float32(captioner, photos, tmp_path):
    captioner.save_pretrained(tmp_path / "whole")
    captioner.save_pretrained(tmp_path / "half", dtype=torch.float16)
    whole, half = (tmp_path / name / "model.safetensors" for name in ("whole", "half"))
    assert half.stat().st_size < 0.6 * whole.stat().st_size
    assert {weight.dtype for weight in load_file(half).values()} == {torch.float16}
    loaded = Captioner.from_pretrained(tmp_path / "half")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert {weight.dtype for weight in captioner.parameters()} == {torch.float32}
    (expected,) = captioner.caption(photos[:1], max_len=6)
    got = loaded.explain(photos[0], expected.text)
    torch.testing.assert_close(got.attention, expected.attention, atol=5e-3, rtol=0.05)
    for one, other in zip(got.words, expected.words):
        assert one.logprob == pytest.approx(other.logprob, abs=0.1)


def test_counts_stay_whole_numbers_in_a_float16_folder(make_captioner, tmp_path):
    """BatchNorm's count of batches is no float: it would end at 65,504."""
    captioner = make_captioner(stem=True)
    captioner.save_pretrained(tmp_path, dtype=torch.float16)
    kinds = {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()}
    assert kinds == {torch.float16, torch.int64}
    Captioner.from_pretrained(tmp_path)


def test_weights_too_large_for_float16_are_refused(make_captioner, tmp_path):
    captioner = make_captioner()
    with torch.no_grad():
        captioner.decoder.embed.weight[3, 5] = 70_000
    with pytest.raises(ValueError, match=r"embed\.weight holds weights too large for torch.float1"):
        captioner.save_pretrained(tmp_path, dtype=torch.float16)
    assert not list(tmp_path.glob("*model.safetensors*"))


def test_a_model_of_the_package_is_found_by_its_name(captioner, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder, "PACKAGED", tmp_path / "package")
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    captioner.save_pretrained(tmp_path / "package" / "tiny", dtype=torch.float16)
    loaded = Captioner.from_pretrained("tiny")
    assert loaded.config == captioner.config
    for name in ("huge", "../package/tiny"):
        with pytest.raises(ValueError, match="no model folder"):
            Captioner.from_pretrained(name)
    monkeypatch.chdir(tmp_path)
    captioner.save_pretrained("tiny")  # a folder of one's own goes first
    assert load_file("tiny/model.safetensors")["memory_proj.1.weight"].dtype == torch.float32
    own = Captioner.from_pretrained("tiny").memory_proj[1].weight
    assert torch.equal(own, captioner.memory_proj[1].weight)


def refuse(*_, **__):
    raise OSError("no hub here")


def test_the_licence_note_is_what_the_card_says(captioner, tmp_path):
    assert licence_note(tmp_path) == ""
    captioner.save_pretrained(tmp_path)
    assert licence_note(tmp_path) == ""
    card = tmp_path / "README.md"
    for heading in ("## Licence", "# License"):
        card.write_text(f"# Card\n\n{heading}\n\nFor *research*\nalone.\n\n## Limits\n\nMany.\n")
        assert licence_note(tmp_path) == "For *research* alone."
