"""The pool of one rank: the address table, the stores behind its tiers, and two lanes that move bytes between them.

Order. ``read``, ``write`` and ``move`` return a handle at once; the bytes travel on lane ``page-in`` (towards the
device: reads, and moves up) or ``page-out`` (writes, and moves down). Each lane works strictly in the order of
submission; the two run beside each other. Operations on one block never overlap: a call waits first for what is under
way for its blocks, on whichever lane, so a read after a write sees what was written, and the address that ``locate``
gives after a handle's ``wait`` is where the block is. A full tier is waited for as long as moves are under way that
will free room, then refused (``PoolFull``), by the call itself and not by the handle.

Failure. What fails on a lane leaves the table as it was: a move keeps its source; a write that had begun leaves its
blocks torn, one that never ran leaves them as they were. The lane then refuses further work until ``reset``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.core.errors import BlockError, MemwallError, PoolFull
from memwall_strategy.core.lane import DEFAULT_TIMEOUT_S, Lane, Transfer
from memwall_strategy.pool.arena import Region
from memwall_strategy.pool.entry import Content, Copy
from memwall_strategy.pool.extent import Extent
from memwall_strategy.pool.store import MemoryStore, Store, matched
from memwall_strategy.pool.table import AddressTable

_HEIGHT = {Tier.DISK: 0, Tier.HOST: 1, Tier.PEER: 2, Tier.DEVICE: 3}
"""How near to the arithmetic a tier is: a move to a higher one is a page-in."""

T = TypeVar("T")
Mark = torch.cuda.Event | None
"""Behind all that a stream was given when it was made; None on CPU."""


class Pool:
    """Blocks of one rank and the bytes in them.

    Args:
        table: the address table; the stores' tiers are open in it.
        stores: one for each tier, in the order in which they were made.
        lane_capacity: most transfers that may wait on each lane.
        timeout_s: longest wait for a transfer.
        record_spans: keep each transfer's start and end, for traces.
    """

    def __init__(
        self,
        table: AddressTable,
        stores: Iterable[Store],
        *,
        lane_capacity: int = 8,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        record_spans: bool = False,
    ) -> None:
        self.table = table
        self.stores: dict[Tier, Store] = {store.tier: store for store in stores}
        self.page_in = Lane("page-in", capacity=lane_capacity, timeout_s=timeout_s, record_spans=record_spans)
        self.page_out = Lane("page-out", capacity=lane_capacity, timeout_s=timeout_s, record_spans=record_spans)
        self._submitting = threading.RLock()
        self._under_way: dict[Block, Transfer] = {}
        self._unfinished: dict[int, Callable[[bool], None]] = {}  # how to undo what a lane has not run yet
        self._number = 0

    # -- blocks --

    def allocate(self, block: Block, nbytes: int, tier: Tier, *, lend: bool = False) -> Placement:
        """``AddressTable.allocate``, after moves under way where the tier is full.

        Raises:
            PoolFull, BlockError: as there.
        """
        return self._with_room(lambda: self.table.allocate(block, nbytes, tier, lend=lend))

    def allocate_group(self, sizes: Mapping[Block, int], tier: Tier, *, lend: bool = False) -> dict[Block, Placement]:
        """``AddressTable.allocate_group``, after moves under way where the tier is full."""
        return self._with_room(lambda: self.table.allocate_group(sizes, tier, lend=lend))

    def drop(self, block: Block) -> None:
        """Forget a block, after what is under way for it."""
        with self._submitting:
            self._settle([block])
            self.table.drop(block)

    def view(self, block: Block, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The authoritative copy as a tensor, without a copy, after what is under way for the block.

        It is valid until the block moves or is dropped. Who writes into it says so with ``updating``.

        Raises:
            BlockError: no such block, it is on disk, or it has another length.
        """
        with self._submitting:
            self._settle([block])
            placement = self.table.locate(block)
            return self.stores[placement.tier].view(placement, dtype, shape)

    @contextmanager
    def updating(self, blocks: Iterable[Block]) -> Iterator[None]:
        """Around writes into views: the blocks' generations rise at the end; they are torn where the body raises."""
        blocks = list(blocks)
        with self._submitting:
            self._settle(blocks)
            self._begin_writes(blocks)
        try:
            yield
        except BaseException:
            for block in blocks:
                self.table.abort_write(block)
            raise
        for block in blocks:
            self.table.end_write(block)

    # -- transfers --

    def write(self, tensors: Mapping[Block, torch.Tensor], *, then: Callable[[], None] | None = None) -> Transfer:
        """Copy tensors into their blocks, where these are. The tensors must not change until the handle's ``wait``.

        Args:
            then: called on the lane when the bytes are there; must not wait, nor call the pool.

        Raises:
            BlockError: no such block, or a tensor that is not contiguous or has another length.
        """
        with self._submitting:
            self._settle(tensors)
            pairs = matched((self.table.locate(block), tensor) for block, tensor in tensors.items())
            begun = self._begin_writes(tensors)

            def undo(ran: bool) -> None:
                for block in begun:
                    self.table.abort_write(block, untouched=not ran)

            def run() -> None:
                for store, group in self._by_store(pairs):
                    store.write(group, after)
                for block in begun:
                    self.table.end_write(block)
                if then is not None:
                    then()

            after = self._mark()
            return self._submit(self.page_out, "write", tensors, sum(p.bytes for p, _ in pairs), run, undo)

    def read(self, tensors: Mapping[Block, torch.Tensor]) -> Transfer:
        """Copy current blocks into tensors, which hold them after the handle's ``wait``.

        Raises:
            BlockError: no such block, it has no readable content, or a tensor does not fit.
        """
        with self._submitting:
            self._settle(tensors)
            pairs = matched((self.table.readable(block), tensor) for block, tensor in tensors.items())
            after = self._mark()

            def run() -> None:
                for store, group in self._by_store(pairs):
                    store.read(group, after)

            return self._submit(self.page_in, "read", tensors, sum(p.bytes for p, _ in pairs), run, _nothing)

    def move(self, blocks: Iterable[Block], tier: Tier, *, lend: bool = False) -> Transfer:
        """Move blocks to a tier; those that are there already stay. All get room or none moves.

        Raises:
            PoolFull: the tier has no room for them.
            BlockError: no such block, or it is torn.
        """
        with self._submitting:
            self._settle(blocks := list(blocks))
            copies = self._with_room(
                lambda: self._begin_all(self.table.begin_move, [b for b in blocks if self._tier(b) != tier], tier, lend)
            )
            return self._carry(copies, blocks, tier, "move")

    def replicate(self, blocks: Iterable[Block], tier: Tier, *, lend: bool = False) -> Transfer:
        """Copy current blocks to a tier as replicas; one that is there is brought up to date.

        Raises:
            PoolFull, BlockError: as ``move``.
        """

        def begin(block: Block, tier: Tier, *, lend: bool) -> Copy:
            if any(p.tier == tier for p in self.table.replicas(block)):
                return self.table.begin_refresh(block, tier)
            return self.table.begin_replica(block, tier, lend=lend)

        with self._submitting:
            self._settle(blocks := list(blocks))
            copies = self._with_room(lambda: self._begin_all(begin, blocks, tier, lend))
            return self._carry(copies, blocks, tier, "replicate")

    def update(self, blocks: Sequence[Block], what: str, nbytes: int, run: Callable[[Mark], None]) -> Transfer:
        """Let ``run`` write into the blocks' views on lane ``page-out``; their generations rise when it returns.

        Args:
            run: called with a mark behind all that the caller's stream was given so far; must not call the pool. What
                it leaves half done is torn.

        Raises:
            BlockError: no such block, or it is being copied.
        """
        with self._submitting:
            self._settle(blocks)
            begun = self._begin_writes(blocks)

            def undo(ran: bool) -> None:
                for block in begun:
                    self.table.abort_write(block, untouched=not ran)

            def tracked() -> None:
                run(after)
                for block in begun:
                    self.table.end_write(block)

            after = self._mark()
            return self._submit(self.page_out, what, blocks, nbytes, tracked, undo)

    def consume(self, blocks: Sequence[Block], what: str, nbytes: int, run: Callable[[Mark], None]) -> Transfer:
        """Let ``run`` read the blocks' views on lane ``page-in``, after what is under way for them; as ``update``."""
        with self._submitting:
            self._settle(blocks)
            for block in blocks:
                self.table.readable(block)
            after = self._mark()
            return self._submit(self.page_in, what, blocks, nbytes, lambda: run(after), _nothing)

    def defragment(self, tier: Tier, arena: str) -> int:
        """Close an arena's gaps; returns how many blocks moved. Views of them are void.

        Raises:
            BlockError: the arena hands out no addresses of its own.
        """
        with self._submitting:
            self.drain()
            with self.table.frozen():
                moves = self.table.plan_defragment(tier, arena)
                for block, placement, to in moves:
                    self.stores[tier].shift(arena, Region(placement.offset, placement.held_bytes), to)
                    self.table.shift(block, placement, to)
        return len(moves)

    # -- life cycle --

    def drain(self) -> None:
        """Wait until nothing is under way; raise what failed."""
        self.page_out.drain()
        self.page_in.drain()

    def reset(self) -> None:
        """After a failure was dealt with: undo what never ran, and let the lanes work again."""
        with self._submitting:
            for lane in (self.page_out, self.page_in):
                lane.reset()
            for undo in list(self._unfinished.values()):
                undo(False)
            self._unfinished.clear()
            self._under_way.clear()

    def close(self) -> None:
        """End the lanes, drop every block, close every store. Idempotent."""
        for lane in (self.page_out, self.page_in):
            lane.close()
        for undo in list(self._unfinished.values()):
            undo(False)
        self._unfinished.clear()
        for block, _ in self.table:
            if block.kind in (Kind.RESERVE, Kind.STAGING):  # a store drops its own buffers when it closes
                continue
            if self.table.content(block) is Content.WRITING:
                self.table.abort_write(block)
            self.table.drop(block)
        for store in reversed(list(self.stores.values())):
            store.close()

    # -- inside --

    def _tier(self, block: Block) -> Tier:
        return self.table.locate(block).tier

    def _mark(self) -> torch.cuda.Event | None:
        memory = next((s for s in self.stores.values() if isinstance(s, MemoryStore)), None)
        return memory.copier.now() if memory is not None else None

    def _settle(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            transfer = self._under_way.pop(block, None)
            if transfer is not None:
                transfer.wait()

    def _with_room(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except PoolFull:
            if all(transfer.done() for transfer in list(self._under_way.values())):
                raise
        self.drain()
        return make()

    def _begin_all(self, begin: Callable[..., Copy], blocks: Sequence[Block], tier: Tier, lend: bool) -> list[Copy]:
        copies: list[Copy] = []
        try:
            for block in blocks:
                copies.append(begin(block, tier, lend=lend))
        except MemwallError:
            for copy in copies:
                self.table.abort(copy)
            raise
        return copies

    def _begin_writes(self, blocks: Iterable[Block]) -> list[Block]:
        begun: list[Block] = []
        try:
            for block in blocks:
                self.table.begin_write(block)
                begun.append(block)
        except BlockError:
            for block in begun:
                self.table.abort_write(block, untouched=True)
            raise
        return begun

    def _carry(self, copies: list[Copy], blocks: Sequence[Block], tier: Tier, what: str) -> Transfer:
        after = self._mark()
        up = any(_HEIGHT[tier] > _HEIGHT[copy.source.tier] for copy in copies)

        def undo(ran: bool) -> None:
            for copy in copies:
                self.table.abort(copy)

        def run() -> None:
            for source_tier in {copy.source.tier for copy in copies}:
                group = [copy for copy in copies if copy.source.tier == source_tier and copy.source.generation]
                source, target = self.stores[source_tier], self.stores[tier]
                if isinstance(source, MemoryStore):
                    target.write([(copy.target, source.extent_of(copy.source)) for copy in group], after)
                elif isinstance(target, MemoryStore):
                    source.read([(copy.source, target.extent_of(copy.target)) for copy in group], after)
                else:
                    raise BlockError(f"no way from the {source_tier} tier to the {tier} tier without memory between")
            for copy in copies:
                self.table.commit(copy)

        nbytes = sum(copy.source.bytes for copy in copies)
        return self._submit(self.page_in if up else self.page_out, f"{what} to {tier}", blocks, nbytes, run, undo)

    def _submit(
        self,
        lane: Lane,
        what: str,
        blocks: Iterable[Block],
        nbytes: int,
        run: Callable[[], None],
        undo: Callable[[bool], None],
    ) -> Transfer:
        blocks = list(blocks)
        self._number += 1
        number = self._number
        self._unfinished[number] = undo

        def tracked() -> None:
            del self._unfinished[number]
            try:
                run()
            except BaseException:
                undo(True)
                raise

        units = dict.fromkeys(block.unit for block in blocks)
        try:
            transfer = lane.submit(tracked, transfer=what, unit=", ".join(units), nbytes=nbytes)
        except (MemwallError, RuntimeError):
            del self._unfinished[number]
            undo(False)
            raise
        self._under_way.update(dict.fromkeys(blocks, transfer))
        return transfer

    def _by_store(
        self, pairs: Iterable[tuple[Placement, Extent]]
    ) -> Iterator[tuple[Store, list[tuple[Placement, Extent]]]]:
        groups: dict[Tier, list[tuple[Placement, Extent]]] = {}
        for placement, tensor in pairs:
            groups.setdefault(placement.tier, []).append((placement, tensor))
        for tier, group in groups.items():
            yield self.stores[tier], group


def _nothing(ran: bool) -> None:
    return None
