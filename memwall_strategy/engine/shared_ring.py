"""A ring of slots in memory that the ranks of one group share: each slot holds one collective's data at a time.

A slot is one range of the segment, the same on every rank, with a part for each rank that only this rank writes. One
collective goes like this, on every rank:

1. ``reserve`` a slot, the same one everywhere because every rank asks in the same order; it waits until all ranks let
   go of the slot's last tenant;
2. write this rank's part, in place; ``arrive``;
3. ``wait`` until all ranks arrived; read their parts, in place;
4. ``release``: the ranks may write the slot again (``free`` lets this rank reserve it again).

A collective has a tag, which grows with each: its generation and its number. For each slot every rank publishes the tag
that it arrived with and the tag that it released, each a word that only it writes, stored after the data it speaks of
(what orders the two: ``engine.shared_memory``). A part is read only if its tag is exactly the reader's, so neither a
former tenant's data nor a half-written part can be taken for what was awaited; ranks that are out of step raise.

``reset`` starts a new generation after an aborted step: whatever was in flight is void, on every rank that resets.
Ranks that wait for one that did raise at once.

Waiting does not spin: on two cores that two ranks share, spinning takes the time of the very rank that is awaited. A
waiter sleeps until a doorbell rings, and looks every ``TICK_S`` whether something was lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memwall_strategy.core.errors import CollectiveError, MemwallError, PeerLost
from memwall_strategy.engine.shared_memory import map_sealed
from memwall_strategy.engine.shared_peers import Connection

TICK_S = 0.05
"""Longest sleep of a waiter before it looks whether its group still stands."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 2e-3
"""Sleeps of one who waits for a slot, doubling: nobody rings for that, since it seldom has to wait."""
_LINE_BYTES = 64
_WORD_BYTES = 8
_OPEN, _CLOSED = 0, 1
_STATE, _GENERATION, _LATEST, _FIRST_SLOT = range(4)
"""Words of a rank: whether its ring is open, its generation, the last tag it arrived with; then two for each slot."""
_GENERATION_SHIFT = 40
"""A tag is generation << 40 | number."""


class RingGroup(Protocol):
    """What a ring needs of its process group (``engine.shared_windows``)."""

    rank: int
    world: int
    ranks: tuple[int, ...]
    """Global ranks, by group rank."""

    def issue(self, name: str) -> None:
        """This rank arrives at the collective ``name``."""

    def check(self, name: str) -> None:
        """Raise what the group raises once it was torn down or replaced."""

    def failure(self, name: str, detail: str, error: type[MemwallError], ranks: tuple[int, ...]) -> MemwallError:
        """What to raise for a failed collective: agreed with the other ranks, else ``error`` with global ``ranks``."""


