"""Arenas: who owns which bytes of one stretch of memory or of one file.

Alignment rule of ``Arena``: a block of at least ``LARGE_BYTES`` starts and ends on a page (``PAGE_BYTES``), so that
direct I/O needs no copy and no other block shares its pages; the padding is below 1.6 % of it. A smaller block starts
and ends on ``GRANULE_BYTES``, so that thousands of small tensors share pages and pad at most 63 bytes each.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

GRANULE_BYTES = 64
"""A cache line, and what torch aligns CPU tensors to."""

PAGE_BYTES = 4096
"""Alignment that direct I/O accepts on every file system that has it, for offsets and for memory."""

LARGE_BYTES = 256 * 1024
"""From here on a block has its pages for itself."""

_ALIGNED_TRIES = 16
"""Holes looked at, smallest first, before a hole is taken that fits wherever it starts."""


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of an arena that is handed out."""

    offset: int
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes


class Regions(Protocol):
    """What the address table needs of an arena; ``Arena`` and torch's allocator under a cap both are one."""

    def allocate(self, nbytes: int, alignment: int | None = None, *, pad: bool = True) -> Region | None:
        """A region of at least ``nbytes``, or None where no stretch is free that is long enough."""

    def free(self, offset: int) -> None:
        """Take back the region that starts at ``offset``."""

    def held(self, nbytes: int, alignment: int | None = None, *, pad: bool = True) -> int:
        """Bytes that a block of ``nbytes`` holds, padding included."""

    def regions(self) -> Iterable[Region]:
        """Every region that is handed out."""

    @property
    def largest_hole_bytes(self) -> int | None:
        """The longest free stretch; None where the arena has no addresses of its own."""


def aligned(nbytes: int, alignment: int) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


