"""Cross-modal attention: modules, the functions behind them, masks and the cache."""

from vlattn.attention.cache import KeyValue, KVCache
from vlattn.attention.functional import additive_attention, scaled_dot_product_attention
from vlattn.attention.masks import causal_mask, length_mask
from vlattn.attention.modules import (
    ATTENTIONS,
    AdditiveAttention,
    CrossAttention,
    ScaledDotProductAttention,
)

__all__ = [
    "ATTENTIONS",
    "AdditiveAttention",
    "CrossAttention",
    "KVCache",
    "KeyValue",
    "ScaledDotProductAttention",
    "additive_attention",
    "causal_mask",
    "length_mask",
    "scaled_dot_product_attention",
]
