"""BERT and RoBERTa as decoders with cross-attention (Devlin et al., NAACL 2019; Liu et al., 2019).

BLIP's text decoder is one of them too. All tokens are of type 0, which is part of the positions
here.
"""

from typing import Any

from torch import Tensor

from vlattn.convert.checkpoint import Weights, activation

BLOCK = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "crossattention.self.query": "cross_attn.q_proj",
    "crossattention.self.key": "cross_attn.k_proj",
    "crossattention.self.value": "cross_attn.v_proj",
    "crossattention.output.dense": "cross_attn.out_proj",
    "crossattention.output.LayerNorm": "norm2",
    "intermediate.dense": "mlp.0",
    "output.dense": "mlp.2",
    "output.LayerNorm": "norm3",
}


def read(
    config: dict[str, Any], weights: Weights, prefix: str = "decoder"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings of `CaptionerConfig` and our weights.

    Args:
        prefix: what the names of its tensors begin with.
    """
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"positions {config['position_embedding_type']!r} are not supported")
    is_roberta = config["model_type"] == "roberta"
    if is_roberta:
        body, head, dense, norm = "roberta", "lm_head", "dense", "layer_norm"
    else:
        body, head = "bert", "cls.predictions"
        dense, norm = "transform.dense", "transform.LayerNorm"
    body, head = f"{prefix}.{body}", f"{prefix}.{head}"
    depth = weights.count(f"{body}.encoder.layer.{{}}.")
    state = weights.layers(
        {
            f"{body}.embeddings.LayerNorm": "decoder.embed_norm",
            f"{head}.{dense}": "decoder.head_layer.0",
            f"{head}.{norm}": "decoder.head_layer.2",
        }
        | {
            f"{body}.encoder.layer.{i}.{theirs}": f"decoder.blocks.{i}.{ours}"
            for i in range(depth)
            for theirs, ours in BLOCK.items()
        }
    )
    positions = weights.take(f"{body}.embeddings.position_embeddings.weight")
    if is_roberta:  # the places before are those of padding
        positions = positions[config.get("pad_token_id", 1) + 1 :]
    if f"{body}.embeddings.token_type_embeddings.weight" in weights:
        positions = positions + weights.take(f"{body}.embeddings.token_type_embeddings.weight")[0]
    embed = weights.take(f"{body}.embeddings.word_embeddings.weight")
    state |= {"decoder.positions": positions, "decoder.embed.weight": embed}
    state["decoder.head_bias"] = weights.take(f"{head}.bias")
    if f"{head}.decoder.bias" in weights:  # the one that is used, if they are two
        state["decoder.head_bias"] = weights.take(f"{head}.decoder.bias")
    state |= untied_head(weights, f"{head}.decoder.weight", embed)
    act = activation(config.get("hidden_act", "gelu"))
    return {
        "dim": embed.size(1),
        "depth": depth,
        "num_heads": config["num_attention_heads"],
        "mlp_ratio": len(state["decoder.blocks.0.mlp.0.weight"]) / embed.size(1),
        "norm_first": False,
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "activation": act,
        "max_len": len(positions),
        "embed_norm": True,
        "tie_embeddings": "decoder.head.weight" not in state,
        "head_layer": "gelu" if is_roberta else act,
        "head_bias": True,
        "dropout": config.get("hidden_dropout_prob", 0.1),
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.1),
    }, state


def untied_head(weights: Weights, name: str, embed: Tensor) -> dict[str, Tensor]:
    """The weights of the logits; none where they are not in the file, or are the embeddings."""
    head = weights.take(name) if name in weights else embed
    return {} if head.equal(embed) else {"decoder.head.weight": head}
