"""Graphs that run without PyTorch write the same captions."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vlattn.cli import main
from vlattn.export import ReadOnlyCache, export

onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime (vlattn[export])")
EXAMPLE = Path(__file__).parent.parent / "examples" / "onnx_caption.py"


@torch.no_grad()
def test_exported_programs_compute_the_same(captioner, photos):
    programs = {name: program.module() for name, program in export(captioner).items()}
    pixels = torch.stack([captioner.preprocess(photo)[0] for photo in photos])
    tokens = torch.randint(4, 20, (3, 5), generator=torch.Generator().manual_seed(0))
    expected, _ = captioner.decode(tokens, captioner.encode(pixels))
    memory = programs["encoder"](pixels)
    past = [x[:, :, :, :0] for x in memory]
    cache = ReadOnlyCache(memory, past)
    hidden, _ = captioner.decoder(tokens[:, :1], cache, places=torch.zeros(1, 1).long())
    torch.testing.assert_close(captioner.decoder.logits(hidden), expected[:, :1])
    past = [torch.stack(x) for x in zip(*cache.grown)]
    for t in range(1, 5):
        new, place = tokens[:, t : t + 1], torch.full((1, 1), t)
        logits, *past = programs["step"](new, place, *memory, *past)
        torch.testing.assert_close(logits, expected[:, t], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("default")  # onnxscript and onnxruntime's own
def test_onnxruntime_alone_writes_the_same_captions(captioner, photos, tmp_path):
    captioner.save_pretrained(tmp_path / "model")
    names = []
    for i, photo in enumerate(photos):
        names.append(str(tmp_path / f"{i}.png"))
        photo.save(names[-1])
    assert main(["export", "--model", str(tmp_path / "model"), str(tmp_path / "graphs")]) == 0
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "graphs"), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    captions = captioner.caption(names, num_beams=1)
    assert done.stdout.splitlines() == [f"{n}: {c.text}" for n, c in zip(names, captions)]
    assert "vlattn" not in EXAMPLE.read_text().split('"""')[2].replace("vlattn export", "")
