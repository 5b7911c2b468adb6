"""Attention masks: boolean, True = may attend. This file holds the one check of masks.

B batch, H heads, T queries, N keys.
"""

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int | None = None, *, device=None) -> Tensor:
    """Each query may attend to the keys up to its own place; the last query to all of them.

    Aligned bottom-right, so that cached decoding (few queries, many keys) is right too:

        causal_mask(3, 3)    causal_mask(2, 4)
        1 0 0                1 1 1 0
        1 1 0                1 1 1 1
        1 1 1

    Returns:
        (num_queries, num_keys) boolean mask.
    """
    num_keys = num_queries if num_keys is None else num_keys
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril(num_keys - num_queries)


def length_mask(lengths: Tensor, max_len: int | None = None) -> Tensor:
    """True for the first `lengths[b]` places of row b, as in right-padded batches.

    Args:
        lengths: (B,) number of real places.
        max_len: length of the rows; the longest where omitted.

    Returns:
        (B, max_len) boolean mask; use `mask[:, None]` as the mask of an attention's keys.
    """
    max_len = int(lengths.max()) if max_len is None else max_len
    return torch.arange(max_len, device=lengths.device) < lengths[:, None]


def expand_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Check a mask against the (B, H, T, N) of an attention, and give it four axes.

    Raises:
        TypeError: the mask is not boolean.
        ValueError: its shape is none of (T, N), (B, 1, N), (B, T, N), (B, H, T, N).
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be boolean (True = may attend), got {mask.dtype}; a numeric mask would be "
            "added to the scores"
        )
    batch, heads, queries, keys = shape
    got = tuple(mask.shape)
    if got == (queries, keys):
        return mask[None, None]
    if got in ((batch, 1, keys), (batch, queries, keys)):
        return mask[:, None]
    if got == shape:
        return mask
    hint = "; for a mask over keys, pass mask[:, None]" if got == (batch, keys) else ""
    raise ValueError(
        f"mask must have shape (T, N) = {(queries, keys)}, (B, 1, N) = {(batch, 1, keys)}, "
        f"(B, T, N) = {(batch, queries, keys)} or (B, H, T, N) = {(batch, heads, queries, keys)}, "
        f"got {got}{hint}"
    )


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check projected heads: query (B, H, T, D), key (B, H_kv, N, D), value (B, H_kv, N, D_v)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (B, H, T, D), got {tuple(tensor.shape)}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "key and value must agree in batch, heads and length, "
            f"got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query.size(0) != key.size(0) or query.size(-1) != key.size(-1):
        raise ValueError(
            "query and key must agree in batch and head size, "
            f"got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.size(1) % max(key.size(1), 1):
        raise ValueError(
            "the number of query heads must be divisible by the number of key heads, "
            f"got {query.size(1)} and {key.size(1)}"
        )
