"""The norms and activations that encoder and decoder are built of, by name."""

from torch import nn

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
