"""The disk tier: one unnamed file, direct I/O, worker threads.

One call moves any number of blocks. Blocks that lie side by side become one run; runs are cut into chunks, and the
workers move chunks in parallel. A chunk goes straight between file and tensor where direct I/O can (host memory that
starts on a page, and whole pages); otherwise through a staging buffer, which is a block of the host tier.

Small blocks share pages (see ``pool.arena``): a chunk whose first or last page belongs to others too reads that page,
replaces its own bytes and writes it back, under a lock of that page. So thousands of small tensors cost their bytes
and no more, and a group of them (``AddressTable.allocate_group``) is one run.

GPU-direct storage (kvikio) is not used: bytes between disk and CUDA pass through the registered host arena.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue

import torch

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.core.errors import BlockError, TransferError
from memwall_strategy.pool.arena import PAGE_BYTES, Arena, Region, aligned
from memwall_strategy.pool.disk_file import DiskFile
from memwall_strategy.pool.extent import Extent
from memwall_strategy.pool.probe import tell_once
from memwall_strategy.pool.store import Copier, MemoryStore, Pairs, Store, matched
from memwall_strategy.pool.table import AddressTable

CHUNK_BYTES = 1024 * 1024
"""What one worker moves at a time; NVMe disks reach their full rate from about this size on at a small queue depth."""

WORKERS = 4
"""Requests in flight at a time."""

_STRIPES = 64
"""Locks over the pages that blocks share."""


@dataclass(frozen=True, slots=True)
class Span:
    """Memory whose bytes lie at ``offset`` of the file; up to ``end`` the file is theirs (padding included)."""

    offset: int
    end: int
    memory: Extent


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one request moves: ``start`` to ``end`` of the file, of which ``own`` belongs to the spans."""

    start: int
    end: int
    own: tuple[int, int]
    spans: tuple[Span, ...]


