"""What encoder and decoder are built of: norms and activations by name, and dropout."""

import torch
from torch import Tensor, nn

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
