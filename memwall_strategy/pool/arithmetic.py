"""Where a unit is stepped whose state rests on the host: on its weights' device, or where the state is, by cost.

On the device, the state comes in and goes out again; page-ins and page-outs run at the same time, beside the steps of
other units, so the slower of the two counts. On the host, gradients and weights come down and new weights go up, beside
the arithmetic of other units: the slowest of the three counts. On CPU there is no other device: nothing is copied, and
the host is never dearer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from memwall_strategy.core.block import Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.optimizer_parts import is_elementwise
from memwall_strategy.planner.host import KERNEL_BYTES
from memwall_strategy.pool.arena import PAGE_BYTES, aligned
from memwall_strategy.pool.desks import can_step_on_host, desk_bytes
from memwall_strategy.pool.device import DeviceStore
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.rates import LARGE_BYTES, Rate, measure
from memwall_strategy.pool.state_fields import UnitState
from memwall_strategy.pool.table import AddressTable

_KERNEL_ELEMENTS = 2**20
_KERNEL_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates of one rank: copies to the device and to the host, and bytes that the host's arithmetic passes over."""

    to_device: Rate
    to_host: Rate
    arithmetic: Rate


def cheaper_on_host(state_bytes: int, weight_bytes: int, costs: Costs) -> bool:
    """Whether a unit is stepped sooner on the host.

    Args:
        state_bytes: of its state that is paged.
        weight_bytes: of its weights; its gradients are as long.
        costs: of this rank.
    """
    on_device = max(costs.to_device.seconds(state_bytes), costs.to_host.seconds(state_bytes))
    on_host = max(
        costs.to_host.seconds(2 * weight_bytes),
        costs.arithmetic.seconds(2 * state_bytes + 3 * weight_bytes),
        costs.to_device.seconds(weight_bytes),
    )
    return on_host < on_device


def measure_costs(device: torch.device) -> Costs:
    """Measure the rates of this rank, in well under a second; takes 16 MiB on device and host for the while."""
    table = AddressTable()
    stores = [DeviceStore(table, 2 * LARGE_BYTES, device=device), HostStore(table, 2 * LARGE_BYTES, device=device)]
    pool = Pool(table, stores)
    try:
        rates = measure(pool)
    finally:
        pool.close()
    parameter = torch.nn.Parameter(torch.zeros(_KERNEL_ELEMENTS))
    parameter.grad = torch.zeros(_KERNEL_ELEMENTS)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    times = []
    for _ in range(_KERNEL_REPEATS):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    kernel = Rate(0.0, _KERNEL_ELEMENTS * KERNEL_BYTES / statistics.median(times))
    return Costs(rates[Tier.HOST, Tier.DEVICE], rates[Tier.DEVICE, Tier.HOST], kernel)


def units_at_home(
    optimizers: Sequence[Optimizer],
    units: Sequence[Sequence[UnitState]],
    device: torch.device,
    *,
    where: str,
    costs: Costs | None = None,
) -> list[frozenset[str]]:
    """For each optimizer, the units that may be stepped where their state rests on the host.

    Args:
        optimizers: of the run.
        units: theirs, as far as they can be paged.
        device: of the weights.
        where: ``PoolConfig.optimizer_on``.
        costs: measured here where None, and only where they matter.

    Raises:
        ConfigError: ``where="host"`` and an optimizer that cannot be stepped there.
    """
    found: list[frozenset[str]] = []
    for optimizer, its in zip(optimizers, units, strict=True):
        if where == "device" or not its:
            found.append(frozenset())
            continue
        if device.type != "cpu":
            if not may_step_on_host(optimizer, where):
                found.append(frozenset())
                continue
            if where == "auto":
                costs = costs if costs is not None else measure_costs(device)
                its = [unit for unit in its if cheaper_on_host(sum(unit.sizes().values()), _weight_bytes(unit), costs)]
        found.append(frozenset(unit.name for unit in its))
    return found


def may_step_on_host(optimizer: Optimizer, where: str) -> bool:
    """Whether an optimizer whose weights are on another device can be stepped on the host.

    Args:
        where: ``PoolConfig.optimizer_on``.

    Raises:
        ConfigError: ``where="host"`` and it cannot.
    """
    why = can_step_on_host(optimizer)
    if not why and not is_elementwise(optimizer):
        why = "it looks at a whole parameter, of which a rank's host has a part"
    if why and where == "host":
        raise ConfigError(
            f"pool.optimizer_on='host': {type(optimizer).__name__} cannot be stepped on the host: {why}. Set "
            "pool.optimizer_on='auto', or use AdamW with its default options."
        )
    return not why


def staging_on_host(units: Iterable[UnitState], at_home: frozenset[str], *, master: bool, desks: int) -> int:
    """Host bytes of an optimizer's desks, at most; 0 where no unit is stepped at one."""
    widest = max((desk_bytes(unit, master=master) for unit in units if unit.name in at_home), default=0)
    return desks * aligned(widest, PAGE_BYTES)


def _weight_bytes(unit: UnitState) -> int:
    return sum(local_tensor(parameter).nbytes for parameter in unit.parameters)
