"""The examples, and the README's code, run as they stand."""

import re
import runpy
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
SMALL = (
    "--max-steps 2 --batch-size 4 --dim 32 --depth 1 --num-heads 2 --encoder-dim 32 "
    "--encoder-depth 1 --encoder-heads 2 --image-size 32 32 --precision fp32"
).split()


def run_example(name, flags, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, *map(str, flags)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return stop.value.code


def test_train_scenes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    assert run_example("train_scenes.py", ["--out", out, *SMALL], monkeypatch) == 0
    shown = capsys.readouterr().out
    for split, count in (("test", 500), ("test_novel", 200)):
        assert f"{split}, {count} images: every colour and shape right in" in shown
    with Image.open(out / "words.png") as sheet:
        assert sheet.width > 500


def test_train_captioner(tmp_path, monkeypatch, capsys, write_imagefolder, records):
    data = write_imagefolder(tmp_path / "data", [r._replace(split="train") for r in records])
    flags = ["--data", data, "--out", tmp_path / "run", "--scst-steps", 1, *SMALL]
    assert run_example("train_captioner.py", flags, monkeypatch) == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert run_example("train_captioner.py", flags, monkeypatch) == 2
    assert "is not empty" in capsys.readouterr().err


def test_readme_code(tmp_path, monkeypatch, captioner, photos):
    """Each block runs in a folder that has the model and the picture that it names."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    captioner.save_pretrained(tmp_path / "runs" / "mine")
    photos[0].save(tmp_path / "picture.jpg")
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_readme_commands_exist():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script in re.findall(r"(?:examples|benchmarks)/\w+\.py", text):
        assert (ROOT / script).is_file(), script
