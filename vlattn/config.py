"""The settings of a captioner, and of its training."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vlattn.images import VIEWS


def option(default: Any, help: str) -> Any:
    """A field of a config with the help of its command-line flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class CaptionerConfig:
    """The sizes and kinds of a captioner; saved as `config.json`.

    More on each is in `ViT` (the settings up to `stem`), `TextDecoder` (those after `memory`) and
    `maps_to_show` (overlays).
    """

    encoder: str = option("vit", "'vit', our own, or 'timm:<name>', any model of timm")
    encoder_classes: bool = option(
        False,
        "words also see what the classifier of a convolutional timm encoder takes the picture and "
        "each patch for",
    )
    image_size: tuple[int, int] | None = option(None, "of the input; the encoder's own if not set")
    resize: Literal["squeeze", "crop", "pad"] = option("squeeze", "how pictures get that size")
    patch_size: int = option(16, "side of a patch of the vit, in pixels")
    encoder_dim: int = option(128, "width of the vit")
    encoder_depth: int = option(2, "blocks of the vit")
    encoder_heads: int = option(4, "attention heads of the vit")
    encoder_mlp_ratio: float = option(4.0, "width of the vit's MLPs over its own")
    encoder_activation: Literal["gelu", "gelu_tanh", "relu"] = option("gelu", "of the vit's MLPs")
    encoder_norm_eps: float | None = option(None, "of the vit's norms; LayerNorm's own if not set")
    encoder_positions: Literal["learned", "sine"] = option("sine", "positions of the vit")
    num_registers: int = option(0, "register tokens of the vit")
    keep_registers: bool = option(False, "words attend to the register tokens of the vit too")
    stem: bool = option(True, "patches of the vit by several small convolutions")
    memory: Literal["normed", "linear", "plain"] = option(
        "normed",
        "what words attend to: the encoder's features in the decoder's width, between two norms "
        "and with places; just in the decoder's width; or as they are",
    )
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
    norm_eps: float | None = option(None, "of the norms; their own if not set")
    activation: Literal["gelu", "gelu_tanh", "relu"] = option("gelu_tanh", "of the decoder's MLPs")
    embed_norm: bool = option(False, "a norm after the embeddings")
    positions: Literal["learned", "rotary"] = option("learned", "positions of the words")
    max_len: int = option(64, "longest caption in tokens, begin included")
    tie_embeddings: bool = option(True, "logits by the token embeddings")
    head_layer: Literal["gelu", "gelu_tanh", "relu"] | None = option(
        None, "a layer with this activation before the logits, as BERT has"
    )
    head_bias: bool = option(False, "logits with a bias")
    dropout: float = option(0.1, "on the decoder's residual branches and the memory")
    attention_dropout: float = option(0.0, "on the weights of cross-attention")
    # Training sets these three by how well the words of the dev split point, where it has boxes.
    overlay_layer: int | None = option(None, "layer that overlays show; the mean if not set")
    overlay_head: int | None = option(None, "head that overlays show; the mean if not set")
    overlay_view: Literal["where", "more_than_usual", "matters"] = option(
        "where",
        "overlays show the attention, what of it is more than in the caption on average, or what "
        "of it matters to the words",
    )

    def __post_init__(self):
        positive = ("encoder_dim", "encoder_depth", "encoder_mlp_ratio")
        for name in (*positive, "dim", "depth", "mlp_ratio", "max_len"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.encoder_classes and not self.encoder.startswith("timm:"):
            raise ValueError(
                f"encoder_classes are those of a timm encoder, got encoder {self.encoder!r}"
            )
        if self.num_registers < 0:
            raise ValueError(f"num_registers must be at least 0, got {self.num_registers}")
        for name, count in (("overlay_layer", self.depth), ("overlay_head", self.num_heads)):
            value = getattr(self, name)
            if value is not None and not 0 <= value < count:
                raise ValueError(f"{name} must be from 0 to {count - 1}, got {value}")

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


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and how; each setting is a flag of `vlattn train` too.

    A run folder `out` holds the best model by its dev score, `train.json` with these settings,
    `checkpoints/` to continue from, `tensorboard/`, and at the end `curves.png` and `captions.png`.
    """

    data: str = option("", "data set: a folder, a table, or 'scenes'")
    out: str = option("", "run folder, which becomes the model folder")
    layout: str = option("auto", "layout of the data set; found by looking")
    image_column: str | None = option(None, "column of a table that names the picture")
    caption_column: str | None = option(None, "column of a table that holds the caption")
    init: str | None = option(
        None, "model folder or hub id to go on from, with its sizes and vocabulary"
    )
    captioner: CaptionerConfig = field(default_factory=CaptionerConfig)
    encoder_weights: str | None = option(None, "safetensors file of a timm encoder's weights")
    pretrained: bool = option(False, "load timm's weights of the encoder from the hub")
    finetune_encoder: int = option(
        0, "last stages of a timm encoder that learn too, or blocks of a transformer"
    )
    tokenizer: Literal["bpe", "unigram", "word"] = option("bpe", "kind of the vocabulary")
    vocab_size: int = option(4000, "most tokens of the vocabulary")
    min_frequency: int = option(2, "how often a word or pair must occur to get a token")
    lowercase: bool = option(True, "put captions in lower case")
    epochs: int = option(10, "passes over the training pictures, teacher-forced")
    max_steps: int | None = option(None, "stop after so many optimiser steps instead")
    batch_size: int = option(32, "pictures of a batch")
    accumulation: int = option(1, "batches of an optimiser step")
    captions_per_image: int = option(
        5, "most captions of a picture per epoch; one with more takes turns"
    )
    views: int = option(
        1, "views of a training picture in turn: 2 its mirror image too, 3 to 6 crops of it too"
    )
    cache_features: str | None = option(
        None,
        "folder to keep a frozen encoder's features in, for later runs too; if not set, they are "
        "in the run folder, until training ends",
    )
    sort_window: int = option(
        16, "batches whose pictures are sorted by length together, to save padding; 1: unsorted"
    )
    learning_rate: float = option(1e-3, "highest rate, reached after the warm-up")
    encoder_rate: float = option(
        0.1, "rate of an encoder that learnt before (of timm, or of init), over learning_rate"
    )
    warmup_steps: int = option(300, "steps over which the rate grows from zero")
    weight_decay: float = option(0.05, "of AdamW")
    clip_norm: float = option(1.0, "longest gradient")
    label_smoothing: float = option(0.1, "share of the target spread over all tokens")
    average_decay: float = option(0.998, "decay of the moving average of the weights")
    attention_supervision: float = option(
        0.0,
        "weight of the loss that draws the words' attention into their phrases' boxes, those of "
        "'scenes' or of an entities.jsonl beside the data",
    )
    scst_steps: int = option(0, "steps of self-critical training (CIDEr-D) after the epochs")
    scst_rate: float = option(5e-5, "learning rate of self-critical training")
    scst_samples: int = option(5, "captions drawn per picture in self-critical training")
    eval_every: int = option(1, "epochs between evaluations on the dev split")
    checkpoint_every: int = option(200, "steps between checkpoints")
    num_workers: int = option(0, "processes that decode pictures ahead")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto", "of the matrix products; auto: the fastest that the machine has"
    )
    seed: int = option(0, "of all random numbers")
    resume: Literal["auto"] | None = option(None, "'auto' continues what is in the run folder")

    def __post_init__(self):
        for name in ("data", "out"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be given")
        least = {
            **dict.fromkeys(("max_steps", "batch_size", "accumulation"), 1),
            **dict.fromkeys(("captions_per_image", "eval_every", "checkpoint_every"), 1),
            "sort_window": 1,
            **dict.fromkeys(
                ("epochs", "finetune_encoder", "warmup_steps", "scst_steps", "num_workers"), 0
            ),
            "scst_samples": 2,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        if not (self.epochs or self.max_steps or self.scst_steps):
            raise ValueError("there is nothing to do: epochs and scst_steps are 0")
        if not 1 <= self.views <= VIEWS:
            raise ValueError(f"views must be 1 to {VIEWS}, got {self.views}")
        for name in ("learning_rate", "encoder_rate", "scst_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("label_smoothing", "average_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )
        if self.init is not None and self.captioner != CaptionerConfig():
            raise ValueError("init has sizes and kinds of its own: give no others")
        if self.encoder_weights is not None and not self.captioner.encoder.startswith("timm:"):
            raise ValueError(
                "encoder_weights are for an encoder of timm, "
                f"got encoder {self.captioner.encoder!r}"
            )
        if self.attention_supervision and self.captioner.resize != "squeeze":
            raise ValueError(
                "attention_supervision needs pictures that are seen whole: resize 'squeeze', "
                f"got {self.captioner.resize!r}"
            )
