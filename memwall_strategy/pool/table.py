"""The address table: the only way to find a pooled block.

A block has one authoritative copy and any number of replicas, at most one in each arena. The authoritative copy's
generation rises with each finished write; a replica keeps the generation that it was copied at, and is served as
current only while the two are equal. While a block is being written nothing reads it; a write that failed leaves it
torn, and it stays unreadable until it is written again or a replica is promoted.

A copy takes two steps, so that bytes can travel in between: ``begin_move`` (or ``begin_replica``, ``begin_refresh``)
books the target, ``commit`` makes it count, ``abort`` gives it back. ``move``, ``replicate`` and ``refresh`` are the
same as context managers. Until the commit both source and target are held and accounted.

Every method is atomic and may be called from any thread; ``locate`` takes no lock. The table moves no bytes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.core.errors import BlockError
from memwall_strategy.pool.arena import Arena, Region, defragment
from memwall_strategy.pool.blocks import UNREADABLE, Blocks
from memwall_strategy.pool.check import faults
from memwall_strategy.pool.entry import Content, Copy, Entry, Role
from memwall_strategy.pool.medium import Medium


class AddressTable(Blocks):
    """Block -> placement, with exact accounts.

    Args:
        rank: global rank whose blocks these are; the owner where none is given.
    """

    # -- copies --

    def begin_move(
        self,
        block: Block,
        tier: Tier,
        *,
        owner: int | None = None,
        arena: str | None = None,
        alignment: int | None = None,
        lend: bool = False,
    ) -> Copy:
        """Book room to which the authoritative copy will move.

        Raises:
            PoolFull: no room there.
            BlockError: no such block; it is torn, being written or copied; or a replica is in that arena.
        """
        with self._lock:
            entry = self._copyable(block, empty=True)
            self._must_rest(block, entry)
            return self._begin(block, entry, Role.MOVE, tier, owner, arena, alignment, lend, block.kind)

    def begin_replica(
        self,
        block: Block,
        tier: Tier,
        *,
        owner: int | None = None,
        arena: str | None = None,
        alignment: int | None = None,
        lend: bool = False,
    ) -> Copy:
        """Book room for a replica, in another arena than every other copy.

        Raises:
            PoolFull, BlockError: as ``begin_move``; also where nothing was written yet.
        """
        with self._lock:
            entry = self._copyable(block, empty=False)
            if any(copy.role is Role.MOVE for copy in entry.pending):
                raise BlockError(f"block {block} is moving; wait for it before it is replicated")
            return self._begin(block, entry, Role.REPLICA, tier, owner, arena, alignment, lend, Kind.REPLICA)

    def begin_refresh(self, block: Block, tier: Tier, *, owner: int | None = None, arena: str | None = None) -> Copy:
        """Announce that a replica is brought up to date; it counts as never written until the commit."""
        with self._lock:
            entry = self._copyable(block, empty=False)
            old = self._replica(block, entry, tier, owner, arena)
            if entry.pending:
                raise BlockError(f"block {block} is being copied; wait for it before a replica is refreshed")
            target = entry.replicas[old.place] = replace(old, generation=0)
            copy = Copy(block, Role.REFRESH, entry.authority, target)
            entry.pending.append(copy)
            return copy

    def commit(self, copy: Copy) -> Placement:
        """The bytes have arrived: the target counts, and a move frees its source. Returns the target's placement.

        Raises:
            BlockError: the copy was committed or aborted before.
        """
        with self._lock:
            entry = self._pending(copy)
            entry.pending.remove(copy)
            placement = replace(copy.target, generation=copy.source.generation)
            if copy.role is Role.MOVE:
                entry.authority = placement
                self._release(copy.source, copy.block.kind)
            else:
                entry.replicas[placement.place] = placement
            return placement

    def abort(self, copy: Copy) -> None:
        """The bytes did not arrive: the target is freed and the source stays; a refreshed replica stays unreadable."""
        with self._lock:
            self._pending(copy).pending.remove(copy)
            if copy.role is not Role.REFRESH:
                self._release(copy.target, copy.block.kind if copy.role is Role.MOVE else Kind.REPLICA)

    def move(self, block: Block, tier: Tier, **where: Any) -> AbstractContextManager[Copy]:
        """``begin_move`` now, ``commit`` after the body, which copies the bytes; ``abort`` where it raises."""
        return self._copying(lambda: self.begin_move(block, tier, **where))

    def replicate(self, block: Block, tier: Tier, **where: Any) -> AbstractContextManager[Copy]:
        """``begin_replica`` now, ``commit`` after the body, which copies the bytes; ``abort`` where it raises."""
        return self._copying(lambda: self.begin_replica(block, tier, **where))

    def refresh(self, block: Block, tier: Tier, **where: Any) -> AbstractContextManager[Copy]:
        """``begin_refresh`` now, ``commit`` after the body, which copies the bytes; ``abort`` where it raises."""
        return self._copying(lambda: self.begin_refresh(block, tier, **where))

    def promote(
        self,
        block: Block,
        tier: Tier,
        *,
        owner: int | None = None,
        arena: str | None = None,
        generation: int | None = None,
    ) -> Placement:
        """Make a replica the authoritative copy and free the old one: its memory is lost, or its content torn.

        Args:
            block: its address.
            tier: where the replica is.
            owner: whose memory the replica is in.
            arena: which arena, where the tier has several.
            generation: which generation the caller accepts; the newest where None. Going back to an older one counts
                as a write: the block gets a generation that it never had, so that every other copy is stale.

        Raises:
            BlockError: no such replica, or its generation is another.
        """
        with self._lock:
            entry = self._entry(block)
            replica = self._replica(block, entry, tier, owner, arena)
            newest = entry.authority.generation
            if entry.pending or entry.content is Content.WRITING:
                raise BlockError(f"block {block} is being written or copied; abort that before a replica is promoted")
            if replica.generation == 0 or replica.generation != (newest if generation is None else generation):
                raise BlockError(
                    f"block {block}: the replica in the {tier} tier of rank {replica.owner} has generation "
                    f"{replica.generation}, wanted is {newest if generation is None else generation}. "
                    "Name that generation to go back to it."
                )
            del entry.replicas[replica.place]
            self._release(entry.authority, block.kind)
            self._ledger.add(replica.owner, replica.tier, Kind.REPLICA, replica.bytes, replica.padding, -1)
            self._ledger.add(replica.owner, replica.tier, block.kind, replica.bytes, replica.padding)
            entry.authority = replica if replica.generation == newest else replace(replica, generation=newest + 1)
            entry.content = Content.WHOLE
            return entry.authority

    # -- defragmentation --

    def plan_defragment(
        self, tier: Tier, arena: str, *, owner: int | None = None
    ) -> list[tuple[Block, Placement, int]]:
        """The moves that close an arena's gaps (block, placement now, offset then), each onto bytes free by its turn.

        Staging buffers stay: I/O holds their addresses.

        Raises:
            BlockError: the arena hands out no addresses of its own, or bytes are under way in it.
        """
        with self._lock:
            medium = self._medium(tier, owner)
            regions = medium.arenas.get(arena)
            if not isinstance(regions, Arena):
                raise BlockError(f"arena {arena!r} of the {tier} tier hands out no addresses of its own")
            found = {}
            for block, entry in self._entries.items():
                for role, p in entry.copies():
                    if _in(p, medium) and p.arena == arena and p.held_bytes:
                        if entry.pending or entry.content is Content.WRITING:
                            raise BlockError(f"block {block} is being written or copied ({role}); wait for it first")
                        found[p.offset] = (block, p)
            pinned = {p.offset for block, p in found.values() if block.kind == Kind.STAGING}
            moves = defragment((Region(p.offset, p.held_bytes) for _, p in found.values()), pinned=pinned)
            return [(*found[move.offset], move.to) for move in moves]

    def shift(self, block: Block, placement: Placement, offset: int) -> Placement:
        """Note that one copy of ``block`` lies at ``offset`` of its arena now (one step of ``plan_defragment``).

        Raises:
            BlockError: there is no such copy, or the bytes there are not free.
        """
        with self._lock:
            entry = self._entry(block)
            self._must_rest(block, entry)
            arena = self._medium(placement.tier, placement.owner).arenas[placement.arena]
            if placement not in (entry.authority, *entry.replicas.values()) or not isinstance(arena, Arena):
                raise BlockError(f"block {block} has no copy at {placement} that could be shifted")
            try:
                arena.shift(placement.offset, offset)
            except ValueError as error:
                raise BlockError(f"block {block} cannot be shifted: {error}") from None
            moved = replace(placement, offset=offset)
            if placement == entry.authority:
                entry.authority = moved
            else:
                entry.replicas[moved.place] = moved
            return moved

    # -- reports --

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: object) -> bool:
        return block in self._entries

    def __iter__(self) -> Iterator[tuple[Block, Placement]]:
        """Each block with its authoritative placement, then what is left of each reserve."""
        with self._lock:
            return iter([*((block, entry.authority) for block, entry in self._entries.items()), *self._reserves()])

    def to_records(self) -> list[dict[str, Any]]:
        """One row for each copy of each block and each reserve, for reports: plain strings and ints."""
        with self._lock:
            rows = [
                _record(block, role, p, entry.content if role == "authority" else None, entry.authority.generation)
                for block, entry in self._entries.items()
                for role, p in entry.copies()
            ]
            return rows + [_record(block, "reserve", p, None, 0) for block, p in self._reserves()]

    def check(self) -> None:
        """Verify every invariant (see ``pool.check``).

        Raises:
            BlockError: one does not hold; the message lists all that do not.
        """
        with self._lock:
            found = faults(self._entries, self._media, self._ledger)
        if found:
            raise BlockError("the address table is inconsistent:\n" + "\n".join(found))

    # -- inside --

    def _copyable(self, block: Block, *, empty: bool) -> Entry:
        entry = self._entry(block)
        if entry.content is not Content.WHOLE and not (empty and entry.content is Content.EMPTY):
            raise BlockError(f"block {block} cannot be copied: {UNREADABLE[entry.content]}")
        return entry

    def _pending(self, copy: Copy) -> Entry:
        entry = self._entry(copy.block)
        if copy not in entry.pending:
            raise BlockError(f"block {copy.block}: this copy to {copy.target.tier} was committed or aborted before")
        return entry

    def _begin(
        self,
        block: Block,
        entry: Entry,
        role: Role,
        tier: Tier,
        owner: int | None,
        arena: str | None,
        alignment: int | None,
        lend: bool,
        kind: str,
    ) -> Copy:
        medium = self._medium(tier, owner)
        taken = {p.arena for _, p in entry.copies() if (p.tier, p.owner) == (medium.tier, medium.owner)}
        names = [name for name in medium.arenas if name not in taken and arena in (None, name)]
        if not names:
            raise BlockError(f"block {block} has a copy in the {tier} tier of rank {medium.owner} already")
        target = self._place(medium, block, entry.authority.bytes, names, alignment, lend, kind)
        copy = Copy(block, role, entry.authority, target)
        entry.pending.append(copy)
        return copy

    @contextmanager
    def _copying(self, begin: Callable[[], Copy]) -> Iterator[Copy]:
        copy = begin()
        try:
            yield copy
        except BaseException:
            self.abort(copy)
            raise
        self.commit(copy)


def _in(placement: Placement, medium: Medium) -> bool:
    return (placement.tier, placement.owner) == (medium.tier, medium.owner)


def _record(block: Block, role: str, p: Placement, content: str | None, newest: int) -> dict[str, Any]:
    return {
        "unit": block.unit,
        "parameter": block.parameter,
        "kind": str(block.kind),
        "role": role,
        "tier": str(p.tier),
        "owner": p.owner,
        "arena": p.arena,
        "offset": p.offset,
        "bytes": p.bytes,
        "padding_bytes": p.padding,
        "generation": p.generation,
        "current": p.generation == newest and newest > 0 and content in (None, Content.WHOLE),
        "content": content and str(content),
    }
