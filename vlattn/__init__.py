"""Vision-language attention for PyTorch: captioners whose words point at regions.

```python
from vlattn import Captioner

captioner = Captioner.from_pretrained("runs/mine")
(caption,) = captioner.caption(["picture.jpg"])
for i, word in enumerate(caption.words):
    caption.overlay(i).save(f"{i}.png")  # where the model looked for the word
```

`AdditiveAttention` and `ScaledDotProductAttention` are for models of one's own.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from vlattn import metrics
from vlattn.attention import AdditiveAttention, ScaledDotProductAttention
from vlattn.caption import Caption
from vlattn.captioner import Captioner
from vlattn.config import CaptionerConfig, TrainConfig
from vlattn.data.records import Record, Report
from vlattn.images import Preprocess, open_image
from vlattn.tokenizer import Tokenizer

__version__ = "0.1.0"

train: Callable[[TrainConfig], Captioner]
"""See `vlattn.training.train`."""
read_records: Callable[..., tuple[list[Record], Report]]
"""See `vlattn.data.layouts.read_records`."""

# Imported at their first use: they bring accelerate and tensorboard with them.
_LATER = {
    "train": "vlattn.training",
    "read_records": "vlattn.data.layouts",
}

__all__ = [
    "AdditiveAttention",
    "Caption",
    "Captioner",
    "CaptionerConfig",
    "Preprocess",
    "ScaledDotProductAttention",
    "Tokenizer",
    "TrainConfig",
    "metrics",
    "open_image",
    *_LATER,
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'vlattn' has no attribute {name!r}")
