"""The files of a checkpoint of the transformers library."""

import json
import pickle
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from vlattn.images import Preprocess
from vlattn.model_folder import find_folder, read_json
from vlattn.tokenizer import Tokenizer

PATTERNS = ("*.json", "merges.txt", "vocab.txt", "*.safetensors")
# Heads that captioning does not use, and buffers that some versions of the library wrote.
UNUSED = re.compile(r"pooler\.|position_ids$|token_type_ids$|attn\.(masked_)?bias$")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # numbers of Pillow


class Weights:
    """Tensors by name, each to be taken once."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._left = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Tensor:
        """One tensor, in float32."""
        try:
            return self._left.pop(name).float()
        except KeyError:
            raise ValueError(f"the weights lack {name}") from None

    def layer(self, theirs: str, ours: str, *, transposed: bool = False) -> dict[str, Tensor]:
        """Weight and bias of a linear layer or a norm under our name; a bias of zeros if none.

        Args:
            transposed: the weight is (in, out), as GPT-2 has it.
        """
        weight = self.take(f"{theirs}.weight")
        weight = weight.T if transposed else weight
        bias = torch.zeros(len(weight))
        if f"{theirs}.bias" in self:
            bias = self.take(f"{theirs}.bias")
        return {f"{ours}.weight": weight, f"{ours}.bias": bias}

    def layers(self, pairs: dict[str, str], **options: Any) -> dict[str, Tensor]:
        """`layer` of each pair of their name and ours."""
        return {
            name: tensor
            for theirs, ours in pairs.items()
            for name, tensor in self.layer(theirs, ours, **options).items()
        }

    def count(self, pattern: str) -> int:
        """How many numbers stand in place of the {} of a name."""
        found = re.compile(re.escape(pattern).replace(r"\{\}", r"(\d+)"))
        return len({match[1] for name in self._left if (match := found.match(name))})

    def check_all_taken(self) -> None:
        left = [name for name in self._left if not UNUSED.search(name)]
        if left:
            raise ValueError(f"no place for {len(left)} tensors: {', '.join(sorted(left)[:5])}")


@dataclass
class Checkpoint:
    """A folder with `config.json`, weights, and the files of a tokenizer and an image processor."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, source: str, **hub: Any) -> "Checkpoint":
        """A folder, or a model of the hub; see `vlattn.convert.convert`."""
        folder = find_folder(source, PATTERNS, **hub)
        if not list(folder.glob("model*.safetensors")):
            folder = find_folder(source, ("pytorch_model*.bin",), **hub)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{source} is no checkpoint: no config.json")
        return cls(folder, read_json(folder / "config.json"))

    @cached_property
    def weights(self) -> Weights:
        """All shards; pickled ones are read as tensors alone."""
        if files := sorted(self.folder.glob("model*.safetensors")):
            shards = map(load_file, files)
        elif files := sorted(self.folder.glob("pytorch_model*.bin")):
            shards = map(_load_pickled, files)
        else:
            raise ValueError("no model.safetensors and no pytorch_model.bin")
        return Weights({name: tensor for shard in shards for name, tensor in shard.items()})

    def token_id(self, *names: str) -> int | None:
        """The first of these settings that generation or a config has."""
        file = self.folder / "generation_config.json"
        generation = read_json(file) if file.is_file() else {}
        decoder = self.config.get("decoder", {})
        for name in names:
            for settings in (generation, self.config, decoder):
                value = settings.get(name)
                if value is not None:
                    return value[0] if isinstance(value, list) else value
        return None

    def tokenizer(self, **ids: int) -> Tokenizer:
        """See `Tokenizer.adopt`."""
        folder = self.folder
        if (folder / "tokenizer.json").is_file():
            spec = read_json(folder / "tokenizer.json")
        elif (folder / "vocab.txt").is_file():
            settings = folder / "tokenizer_config.json"
            lowercase = not settings.is_file() or read_json(settings).get("do_lower_case", True)
            library = tokenizers.BertWordPieceTokenizer(
                str(folder / "vocab.txt"), lowercase=lowercase
            )
            spec = json.loads(library.to_str())
        elif (folder / "merges.txt").is_file():
            library = tokenizers.ByteLevelBPETokenizer(
                str(folder / "vocab.json"), str(folder / "merges.txt")
            )
            spec = json.loads(library.to_str())
        else:
            raise ValueError("no tokenizer.json, vocab.txt or merges.txt")
        return Tokenizer.adopt(spec, **ids)

    def preprocess(self, image_size: tuple[int, int]) -> Preprocess:
        """That of the checkpoint, for an encoder of this input size."""
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (self.folder / name).is_file():
                settings = read_json(self.folder / name)
                settings = settings.get("image_processor", settings)
                break
        else:
            raise ValueError("no preprocessor_config.json")
        if not settings.get("do_rescale", True) or not settings.get("do_resize", True):
            raise ValueError("pictures are not resized, or their values not brought to 0..1")
        size, share, mode = _sides(settings["size"]), 1.0, "squeeze"
        if settings.get("do_center_crop"):
            crop = _sides(settings["crop_size"])
            mode = "crop" if size[0] is None else "squeeze"
            share = crop[0] / (settings["size"]["shortest_edge"] if size[0] is None else size[0])
            size = crop
        if size != image_size:
            raise ValueError(f"pictures are brought to {size}, the encoder takes {image_size}")
        normalised = settings.get("do_normalize", True)
        mean, std = ((settings[name]) if normalised else [v] * 3 for name, v in MOMENTS)
        return Preprocess(
            size=image_size,
            mode=mode,
            mean=tuple(mean),
            std=tuple(std),
            resample=RESAMPLING[settings.get("resample", 3)],
            share=share,
        )


def _load_pickled(file: Path) -> dict[str, Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file.name} holds more than tensors, and is not read") from error


MOMENTS = (("image_mean", 0.0), ("image_std", 1.0))


def _sides(size: int | dict[str, int]) -> tuple[int | None, int | None]:
    """(S_h, S_w) of a size as image processors write it; None where the shortest side is given."""
    if isinstance(size, int):
        return size, size
    return size.get("height"), size.get("width")


def activation(name: str) -> str:
    """Our name of an activation."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
