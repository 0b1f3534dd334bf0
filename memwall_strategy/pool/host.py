"""The host tier: one arena for each NUMA node, mapped once at set-up with its exact size, never grown.

With CUDA each arena is registered once (page-locked), so that copies run asynchronously at full speed. torch's own
pinned allocator rounds each request up to a power of two; here the bytes that are locked are the bytes of the arenas.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.arena import Arena
from memwall_strategy.pool.mapping import Mapping
from memwall_strategy.pool.numa import Node, bind, nodes, why_unbound
from memwall_strategy.pool.probe import tell_once, unused_memory_bytes
from memwall_strategy.pool.store import Copier, MemoryStore
from memwall_strategy.pool.table import AddressTable


class HostStore(MemoryStore):
    """The host tier of this rank.

    Args:
        table: where the tier is opened.
        capacity_bytes: bytes of all arenas together; the part that is no whole page is left out.
        device: the device that copies go to and come from; a CUDA device makes the arenas registered.
        reserve_bytes: part of it that only borrowers get.
        on: the nodes to take memory from, in order of preference, in proportion to their size; the machine's where
            None.

    Raises:
        ConfigError: more than is unused now, or the driver does not register it, or a node that was asked for cannot
            be bound.

    Attributes:
        regions: the books of its arenas, in the order in which they are tried.
    """

    tier = Tier.HOST

    def __init__(
        self,
        table: AddressTable,
        capacity_bytes: int,
        *,
        device: torch.device | str = "cpu",
        reserve_bytes: int = 0,
        on: Sequence[Node] | None = None,
    ) -> None:
        super().__init__(table, Copier(device))
        self._on = on
        self.regions: list[Arena] = []
        self._registered: list[int] = []
        self._closed = False
        try:
            maps = self._map(capacity_bytes)
            table.open_tier(self.tier, sum(m.nbytes for m in maps.values()), reserve_bytes=reserve_bytes)
        except BaseException:
            self._unregister()
            raise
        self._add(maps)

    def extend(self, capacity_bytes: int) -> None:
        """Map further arenas of the tier, between two steps; what is there stays where it is.

        Raises:
            ConfigError: as when the tier was made.
        """
        maps = self._map(capacity_bytes)
        more = sum(m.nbytes for m in maps.values())
        self.table.resize_tier(self.tier, capacity_bytes=self.table.capacity_bytes(self.tier) + more)
        self._add(maps)

    def _map(self, capacity_bytes: int) -> dict[str, Mapping]:
        if capacity_bytes > (unused := unused_memory_bytes()):
            raise ConfigError(
                f"pool.host_budget={format_size(capacity_bytes)} is above the {format_size(unused)} of memory that are "
                f"unused now. Lower it, or give pool.disk_budget the rest."
            )
        found = list(_bindable() if self._on is None else self._on)
        shares = _shares(capacity_bytes // mmap.PAGESIZE, [node.memory_bytes for node in found])
        part = len(self._arenas) // len(found)
        maps: dict[str, Mapping] = {}
        for node, pages in zip(found, shares, strict=True):
            name = f"node{node.index}" if part == 0 else f"node{node.index} part {part}"
            mapping = maps[name] = Mapping(pages * mmap.PAGESIZE)
            if len(found) > 1 and pages:
                bind(mapping.address, mapping.nbytes, node.index)  # before the first touch: it places new pages
            mapping.bytes.zero_()  # resident from now on: no page fault in a step, and no late surprise
            if self.copier.device.type == "cuda" and pages:
                self._register(mapping)
        return maps

    def _add(self, maps: dict[str, Mapping]) -> None:
        for name, mapping in maps.items():
            self.regions.append(Arena(mapping.nbytes))
            self.table.add_arena(self.tier, name, self.regions[-1])
            self._arenas[name] = mapping.bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all arenas; with CUDA they are locked."""
        return sum(memory.numel() for memory in self._arenas.values())

    def close(self) -> None:
        if not self._closed:
            self.table.close_tier(self.tier)
            self._unregister()
            self._arenas.clear()
            self._closed = True

    def _register(self, mapping: Mapping) -> None:
        result = torch.cuda.cudart().cudaHostRegister(mapping.address, mapping.nbytes, 0)
        if int(result) != 0:
            raise ConfigError(
                f"the CUDA driver does not register {format_size(mapping.nbytes)} of host memory "
                f"(cudaHostRegister: error {int(result)}). Lower pool.host_budget, or raise the memlock limit."
            )
        self._registered.append(mapping.address)

    def _unregister(self) -> None:
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())


def arena_count() -> int:
    """Arenas that a host tier is mapped in: one for each NUMA node."""
    return len(_bindable())


def _bindable() -> list[Node]:
    found = list(nodes())
    if why := why_unbound(found):
        tell_once(f"host memory is one arena, from whichever NUMA nodes the kernel takes: {why}")
        return [Node(0, 1)]
    return found


def _shares(pages: int, sizes: Sequence[int]) -> list[int]:
    """``pages`` split in proportion to ``sizes``, to the page; what rounding leaves goes to the first."""
    total = sum(sizes) or 1
    parts = [pages * size // total for size in sizes]
    parts[0] += pages - sum(parts)
    return parts
