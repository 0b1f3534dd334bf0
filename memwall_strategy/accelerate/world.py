"""The process group under an accelerator: memwall's own where it can still be made."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from memwall_strategy.config import MemwallConfig
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.swap_group import BACKEND
from memwall_strategy.runtime.world import check_world, group_backend

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def runs_on_cpu(cpu: bool) -> bool:
    """Whether ranks compute on the CPU: as asked, or because there is no CUDA device.

    Accelerate without ``cpu=True`` on a machine without accelerators lets each process train by itself.
    """
    return cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true") or not torch.cuda.is_available()


def start_group(config: MemwallConfig, *, cpu: bool, handler: Any = None) -> None:
    """Make the default process group, unless somebody did: torchrun's ranks, or one rank by itself.

    Accelerate takes up a group that exists. Where a launcher gives no rendezvous (MPI), Accelerate makes a plain one.

    Args:
        handler: the user's ``InitProcessGroupKwargs``, whose backend and timeout count.

    Raises:
        ConfigError: the number of ranks rules out an option, or the group that exists is not the one asked for.
    """
    given = handler.to_kwargs() if handler is not None else {}
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    check_world(config, world, torch.device("cpu" if cpu else "cuda"))
    if dist.is_initialized():
        wanted = config.resilience.enabled and config.resilience.swappable_groups is True
        if wanted and dist.get_backend() != BACKEND:
            raise ConfigError(
                f"resilience.swappable_groups=true, but a process group over {dist.get_backend()} exists already "
                "(transformers.TrainingArguments and PartialState make one). Make the MemwallAccelerator first, or "
                "leave swappable_groups out."
            )
        return
    backend = given.pop("backend", None) or group_backend(config, "cpu" if cpu else "cuda")
    timeout = given.pop("timeout", None) or timedelta(seconds=config.timeout_s)
    if not cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if world == 1:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    elif all(name in os.environ for name in _RENDEZVOUS):
        dist.init_process_group(backend, timeout=timeout, **given)


def check_agreement(seen: int, device: torch.device) -> None:
    """Accelerate must see the ranks that the process group has.

    Raises:
        ConfigError: it sees another number, or a device that memwall does not run on.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"memwall runs on cpu and cuda, not on {device.type}. Pass cpu=True.")
    if seen != dist.get_world_size():
        raise ConfigError(
            f"Accelerate sees {seen} process(es) and the process group has {dist.get_world_size()}: a PartialState or "
            "Accelerator without cpu=True was made before. Make the MemwallAccelerator first, or pass cpu=True there."
        )
