"""Model folders: the files that a captioner is saved as."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vlattn.config import CaptionerConfig
from vlattn.files import write_aside

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json")
PACKAGED = Path(__file__).with_name("pretrained")  # models that come with the package
PACKAGED_MODEL = "flickr8k-small"


def find_model(source: str, **hub: Any) -> Path:
    """A model folder, or the one that a model of the Hugging Face hub is kept in.

    Args:
        hub: see `find_folder`.

    Raises:
        ValueError: there is neither, or it is another software's; the message says what to do.
    """
    folder = find_folder(source, ("config.json",), **hub)
    if kind := _foreign_kind(folder / "config.json"):
        raise ValueError(
            f"{source} is a checkpoint of {kind!r}: 'vlattn convert {source} OUT' makes a model "
            "folder of it"
        )
    folder = find_folder(source, (*MODEL_FILES, "README.md"), **hub)
    if missing := [name for name in MODEL_FILES if not (folder / name).is_file()]:
        raise ValueError(f"{source} is not a vlattn model folder: no {', '.join(missing)}")
    return folder


def find_folder(source: str, patterns: Sequence[str], **hub: Any) -> Path:
    """The folder itself, a model of the package, or what files of one of the hub are kept in.

    Args:
        patterns: names of the files to download.
        hub: `revision`, `cache_dir`, `token`, `local_files_only`; see `snapshot_download` of
            huggingface_hub.

    Raises:
        ValueError: there is none of them.
    """
    if Path(source).is_dir():
        return Path(source)
    if source == Path(source).name and (PACKAGED / source).is_dir():
        return PACKAGED / source
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns), **hub))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"no model folder {source}, and none of that name on the hub") from error


def _foreign_kind(config: Path) -> str | None:
    """What transformers calls a checkpoint of its own; None for anything else."""
    try:
        return read_json(config).get("model_type")
    except (OSError, ValueError):  # the reader of the model folder says which
        return None


def read_json(path: Path) -> dict[str, Any]:
    """The one object of a file; a `ValueError` where it is anything else."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must hold one JSON object")
    return values


def write_weights(
    path: Path, weights: dict[str, Tensor], vocabulary: str, dtype: torch.dtype | None = None
) -> None:
    """Replaces the file in one step.

    Args:
        vocabulary: the digest of the tokenizer that the weights belong to.
        dtype: of the floats in the file; each weight's own where omitted.

    Raises:
        ValueError: a weight is larger than `dtype` can hold.
    """
    tensors = {}
    for name, weight in weights.items():
        stored = weight.to(dtype) if dtype and weight.is_floating_point() else weight
        if stored.dtype != weight.dtype and (stored.isinf() & weight.isfinite()).any():
            raise ValueError(f"{name} holds weights too large for {dtype}")
        tensors[name] = stored.contiguous()
    with write_aside(path) as aside:
        save_file(tensors, aside, metadata={"format": "pt", "vocabulary": vocabulary})


def read_weights(path: Path, vocabulary: str) -> dict[str, Tensor]:
    """What `write_weights` wrote, or any other safetensors file.

    Raises:
        ValueError: the weights belong to another tokenizer.
    """
    with safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("vocabulary") not in (None, vocabulary):
            raise ValueError("tokenizer.json is not the one that the weights were trained with")
        return {name: file.get_tensor(name) for name in file.keys()}


def licence_note(folder: Path) -> str:
    """What the model card says under "Licence", in one line; nothing where it says nothing."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    found = re.search(r"^#+ Licen[cs]e\n+(.+?)(?=\n#|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def model_card(config: CaptionerConfig, vocab_size: int, scores: str) -> str:
    """The README of a model folder, as the hub shows it."""
    scores = f"\n{scores}\n" if scores else ""
    return f"""---
library_name: vlattn
pipeline_tag: image-to-text
---

# A vlattn captioner

{config.encoder} encoder, {config.attention} cross-attention, {config.depth} decoder layers of width
{config.dim}, {vocab_size} tokens.
{scores}
```python
from vlattn import Captioner

captioner = Captioner.from_pretrained("this folder")
(caption,) = captioner.caption(["picture.jpg"])
print(caption.text)
caption.overlay(0).save("first_word.png")
```
"""
