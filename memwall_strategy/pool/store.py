"""Stores: the memory behind a tier, under one interface for device, host and disk.

A store moves bytes between its own placements and tensors, and returns when they are there. ``Pool`` runs these calls
on lanes and hands out a handle for each. Which bytes are whose is the address table's affair: a store opens its tier
there, adds its arenas, and trusts every placement of its tier.

What orders what on CUDA: the caller's ``after`` event was recorded on the stream that last wrote the source and last
read the destination; the copy's own stream waits for it; the call returns after that stream is empty. So whoever sees
the call return may use the bytes on any stream, and no buffer is freed while a copy runs. On CPU the copy runs in the
calling thread, and ``after`` is None.
"""

from __future__ import annotations

import ctypes
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from memwall_strategy.core.block import Placement, Tier
from memwall_strategy.core.errors import BlockError
from memwall_strategy.pool.arena import Region
from memwall_strategy.pool.extent import Extent, extent_of
from memwall_strategy.pool.table import AddressTable

Pairs = Iterable[tuple[Placement, torch.Tensor | Extent]]
"""Placements, each with the contiguous tensor that its bytes come from or go to."""


def matched(pairs: Pairs) -> list[tuple[Placement, Extent]]:
    """The pairs with their tensors as memory; each tensor must be exactly as long as its block.

    Raises:
        BlockError: it is not, or it is not contiguous.
    """
    out = []
    for placement, tensor in pairs:
        extent = extent_of(tensor)
        if extent.nbytes != placement.bytes:
            raise BlockError(
                f"a tensor of {extent.nbytes} bytes for a block of {placement.bytes} bytes in the {placement.tier} tier"
            )
        out.append((placement, extent))
    return out


class Copier:
    """Copies bytes between one device and the host, each calling thread on a stream of its own.

    On CPU one thread copies, so that paging takes one core and no more, whatever the number of torch's threads.

    Args:
        device: the accelerator, or CPU.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._local = threading.local()

    def now(self) -> torch.cuda.Event | None:
        """A mark behind all that the calling thread's current stream was given; None on CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Extent, Extent]], after: torch.cuda.Event | None = None) -> None:
        """Copy each second extent into its first, of equal length, and return when the bytes are there."""
        pairs, across = list(pairs), []  # the list keeps the memory while addresses of it are in use
        stretches: list[tuple[int, int, int]] = []
        for target, source in pairs:
            if target.on_cpu and source.on_cpu:
                _append(stretches, target.address, source.address, target.nbytes)
            else:
                across.append((target, source))
        if stretches and after is not None:  # the host copies at once, whatever streams still do
            after.synchronize()
        for to, where, nbytes in stretches:
            ctypes.memmove(to, where, nbytes)
        if not across:
            return
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self.device)
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for target, source in across:
                target.tensor().copy_(source.tensor(), non_blocking=True)
        stream.synchronize()


def _append(stretches: list[tuple[int, int, int]], target: int, source: int, nbytes: int) -> None:
    """Add a copy of bytes between two addresses, to the last one where it goes on on both sides.

    Each copy lets go of Python's lock and may wait to get it back, which costs more than copying a small tensor.
    """
    if stretches:
        to, where, before = stretches[-1]
        if (to + before, where + before) == (target, source):
            stretches[-1] = (to, where, before + nbytes)
            return
    stretches.append((target, source, nbytes))


class Store(ABC):
    """The memory behind one tier of this rank. Made open; ``close`` gives everything back.

    Attributes:
        tier: which one.
        table: the address table that knows its blocks.
        addressable: whether ``view`` works.
    """

    tier: Tier
    table: AddressTable
    addressable: bool

    @abstractmethod
    def read(self, pairs: Pairs, after: torch.cuda.Event | None = None) -> None:
        """Copy each placement's bytes into its tensor.

        Args:
            pairs: placements of this tier, and contiguous tensors of exactly their length, on CPU or the pool's device.
            after: see the module.

        Raises:
            BlockError: a tensor that does not fit.
            TransferError: the medium failed.
        """

    @abstractmethod
    def write(self, pairs: Pairs, after: torch.cuda.Event | None = None) -> None:
        """Copy each tensor's bytes into its placement; as ``read``. What failed half way left its blocks torn."""

    @abstractmethod
    def view(self, placement: Placement, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The block's memory as a tensor, without a copy. It must not be used after the block moved or was dropped.

        Raises:
            BlockError: the tier has no addresses, or the block has another length.
        """

    @abstractmethod
    def shift(self, arena: str, source: Region, to: int) -> None:
        """Move bytes down within an arena; the two stretches may overlap."""

    def storages(self) -> Iterable[torch.UntypedStorage]:
        """What torch holds the tier's memory by; nothing where it has no addresses, or torch allocates each block."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Give memory and files back and close the tier in the table; every block must have left it. Idempotent.

        Raises:
            BlockError: blocks are left; nothing was closed.
        """


class MemoryStore(Store):
    """What device and host share: arenas that are tensors of bytes."""

    addressable = True

    def __init__(self, table: AddressTable, copier: Copier) -> None:
        self.table, self.copier = table, copier
        self._arenas: dict[str, torch.Tensor] = {}

    def bytes_of(self, placement: Placement) -> torch.Tensor:
        """The block's memory as a vector of bytes, without a copy."""
        if placement.bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device(placement))
        return self._arenas[placement.arena][placement.offset : placement.offset + placement.bytes]

    def extent_of(self, placement: Placement) -> Extent:
        """The block's memory, for copies."""
        memory = self._arenas.get(placement.arena)
        if memory is None or not placement.bytes:
            return extent_of(self.bytes_of(placement))
        return Extent(memory, placement.offset, placement.bytes, memory.data_ptr() + placement.offset)

    def storages(self) -> Iterable[torch.UntypedStorage]:
        return [memory.untyped_storage() for memory in self._arenas.values()]

    def view(self, placement: Placement, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        if math.prod(shape) * dtype.itemsize != placement.bytes:
            raise BlockError(f"a view of shape {tuple(shape)}, {dtype} on a block of {placement.bytes} bytes")
        return self.bytes_of(placement).view(dtype).view(tuple(shape))

    def read(self, pairs: Pairs, after: torch.cuda.Event | None = None) -> None:
        self.copier.copy([(extent, self.extent_of(placement)) for placement, extent in matched(pairs)], after)

    def write(self, pairs: Pairs, after: torch.cuda.Event | None = None) -> None:
        self.copier.copy([(self.extent_of(placement), extent) for placement, extent in matched(pairs)], after)

    def shift(self, arena: str, source: Region, to: int) -> None:
        base = self._arenas[arena].data_ptr()
        ctypes.memmove(base + to, base + source.offset, source.bytes)  # as if the source were read first

    def _device(self, placement: Placement) -> torch.device:
        return torch.device("cpu")
