"""One optimiser step of training: teacher forcing, or self-critical training.

B pictures, K real tokens of a batch, V vocabulary, N patches.
"""

import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from vlattn.captioner import Captioner
from vlattn.data.dataset import Batch, pack
from vlattn.self_critical import SelfCritical, policy_loss


def teacher_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: list[Batch],
    *,
    label_smoothing: float,
    attention_supervision: float,
    clip_norm: float,
) -> float:
    """Learn the written captions; returns the mean loss over the real targets of the window.

    The window is that of all processes together, of which each has its share.
    """
    last_layer = accelerator.unwrap_model(model).config.depth - 1
    num_targets = max(1, _sum(accelerator, sum(batch.targets.numel() for batch in window)))
    total = 0.0
    for batch in window:
        model.train(bool(batch.indices))
        batch = _or_blank(batch, accelerator.unwrap_model(model)).to(accelerator.device)
        supervised = batch.regions is not None
        layers = [last_layer] if supervised else []
        logits, weights = model(batch.images, batch.packed, need_weights=layers)
        loss = token_loss(logits, batch.targets, label_smoothing) / num_targets
        total += loss.item()
        if supervised:
            drawn = region_loss(weights, batch.regions) / num_targets
            loss = loss + attention_supervision * drawn
        accelerator.backward(loss)
    finite = _update(accelerator, model, optimizer, clip_norm)
    return _sum(accelerator, total) if finite else math.nan


def token_loss(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy, summed over the K real tokens: logits (K, V), targets (K,)."""
    return F.cross_entropy(
        logits.float(), targets, label_smoothing=label_smoothing, reduction="sum"
    )


def region_loss(weights: Tensor, regions: Tensor) -> Tensor:
    """Minus the log of the attention inside the boxes, summed over the targets that have any.

    After Liu et al., "Attention Correctness in Neural Image Captioning", AAAI 2017.

    Args:
        weights: (K, L, H, N) cross-attention; its mean over layers and heads is drawn.
        regions: (K, N) share of each patch inside the boxes of the target's phrase.
    """
    inside = (weights.float().mean((1, 2)) * regions).sum(-1)  # (K,)
    return -inside[regions.any(-1)].clamp(min=1e-6).log().sum()


def self_critical_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: list[Batch],
    critic: SelfCritical,
    writer: Captioner,
    generator: torch.Generator,
    *,
    clip_norm: float,
) -> float:
    """Learn, with dropout, from captions that the model draws without; returns the mean reward.

    Args:
        writer: has the weights of the model, and draws the captions.
    """
    writer.eval()
    drawn = [
        critic.draw(writer, batch.to(accelerator.device), generator)
        if batch.indices
        else (_or_blank(batch, writer), torch.empty(0), 0.0)
        for batch in window
    ]
    num_targets = max(1, _sum(accelerator, sum(batch.targets.numel() for batch, _, _ in drawn)))
    for batch, advantages, _ in drawn:
        model.train(bool(batch.indices))
        batch = batch.to(accelerator.device)
        logits, _ = model(batch.images, batch.packed)
        loss = policy_loss(logits, batch.targets, advantages.to(accelerator.device)) / num_targets
        accelerator.backward(loss)
    if not _update(accelerator, model, optimizer, clip_norm):
        return math.nan
    rewards = _sum(accelerator, sum(reward for *_, reward in drawn))
    return rewards / max(1, _sum(accelerator, sum(bool(batch.indices) for batch in window)))


def _or_blank(batch: Batch, captioner: Captioner) -> Batch:
    """The batch or, where it has no picture, a black one without a caption.

    All processes have to go through the model together, and its gradients are zero.
    """
    if batch.indices:
        return batch
    packed, targets = pack([[]])
    images = torch.zeros(1, 3, *captioner.preprocess.size)
    return batch._replace(images=images, packed=packed, targets=targets)


def _sum(accelerator: Accelerator, value: float) -> float:
    """A number of this process added to those of the others."""
    if accelerator.num_processes == 1:
        return value
    return accelerator.reduce(torch.tensor(float(value), device=accelerator.device)).item()


def _update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_norm: float,
) -> bool:
    """One step of the optimiser; False, and no step, where the gradient is not finite.

    In float16 such a step is skipped by the scaler, which then tries a smaller scale.
    """
    if accelerator.num_processes > 1 and not isinstance(model, FSDPModule):  # which sums its own
        _reduce(accelerator, [p.grad for p in model.parameters() if p.grad is not None], "sum")
    _average_statistics(accelerator, model)
    norm = accelerator.clip_grad_norm_(model.parameters(), clip_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    finite = accelerator.scaler is not None or math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    return finite


@torch.no_grad()
def _average_statistics(accelerator: Accelerator, model: nn.Module) -> None:
    """The running statistics of batch norms, of which each process has those of its pictures."""
    running = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    if accelerator.num_processes > 1 and running:
        _reduce(accelerator, running, "mean")


def _reduce(accelerator: Accelerator, tensors: list[Tensor], reduction: str) -> None:
    """In place and in one go; each keeps its order in memory, which fused AdamW relies on."""
    joined = accelerator.reduce(torch.cat([x.flatten() for x in tensors]), reduction)
    for x, part in zip(tensors, joined.split([x.numel() for x in tensors])):
        x.copy_(part.view_as(x))