class _Slot:
    __slots__ = ("bytes", "free", "index", "nbytes", "stride_bytes", "tag", "used")

    def __init__(self, index: int, nbytes: int, stride_bytes: int, bytes_: torch.Tensor) -> None:
        self.index, self.nbytes, self.stride_bytes, self.bytes = index, nbytes, stride_bytes, bytes_
        self.free, self.tag, self.used = True, 0, 0


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """One collective's hold on a slot."""

    ring: SharedRing
    slot: _Slot
    tag: int
    nbytes: int

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The first ``nbytes`` of the slot, flat: all ranks' parts behind each other (an undivided slot)."""
        return self.slot.bytes[: self.nbytes].view(dtype)

    def part(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """``nbytes`` that belong to ``rank``, flat (a divided slot)."""
        start = rank * self.slot.stride_bytes
        return self.slot.bytes[start : start + self.nbytes].view(dtype)


class SharedRing:
    """This rank's view of the ring.

    Args:
        connection: to the other ranks; the ring owns it from now on.
        group: see ``RingGroup``.
        sizes_bytes: of the slots; what the largest collectives that are in flight together need.
        divided: each rank has a part of ``size`` bytes in each slot; otherwise the ranks share ``size`` bytes.
        timeout_s: gives the longest wait.
        count: told the bytes that this rank reads from the others' parts.

    Attributes:
        divided: as given.
        total_bytes: of the segment, which the ranks hold together.
    """

    def __init__(
        self,
        connection: Connection,
        group: RingGroup,
        sizes_bytes: Sequence[int],
        *,
        divided: bool,
        timeout_s: Callable[[], float],
        count: Callable[[int], None],
    ) -> None:
        self._connection, self._group, self._timeout_s = connection, group, timeout_s
        self.divided, self._count = divided, count
        self.total_bytes, offsets, strides = layout(sizes_bytes, group.world, divided=divided)
        try:
            memory = map_sealed(connection.descriptor, self.total_bytes)
        finally:
            os.close(connection.descriptor)
        self._words = memoryview(memory)[: offsets[0]].cast("q")  # an aligned word is one store, and one load
        self._words_per_rank = _words_per_rank(len(sizes_bytes))
        self._slots = []
        for i, (offset, stride) in enumerate(zip(offsets, strides, strict=True)):
            extent = stride * group.world if divided else stride
            data = torch.frombuffer(memory, dtype=torch.uint8, count=extent, offset=offset)
            self._slots.append(_Slot(i, sizes_bytes[i], stride, data))
        self._generation = self._number = 0
        self._closed = False
        self._peers = [rank for rank in range(group.world) if rank != group.rank]

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The slots' memory, as torch sees it."""
        return [slot.bytes.untyped_storage() for slot in self._slots]

    # -- one collective --

    def fits(self, nbytes: int) -> bool:
        """Whether any slot, taken or not, is large enough; the same answer on every rank."""
        return nbytes > 0 and any(slot.nbytes >= nbytes for slot in self._slots)

    def reserve(self, nbytes: int, name: str) -> Lease | None:
        """Take the smallest slot that is free on this rank and large enough; None where there is none.

        Every rank must ask, and ``free``, in the same order: then each gets the same slot. Waits until every rank has
        let go of what was in it.
        """
        found = [slot for slot in self._slots if slot.free and slot.nbytes >= nbytes > 0]
        if not found:
            return None
        slot = min(found, key=lambda slot: (slot.nbytes, slot.used))
        self._wait(name, lambda rank: self._words[self._at(rank, slot) + 1] >= slot.tag, rings=False)
        self._number += 1
        slot.free, slot.used = False, self._number
        slot.tag = self._generation << _GENERATION_SHIFT | self._number
        return Lease(self, slot, slot.tag, nbytes)

    def arrive(self, lease: Lease, name: str) -> None:
        """This rank's part is written."""
        if not self.is_current(lease):
            raise CollectiveError(f"{name}: the step that it belongs to was given up, or its lanes were closed.")
        self._group.issue(name)
        self._words[self._at(self._group.rank, lease.slot)] = lease.tag
        self._words[self._base(self._group.rank) + _LATEST] = lease.tag
        self._connection.ring()

    def wait(self, lease: Lease, name: str, read_bytes: int) -> None:
        """Return when every rank's part is written.

        Args:
            read_bytes: of the others' parts that this rank will read; counted.

        Raises:
            PeerLost: a rank's process ended.
            CollectiveError: a rank did not come in time, gave this step up, or is at another collective.
        """
        slot, tag = lease.slot, lease.tag
        self._wait(name, lambda rank: self._words[self._at(rank, slot)] == tag, rings=True, tag=tag)
        self._count(read_bytes)

    def release(self, lease: Lease) -> None:
        """This rank has read what it needs. Idempotent; any thread."""
        at = self._at(self._group.rank, lease.slot) + 1
        if self.is_current(lease) and self._words[at] < lease.tag:
            self._words[at] = lease.tag

    def free(self, lease: Lease) -> None:
        """Let this rank reserve the slot again; on the thread that reserves, at the same point on every rank."""
        if self.is_current(lease) and lease.slot.tag == lease.tag:
            lease.slot.free = True

    def is_current(self, lease: Lease) -> bool:
        """Whether the lease is of the present generation."""
        return not self._closed and lease.tag >> _GENERATION_SHIFT == self._generation

    def reset(self) -> None:
        """Void whatever is in flight: a new generation. Nobody on this rank reads or waits any more."""
        if self._closed:
            return
        self._generation, self._number = self._generation + 1, 0
        base = self._base(self._group.rank)
        self._words[base + _GENERATION] = self._generation
        for slot in self._slots:
            slot.free, slot.used = True, 0
            self._words[self._at(self._group.rank, slot) + 1] = self._generation << _GENERATION_SHIFT

    def close(self) -> None:
        """Tell the peers that this rank will not come any more. The memory goes with its last tensor. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._words[self._base(self._group.rank)] = _CLOSED
        self._connection.ring()
        self._connection.close()

    # -- waiting --

    def _wait(self, name: str, ready: Callable[[int], bool], *, rings: bool, tag: int = 0) -> None:
        missing = [rank for rank in self._peers if not ready(rank)]
        if not missing:
            return
        deadline, pause_s = time.monotonic() + self._timeout_s(), _FIRST_PAUSE_S
        while True:
            if self._closed:
                raise CollectiveError(f"{name}: this process closed the shared window meanwhile.")
            self._group.check(name)
            self._look_for_trouble(name, missing, ready, tag)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                self._fail(name, missing, "had not arrived in time", CollectiveError)
            if rings:
                self._connection.sleep(min(TICK_S, remaining_s))
            else:
                time.sleep(min(pause_s, remaining_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            missing = [rank for rank in missing if not ready(rank)]
            if not missing:
                return

    def _look_for_trouble(self, name: str, missing: list[int], ready: Callable[[int], bool], tag: int) -> None:
        """Raise where one of the ranks will never come. What it published before its end still counts."""
        words = self._words
        dead = self._connection.dead()
        closed = [rank for rank in missing if words[self._base(rank) + _STATE] == _CLOSED]
        void = [rank for rank in missing if words[self._base(rank) + _GENERATION] > self._generation]
        ahead = [rank for rank in missing if tag and words[self._base(rank) + _LATEST] > tag]
        if closed := [rank for rank in closed if not ready(rank)]:
            self._fail(name, closed, "had closed its lanes", CollectiveError)
        if any(not ready(rank) for rank in dead if rank in missing):
            self._fail(name, dead, "ended: its connection was closed", PeerLost)
        if void := [rank for rank in void if not ready(rank)]:
            self._fail(name, void, "had given up the step", CollectiveError)
        if ahead := [rank for rank in ahead if not ready(rank)]:
            self._fail(name, ahead, "was at a later collective already", CollectiveError)

    def _fail(self, name: str, ranks: list[int], what: str, error: type[MemwallError]) -> None:
        lost = tuple(self._group.ranks[rank] for rank in ranks)
        detail = f"rank {', '.join(map(str, lost))} {what}"
        raise self._group.failure(name, detail, error, lost)

    # -- where the words are --

    def _base(self, rank: int) -> int:
        return rank * self._words_per_rank

    def _at(self, rank: int, slot: _Slot) -> int:
        return rank * self._words_per_rank + _FIRST_SLOT + 2 * slot.index


def layout(sizes_bytes: Sequence[int], world: int, *, divided: bool) -> tuple[int, list[int], list[int]]:
    """Total bytes of a ring's segment, the offset of each slot, and the bytes of each slot or of one rank's part."""
    offset = world * _words_per_rank(len(sizes_bytes)) * _WORD_BYTES  # whole cache lines
    offsets, strides = [], []
    for size in sizes_bytes:
        stride = _round_up(size, _LINE_BYTES)
        offsets.append(offset)
        strides.append(stride)
        offset += stride * (world if divided else 1)
    return offset, offsets, strides


def _words_per_rank(slots: int) -> int:
    return _round_up((_FIRST_SLOT + 2 * slots) * _WORD_BYTES, _LINE_BYTES) // _WORD_BYTES


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
