"""ViT and DeiT encoders (Dosovitskiy et al., ICLR 2021; Touvron et al., ICML 2021), and BLIP's.

Their class token, and DeiT's distillation token, are registers here, with their positions added.
"""

from typing import Any

import torch
from torch import Tensor

from vlattn.convert.checkpoint import Weights, activation

BLOCK = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.attention.query": "self_attn.q_proj",
    "attention.attention.key": "self_attn.k_proj",
    "attention.attention.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "intermediate.dense": "mlp.0",
    "output.dense": "mlp.2",
}


def read(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings of `CaptionerConfig` and our weights, of tensors named "encoder. ..."."""
    tokens = [weights.take("encoder.embeddings.cls_token")]
    if config["model_type"] == "deit":
        tokens.append(weights.take("encoder.embeddings.distillation_token"))
    depth = weights.count("encoder.encoder.layer.{}.")
    state = weights.layers(
        {
            "encoder.embeddings.patch_embeddings.projection": "encoder.patch_embed.proj",
            "encoder.layernorm": "encoder.norm",
        }
        | {
            f"encoder.encoder.layer.{i}.{theirs}": f"encoder.blocks.{i}.{ours}"
            for i in range(depth)
            for theirs, ours in BLOCK.items()
        }
    )
    positions = weights.take("encoder.embeddings.position_embeddings")
    state |= embeddings(torch.cat(tokens, dim=1), positions)
    return settings(config, state, norm_eps=1e-12), state


def embeddings(tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Class tokens (1, P, D), and positions (1, P + N, D) of them and the patches."""
    count = tokens.size(1)
    return {
        "encoder.registers": tokens[0] + positions[0, :count],
        "encoder.positions.table": positions[0, count:],
    }


def settings(
    config: dict[str, Any], state: dict[str, Tensor], *, norm_eps: float
) -> dict[str, Any]:
    """Of the encoder; sizes are those of the weights.

    Args:
        norm_eps: of a config that does not say.
    """
    size = config["image_size"]
    dim, _, *patch = state["encoder.patch_embed.proj.weight"].shape
    if patch[0] != patch[1]:
        raise ValueError(f"patches must be square, got {patch}")
    return {
        "encoder": "vit",
        "image_size": (size, size) if isinstance(size, int) else tuple(size),
        "patch_size": patch[0],
        "encoder_dim": dim,
        "encoder_depth": len({name.split(".")[2] for name in state if ".blocks." in name}),
        "encoder_heads": config["num_attention_heads"],
        "encoder_mlp_ratio": len(state["encoder.blocks.0.mlp.0.weight"]) / dim,
        "encoder_activation": activation(config.get("hidden_act", "gelu")),
        "encoder_norm_eps": config.get("layer_norm_eps", norm_eps),
        "encoder_positions": "learned",
        "num_registers": len(state["encoder.registers"]),
        "keep_registers": True,
        "stem": False,
    }
