"""Blocks and their authoritative copies: allocated, located, written, dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.core.errors import BlockError, PoolFull
from memwall_strategy.pool.accounts import Accounts
from memwall_strategy.pool.arena import Arena
from memwall_strategy.pool.entry import Content, Entry
from memwall_strategy.pool.medium import Medium

UNREADABLE = {
    Content.EMPTY: "nothing was written to it yet",
    Content.WRITING: "it is being written",
    Content.TORN: "its last write failed; write it again, or promote a replica",
}


class Blocks(Accounts):
    """Which block is where, without the copying: see ``AddressTable``."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self._entries: dict[Block, Entry] = {}

    def allocate(
        self,
        block: Block,
        nbytes: int,
        tier: Tier,
        *,
        owner: int | None = None,
        arena: str | None = None,
        alignment: int | None = None,
        lend: bool = False,
    ) -> Placement:
        """Give a new block room in a tier. What it holds is undefined until the first write.

        Args:
            block: its address.
            nbytes: its length; 0 is allowed and takes no room.
            tier: where.
            owner: whose memory; the table's rank where None.
            arena: which arena; the first with room where None.
            alignment: of its first byte, by the arena's rule where None.
            lend: take from the reserve what is missing.

        Raises:
            PoolFull: no room.
            BlockError: the block exists, or the tier is not open.
        """
        with self._lock:
            self._must_be_new(block)
            medium = self._medium(tier, owner)
            placement = self._place(medium, block, nbytes, arena and [arena], alignment, lend, block.kind)
            self._entries[block] = Entry(placement, Content.EMPTY, {}, [])
            return placement

    def allocate_group(
        self,
        sizes: Mapping[Block, int],
        tier: Tier,
        *,
        owner: int | None = None,
        arena: str | None = None,
        lend: bool = False,
    ) -> dict[Block, Placement]:
        """Give new blocks one contiguous stretch, so that one transfer moves them all: all get room or none does.

        Large blocks come first, then small ones, each in the order given.

        Raises:
            PoolFull, BlockError: as ``allocate``.
        """
        with self._lock:
            for block in sizes:
                self._must_be_new(block)
            if not sizes:
                return {}
            medium = self._medium(tier, owner)
            rules = [medium.arenas[name] for name in medium.arenas if arena in (None, name)]
            if not rules or not all(isinstance(rule, Arena) for rule in rules):
                return self._allocate_each(sizes, tier, owner, arena, lend)
            rule: Arena = rules[0]  # type: ignore[assignment]  # the arenas of a tier share their rule
            order = sorted(sizes, key=lambda b: -rule.alignment(sizes[b]))
            held = [rule.held(sizes[b]) for b in order]
            group = Block(order[0].unit, f"{order[0].parameter} and {len(order) - 1} more", order[0].kind)
            # Its end needs no page: small blocks behind it may share the last one.
            alignment = rule.alignment(sizes[order[0]])
            name, region = medium.allocate(group, sum(held), arena and [arena], alignment, lend, pad=False)
            owning: Arena = medium.arenas[name]  # type: ignore[assignment]
            pieces = owning.cut(region.offset, held) if region.bytes else [region] * len(order)
            for block, piece in zip(order, pieces, strict=True):
                placement = self._booked(medium, name, piece, sizes[block], block.kind)
                self._entries[block] = Entry(placement, Content.EMPTY, {}, [])
            return {block: self._entries[block].authority for block in sizes}

    def book(
        self, block: Block, nbytes: int, tier: Tier, offset: int, *, arena: str = "torch", owner: int | None = None
    ) -> Placement:
        """Note a block that somebody else allocated and wrote (the engine, in a ``BookedArena``), at its address.

        Raises:
            PoolFull: the tier's capacity does not allow it.
            BlockError: the block or something at that address is booked already.
        """
        with self._lock:
            self._must_be_new(block)
            medium = self._medium(tier, owner)
            region = medium.book(block, nbytes, arena, offset)
            placement = replace(self._booked(medium, arena, region, nbytes, block.kind), generation=1, offset=offset)
            self._entries[block] = Entry(placement, Content.WHOLE, {}, [])
            return placement

    def locate(self, block: Block) -> Placement:
        """The authoritative copy's place, whatever its content.

        Raises:
            BlockError: no such block.
        """
        entry = self._entries.get(block)
        if entry is None:
            raise self._unknown(block)
        return entry.authority

    def readable(self, block: Block, *, tier: Tier | None = None, owner: int | None = None) -> Placement:
        """A current copy, in ``tier`` or at ``owner`` if one is there, else the authoritative one.

        Raises:
            BlockError: no such block, nothing was written yet, it is being written, or its last write failed.
        """
        with self._lock:
            entry = self._entry(block)
            if entry.content is not Content.WHOLE:
                raise BlockError(f"block {block} cannot be read: {UNREADABLE[entry.content]}")
            newest = entry.authority.generation
            current = (p for p in (entry.authority, *entry.replicas.values()) if p.generation == newest)
            near = (p for p in current if tier in (None, p.tier) and owner in (None, p.owner))
            return next(near, entry.authority)

    def replicas(self, block: Block) -> list[Placement]:
        """Every replica with its generation, current or not."""
        with self._lock:
            return list(self._entry(block).replicas.values())

    def content(self, block: Block) -> Content:
        """State of the authoritative copy."""
        return self._entry(block).content

    def drop(self, block: Block) -> None:
        """Forget a block and free all its copies.

        Raises:
            BlockError: no such block, or bytes are still under way to or from it.
        """
        with self._lock:
            entry = self._entry(block)
            self._must_rest(block, entry)
            self._release(entry.authority, block.kind)
            for replica in entry.replicas.values():
                self._release(replica, Kind.REPLICA)
            del self._entries[block]

    def drop_replica(self, block: Block, tier: Tier, *, owner: int | None = None, arena: str | None = None) -> None:
        """Free one replica.

        Raises:
            BlockError: no such replica, or bytes are under way to it.
        """
        with self._lock:
            entry = self._entry(block)
            replica = self._replica(block, entry, tier, owner, arena)
            self._must_rest(block, entry)
            del entry.replicas[replica.place]
            self._release(replica, Kind.REPLICA)

    # -- writes and generations --

    def begin_write(self, block: Block) -> Placement:
        """Announce that the authoritative copy's bytes change; nothing may read it until ``end_write``.

        Raises:
            BlockError: no such block, or it is being written or copied.
        """
        with self._lock:
            entry = self._entry(block)
            self._must_rest(block, entry)
            entry.before, entry.content = entry.content, Content.WRITING
            return entry.authority

    def end_write(self, block: Block) -> Placement:
        """The write is whole: the generation rises by one, and every replica is stale."""
        with self._lock:
            entry = self._writing(block)
            entry.authority = replace(entry.authority, generation=entry.authority.generation + 1)
            entry.content = Content.WHOLE
            return entry.authority

    def abort_write(self, block: Block, *, untouched: bool = False) -> None:
        """The write failed: the block is torn, or as before where no byte of it was touched."""
        with self._lock:
            entry = self._writing(block)
            entry.content = entry.before if untouched else Content.TORN

    @contextmanager
    def writing(self, block: Block) -> Iterator[Placement]:
        """``begin_write`` and ``end_write``; ``abort_write`` where the body raises."""
        placement = self.begin_write(block)
        try:
            yield placement
        except BaseException:
            self.abort_write(block)
            raise
        self.end_write(block)

    # -- inside --

    def _entry(self, block: Block) -> Entry:
        entry = self._entries.get(block)
        if entry is None:
            raise self._unknown(block)
        return entry

    def _unknown(self, block: Block) -> BlockError:
        return BlockError(f"there is no block {block} in the table of rank {self.rank}")

    def _must_be_new(self, block: Block) -> None:
        if block in self._entries:
            raise BlockError(f"block {block} is in the table already, at {self._entries[block].authority}")
        if block.kind == Kind.RESERVE:
            raise BlockError(f"block {block}: a tier's reserve is set with resize_tier")

    @staticmethod
    def _must_rest(block: Block, entry: Entry) -> None:
        if entry.content is Content.WRITING:
            raise BlockError(f"block {block} is being written; wait for it")
        if entry.pending:
            raise BlockError(f"block {block} is being copied to {entry.pending[0].target.tier}; wait for it")

    def _writing(self, block: Block) -> Entry:
        entry = self._entry(block)
        if entry.content is not Content.WRITING:
            raise BlockError(f"block {block}: no write has begun")
        return entry

    def _replica(self, block: Block, entry: Entry, tier: Tier, owner: int | None, arena: str | None) -> Placement:
        owner = self.rank if owner is None else owner
        found = [p for p in entry.replicas.values() if (p.tier, p.owner) == (tier, owner) and arena in (None, p.arena)]
        if len(found) != 1:
            raise BlockError(f"block {block} has {len(found)} replicas in the {tier} tier of rank {owner}, not one")
        return found[0]

    def _place(
        self,
        medium: Medium,
        block: Block,
        nbytes: int,
        arenas: list[str] | None,
        alignment: int | None,
        lend: bool,
        kind: str,
    ) -> Placement:
        name, region = medium.allocate(block, nbytes, arenas, alignment, lend)
        return self._booked(medium, name, region, nbytes, kind)

    def _allocate_each(
        self, sizes: Mapping[Block, int], tier: Tier, owner: int | None, arena: str | None, lend: bool
    ) -> dict[Block, Placement]:
        done: dict[Block, Placement] = {}
        try:
            for block, nbytes in sizes.items():
                done[block] = self.allocate(block, nbytes, tier, owner=owner, arena=arena, lend=lend)
        except (PoolFull, BlockError):
            for block in done:
                self.drop(block)
            raise
        return done
