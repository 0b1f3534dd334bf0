"""Modules that run on the host, in the books: weights, gradients and optimizer state by their addresses there.

The engine allocates them. They are booked in the host tier, whose capacity grows by each that is booked and shrinks by
each that goes: what the tier can hand out stays what it has mapped. The budget keeps room for all of them from the
start. What is gathered and reduced on the host while a step runs is counted by ``MemoryAccount.host`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.pool.arena import BookedArena
from memwall_strategy.pool.device import ENGINE
from memwall_strategy.pool.state_fields import UnitState
from memwall_strategy.pool.table import AddressTable

if TYPE_CHECKING:
    from memwall_strategy.pool.tiers import Tiers
    from memwall_strategy.runtime.runtime import Runtime

SMALL_STATE_BYTES = 64
"""Room for each parameter's step counter and the like."""


class HostUnits:
    """What the modules that run on the host hold there."""

    def __init__(self) -> None:
        self._table: AddressTable | None = None
        self._tiers: Tiers | None = None
        self._booked: list[Block] = []

    def open(self, runtime: Runtime, units: Sequence[Sequence[UnitState]], tiers: Tiers) -> None:
        """Keep room in the budget for everything, and book the weights.

        Args:
            units: of each optimizer.

        Raises:
            ConfigError: ``pool.host_budget`` has no room for it.
        """
        if not runtime.host_modules:
            return
        needed = _bytes_of(runtime, units)
        if needed > (there := tiers.host_budget_bytes()):
            raise ConfigError(
                f"pool.host_modules={list(runtime.host_modules)} take {format_size(needed)} of host memory on this "
                f"rank, pool.host_budget allows {format_size(there)}. Raise it, or name fewer."
            )
        table = self._table = runtime.pool.table
        self._tiers = tiers
        tiers.open_host()
        tiers.engine_host_bytes = needed
        table.add_arena(Tier.HOST, ENGINE, BookedArena())
        for name, module in runtime.host_modules.items():
            for inner, parameter in module.named_parameters():
                local = local_tensor(parameter)
                if local.numel():
                    block = Block(name, f"{name}.{inner}", Kind.PARAM)
                    book(table, block, local.nbytes, Tier.HOST, local.data_ptr())
                    self._booked.append(block)

    def close(self) -> None:
        """Take them out of the books."""
        for block in self._booked:
            unbook(self._table, block)
        self._booked.clear()
        if self._tiers is not None:
            self._tiers.engine_host_bytes = 0


def _bytes_of(runtime: Runtime, units: Sequence[Sequence[UnitState]]) -> int:
    own = [unit for each in units for unit in each if unit.on_host]
    state = sum(sum(unit.sizes().values()) + SMALL_STATE_BYTES * len(unit.parameters) for unit in own)
    parameters = [p for module in runtime.host_modules.values() for p in module.parameters()]
    return state + sum(local_tensor(p).nbytes * (2 if p.requires_grad else 1) for p in parameters)


def book(table: AddressTable, block: Block, nbytes: int, tier: Tier, address: int) -> None:
    """Note a block where torch holds it, on the device or on the host.

    Raises:
        PoolFull: the device has no room for it.
    """
    if tier is Tier.HOST:
        table.resize_tier(tier, capacity_bytes=table.capacity_bytes(tier) + nbytes)
    table.book(block, nbytes, tier, address, arena=ENGINE)


def unbook(table: AddressTable, block: Block) -> None:
    """Forget what ``book`` noted."""
    placement = table.locate(block)
    table.drop(block)
    if placement.tier is Tier.HOST:
        table.resize_tier(Tier.HOST, capacity_bytes=table.capacity_bytes(Tier.HOST) - placement.bytes)