class Arena:
    """Best fit with coalescing over ``[0, capacity)``.

    Of all holes that fit, the smallest is taken, and of equal ones the first. Neighbouring holes are always one hole.
    Finding a hole takes O(log n) comparisons; keeping the list of holes sorted moves pointers, a few microseconds at
    ten thousand holes. Not thread-safe by itself: the address table holds its lock.

    Args:
        capacity_bytes: length; the part of it that is no whole granule is never handed out.
        page_blocks: apply the page rule to large blocks (see the module).
    """

    def __init__(self, capacity_bytes: int, *, page_blocks: bool = True) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"an arena of {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes - capacity_bytes % GRANULE_BYTES
        self._large_bytes = LARGE_BYTES if page_blocks else None
        self._live: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # holes: start -> end, and back
        self._ends: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # holes: (bytes, start)
        self.used_bytes = 0
        if self.capacity_bytes:
            self._add_hole(0, self.capacity_bytes)

    def alignment(self, nbytes: int) -> int:
        """Alignment of a block of ``nbytes``."""
        return PAGE_BYTES if self._large_bytes is not None and nbytes >= self._large_bytes else GRANULE_BYTES

    def held(self, nbytes: int, alignment: int | None = None, *, pad: bool = True) -> int:
        """Bytes that a block of ``nbytes`` holds, padding included."""
        return aligned(nbytes, (alignment or self.alignment(nbytes)) if pad else GRANULE_BYTES)

    def allocate(self, nbytes: int, alignment: int | None = None, *, pad: bool = True) -> Region | None:
        """The best hole's first aligned bytes, or None where no hole fits. Zero bytes take no room.

        Args:
            nbytes: length of the block.
            alignment: of its start and its end, a power of two times the granule; by the rule where None.
            pad: False: its end only needs the granule.
        """
        alignment = alignment or self.alignment(nbytes)
        if alignment % GRANULE_BYTES:
            raise ValueError(f"alignment {alignment} is no multiple of {GRANULE_BYTES}")
        size = self.held(nbytes, alignment, pad=pad)
        if size == 0:
            return Region(0, 0)
        start = self._best_fit(size, alignment)
        if start is None:
            return None
        end = self._starts[start]
        self._remove_hole(start)
        offset = aligned(start, alignment)
        if offset > start:
            self._add_hole(start, offset)
        if offset + size < end:
            self._add_hole(offset + size, end)
        self._live[offset] = size
        self.used_bytes += size
        return Region(offset, size)

    def cut(self, offset: int, sizes: Sequence[int]) -> list[Region]:
        """Cut the region at ``offset`` into regions of ``sizes``, which must add up to it; zeros take no room."""
        if sum(sizes) != self._live[offset]:
            raise ValueError(f"{list(sizes)} do not add up to {self._live[offset]}")
        pieces = []
        for size in sizes:
            pieces.append(Region(offset, size) if size else Region(0, 0))
            if size:
                self._live[offset] = size
            offset += size
        return pieces

    def free(self, offset: int) -> None:
        """Take back the region that starts at ``offset`` and join it with the holes beside it."""
        size = self._live.pop(offset)
        self.used_bytes -= size
        start, end = offset, offset + size
        if start in self._ends:
            start = self._ends[start]
            self._remove_hole(start)
        if end in self._starts:
            after, end = end, self._starts[end]
            self._remove_hole(after)
        self._add_hole(start, end)

    def shift(self, offset: int, to: int) -> None:
        """Move the region at ``offset`` down to ``to``; what it passes over must be free.

        Raises:
            ValueError: it is not free.
        """
        size = self._live[offset]
        self.free(offset)
        hole = next((start for start in (to, self._hole_around(to)) if start in self._starts), None)
        if hole is None or self._starts[hole] < to + size:
            self._take(offset, size)
            raise ValueError(f"bytes {to} to {to + size} are not free")
        self._take(to, size)

    def regions(self) -> Iterator[Region]:
        """Every region that is handed out, by offset."""
        return (Region(offset, self._live[offset]) for offset in sorted(self._live))

    def holes(self) -> list[Region]:
        """Every free stretch, by offset."""
        return [Region(start, self._starts[start] - start) for start in sorted(self._starts)]

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_hole_bytes(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that the largest hole does not hold: 0.0 is one hole (or none)."""
        return 1.0 - self.largest_hole_bytes / self.free_bytes if self.free_bytes else 0.0

    # -- holes --

    def _best_fit(self, size: int, alignment: int) -> int | None:
        first = bisect.bisect_left(self._by_size, (size, 0))
        if alignment == GRANULE_BYTES:
            return self._by_size[first][1] if first < len(self._by_size) else None
        # Every start is a multiple of the granule, so a hole this long fits wherever it starts.
        sure = bisect.bisect_left(self._by_size, (size + alignment - GRANULE_BYTES, 0), first)
        tries = _ALIGNED_TRIES if sure < len(self._by_size) else len(self._by_size)  # nothing sure: look at them all
        for hole, start in self._by_size[first : min(sure, first + tries)]:
            if aligned(start, alignment) + size <= start + hole:
                return start
        return self._by_size[sure][1] if sure < len(self._by_size) else None

    def _add_hole(self, start: int, end: int) -> None:
        self._starts[start] = end
        self._ends[end] = start
        bisect.insort(self._by_size, (end - start, start))

    def _remove_hole(self, start: int) -> None:
        end = self._starts.pop(start)
        del self._ends[end]
        del self._by_size[bisect.bisect_left(self._by_size, (end - start, start))]

    def _hole_around(self, offset: int) -> int:
        return max((start for start in self._starts if start <= offset), default=-1)

    def _take(self, offset: int, size: int) -> None:
        start = self._hole_around(offset)
        end = self._starts[start]
        self._remove_hole(start)
        if start < offset:
            self._add_hole(start, offset)
        if offset + size < end:
            self._add_hole(offset + size, end)
        self._live[offset] = size
        self.used_bytes += size


class BookedArena:
    """Bytes that somebody else allocates (the engine's gathered weights, say), booked at their addresses."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}

    def book(self, offset: int, nbytes: int) -> Region:
        """Note that ``nbytes`` at ``offset`` are held.

        Raises:
            ValueError: something is booked at that offset already.
        """
        if offset in self._live and nbytes:
            raise ValueError(f"address {offset:#x} is booked already")
        if nbytes:
            self._live[offset] = nbytes
        return Region(offset, nbytes)

    def allocate(self, nbytes: int, alignment: int | None = None, *, pad: bool = True) -> Region | None:
        """Never: what is here was allocated elsewhere."""
        return Region(0, 0) if nbytes == 0 else None

    def free(self, offset: int) -> None:
        """Forget what is booked at ``offset``."""
        del self._live[offset]

    def held(self, nbytes: int, alignment: int | None = None, *, pad: bool = True) -> int:
        """The bytes themselves: padding is the other allocator's affair."""
        return nbytes

    def regions(self) -> Iterator[Region]:
        """Everything that is booked, by address."""
        return (Region(offset, self._live[offset]) for offset in sorted(self._live))

    @property
    def largest_hole_bytes(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Shift:
    """One move of a defragmentation: ``bytes`` from ``offset`` down to ``to``; the two may overlap."""

    offset: int
    to: int
    bytes: int


def defragment(regions: Iterable[Region], *, pinned: Collection[int] = ()) -> list[Shift]:
    """The moves that close every gap, in an order in which each lands on free bytes: sliding compaction.

    Args:
        regions: what is live in one arena, in any order. One that starts and ends on a page keeps that.
        pinned: offsets of regions that stay where they are.

    Returns:
        Moves by rising offset, each downwards. Gaps that remain are alignment, or lie before a pinned region.
    """
    moves, end = [], 0
    for region in sorted(regions, key=lambda r: r.offset):
        paged = region.offset % PAGE_BYTES == 0 and region.bytes % PAGE_BYTES == 0
        to = min(aligned(end, PAGE_BYTES if paged else GRANULE_BYTES), region.offset)
        if region.offset in pinned:
            to = region.offset
        if to < region.offset:
            moves.append(Shift(region.offset, to, region.bytes))
        end = to + region.bytes
    return moves
