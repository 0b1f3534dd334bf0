"""Every invariant of the address table, verified from the ground up: nothing here trusts a counter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.pool.arena import Arena
from memwall_strategy.pool.entry import Content, Entry, Role
from memwall_strategy.pool.ledger import Ledger
from memwall_strategy.pool.medium import Medium


def faults(entries: Mapping[Block, Entry], media: Mapping[tuple[Tier, int], Medium], ledger: Ledger) -> list[str]:
    """One line for each invariant that does not hold; empty where all do."""
    return [*_of_blocks(entries), *_of_places(entries, media), *_of_media(entries, media), *_of_ledger(entries, ledger)]


def _of_blocks(entries: Mapping[Block, Entry]) -> Iterator[str]:
    """One authoritative copy, one copy an arena, generations that can be."""
    for block, entry in entries.items():
        copies = [p for _, p in entry.copies()]
        places = [p.place for p in copies]
        if len(set(places)) < len(places):
            yield f"block {block} has two copies in one arena: {places}"
        if any(p.bytes != entry.authority.bytes for p in copies):
            yield f"block {block} has copies of different lengths: {[p.bytes for p in copies]}"
        if any(p.generation > entry.authority.generation for p in entry.replicas.values()):
            yield f"block {block} has a replica newer than its authoritative copy"
        if (entry.content is Content.EMPTY or entry.content is Content.WHOLE) and (
            (entry.content is Content.EMPTY) != (entry.authority.generation == 0)
        ):
            yield f"block {block} is {entry.content} at generation {entry.authority.generation}"
        if sum(copy.role is Role.MOVE for copy in entry.pending) > 1:
            yield f"block {block} moves to two places"
        if any(copy.source != entry.authority for copy in entry.pending):
            yield f"block {block} is copied from a place where it no longer is"


def _of_places(entries: Mapping[Block, Entry], media: Mapping[tuple[Tier, int], Medium]) -> Iterator[str]:
    """No two copies overlap, each lies inside its arena, and arenas hold copies and nothing else."""
    by_arena: dict[tuple[Tier, int, str], list[tuple[int, int, Block]]] = {}
    for block, entry in entries.items():
        for _, p in entry.copies():
            if (p.tier, p.owner) not in media or p.arena not in media[p.tier, p.owner].arenas:
                yield f"block {block} lies in an arena that is not open: {p}"
            elif p.held_bytes:
                by_arena.setdefault(p.place, []).append((p.offset, p.held_bytes, block))
    for (tier, owner), medium in media.items():
        for name, arena in medium.arenas.items():
            where = f"{tier} tier of rank {owner}, arena {name!r}"
            spans = sorted(by_arena.get((tier, owner, name), []), key=lambda span: span[:2])
            for (offset, size, block), (after, _, other) in pairwise(spans):
                if offset + size > after:
                    yield f"{where}: blocks {block} and {other} overlap at {after}"
            if [span[:2] for span in spans] != [(r.offset, r.bytes) for r in arena.regions()]:
                yield f"{where}: what is handed out is not what blocks hold"
            if isinstance(arena, Arena):
                yield from (f"{where}: {fault}" for fault in _of_arena(arena))


def _of_arena(arena: Arena) -> Iterator[str]:
    """Regions and holes tile the arena, and no two holes touch."""
    tiles = [(r.offset, r.end, False) for r in arena.regions()] + [(h.offset, h.end, True) for h in arena.holes()]
    tiles.sort()
    end, after_hole = 0, False
    for start, its_end, is_hole in tiles:
        if start != end:
            yield f"bytes {end} to {start} are neither free nor handed out, or both"
        if is_hole and after_hole:
            yield f"two holes touch at {start}"
        end, after_hole = its_end, is_hole
    if end != arena.capacity_bytes:
        yield f"it ends at {end}, not at {arena.capacity_bytes}"
    if arena.used_bytes != sum(r.bytes for r in arena.regions()):
        yield f"{arena.used_bytes} bytes are counted as used"
    if arena.largest_hole_bytes != max((h.bytes for h in arena.holes()), default=0):
        yield f"{arena.largest_hole_bytes} bytes are thought to be the largest hole"


def _of_media(entries: Mapping[Block, Entry], media: Mapping[tuple[Tier, int], Medium]) -> Iterator[str]:
    """Counters agree, and nothing is above its capacity."""
    held: dict[tuple[Tier, int], int] = dict.fromkeys(media, 0)
    for entry in entries.values():
        for _, p in entry.copies():
            held[p.tier, p.owner] = held.get((p.tier, p.owner), 0) + p.held_bytes
    for key, medium in media.items():
        where = f"{medium.tier} tier of rank {medium.owner}"
        if medium.held_bytes != held[key]:
            yield f"{where}: {medium.held_bytes} bytes are counted, {held[key]} are held"
        if medium.held_bytes > medium.capacity_bytes:
            yield f"{where}: {medium.held_bytes} bytes are held of {medium.capacity_bytes}"
        if not 0 <= medium.lent_bytes <= medium.reserve_bytes <= medium.capacity_bytes:
            yield f"{where}: {medium.lent_bytes} bytes of {medium.reserve_bytes} are lent"


def _of_ledger(entries: Mapping[Block, Entry], ledger: Ledger) -> Iterator[str]:
    """The accounts are what a count from the ground up gives."""
    fresh = Ledger()
    for block, entry in entries.items():
        for role, p in entry.copies():
            _add(fresh, Kind.REPLICA if role == Role.REPLICA else block.kind, p)
    booked, counted = dict(ledger.items()), dict(fresh.items())
    for account in sorted({*booked, *counted}):
        if booked.get(account) != counted.get(account):
            yield f"account {account}: booked {booked.get(account)}, held {counted.get(account)}"


def _add(ledger: Ledger, kind: str, p: Placement) -> None:
    ledger.add(p.owner, p.tier, kind, p.bytes, p.padding)
