"""Graphs that run without PyTorch write the same captions."""

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from vlattn.cli import main
from vlattn.export import ReadOnlyCache, export, export_onnx

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


@pytest.mark.filterwarnings("default")
def test_int8_holds_products_and_embeddings_in_a_byte_but_no_convolutions(captioner, tmp_path):
    """Convolutions were quantised too: eight times slower, and three in four captions changed."""
    onnx = pytest.importorskip("onnx")
    export_onnx(captioner, tmp_path, int8=True)
    numbers, kinds = {}, Counter()
    for name in ("encoder", "step"):
        graph = onnx.load(tmp_path / f"{name}.onnx").graph
        kinds.update(node.op_type for node in graph.node)
        sizes = Counter()
        for weight in graph.initializer:
            sizes[weight.data_type] += math.prod(weight.dims)
        numbers[name] = sizes
    assert kinds["MatMulInteger"] > 0 and kinds["Conv"] == 1 and "ConvInteger" not in kinds
    step = numbers["step"]
    in_a_byte = step[onnx.TensorProto.INT8] + step[onnx.TensorProto.UINT8]
    assert in_a_byte > 10 * step[onnx.TensorProto.FLOAT]
    past = [np.zeros((2, 1, 2, 0, 16), np.float32)] * 2
    memory = [np.ones((2, 1, 2, 24, 16), np.float32)] * 2
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    inputs = zip(session.get_inputs(), ([[1]], [[0]], *memory, *past))
    logits, *_ = session.run(None, {i.name: np.asarray(x) for i, x in inputs})
    cache = ReadOnlyCache(*([torch.tensor(x) for x in pair] for pair in (memory, past)))
    hidden, _ = captioner.decoder(torch.tensor([[1]]), cache, places=torch.zeros(1, 1).long())
    expected = captioner.decoder.logits(hidden[:, -1]).detach()
    assert (torch.tensor(logits) - expected).norm() < 0.05 * expected.norm()
