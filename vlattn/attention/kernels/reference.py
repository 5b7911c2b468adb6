"""The additive score written out: the truth that the other backends are compared with."""

import torch
from torch import Tensor

from vlattn.attention.kernels.operator import score_dtype


def additive_scores(query: Tensor, key: Tensor, score_weight: Tensor) -> Tensor:
    """`score_weight . tanh(query + key)` for every pair; stores B*H*T*N*D numbers.

    Args:
        query: (B, H, T, D).
        key: (B, H, N, D).
        score_weight: (H, D).

    Returns:
        (B, H, T, N).
    """
    dtype = score_dtype(query.dtype)
    query, key, score_weight = query.to(dtype), key.to(dtype), score_weight.to(dtype)
    hidden = (query[:, :, :, None] + key[:, :, None]).tanh()  # (B, H, T, N, D)
    with torch.autocast(query.device.type, enabled=False):
        if len(score_weight) == 1:  # one product is faster than a batch of them
            return hidden @ score_weight[0]
        return (hidden @ score_weight[None, :, None, :, None]).squeeze(-1)
