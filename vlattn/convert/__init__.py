"""Captioners of other software as model folders of vlattn: their weights, words and preprocessing.

Only files are read; the library that wrote them need not be there.
"""

from pathlib import Path
from typing import Any

from vlattn.captioner import Captioner
from vlattn.convert import blip, vision_encoder_decoder
from vlattn.convert.checkpoint import Checkpoint
from vlattn.layers import lay_out_to_write

__all__ = ["convert"]

FAMILIES = {
    "blip": blip.read,
    "vision-encoder-decoder": vision_encoder_decoder.read,
}


def convert(source: str | Path, out: str | Path, **hub: Any) -> Captioner:
    """Make a model folder of a checkpoint of the transformers library.

    Args:
        source: a folder that `save_pretrained` wrote, or a model of the Hugging Face hub by its id.
        out: the model folder.
        hub: `revision`, `cache_dir`, `token`, `local_files_only`; see `snapshot_download` of
            huggingface_hub.

    Raises:
        ValueError: no such checkpoint, one of another family, or one that lacks a file.
    """
    checkpoint = Checkpoint.open(str(source), **hub)
    family = checkpoint.config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{source} is a checkpoint of {family!r}, vlattn converts {', '.join(FAMILIES)}"
        )
    try:
        config, state, tokenizer = FAMILIES[family](checkpoint)
        checkpoint.weights.check_all_taken()
        captioner = Captioner(config, tokenizer)
        captioner.load_state_dict(state)
        captioner.preprocess = checkpoint.preprocess(captioner.encoder.image_size)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot convert {source}: {reason[:300]}") from error
    captioner.eval().save_pretrained(out)
    lay_out_to_write(captioner.decoder)
    return captioner
