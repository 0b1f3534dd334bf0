"""What both strategies share: reading options, and what follows from the number of ranks and the device."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from memwall_strategy.config import MemwallConfig
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.capacity import share_machine
from memwall_strategy.engine.swap_group import BACKEND
from memwall_strategy.runtime.data import position_loader
from memwall_strategy.runtime.world import check_world, group_backend, read_options

__all__ = ["WorldMethods", "choose_precision", "divided", "read_options", "sum_for"]

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
        share_machine(self.num_processes)
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
