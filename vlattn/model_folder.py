"""Model folders: the files that a captioner is saved as."""

import json
from pathlib import Path
from typing import Any

from vlattn.config import CaptionerConfig

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json")


def find_model(source: str) -> Path:
    """The folder itself, or the one that a model of the Hugging Face hub is kept in.

    Raises:
        ValueError: there is neither.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=[*MODEL_FILES, "README.md"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"no model folder {source}, and none of that name on the hub") from error


def read_json(path: Path) -> dict[str, Any]:
    """The one object of a file; a `ValueError` where it is anything else."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must hold one JSON object")
    return values


def model_card(config: CaptionerConfig, vocab_size: int) -> str:
    """The README of a model folder, as the hub shows it."""
    return f"""---
library_name: vlattn
pipeline_tag: image-to-text
---

# A vlattn captioner

{config.encoder} encoder, {config.attention} cross-attention, {config.depth} decoder layers of width
{config.dim}, {vocab_size} tokens.

```python
from vlattn import Captioner

captioner = Captioner.from_pretrained("this folder")
(caption,) = captioner.caption(["picture.jpg"])
print(caption.text)
caption.overlay(0).save("first_word.png")
```
"""
