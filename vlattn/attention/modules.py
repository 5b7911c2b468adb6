"""Cross-modal attention modules: projections around the functions of `functional.py`.

B batch, T queries, N keys, H query heads, H_kv key/value heads, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlattn.attention.cache import KeyValue
from vlattn.attention.functional import (
    additive_attention,
    known_finite,
    scaled_dot_product_attention,
)
from vlattn.layers import Linear


class CrossAttention(nn.Module, ABC):
    """Queries of one modality attend to keys and values of another; abstract.

    Args:
        query_dim: size of the queries.
        key_dim: size of the keys; `query_dim` where omitted.
        value_dim: size of the values; `key_dim` where omitted.
        hidden_dim: size in which queries and keys are compared, all heads together; `query_dim`
            where omitted.
        out_dim: size of the output; `query_dim` where omitted.
        num_heads: attention heads; must divide `hidden_dim`.
        num_kv_heads: heads of keys and values; must divide `num_heads`, whose neighbours share
            them (grouped-query attention, Ainslie et al., EMNLP 2023); 1 is multi-query; as many
            as `num_heads` where omitted.
        project_value: False: the values are summed as they are, split over the heads.
        project_out: False: the heads' outputs are joined as they are.
        bias: whether the projections have one.
        dropout: share of the weights dropped in training.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None,
        value_dim: int | None,
        *,
        hidden_dim: int | None,
        out_dim: int | None,
        num_heads: int,
        num_kv_heads: int | None,
        project_value: bool,
        project_out: bool,
        bias: bool,
        key_bias: bool,
        dropout: float,
    ):
        super().__init__()
        key_dim = query_dim if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        hidden_dim = query_dim if hidden_dim is None else hidden_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_positive(
            query_dim=query_dim,
            key_dim=key_dim,
            value_dim=value_dim,
            hidden_dim=hidden_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
        _check_divisible("hidden_dim", hidden_dim, "num_heads", num_heads)
        _check_divisible("num_heads", num_heads, "num_kv_heads", num_kv_heads)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.head_dim = hidden_dim // num_heads
        self.num_heads, self.num_kv_heads, self.dropout = num_heads, num_kv_heads, dropout
        self.query_dim, self.key_dim, self.value_dim = query_dim, key_dim, value_dim
        kv_dim = num_kv_heads * self.head_dim
        self.q_proj = Linear(query_dim, hidden_dim, bias=bias)
        self.k_proj = Linear(key_dim, kv_dim, bias=key_bias)
        if project_value:
            self.v_proj = Linear(value_dim, kv_dim, bias=bias)
            joined_dim = hidden_dim
        else:
            _check_divisible("value_dim", value_dim, "num_kv_heads", num_kv_heads)
            self.v_proj = nn.Identity()
            joined_dim = value_dim // num_kv_heads * num_heads
        if project_out:
            self.out_proj = Linear(joined_dim, query_dim if out_dim is None else out_dim, bias)
        else:
            if out_dim not in (None, joined_dim):
                raise ValueError(
                    "out_dim without an output projection is the size of the joined heads, "
                    f"{joined_dim}, got {out_dim}"
                )
            self.out_proj = nn.Identity()
        for module in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if isinstance(module, nn.Linear):  # scores of unit size, so that attention can start
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        need_weights: bool | Sequence[int] = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with `query` to `key`, and sum `value`.

        Args:
            query: (B, T, query_dim), or (B, query_dim) for one state, which has no T axis in the
                results either.
            key: (B, N, key_dim).
            value: (B, N, value_dim); `key` where omitted.
            mask: boolean, True = may attend: (T, N), (B, 1, N), (B, T, N) or (B, H, T, N).
            need_weights: also return the weights, of all heads or of those whose numbers are
                given; the output is the same.

        Returns:
            output (B, T, out_dim), and weights (B, H, T, N): after the softmax, before dropout, per
            head; None unless asked for. A row with nothing to attend has zero weights.
        """
        return self.attend(query, self.project_kv(key, value), mask, need_weights=need_weights)

    def project_kv(self, key: Tensor, value: Tensor | None = None) -> KeyValue:
        """Project keys (B, N, key_dim) and values (B, N, value_dim) once, for many `attend`."""
        value = key if value is None else value
        _check_input("key", key, 3, self.key_dim)
        _check_input("value", value, 3, self.value_dim)
        if key.shape[:2] != value.shape[:2]:
            raise ValueError(
                "key and value must agree in batch and length, "
                f"got {tuple(key.shape)} and {tuple(value.shape)}"
            )
        return KeyValue(
            _split_heads(_project(self.k_proj, key), self.num_kv_heads),
            _split_heads(_project(self.v_proj, value), self.num_kv_heads),
        )

    def attend(
        self,
        query: Tensor,
        kv: KeyValue,
        mask: Tensor | None = None,
        *,
        need_weights: bool | Sequence[int] = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` for keys and values that `project_kv` projected."""
        if query.dim() == 2:
            output, weights = self.attend(query[:, None], kv, mask, need_weights=need_weights)
            return output.squeeze(1), None if weights is None else weights.squeeze(2)
        _check_input("query", query, 3, self.query_dim)
        query = self.q_proj(query) if mask is None else _project(self.q_proj, query)
        heads = _split_heads(query, self.num_heads)
        return self.attend_heads(heads, kv, mask, need_weights=need_weights)

    def project_self(self, x: Tensor) -> tuple[Tensor, KeyValue]:
        """Queries (B, H, T, D), keys and values of self-attention, from x (B, T, query_dim)."""
        query = _split_heads(self.q_proj(x), self.num_heads)
        key, value = (_split_heads(p(x), self.num_kv_heads) for p in (self.k_proj, self.v_proj))
        return query, KeyValue(key, value)

    def attend_heads(
        self,
        query: Tensor,
        kv: KeyValue,
        mask: Tensor | None = None,
        *,
        need_weights: bool | Sequence[int] = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`attend` for queries (B, H, T, D) that are projected too."""
        dropout_p = self.dropout if self.training else 0.0
        every = slice(None)
        if isinstance(need_weights, bool):
            output, weights = self._attention(query, kv, mask, dropout_p, need_weights, every)
        else:
            output, _ = self._attention(query, kv, mask, dropout_p, False, every)
            weights = self._weights(query, kv, mask, list(need_weights))
        output = output.transpose(1, 2).flatten(2)  # (B, T, H * D_v)
        output = self.out_proj(output) if mask is None else _project(self.out_proj, output)
        return output, weights

    def _weights(
        self, query: Tensor, kv: KeyValue, mask: Tensor | None, heads: list[int]
    ) -> Tensor | None:
        """The weights of some heads alone, (B, len(heads), T, N)."""
        if any(not 0 <= head < self.num_heads for head in heads):
            raise ValueError(
                f"need_weights must name heads from 0 to {self.num_heads - 1}, got {heads}"
            )
        groups = self.num_heads // self.num_kv_heads
        key = kv.key[:, [head // groups for head in heads]]
        no_value = key[..., :0]
        if mask is not None and mask.dim() == 4:
            mask = mask[:, heads]
        return self._attention(query[:, heads], KeyValue(key, no_value), mask, 0.0, True, heads)[1]

    def weight_gradient(self, gradient: Tensor, kv: KeyValue) -> Tensor:
        """What a gradient with respect to the output is with respect to the weights.

        Args:
            gradient: (R, T, out_dim); R a multiple of the B rows of `kv`, a row's own together.
            kv: what was attended to.

        Returns:
            (R, H, T, N).
        """
        if isinstance(self.out_proj, nn.Linear):
            gradient = gradient @ self.out_proj.weight.to(gradient.dtype)
        heads = _split_heads(gradient, self.num_heads)  # (R, H, T, D_v)
        value = kv.value.repeat_interleave(self.num_heads // kv.value.size(1), dim=1)
        value = value.repeat_interleave(len(heads) // len(value), dim=0)
        return heads @ value.transpose(2, 3).to(heads.dtype)

    @abstractmethod
    def _attention(
        self,
        query: Tensor,
        kv: KeyValue,
        mask: Tensor | None,
        dropout_p: float,
        need_weights: bool,
        heads: list[int] | slice,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention over heads, a function of `functional.py`; `heads` says which they are."""


class AdditiveAttention(CrossAttention):
    """Additive attention: the score of a pair is `v . tanh(W_q q + W_k k + b)`.

    Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", ICLR 2015. With `project_value=False, project_out=False, num_heads=1` the output is
    the plain weighted sum of the values. Arguments are those of `CrossAttention`. `backend` is how
    it is computed, see `additive_attention`; it may be set on a class or on one module.
    """

    backend = "auto"

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        *,
        hidden_dim: int | None = None,
        out_dim: int | None = None,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        project_value: bool = True,
        project_out: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__(
            query_dim,
            key_dim,
            value_dim,
            hidden_dim=hidden_dim,
            out_dim=out_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            project_value=project_value,
            project_out=project_out,
            bias=bias,
            key_bias=False,  # the queries' bias is the b of the score
            dropout=dropout,
        )
        self.score_weight = nn.Parameter(torch.empty(num_heads, self.head_dim))  # v, per head
        nn.init.uniform_(self.score_weight, -(self.head_dim**-0.5), self.head_dim**-0.5)

    def _attention(self, query, kv, mask, dropout_p, need_weights, heads):
        return additive_attention(
            query,
            kv.key,
            kv.value,
            self.score_weight[heads].to(query.dtype),
            mask,
            dropout_p=dropout_p,
            need_weights=need_weights,
            backend=self.backend,
        )


class ScaledDotProductAttention(CrossAttention):
    """Scaled dot-product attention: the score of a pair is `q . k / sqrt(D)`.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017. Arguments are those of
    `CrossAttention`.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        *,
        hidden_dim: int | None = None,
        out_dim: int | None = None,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        project_value: bool = True,
        project_out: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__(
            query_dim,
            key_dim,
            value_dim,
            hidden_dim=hidden_dim,
            out_dim=out_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            project_value=project_value,
            project_out=project_out,
            bias=bias,
            key_bias=bias,
            dropout=dropout,
        )

    def _attention(self, query, kv, mask, dropout_p, need_weights, heads):
        return scaled_dot_product_attention(
            query, kv.key, kv.value, mask, dropout_p=dropout_p, need_weights=need_weights
        )

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "ScaledDotProductAttention":
        """The same attention with the weights of PyTorch's, `kdim` and `vdim` included.

        Queries, keys and values are batch first here whatever they are there.

        Raises:
            ValueError: the module adds keys of its own (`add_bias_kv`, `add_zero_attn`).
        """
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("module must have add_bias_kv=False and add_zero_attn=False")
        attn = cls(
            module.embed_dim,
            module.kdim,
            module.vdim,
            num_heads=module.num_heads,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
        ).to(module.out_proj.weight)
        names = ("q_proj", "k_proj", "v_proj")
        if module.in_proj_weight is None:
            weights = [getattr(module, f"{name}_weight") for name in names]
        else:
            weights = module.in_proj_weight.chunk(3)
        state = {f"{name}.weight": weight for name, weight in zip(names, weights)}
        if module.in_proj_bias is not None:
            biases = module.in_proj_bias.chunk(3)
            state |= {f"{name}.bias": bias for name, bias in zip(names, biases)}
        state |= {f"out_proj.{name}": x for name, x in module.out_proj.named_parameters()}
        attn.load_state_dict(state)
        return attn.train(module.training)


ATTENTIONS: dict[str, type[CrossAttention]] = {
    "additive": AdditiveAttention,
    "scaled_dot_product": ScaledDotProductAttention,
}


def _project(projection: nn.Module, x: Tensor) -> Tensor:
    """The projection, with the rows that are not finite kept out of the gradient of its weights.

    Such a row may lie under a mask: its gradient is zero then, but zero times NaN is NaN.
    """
    if not torch.is_grad_enabled() or known_finite(x):
        return projection(x)
    spoil = (0 * x.detach()).sum(-1, keepdim=True)  # zero, or NaN where a number is not finite
    output = projection(x.masked_fill(spoil.isnan(), 0.0))
    return output + spoil.to(output.dtype)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, x.size(-1) // heads)).transpose(1, 2)  # (B, H, T, D)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _check_divisible(name: str, size: int, by_name: str, by: int) -> None:
    if size % by:
        raise ValueError(
            f"{name} must be divisible by {by_name}, got {name}={size}, {by_name}={by}"
        )


def _check_input(name: str, x: Tensor, axes: int, size: int) -> None:
    if x.dim() != axes or x.size(-1) != size:
        letters = {"query": "(B, T, query_dim)", "key": "(B, N, key_dim)"}
        shape = letters.get(name, "(B, N, value_dim)")
        raise ValueError(
            f"{name} must have shape {shape} with {name}_dim={size}, got {tuple(x.shape)}"
        )
