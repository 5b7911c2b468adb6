"""Makes a differentiable operator of additive scores and their gradients, which stores no pair.

The backward pass computes again what it needs from the inputs. As an operator of its own,
`torch.compile` takes it as one node.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
Gradients = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores of half precision are kept in float32: a softmax sees their differences."""
    return torch.promote_types(dtype, torch.float32)


def additive_operator(backend: str, scores: Scores, gradients: Gradients) -> Scores:
    """The operator of a backend, with the signature of `additive_scores`.

    Args:
        scores: (query, key, score_weight) in one dtype, float32 or float64 -> (B, H, T, N).
        gradients: (grad, query, key, score_weight) -> the gradients of the last three.
    """

    @torch.library.custom_op(f"vlattn::additive_scores_{backend}", mutates_args=())
    def operator(query: Tensor, key: Tensor, score_weight: Tensor) -> Tensor:
        dtype = score_dtype(query.dtype)
        with torch.autocast(query.device.type, enabled=False):
            return scores(query.to(dtype), key.to(dtype), score_weight.to(dtype))

    @operator.register_fake
    def _(query, key, score_weight):
        shape = (*query.shape[:3], key.size(2))
        return query.new_empty(shape, dtype=score_dtype(query.dtype))

    @torch.library.custom_op(f"vlattn::additive_scores_{backend}_backward", mutates_args=())
    def backward_operator(
        grad: Tensor, query: Tensor, key: Tensor, score_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (query, key, score_weight)
        with torch.autocast(query.device.type, enabled=False):
            found = gradients(*(x.to(grad.dtype) for x in (grad, *inputs)))
        return tuple(g.to(x.dtype, copy=False) for g, x in zip(found, inputs))

    @backward_operator.register_fake
    def _(grad, query, key, score_weight):
        return tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (query, key, score_weight)
        )

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        return backward_operator(grad, *ctx.saved_tensors)

    operator.register_autograd(backward, setup_context=save)
    backward_operator.register_autograd(refuse_second_derivative(backend))
    return operator


def refuse_second_derivative(backend: str) -> Callable:
    """A backward function that raises a `RuntimeError`."""

    def refuse(ctx, *grads):
        raise RuntimeError(
            f"additive attention of backend {backend!r} has no second derivative; "
            "backend='reference' has"
        )

    return refuse
