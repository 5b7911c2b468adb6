"""The text decoder: causal self-attention, cross-attention to the patches, MLP.

B pictures, C captions or beams of each, R = B * C rows, T tokens, N patches, D width, L layers,
H heads, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlattn.attention import ATTENTIONS, KeyValue, KVCache, ScaledDotProductAttention, causal_mask
from vlattn.layers import (
    ACTIVATIONS,
    NORMS,
    Dropout,
    Linear,
    make_activation,
    make_norm,
    product,
)


class DecoderOutput(NamedTuple):
    """Hidden states (R, T, D), and cross-attention weights (R, L, H, T, N) where asked for.

    L are the layers that were asked for.
    """

    hidden: Tensor
    weights: Tensor | None


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotary positions: turn each pair of features by an angle that grows with the place.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Args:
        x: queries or keys (R, H, T, D), D even.
        places: (R | 1, T) where each stands.
    """
    half = x.size(-1) // 2
    rates = 10_000 ** -(torch.arange(half, device=x.device) / half)
    angles = (places[..., None] * rates)[:, None]  # (R | 1, 1, T, D / 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention and MLP, each a residual branch with its norm.

    Args:
        dim: width.
        memory_dim: width of the memory that cross-attention reads.
        num_heads: heads of both attentions.
        num_kv_heads: key/value heads of both; see `CrossAttention`.
        attention: the cross-attention, a key of `ATTENTIONS`.
        mlp_ratio: width of the MLP over `dim`.
        activation: of the MLP, a key of `ACTIVATIONS`.
        norm: "layer" or "rms".
        norm_eps: added in the norms' square roots; their own where None.
        norm_first: pre-norm (Xiong et al., ICML 2020); False: post-norm, as in Vaswani et al.
        rotary: rotary positions in self-attention.
        dropout: on each residual branch.
        attention_dropout: on the weights of cross-attention.
    """

    def __init__(
        self,
        dim: int,
        memory_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None,
        attention: str,
        mlp_ratio: float,
        activation: str,
        norm: str,
        norm_eps: float | None,
        norm_first: bool,
        rotary: bool,
        dropout: float,
        attention_dropout: float,
    ):
        super().__init__()
        self.norm_first, self.rotary = norm_first, rotary
        self.self_attn = ScaledDotProductAttention(
            dim, num_heads=num_heads, num_kv_heads=num_kv_heads
        )
        self.cross_attn = ATTENTIONS[attention](
            dim,
            memory_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            dropout=attention_dropout,
        )
        hidden_dim = round(mlp_ratio * dim)
        self.mlp = nn.Sequential(
            Linear(dim, hidden_dim), make_activation(activation), Linear(hidden_dim, dim)
        )
        self.norm1, self.norm2, self.norm3 = (make_norm(norm, dim, norm_eps) for _ in range(3))
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        cache: KVCache,
        layer: int,
        places: Tensor,
        mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """x (R, T, D) -> the same, and of cross-attention weights (R, H, T, N) and output."""
        past = self._look_back(self._before(self.norm1, x), cache, layer, places, mask)
        x = self._after(self.norm1, x + self.dropout(past))
        seen, weights = self._look_at(
            self._before(self.norm2, x), cache.memory(layer), need_weights
        )
        x = self._after(self.norm2, x + self.dropout(seen))
        thought = self.mlp(self._before(self.norm3, x))
        return self._after(self.norm3, x + self.dropout(thought)), weights, seen

    def project_memory(self, memory: Tensor) -> KeyValue:
        """The memory (B, N, memory_dim) as cross-attention reads it."""
        return self.cross_attn.project_kv(memory)

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.norm_first else x

    def _after(self, norm: nn.Module, x: Tensor) -> Tensor:
        return x if self.norm_first else norm(x)

    def _look_back(
        self, x: Tensor, cache: KVCache, layer: int, places: Tensor, mask: Tensor | None
    ) -> Tensor:
        query, kv = self.self_attn.project_self(x)
        if self.rotary:
            query, kv = rotate(query, places), KeyValue(rotate(kv.key, places), kv.value)
        return self.self_attn.attend_heads(query, cache.append(layer, kv), mask)[0]

    def _look_at(
        self, x: Tensor, memory: KeyValue, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """All captions of a picture read its one memory: their queries stand in one row."""
        rows, num_tokens, dim = x.shape
        num_images = memory.key.size(0)
        num_captions = rows // max(num_images, 1)
        if rows != num_captions * num_images:
            raise ValueError(
                f"rows of tokens must be a multiple of the {num_images} pictures in the cache, "
                f"got {rows}"
            )
        query = x.reshape(num_images, num_captions * num_tokens, dim)  # (B, C * T, D)
        output, weights = self.cross_attn.attend(query, memory, need_weights=need_weights)
        if weights is not None:
            weights = weights.unflatten(2, (num_captions, num_tokens))  # (B, H, C, T, N)
            weights = weights.transpose(1, 2).flatten(0, 1)  # (R, H, T, N)
        return output.reshape(rows, num_tokens, dim), weights


class TextDecoder(nn.Module):
    """Transformer decoder (Vaswani et al., NeurIPS 2017) that reads patches by cross-attention.

    Args:
        vocab_size: tokens of the vocabulary.
        dim: width.
        memory_dim: width of the memory that it reads; `dim` where omitted.
        depth: number of blocks.
        max_len: longest text in tokens, the begin token included.
        positions: "learned" or "rotary".
        embed_norm: a norm after the embeddings.
        tie_embeddings: logits are products with the token embeddings (Press and Wolf, EACL 2017).
        head_layer: activation of a layer that stands, with a norm, before the logits (Devlin et
            al., "BERT", NAACL 2019); none where omitted.
        head_bias: logits have a bias.
        num_heads, num_kv_heads, attention, mlp_ratio, activation, norm, norm_eps, norm_first,
            dropout, attention_dropout: see `DecoderBlock`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        dim: int = 256,
        memory_dim: int | None = None,
        depth: int = 3,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        attention: str = "scaled_dot_product",
        mlp_ratio: float = 4.0,
        activation: str = "gelu_tanh",
        norm: str = "layer",
        norm_eps: float | None = None,
        norm_first: bool = True,
        positions: str = "learned",
        max_len: int = 64,
        embed_norm: bool = False,
        tie_embeddings: bool = True,
        head_layer: str | None = None,
        head_bias: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        _check_choice("attention", attention, ATTENTIONS)
        _check_choice("norm", norm, NORMS)
        _check_choice("activation", activation, ACTIVATIONS)
        _check_choice("positions", positions, ("learned", "rotary"))
        self.max_len = max_len
        self.embed = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        rotary = positions == "rotary"
        if rotary and dim // num_heads % 2:
            raise ValueError(
                "rotary positions need an even size of one head, "
                f"got dim={dim}, num_heads={num_heads}"
            )
        self.positions = None if rotary else nn.Parameter(0.02 * torch.randn(max_len, dim))
        self.embed_norm = make_norm(norm, dim, norm_eps) if embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            DecoderBlock(
                dim,
                dim if memory_dim is None else memory_dim,
                num_heads,
                num_kv_heads=num_kv_heads,
                attention=attention,
                mlp_ratio=mlp_ratio,
                activation=activation,
                norm=norm,
                norm_eps=norm_eps,
                norm_first=norm_first,
                rotary=rotary,
                dropout=dropout,
                attention_dropout=attention_dropout,
            )
            for _ in range(depth)
        )
        self.norm = make_norm(norm, dim, norm_eps) if norm_first else nn.Identity()
        self.head_layer = nn.Identity()
        if head_layer is not None:
            _check_choice("head_layer", head_layer, ACTIVATIONS)
            self.head_layer = nn.Sequential(
                Linear(dim, dim), make_activation(head_layer), make_norm(norm, dim, norm_eps)
            )
        self.head = None if tie_embeddings else Linear(dim, vocab_size, bias=False)
        self.head_bias = nn.Parameter(torch.zeros(vocab_size)) if head_bias else None
        self.dropout = Dropout(dropout)

    def start(self, memory: Tensor, *, cache_dtype: torch.dtype | None = None) -> KVCache:
        """A cache to write with: memory (B, N, memory_dim) is projected once per picture and layer.

        Args:
            cache_dtype: what the cache keeps its numbers in; see `KVCache`.
        """
        memories = [block.project_memory(memory) for block in self.blocks]
        return KVCache(memories, dtype=cache_dtype)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        places: Tensor | None = None,
        mask: Tensor | None = None,
        need_weights: bool | Sequence[int] = False,
    ) -> DecoderOutput:
        """Read the tokens that follow those in the cache.

        Args:
            tokens: (R, T); R a multiple of the pictures in the cache, a picture's rows together.
            cache: from `start`; holds the keys and values of these tokens too afterwards.
            places: (R, T) place of each token in its text; one after the other where omitted.
            mask: what self-attention may look at; all tokens up to its own where omitted.
            need_weights: also return the weights of cross-attention, of all layers or of those
                whose numbers are given.

        Raises:
            ValueError: a text would be longer than `max_len`, or there is no such layer.
        """
        return self.trace(tokens, cache, places, mask, self._layers(need_weights))[0]

    def trace(
        self,
        tokens: Tensor,
        cache: KVCache,
        places: Tensor | None = None,
        mask: Tensor | None = None,
        wanted: Sequence[int] = (),
    ) -> tuple[DecoderOutput, list[Tensor]]:
        """`forward`, and what cross-attention gave in each layer, (R, T, D)."""
        num_tokens = tokens.size(1)
        if places is None:
            start = len(cache)
            if start + num_tokens > self.max_len:
                raise ValueError(
                    f"tokens must not go past max_len={self.max_len}, got {start + num_tokens}"
                )
            places = torch.arange(start, start + num_tokens, device=tokens.device)[None]
        if mask is None and num_tokens > 1:
            mask = causal_mask(num_tokens, len(cache) + num_tokens, device=tokens.device)
        x = self.embed(tokens)  # (R, T, D)
        if self.positions is not None:
            x = x + self.positions[places]
        x = self.dropout(self.embed_norm(x))
        looked, seen = {}, []
        for layer, block in enumerate(self.blocks):
            x, looked[layer], output = block(x, cache, layer, places, mask, layer in wanted)
            seen.append(output)
        weights = torch.stack([looked[layer] for layer in wanted], dim=1) if wanted else None
        return DecoderOutput(self.norm(x), weights), seen

    def _layers(self, need_weights: bool | Sequence[int]) -> list[int]:
        if isinstance(need_weights, bool):
            return list(range(len(self.blocks))) if need_weights else []
        if any(not 0 <= layer < len(self.blocks) for layer in need_weights):
            raise ValueError(
                f"need_weights must name layers from 0 to {len(self.blocks) - 1}, "
                f"got {list(need_weights)}"
            )
        return list(need_weights)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) hidden states to (..., V)."""
        weight = (self.embed if self.head is None else self.head).weight
        logits = product(self.head_layer(hidden), weight)
        return logits if self.head_bias is None else logits + self.head_bias


def _check_choice(name: str, value: str, choices) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
