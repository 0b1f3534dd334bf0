"""What every front end needs to know of the number of ranks and the device, and how options are read."""

from __future__ import annotations

from typing import Any

import torch

from memwall_strategy.config import MemwallConfig, check_entries, config_from
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.sharding import check_replicate
from memwall_strategy.engine.swap_group import BACKEND, register_backend
from memwall_strategy.pool.budget import device_budget_bytes


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



def refuse_trainer_only(config: MemwallConfig, front_end: str) -> None:
    """Raise ``ConfigError`` for options that need a trainer that owns the whole step."""
    if config.overlap.enabled and config.overlap.optimizer_in_backward:
        raise ConfigError(
            f"overlap.optimizer_in_backward=true needs Lightning's Trainer, which runs forward, backward and step in "
            f"one call; {front_end} leaves them to your loop. Leave it out here."
        )


def check_world(config: MemwallConfig, world: int, device: torch.device, tensor_parallel: int = 1) -> None:
    """Refuse options that the number of ranks rules out.

    Raises:
        ConfigError: ``tensor_parallel_size`` or ``replicate`` does not divide, the budget is above what is there, or a
            list of budgets has another length.
    """
    if not isinstance(tensor_parallel, int) or tensor_parallel < 1 or world % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel} does not divide the {world} ranks. Use a divisor, or 1."
        )
    if tensor_parallel > 1 and config.replicate > 1:
        raise ConfigError("replicate and tensor_parallel_size cannot both be above 1: set one of them to 1.")
    check_replicate(world // tensor_parallel, config.replicate)
    if config.pool.enabled:
        check_entries(config.pool, world)
        if not isinstance(config.pool.device_budget, tuple):  # entries are for other machines too
            device_budget_bytes(config.pool, device, 0)


def group_backend(config: MemwallConfig, device_type: str) -> str:
    """gloo on CPU and NCCL on CUDA, behind a swappable group where ``resilience`` says so."""
    plain = "nccl" if device_type == "cuda" else "gloo"
    wanted = config.resilience.swappable_groups
    if not config.resilience.enabled or not (plain == "gloo" if wanted is None else wanted):
        return plain
    register_backend(cuda=plain)
    return BACKEND
