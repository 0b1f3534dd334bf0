"""What both strategies share: reading options, and what follows from the number of ranks and the device."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from memwall_strategy.config import MemwallConfig, config_from
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.sharding import check_replicate
from memwall_strategy.engine.swap_group import BACKEND, register_backend
from memwall_strategy.runtime.data import position_loader
from memwall_strategy.runtime.runtime import device_budget_bytes

_MEANS = ("mean", "avg")


class WorldMethods:
    """Mixed into both strategies before ``ModelParallelSeams``, which calls the first two."""

    config: MemwallConfig

    def check_world(self, world: int) -> None:
        """Options that the number of ranks rules out, found before any process starts."""
        check_world(self.config, world, self.root_device, self._wanted_tensor_parallel)

    def group_backend(self) -> str:
        """gloo or NCCL, behind a swappable group where the config says so."""
        return group_backend(self.config, self.root_device.type)

    def setup_environment(self) -> None:
        self.set_parallel_sizes()
        super().setup_environment()

    def give_position(self, dataloader: Any, mode: str) -> Any:
        """Deal a loader's data over the data-parallel ranks, with a position that can be saved."""
        dealt = self.distributed_sampler_kwargs
        return position_loader(
            dataloader,
            rank=dealt["rank"],
            world=dealt["num_replicas"],
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),  # what seed_everything set; the same on every rank
            mode=mode,
        )


def read_options(config: MemwallConfig | None, options: dict[str, Any], owner: str) -> MemwallConfig:
    """The configuration, given as a whole or as single options.

    Raises:
        ConfigError: both were given, or an option that does not exist or cannot be.
    """
    if config is None:
        return config_from(options, owner=owner)
    if options:
        raise ConfigError(f"give either config= or single options, not both: {', '.join(sorted(options))}.")
    return config


def choose_precision(plugin: type, asked: Any, given: Any, remedy: str) -> Any:
    """The precision plugin for what the user asked for.

    Args:
        plugin: ours.
        given: a plugin that the user passed, or None.
        remedy: what to write instead of another plugin.

    Raises:
        ConfigError: a plugin of another kind, which would autocast on top of FSDP2's policy.
    """
    if given is None:
        return plugin(asked)
    if isinstance(given, plugin):
        return given
    raise ConfigError(f"plugins={type(given).__name__}(...) cannot be used with memwall. Write {remedy}.")


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
    check_replicate(world // tensor_parallel, config.replicate)
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
