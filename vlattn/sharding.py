"""Weights, gradients and optimiser shared out over processes, for models too large for each.

PyTorch's FSDP2; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
VLDB 2023.
"""

import copy
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from vlattn.captioner import Captioner


def shard(device: str, *captioners: Captioner) -> Callable[[Captioner], Captioner]:
    """Leave each process a share of the weights of captioners of one kind, in place.

    The shares move to the device, "cpu" or "cuda", module by module. A block's weights are whole
    while it computes. Gradients are sums over the processes. State dicts are those of whole
    captioners, in the first process; all processes ask for them together.

    Returns:
        a function that all call together: a whole copy of one of the captioners, to write with.
    """
    # Keys and values are views, and nothing is written into them.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(\w+\) returned a view")
    frame = _without_weights(captioners[0])

    def whole(captioner: Captioner) -> Captioner:
        tensors = chain(captioner.named_parameters(), captioner.named_buffers())
        weights = {name: _whole(x.detach()) for name, x in tensors if name in names}
        copied = copy.deepcopy(frame)
        copied.load_state_dict(weights, assign=True)
        return copied.to(captioner.device)

    names = frame.state_dict().keys()
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    for captioner in captioners:
        for p in captioner.parameters():
            p.data = p.data.contiguous()  # those of timm and of loaded models may not be
        blocks = captioner.decoder.blocks
        for module in (*blocks, captioner.encoder, captioner):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        for block in blocks:
            register_fsdp_forward_method(block, "project_memory")
        captioner.register_state_dict_post_hook(_gather)
        captioner.register_load_state_dict_pre_hook(_distribute)
    return whole


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make the state dict of an optimiser of shared weights that of whole ones, too."""
    optimizer.register_state_dict_post_hook(_gather_moments)
    optimizer.register_load_state_dict_pre_hook(_distribute_moments)


def _without_weights(captioner: Captioner) -> Captioner:
    """A copy whose weights are of no device; buffers that are not saved are as they were."""
    frame = copy.deepcopy(captioner)
    frame.load_state_dict({k: x.to("meta") for k, x in frame.state_dict().items()}, assign=True)
    return frame


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _for_first(x: Any) -> Any:
    """Gathered on the CPU of the first process; in the others memory that is never touched."""
    if not isinstance(x, DTensor):
        return x
    gathered = x.full_tensor()
    held = torch.empty(gathered.shape, dtype=gathered.dtype)
    return held.copy_(gathered) if x.device_mesh.get_rank() == 0 else held


def _share(x: Any, of: Tensor) -> Any:
    """This process's share of a whole tensor, shared as `of` is."""
    if not isinstance(of, DTensor) or not isinstance(x, Tensor) or x.shape != of.shape:
        return x
    x = x.to(of.device)
    return distribute_tensor(x, of.device_mesh, of.placements, src_data_rank=None)


def _gather(module: nn.Module, weights: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in weights:
        weights[name] = _for_first(weights[name])


def _distribute(module: nn.Module, weights: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters():
        if prefix + name in weights:
            weights[prefix + name] = _share(weights[prefix + name], parameter)


def _gather_moments(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    state = {
        i: {name: _for_first(x) for name, x in moments.items()}
        for i, moments in saved["state"].items()
    }
    return saved | {"state": state}


def _distribute_moments(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        i: {name: _share(x, parameters[i]) for name, x in moments.items()}
        for i, moments in saved["state"].items()
    }
    return saved | {"state": state}
