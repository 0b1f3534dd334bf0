"""The device tier: memory where the arithmetic runs, under a cap.

On CPU one mapping of the cap's size hands out regions; its pages become resident as they are touched, and ``trim``
gives free ones back. On CUDA torch's allocator hands out each block, so that pool and engine share one allocator and
no memory is set aside for either. On both, what the engine holds can be booked in the arena ``"engine"`` and counts
against the same cap.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch

from memwall_strategy.core.block import Placement, Tier
from memwall_strategy.pool.arena import Arena, BookedArena, Region, aligned
from memwall_strategy.pool.mapping import Mapping
from memwall_strategy.pool.store import Copier, MemoryStore
from memwall_strategy.pool.table import AddressTable

ENGINE = "engine"
"""Arena in which blocks are booked that the engine allocates."""

CUDA_GRANULE_BYTES = 512
"""torch's CUDA allocator rounds every request up to this (``kMinBlockSize`` of its caching allocator)."""


class TorchArena:
    """Regions from torch's CUDA allocator; the offset of a region is its address.

    Blocks are allocated on the stream that was current when the arena was made (the compute stream). The allocator
    gives memory that is freed on that stream to later work of that stream, in order; copies on other streams have
    ended by then, because ``Copier.copy`` waits for them. A tensor from ``view`` that is still held keeps its memory
    from torch, although the table counts it as free: views must not outlive their block.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._tensors: dict[int, torch.Tensor] = {}

    def allocate(self, nbytes: int, alignment: int | None = None, *, pad: bool = True) -> Region | None:
        """A region of its own; None where torch has no memory left."""
        size = self.held(nbytes, alignment)
        if size == 0:
            return Region(0, 0)
        if alignment is not None and CUDA_GRANULE_BYTES % alignment:
            raise ValueError(f"torch's CUDA allocator aligns to {CUDA_GRANULE_BYTES} bytes, not to {alignment}")
        try:
            with torch.cuda.stream(self._stream):
                tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return None
        self._tensors[tensor.data_ptr()] = tensor
        return Region(tensor.data_ptr(), size)

    def free(self, offset: int) -> None:
        """Give the region back to torch."""
        del self._tensors[offset]

    def held(self, nbytes: int, alignment: int | None = None, *, pad: bool = True) -> int:
        """``nbytes`` rounded up as torch's allocator does."""
        return aligned(nbytes, CUDA_GRANULE_BYTES)

    def regions(self) -> Iterator[Region]:
        """Every region, by address."""
        return (Region(address, self._tensors[address].numel()) for address in sorted(self._tensors))

    def tensor(self, offset: int) -> torch.Tensor:
        """The region's bytes."""
        return self._tensors[offset]

    @property
    def largest_hole_bytes(self) -> None:
        return None


class DeviceStore(MemoryStore):
    """The device tier of this rank.

    Args:
        table: where the tier is opened.
        capacity_bytes: the cap, over the pool's blocks and what is booked for the engine.
        device: ``cpu`` or a CUDA device.
        reserve_bytes: part of the cap that only borrowers get.
        joins: the tier is open in the table, with the arena of what the engine holds.
    """

    tier = Tier.DEVICE

    def __init__(
        self,
        table: AddressTable,
        capacity_bytes: int,
        *,
        device: torch.device | str = "cpu",
        reserve_bytes: int = 0,
        joins: bool = False,
    ) -> None:
        super().__init__(table, Copier(device))
        self.device = torch.device(device)
        if not joins:
            table.open_tier(self.tier, capacity_bytes, reserve_bytes=reserve_bytes)
            table.add_arena(self.tier, ENGINE, BookedArena())
        self._mapping: Mapping | None = None
        self._closed = False
        if self.device.type == "cuda":
            self._torch = TorchArena(self.device)
            table.add_arena(self.tier, "torch", self._torch)
        else:
            self._mapping = Mapping(capacity_bytes - capacity_bytes % mmap.PAGESIZE)
            self._arena = Arena(self._mapping.nbytes)
            self._arenas["device"] = self._mapping.bytes
            table.add_arena(self.tier, "device", self._arena)

    def bytes_of(self, placement: Placement) -> torch.Tensor:
        if self.device.type == "cuda" and placement.bytes:
            return self._torch.tensor(placement.offset)[: placement.bytes]
        return super().bytes_of(placement)

    def trim(self) -> int:
        """On CPU, give the resident pages of every hole back to the kernel; returns the bytes of these holes."""
        if self._mapping is None:
            return 0
        with self.table.frozen():
            return sum(self._mapping.give_back(hole.offset, hole.bytes) for hole in self._arena.holes())

    def close(self) -> None:
        if not self._closed:
            self.table.close_tier(self.tier)
            self._arenas.clear()
            self._mapping = None
            self._closed = True

    def _device(self, placement: Placement) -> torch.device:
        return self.device
