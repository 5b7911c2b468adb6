"""GPT-2 as a decoder with cross-attention (Radford et al., 2019)."""

from typing import Any

from torch import Tensor

from vlattn.convert.bert import untied_head
from vlattn.convert.checkpoint import Weights, activation

NORMS = {"ln_1": "norm1", "ln_cross_attn": "norm2", "ln_2": "norm3"}
LAYERS = {
    "attn.c_proj": "self_attn.out_proj",
    "crossattention.q_attn": "cross_attn.q_proj",
    "crossattention.c_proj": "cross_attn.out_proj",
    "mlp.c_fc": "mlp.0",
    "mlp.c_proj": "mlp.2",
}
# Layers whose outputs are those of several of ours, one after the other.
JOINED = {
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "crossattention.c_attn": ("cross_attn.k_proj", "cross_attn.v_proj"),
}


def read(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings of `CaptionerConfig` and our weights, of tensors named "decoder. ..."."""
    body = "decoder.transformer"
    depth = weights.count(f"{body}.h.{{}}.")
    state = weights.layers({f"{body}.ln_f": "decoder.norm"})
    for i in range(depth):
        theirs, ours = f"{body}.h.{i}", f"decoder.blocks.{i}"
        state |= weights.layers({f"{theirs}.{a}": f"{ours}.{b}" for a, b in NORMS.items()})
        pairs = {f"{theirs}.{a}": f"{ours}.{b}" for a, b in LAYERS.items()}
        state |= weights.layers(pairs, transposed=True)
        for name, parts in JOINED.items():
            joined = weights.layer(f"{theirs}.{name}", "joined", transposed=True)
            for kind in ("weight", "bias"):
                chunks = joined[f"joined.{kind}"].chunk(len(parts))
                state |= {f"{ours}.{part}.{kind}": x for part, x in zip(parts, chunks)}
        _scale_scores(config, state, ours, i)
    embed = weights.take(f"{body}.wte.weight")
    positions = weights.take(f"{body}.wpe.weight")
    state |= {"decoder.embed.weight": embed, "decoder.positions": positions}
    state |= untied_head(weights, "decoder.lm_head.weight", embed)
    return {
        "dim": embed.size(1),
        "depth": depth,
        "num_heads": config["n_head"],
        "mlp_ratio": len(state["decoder.blocks.0.mlp.0.weight"]) / embed.size(1),
        "norm_first": True,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": activation(config.get("activation_function", "gelu_new")),
        "max_len": len(positions),
        "tie_embeddings": "decoder.head.weight" not in state,
        "dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
    }, state


def _scale_scores(config: dict[str, Any], state: dict[str, Tensor], block: str, layer: int) -> None:
    """Put into the queries what the scores of a block are scaled by, other than 1 / sqrt(D)."""
    scale = 1.0
    if not config.get("scale_attn_weights", True):
        scale = (len(state[f"{block}.self_attn.q_proj.weight"]) / config["n_head"]) ** 0.5
    if config.get("scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    for attention in ("self_attn", "cross_attn"):
        for kind in ("weight", "bias"):
            state[f"{block}.{attention}.q_proj.{kind}"] *= scale
