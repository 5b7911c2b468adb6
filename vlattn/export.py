"""Captioners as graphs that run without PyTorch: the encoder, and one step of writing.

B pictures, L layers, H_kv key/value heads, N memory tokens, T tokens that are written, D head size,
V vocabulary.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vlattn.attention import AdditiveAttention, KeyValue
from vlattn.captioner import Captioner
from vlattn.files import write_json

INT8 = ("MatMul", "Gemm", "Gather")  # convolutions would be slower, and change most captions
EXAMPLE = 2  # pictures, and tokens written, of the inputs that a graph is traced with


class ReadOnlyCache:
    """A `KVCache` for one step, over tensors (L, B, H_kv, N or T, D); keeps what it returned."""

    def __init__(self, memory: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor]):
        self._memory, self._past, self.grown = memory, past, []

    def memory(self, layer: int) -> KeyValue:
        return KeyValue(*(x[layer] for x in self._memory))

    def append(self, layer: int, new: KeyValue) -> KeyValue:
        past = (x[layer] for x in self._past)
        self.grown.append(KeyValue(*(torch.cat(pair, dim=2) for pair in zip(past, new))))
        return self.grown[-1]


class EncoderGraph(nn.Module):
    """Pixels (B, 3, S_h, S_w) to what the steps read: keys and values (L, B, H_kv, N, D)."""

    def __init__(self, captioner: Captioner):
        super().__init__()
        self.captioner = captioner

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.captioner.memory(self.captioner.encode(pixels))
        kept = [block.project_memory(memory) for block in self.captioner.decoder.blocks]
        return tuple(torch.stack(x) for x in zip(*kept))


class StepGraph(nn.Module):
    """One token each: logits of the next, and the keys and values with this one's added.

    Args of `forward`:
        tokens: (B, 1).
        place: (1, 1), how many were before.
        memory_keys, memory_values: of `EncoderGraph`.
        keys, values: (L, B, H_kv, T, D), none at the begin token.
    """

    def __init__(self, captioner: Captioner):
        super().__init__()
        self.decoder = captioner.decoder

    def forward(
        self,
        tokens: Tensor,
        place: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cache = ReadOnlyCache((memory_keys, memory_values), (keys, values))
        hidden, _ = self.decoder(tokens, cache, places=place)
        grown = (torch.stack(x) for x in zip(*cache.grown))
        return self.decoder.logits(hidden[:, -1]), *grown


@torch.no_grad()
def export(captioner: Captioner) -> dict[str, ExportedProgram]:
    """The "encoder" and the "step" as programs of `torch.export`, for any number of pictures."""
    captioner = copy.deepcopy(captioner).cpu().eval().float()
    for module in captioner.modules():
        if isinstance(module, AdditiveAttention):
            module.backend = "reference"  # the others are no operators of a graph
    pixels = torch.zeros(EXAMPLE, 3, *captioner.encoder.image_size)
    encoder, step = EncoderGraph(captioner), StepGraph(captioner)
    memory = encoder(pixels)
    past = [x[:, :, :, :1].expand(-1, -1, -1, EXAMPLE, -1).contiguous() for x in memory]
    tokens, place = torch.zeros(EXAMPLE, 1).long(), torch.full((1, 1), EXAMPLE)
    pictures, length = Dim("pictures"), Dim("length")
    kept, written = {1: pictures}, {1: pictures, 3: length}
    shapes = ({0: pictures}, {}, kept, kept, written, written)
    return {
        "encoder": torch.export.export(encoder, (pixels,), dynamic_shapes=({0: pictures},)),
        "step": torch.export.export(step, (tokens, place, *memory, *past), dynamic_shapes=shapes),
    }


def export_onnx(captioner: Captioner, folder: str | Path, *, int8: bool = False) -> None:
    """Write `encoder.onnx` and `step.onnx`, and what a program needs to use them.

    See examples/onnx_caption.py, which needs onnxruntime alone.

    Args:
        int8: weights of the matrix products and embeddings in a byte each (dynamic quantisation).

    Raises:
        ValueError: the extra `export` is not installed.
    """
    try:
        import onnxscript  # noqa: F401
        from onnxruntime.quantization import quantize_dynamic
    except ImportError as error:
        raise ValueError(f"export needs onnx: pip install 'vlattn[export]' ({error})") from error

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    memory, past = ["memory_keys", "memory_values"], ["keys", "values"]
    names = {
        "encoder": (["pixels"], memory),
        "step": (["tokens", "place", *memory, *past], ["logits", "new_keys", "new_values"]),
    }
    for name, program in export(captioner).items():
        path = folder / f"{name}.onnx"
        inputs, outputs = names[name]
        made = torch.onnx.export(
            program, input_names=inputs, output_names=outputs, dynamo=True, verbose=False
        )
        made.save(path, external_data=False)
        if int8:
            quantize_dynamic(path, path, op_types_to_quantize=INT8, per_channel=True)
    tokenizer, preprocess = captioner.tokenizer, captioner.preprocess
    tokenizer.save(folder / "tokenizer.json")
    settings = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
    settings["never"] = sorted(tokenizer.control_ids - {tokenizer.eos_id})
    write_json(folder / "caption.json", preprocess.to_dict() | settings)
