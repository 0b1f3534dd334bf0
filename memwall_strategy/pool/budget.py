"""What each rank may hold in each tier, in bytes: read from the options when the ranks are known.

Without an option a tier's default follows the container's limit (``engine.capacity``): on the device all that the rank
may count on, on the host its share of what is unused.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from memwall_strategy.config import PER_RANK, PoolConfig, RankSizes, Size, check_entries, format_size, parse_size
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.capacity import available_device_bytes
from memwall_strategy.pool.agreement import Agreement
from memwall_strategy.pool.probe import unused_memory_bytes

UNKNOWN_BYTES = 2**62
"""Room in a place of which nobody said how much it has."""


def differs_by_rank(config: PoolConfig) -> bool:
    """Whether any budget is given as a list."""
    return any(isinstance(getattr(config, name), tuple) for name in PER_RANK)


def of_rank(value: RankSizes | None, rank: int) -> Size | None:
    """The entry of a rank."""
    return value[rank] if isinstance(value, tuple) else value


def device_budget_bytes(
    config: PoolConfig, device: torch.device, rank: int, available_bytes: int | None = None
) -> int | None:
    """A rank's budget on its device; None when none is set.

    Args:
        config: the pool's options.
        device: the rank's.
        rank: global rank.
        available_bytes: what the device has; None: what is found here.

    Raises:
        ConfigError: it is above what the device, or the container, has.
    """
    budget = of_rank(config.device_budget, rank)
    if budget is None:
        return None
    available = available_device_bytes(device) if available_bytes is None else available_bytes
    return parse_size(budget, option=_option("device_budget", config.device_budget, rank), available_bytes=available)


def agreed_device_budget_bytes(config: PoolConfig, device: torch.device) -> int | None:
    """This rank's budget on its device; where budgets differ, all ranks refuse one that any of them cannot have.

    Raises:
        ConfigError: as ``check_entries`` and ``device_budget_bytes``, before any rank waits for another.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    check_entries(config, world)
    if not differs_by_rank(config):
        return device_budget_bytes(config, device, rank)
    found, error = None, None
    try:
        found = device_budget_bytes(config, device, rank)
    except ConfigError as refused:
        error = refused
    Agreement(device).fail_together(error)
    return found


def host_budget_bytes(config: PoolConfig, rank: int, unused_bytes: int | None = None) -> int:
    """A rank's budget on the host; by default its share of what is unused.

    Args:
        config: the pool's options.
        rank: global rank.
        unused_bytes: what all ranks of this machine may take now; None: what is found here.
    """
    unused = unused_memory_bytes() if unused_bytes is None else unused_bytes
    budget = of_rank(config.host_budget, rank)
    if budget is None:
        return unused // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return parse_size(budget, option=_option("host_budget", config.host_budget, rank), available_bytes=unused)


def disk_budget_bytes(config: PoolConfig, rank: int) -> int:
    """A rank's budget on disk."""
    budget = of_rank(config.disk_budget, rank)
    return parse_size(
        budget, option=_option("disk_budget", config.disk_budget, rank), available_bytes=UNKNOWN_BYTES
    )


def reserve_bytes(config: PoolConfig, budget_bytes: int) -> int:
    """The reserve of a rank with this device budget.

    Raises:
        ConfigError: it is above the budget.
    """
    found = parse_size(config.reserve, option="pool.reserve", available_bytes=UNKNOWN_BYTES)
    if isinstance(config.reserve, float) or (isinstance(config.reserve, str) and _is_fraction(config.reserve)):
        found = parse_size(config.reserve, option="pool.reserve", available_bytes=budget_bytes)
    if found >= budget_bytes and found:
        raise ConfigError(
            f"pool.reserve={format_size(found)} leaves nothing of pool.device_budget={format_size(budget_bytes)}. "
            "Lower it, or give a fraction such as pool.reserve=0.1."
        )
    return found


def _is_fraction(text: str) -> bool:
    return "." in text and text.strip().replace(".", "", 1).isdigit()


def _option(name: str, value: RankSizes | None, rank: int) -> str:
    return f"pool.{name}[{rank}]" if isinstance(value, tuple) else f"pool.{name}"