def chunks(spans: Iterable[Span], *, unit_bytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Join spans that lie side by side and cut what results into chunks, whose borders are whole units.

    Args:
        spans: in any order, none overlapping.
        unit_bytes: what requests must be multiples of: a page with direct I/O, else 1.
        chunk_bytes: a multiple of the unit.
    """
    run: list[Span] = []
    for span in sorted((s for s in spans if s.memory.nbytes), key=lambda s: s.offset):
        if run and run[-1].end != span.offset:
            yield from _cut(run, unit_bytes, chunk_bytes)
            run = []
        run.append(span)
    if run:
        yield from _cut(run, unit_bytes, chunk_bytes)


def _cut(run: Sequence[Span], unit_bytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    first, last = run[0].offset, run[-1].end
    start, at = first // unit_bytes * unit_bytes, 0
    while start < last:
        end = min(start // chunk_bytes * chunk_bytes + chunk_bytes, aligned(last, unit_bytes))
        while run[at].end <= start:
            at += 1
        reached = at
        while reached < len(run) and run[reached].offset < end:
            reached += 1
        yield Chunk(start, end, (max(start, first), min(end, last)), tuple(run[at:reached]))
        start = end


class DiskStore(Store):
    """The disk tier of this rank.

    Args:
        table: where the tier is opened.
        capacity_bytes: size of the file; the part that is no whole page is left out.
        folder: where the file is; a local disk.
        host: the host tier, which holds the staging buffers and with CUDA makes them registered memory.
        reserve_bytes: part of it that only borrowers get.
        workers: requests in flight.
        chunk_bytes: length of a request, whole pages.
        allow_direct: False: through the page cache, which then holds memory that no budget counts.

    Raises:
        ConfigError: the folder cannot be written, or has no room for the file.
        PoolFull: the host tier has no room for ``(workers + 1) * chunk_bytes`` of staging buffers.
    """

    tier = Tier.DISK
    addressable = False

    def __init__(
        self,
        table: AddressTable,
        capacity_bytes: int,
        folder: str | Path,
        *,
        host: MemoryStore,
        reserve_bytes: int = 0,
        workers: int = WORKERS,
        chunk_bytes: int = CHUNK_BYTES,
        allow_direct: bool = True,
    ) -> None:
        if workers < 1 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
            raise ValueError(f"{workers} workers with chunks of {chunk_bytes} bytes")
        self.table, self.copier = table, Copier(host.copier.device)
        self._host, self._chunk_bytes = host, chunk_bytes
        self._closed = False
        self.file = DiskFile(Path(folder), capacity_bytes - capacity_bytes % PAGE_BYTES, allow_direct=allow_direct)
        # One more than there are workers: a shift holds one while a worker's request needs another.
        self._staging = [Block("pool", f"disk staging {i}", Kind.STAGING) for i in range(workers + 1)]
        sizes = dict.fromkeys(self._staging, chunk_bytes)
        try:
            places = [table.allocate(b, n, Tier.HOST, alignment=PAGE_BYTES) for b, n in sizes.items()]
            table.open_tier(self.tier, self.file.nbytes, reserve_bytes=reserve_bytes)
        except BaseException:
            self._drop_staging()
            self.file.close()
            raise
        table.add_arena(self.tier, "file", Arena(self.file.nbytes))
        if allow_direct and not self.file.direct and self.file.nbytes:
            tell_once(f"the disk tier reads and writes through the page cache: {self.file.why_buffered}")
        self._unit_bytes = PAGE_BYTES if self.file.direct else 1
        self._buffers: LifoQueue[Extent] = LifoQueue()
        for place in places:
            self._buffers.put(host.extent_of(place))
        self._pages = [threading.Lock() for _ in range(_STRIPES)]
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="memwall-disk")

    def read(self, pairs: Pairs, after: torch.cuda.Event | None = None) -> None:
        self._all(self._read_chunk, _spans(pairs), after)

    def write(self, pairs: Pairs, after: torch.cuda.Event | None = None) -> None:
        self._all(self._write_chunk, _spans(pairs), after)

    def view(self, placement: Placement, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        raise BlockError("a block on disk has no address; move it to host or device memory first")

    def shift(self, arena: str, source: Region, to: int) -> None:
        held = self._buffers.get()
        try:
            for at in range(0, source.bytes, self._chunk_bytes):
                size = min(self._chunk_bytes, source.bytes - at)
                part = held.part(0, size)
                self._all(self._read_chunk, [Span(source.offset + at, source.offset + at + size, part)], None)
                self._all(self._write_chunk, [Span(to + at, to + at + size, part)], None)
        finally:
            self._buffers.put(held)

    def close(self) -> None:
        if not self._closed:
            self.table.close_tier(self.tier)
            self._workers.shutdown()
            self._drop_staging()
            self.file.close()
            self._closed = True

    # -- requests --

    def _all(self, request: Callable[[Chunk], None], spans: Iterable[Span], after: torch.cuda.Event | None) -> None:
        """Run a request for each chunk; returns, or raises, when none is running any more: they use the tensors."""
        if after is not None:
            after.synchronize()
        cut = list(chunks(spans, unit_bytes=self._unit_bytes, chunk_bytes=self._chunk_bytes))
        try:
            if len(cut) == 1:
                request(cut[0])
                return
            futures: list[Future[None]] = [self._workers.submit(request, chunk) for chunk in cut]
            wait(futures)
            for future in futures:
                future.result()
        except OSError as error:
            verb = "read" if request == self._read_chunk else "write"
            size = sum(chunk.end - chunk.start for chunk in cut)
            raise TransferError(
                f"disk tier: {verb} of {size} bytes in {self.file.folder} failed: {error.strerror or error}. "
                "Look at the system log for errors of that disk."
            ) from error

    def _read_chunk(self, chunk: Chunk) -> None:
        if (straight := self._straight(chunk)) is not None:
            self.file.read(straight, chunk.start)
            return
        buffer = self._buffers.get()
        try:
            self.file.read(buffer.part(0, chunk.end - chunk.start).memory(), chunk.start)
            self.copier.copy(self._parts(chunk, buffer))
        finally:
            self._buffers.put(buffer)

    def _write_chunk(self, chunk: Chunk) -> None:
        if (straight := self._straight(chunk)) is not None:
            self.file.write(straight, chunk.start)
            return
        buffer = self._buffers.get()
        try:
            with ExitStack() as held:
                for page in self._lock_shared(chunk, held):
                    at = page - chunk.start
                    self.file.read(buffer.part(at, at + PAGE_BYTES).memory(), page)
                self.copier.copy((staged, its) for its, staged in self._parts(chunk, buffer))
                self.file.write(buffer.part(0, chunk.end - chunk.start).memory(), chunk.start)
        finally:
            self._buffers.put(buffer)

    def _lock_shared(self, chunk: Chunk, held: ExitStack) -> list[int]:
        """Offsets of the pages that others have bytes in, locked; two at most, always in the order of the locks."""
        pages = set()
        if chunk.own[0] > chunk.start:
            pages.add(chunk.start)
        if chunk.own[1] < chunk.end:
            pages.add(chunk.end - PAGE_BYTES)
        for stripe in sorted({page // PAGE_BYTES % _STRIPES for page in pages}):
            held.enter_context(self._pages[stripe])
        return sorted(pages)

    def _straight(self, chunk: Chunk) -> memoryview | None:
        """The chunk's bytes in the tensor itself, where the file can be read into or written from them."""
        span = chunk.spans[0]
        if len(chunk.spans) > 1 or not span.memory.on_cpu:
            return None
        low, high = chunk.start - span.offset, chunk.end - span.offset
        if low < 0 or high > span.memory.nbytes or (span.memory.address + low) % self._unit_bytes:
            return None
        return span.memory.part(low, high).memory()

    @staticmethod
    def _parts(chunk: Chunk, buffer: Extent) -> Iterator[tuple[Extent, Extent]]:
        """Each span's share of the chunk: in its own memory, and in the buffer."""
        for span in chunk.spans:
            low = max(chunk.start, span.offset)
            high = min(chunk.end, span.offset + span.memory.nbytes)
            if low < high:
                its = span.memory.part(low - span.offset, high - span.offset)
                yield its, buffer.part(low - chunk.start, high - chunk.start)

    def _drop_staging(self) -> None:
        for block in self._staging:
            if block in self.table:
                self.table.drop(block)


def _spans(pairs: Pairs) -> list[Span]:
    return [Span(p.offset, p.offset + p.held_bytes, extent) for p, extent in matched(pairs)]
