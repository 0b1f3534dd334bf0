"""One rank's open tiers: opened when first needed, made larger between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memwall_strategy.config import PoolConfig, format_size
from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.capacity import available_device_bytes
from memwall_strategy.pool.arena import PAGE_BYTES, BookedArena, aligned
from memwall_strategy.pool.budget import disk_budget_bytes, host_budget_bytes, reserve_bytes
from memwall_strategy.pool.device import ENGINE, DeviceStore
from memwall_strategy.pool.disk import CHUNK_BYTES, WORKERS, DiskStore
from memwall_strategy.pool.host import HostStore, arena_count
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.probe import unused_memory_bytes
from memwall_strategy.pool.reserve import Reserve
from memwall_strategy.pool.state_homes import group_bytes, left_over, packed_bytes
from memwall_strategy.pool.store import Store
from memwall_strategy.pool.table import AddressTable

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime


class Tiers:
    """Opens and closes them.

    Args:
        config: the pool's options.
        reserve: of the device tier.

    Attributes:
        pool: the stores behind two lanes; None until something is paged.
        engine_host_bytes: host memory that torch holds, or will, for modules that run there.
    """

    def __init__(self, config: PoolConfig, reserve: Reserve) -> None:
        self.pool: Pool | None = None
        self._config, self._reserve = config, reserve
        self._runtime: Runtime | None = None
        self._table: AddressTable | None = None
        self._staging_bytes = self.engine_host_bytes = 0

    @property
    def stores(self) -> dict[Tier, Store]:
        """The open stores; none where nothing is paged."""
        return self.pool.stores if self.pool is not None else {}

    @property
    def capacity_bytes(self) -> int:
        """Of the device tier."""
        budget = self._runtime.budget_bytes
        return available_device_bytes(self._runtime.device) if budget is None else budget

    def start(self, runtime: Runtime, table: AddressTable) -> None:
        """Open the books of the device tier: what torch holds there counts against the budget."""
        self._runtime, self._table, self._staging_bytes = runtime, table, 0
        self._reserve.end_steps()
        table.open_tier(Tier.DEVICE, self.capacity_bytes)
        table.add_arena(Tier.DEVICE, ENGINE, BookedArena())
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        if self._runtime.budget_bytes is not None:
            nbytes = reserve_bytes(self._config, self._runtime.budget_bytes)
            self._reserve.attach(self._table, nbytes, self._runtime.events)

    def open_device(self) -> None:
        """Let the pool hand out device memory too. Does nothing when it does already."""
        if Tier.DEVICE not in self.stores:
            self._add(DeviceStore(self._table, self.capacity_bytes, device=self._runtime.device, joins=True))

    def make_room(self, tier: Tier, nbytes: int, *, longest_bytes: int | None = None) -> None:
        """Map so much more of a tier.

        Args:
            tier: which.
            nbytes: of all that is to lie there.
            longest_bytes: of the longest that lies in one piece; all of it where None.

        Raises:
            ConfigError: the disk tier has the size that it was opened with.
        """
        if tier is Tier.HOST:
            self._more_host(_pages(nbytes) + self._lost_between(nbytes if longest_bytes is None else longest_bytes))
            return
        raise ConfigError(
            f"optimizer state that came after the start needs {format_size(nbytes)} more on disk, whose file was made "
            "with what was needed then. Raise pool.host_budget, or add the param groups before training starts."
        )

    def open_host(self) -> None:
        """Open the host tier, with nothing mapped yet. Does nothing when it is open."""
        if Tier.HOST not in self.stores:
            self._more_host(0)

    def make_room_for(
        self, units: Sequence[Mapping[Block, int]], homes: Mapping[Block, Tier], *, staging_bytes: int = 0
    ) -> None:
        """Open the tiers that hold something, and map what blocks need that are to rest off the device and do not yet.

        Args:
            units: the blocks of each unit, which lie together.
            homes: where they are to rest.
            staging_bytes: of the host tier, beside.

        Raises:
            ConfigError: the disk tier is open, and too small.
        """
        groups = {
            tier: [[n for b, n in unit.items() if homes[b] is tier and not self._is_in(b, tier)] for unit in units]
            for tier in (Tier.HOST, Tier.DISK)
        }
        host = self.stores.get(Tier.HOST)
        if isinstance(host, HostStore):
            with self._table.frozen():
                free, all_ = self._table.free_bytes(Tier.HOST), groups[Tier.HOST]
                groups[Tier.HOST] = left_over(all_, host.regions)
            free -= sum(map(group_bytes, all_)) - sum(map(group_bytes, groups[Tier.HOST]))
            staging_bytes = max(0, staging_bytes - max(0, free))
        longest = [*map(group_bytes, groups[Tier.HOST]), staging_bytes]
        # What is staged may come between two optimizers' groups; else it is known how these lie.
        on_host = sum(map(group_bytes, groups[Tier.HOST])) if staging_bytes else packed_bytes(groups[Tier.HOST])
        on_disk = sum(map(group_bytes, groups[Tier.DISK]))
        if on_disk > 0 and Tier.DISK in self.stores:
            on_disk -= self._table.free_bytes(Tier.DISK)
            if on_disk > 0:
                self.make_room(Tier.DISK, on_disk)
        if on_disk > 0:
            staging_bytes += (WORKERS + 1) * CHUNK_BYTES
            longest.append(CHUNK_BYTES)
        if (more := _pages(on_host + staging_bytes + self._lost_between(max(longest)))) > 0:
            self._more_host(more)
        if on_disk > 0:
            self._add(DiskStore(self._table, _pages(on_disk), self._folder(), host=self.stores[Tier.HOST]))

    def _lost_between(self, longest_bytes: int) -> int:
        """What lies in one piece lies in one arena: what is left at the ends of the others may be too short for it."""
        return (arena_count() - 1) * _pages(longest_bytes)

    def _is_in(self, block: Block, tier: Tier) -> bool:
        return block in self._table and self._table.locate(block).tier is tier

    def for_activations(self) -> Pool:
        """The pool, its host tier as large as ``host_budget`` lets it be; mapped once, between two steps."""
        host = self.stores.get(Tier.HOST)
        held = host.mapped_bytes if isinstance(host, HostStore) else 0
        self._more_host(self.host_budget_bytes(held) - held)
        return self.pool

    def host_budget_bytes(self, held_bytes: int = 0) -> int:
        """What this rank may map on the host, ``held_bytes`` of which it has mapped."""
        budget = host_budget_bytes(self._config, self._table.rank, unused_memory_bytes() + held_bytes)
        return max(0, budget - self.engine_host_bytes)

    def disk_budget_bytes(self) -> int:
        """What this rank may take on disk; once the tier is open, what it has.

        Raises:
            ConfigError: the folder is not there.
        """
        if Tier.DISK in self.stores:
            return self._table.capacity_bytes(Tier.DISK)
        if self._config.disk_path is not None and not Path(self._config.disk_path).is_dir():
            raise ConfigError(f"pool.disk_path={self._config.disk_path} is no folder here. Make it, or name another.")
        return disk_budget_bytes(self._config, self._table.rank)

    def count_staging(self) -> None:
        """Book the slots on the device with the account, again when they changed."""
        memory = self._runtime.memory
        now = self._table.balance(Tier.DEVICE, kind=Kind.STAGING).bytes
        if memory is not None:
            memory.remove(Kind.STAGING, self._staging_bytes)
            memory.add(Kind.STAGING, now)
            self._staging_bytes = now

    def close(self) -> None:
        """Close the stores; blocks that are left are dropped."""
        if self._runtime is not None and self._runtime.memory is not None and self._staging_bytes:
            self._runtime.memory.remove(Kind.STAGING, self._staging_bytes)
        self._staging_bytes = 0
        self._reserve.detach()
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _more_host(self, nbytes: int) -> None:
        host = self.stores.get(Tier.HOST)
        if not isinstance(host, HostStore):
            self._add(HostStore(self._table, nbytes, device=self._runtime.device))
        elif nbytes > 0:
            before = list(host.storages())
            host.extend(nbytes)
            self._ignore([s for s in host.storages() if all(s is not old for old in before)])

    def _add(self, store: Store) -> None:
        runtime = self._runtime
        if self.pool is None:
            self.pool = Pool(
                self._table, [store], timeout_s=runtime.config.timeout_s, record_spans=runtime.config.overlap.trace
            )
        else:
            self.pool.stores[store.tier] = store
        self._ignore(list(store.storages()))

    def _ignore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        if self._runtime.memory is not None:
            for storage in storages:
                self._runtime.memory.ignore(storage)

    def _folder(self) -> Path:
        if self._config.disk_path is None:
            raise ConfigError("pool.disk_budget is set, but not where: set pool.disk_path to a folder on a local disk.")
        return Path(self._config.disk_path)


def _pages(nbytes: int) -> int:
    return aligned(nbytes, PAGE_BYTES)
