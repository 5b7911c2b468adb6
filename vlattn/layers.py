"""What encoder and decoder are built of: products, norms and activations by name, dropout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 64  # with more, the two products are about as fast
HAS_ONEDNN = torch.backends.mkldnn.is_available()

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
}


def make_norm(kind: str, dim: int, eps: float | None) -> nn.Module:
    """A key of `NORMS`; with the kind's own `eps` where None."""
    return NORMS[kind](dim) if eps is None else NORMS[kind](dim, eps=eps)


def make_activation(kind: str) -> nn.Module:
    """A key of `ACTIVATIONS`."""
    return ACTIVATIONS[kind]()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., D_in) times weight (D_out, D_in), plus bias (D_out,): `F.linear`.

    Words are written with few rows at a time. On a CPU oneDNN's product of such is 1.2 to 4 times
    as fast as the one that PyTorch takes, most where `lay_out_to_write` has stored the weight.
    """
    learning = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    plain = learning or torch.compiler.is_compiling() or not HAS_ONEDNN
    if (
        not plain
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and 0 < x.numel() <= FEW_ROWS * x.size(-1)
    ):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` by `product`."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


@torch.no_grad()
def lay_out_to_write(module: nn.Module) -> None:
    """Store the weights of products by columns, as `product` reads them fastest.

    Embeddings too: logits are products with them. The weights stay as they are, and may be trained
    in this order as well.
    """
    for part in module.modules():
        if isinstance(part, Linear | nn.Embedding):
            part.weight.data = part.weight.data.t().contiguous().t()


class NormedProjection(nn.Sequential):
    """A linear layer between two LayerNorms: (..., D_in) to (..., D_out)."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(
            nn.LayerNorm(in_features),
            nn.Linear(in_features, out_features),
            nn.LayerNorm(out_features),
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.requires_grad:
            return super().forward(x)
        # Features that do not learn: with the first norm's scale and shift in the weight, no
        # gradient has to go back to where they came in.
        norm, linear, last = self
        x = F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
        bias = linear.bias + (linear.weight * norm.bias).sum(1)
        return last(F.linear(x, linear.weight * norm.weight, bias))


class Dropout(nn.Dropout):
    """`nn.Dropout` at a quarter of its time on a CPU: 16 random bits decide on a number.

    Srivastava et al., JMLR 2014. The share that is dropped is rounded to 1/65536.
    """

    def forward(self, x: Tensor) -> Tensor:
        limit = round(self.p * 2**16)
        quick = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (self.training and quick and 0 < limit < 2**16):
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        drawn = words.view(torch.int16)[: x.numel()].view(x.shape)
        kept = (drawn >= limit - 2**15).to(x.dtype)
        return x * kept.mul_(1 / (1 - limit / 2**16))
