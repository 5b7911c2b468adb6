"""BLIP captioners: a ViT and a BERT-like decoder (Li et al., ICML 2022)."""

from torch import Tensor

from vlattn.config import CaptionerConfig
from vlattn.convert import bert, vit
from vlattn.convert.checkpoint import Checkpoint, Weights
from vlattn.tokenizer import Tokenizer

BLOCK = {
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.projection": "self_attn.out_proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}


def read(checkpoint: Checkpoint) -> tuple[CaptionerConfig, dict[str, Tensor], Tokenizer]:
    """Config, weights and tokenizer of our captioner."""
    weights = checkpoint.weights
    vision, text = (checkpoint.config[name] for name in ("vision_config", "text_config"))
    encoder = _encoder(weights)
    settings, decoder = bert.read(
        {"num_attention_heads": 8, "hidden_dropout_prob": 0.0, "model_type": "bert"}
        | {"attention_probs_dropout_prob": 0.0}
        | text,
        weights,
        prefix="text_decoder",
    )
    defaults = {"image_size": 384, "num_attention_heads": 12}
    settings |= vit.settings(defaults | vision, encoder, norm_eps=1e-5)
    tokenizer = checkpoint.tokenizer(
        vocab_size=len(decoder["decoder.embed.weight"]),
        pad_id=text.get("pad_token_id", 0),
        bos_id=text.get("bos_token_id", 30522),
        eos_id=text.get("sep_token_id", 102),
    )
    return CaptionerConfig(memory="plain", **settings), encoder | decoder, tokenizer


def _encoder(weights: Weights) -> dict[str, Tensor]:
    layers = "vision_model.encoder.layers"
    pairs = {
        "vision_model.embeddings.patch_embedding": "encoder.patch_embed.proj",
        "vision_model.post_layernorm": "encoder.norm",
    }
    depth = weights.count(f"{layers}.{{}}.")
    state = {}
    for i in range(depth):
        pairs |= {f"{layers}.{i}.{a}": f"encoder.blocks.{i}.{b}" for a, b in BLOCK.items()}
        joined = weights.layer(f"{layers}.{i}.self_attn.qkv", "joined")
        for kind in ("weight", "bias"):
            chunks = joined[f"joined.{kind}"].chunk(3)
            state |= {
                f"encoder.blocks.{i}.self_attn.{name}.{kind}": x
                for name, x in zip(("q_proj", "k_proj", "v_proj"), chunks)
            }
    state |= weights.layers(pairs)
    return state | vit.embeddings(
        weights.take("vision_model.embeddings.class_embedding"),
        weights.take("vision_model.embeddings.position_embedding"),
    )
