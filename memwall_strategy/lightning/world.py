"""What both strategies derive from the number of ranks and the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memwall_strategy.config import MemwallConfig
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.engine.swap_group import BACKEND, register_backend
from memwall_strategy.runtime.runtime import device_budget_bytes

_MEANS = ("mean", "avg")


def check_world(config: MemwallConfig, world: int, device: torch.device, tensor_parallel: int = 1) -> None:
    """Refuse options that the number of ranks rules out.

    Raises:
        ConfigError: ``tensor_parallel_size`` or ``replicate`` does not divide, or the budget is above what is there.
    """
    if not isinstance(tensor_parallel, int) or tensor_parallel < 1 or world % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel} does not divide the {world} ranks. Use a divisor, or 1."
        )
    if tensor_parallel > 1 and config.replicate > 1:
        raise ConfigError("replicate and tensor_parallel_size cannot both be above 1: set one of them to 1.")
    ranks = world // tensor_parallel
    if ranks % config.replicate:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ConfigError(
            f"replicate={config.replicate} does not divide the {ranks} data-parallel ranks. Use one of {divisors}."
        )
    if config.pool.enabled:
        device_budget_bytes(config, device)


def group_backend(config: MemwallConfig, device_type: str) -> str:
    """gloo on CPU and NCCL on CUDA, behind a swappable group where ``resilience`` says so."""
    plain = "nccl" if device_type == "cuda" else "gloo"
    wanted = config.resilience.swappable_groups
    if not config.resilience.enabled or not (plain == "gloo" if wanted is None else wanted):
        return plain
    register_backend(cuda=plain)
    return BACKEND


def data_mesh(config: MemwallConfig, device_type: str, world: int) -> DeviceMesh:
    """The mesh to shard over."""
    return data_parallel_mesh(device_type, world, config.replicate)


def sum_for(tensor: Any, op: Any) -> tuple[Any, bool]:
    """The operation to ask Lightning's reduction for, and whether ``divided`` must follow.

    Lightning turns a mean into a sum and a division for gloo, which knows no mean of integers, but by the backend's
    name: a gloo inside a swappable group is not recognized.
    """
    mean = isinstance(tensor, torch.Tensor) and isinstance(op, str) and op.lower() in _MEANS
    mean = mean and dist.is_initialized() and dist.get_backend() == BACKEND
    return ("sum", True) if mean else (op, False)


def divided(total: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The mean from the sum over ``group``, in place, rounded towards zero for integers as Lightning does."""
    world = dist.get_world_size(group)
    return total.div_(world) if total.is_floating_point() else total.copy_(total / world)
