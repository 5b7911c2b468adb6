"""The settings of a captioner."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal


def option(default: Any, help: str) -> Any:
    """A field of a config with the help of its command-line flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class CaptionerConfig:
    """The sizes and kinds of a captioner; saved as `config.json`.

    More on each is in `ViT` (the settings up to `stem`) and `TextDecoder` (those after it).
    """

    encoder: str = option("vit", "'vit', our own, or 'timm:<name>', any model of timm")
    finetune_encoder: bool = option(False, "a timm encoder learns too")
    image_size: tuple[int, int] | None = option(None, "of the input; the encoder's own if not set")
    resize: Literal["squeeze", "crop", "pad"] = option("squeeze", "how pictures get that size")
    patch_size: int = option(16, "side of a patch of the vit, in pixels")
    encoder_dim: int = option(128, "width of the vit")
    encoder_depth: int = option(2, "blocks of the vit")
    encoder_heads: int = option(4, "attention heads of the vit")
    encoder_positions: Literal["learned", "sine"] = option("sine", "positions of the vit")
    num_registers: int = option(0, "register tokens of the vit")
    stem: bool = option(True, "patches of the vit by several small convolutions")
    attention: Literal["additive", "scaled_dot_product"] = option(
        "scaled_dot_product", "the cross-attention"
    )
    dim: int = option(256, "width of the decoder")
    depth: int = option(2, "blocks of the decoder")
    num_heads: int = option(8, "attention heads of the decoder")
    num_kv_heads: int | None = option(None, "key/value heads; as many as heads if not set")
    mlp_ratio: float = option(4.0, "width of the decoder's MLPs over its own")
    norm: Literal["layer", "rms"] = option("layer", "LayerNorm or RMSNorm")
    norm_first: bool = option(True, "pre-norm; else post-norm")
    positions: Literal["learned", "rotary"] = option("learned", "positions of the words")
    max_len: int = option(64, "longest caption in tokens, begin included")
    tie_embeddings: bool = option(True, "logits by the token embeddings")
    dropout: float = option(0.1, "on the decoder's residual branches and the memory")
    attention_dropout: float = option(0.0, "on the weights of cross-attention")

    def __post_init__(self):
        for name in ("encoder_dim", "encoder_depth", "dim", "depth", "mlp_ratio", "max_len"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.num_registers < 0:
            raise ValueError(f"num_registers must be at least 0, got {self.num_registers}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CaptionerConfig":
        """The inverse of `dataclasses.asdict` through JSON.

        Raises:
            ValueError: a setting is unknown, as in another software's file.
        """
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"not a vlattn config: unknown setting {', '.join(unknown)}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
