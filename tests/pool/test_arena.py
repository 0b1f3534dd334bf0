"""The allocator inside an arena, against plain lists."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memwall_strategy.pool.arena import (
    GRANULE_BYTES,
    LARGE_BYTES,
    PAGE_BYTES,
    Arena,
    BookedArena,
    Region,
    aligned,
    defragment,
)

SIZES = st.one_of(st.integers(0, 300), st.integers(0, 20_000), st.integers(LARGE_BYTES - 2, LARGE_BYTES + 5000))
CAPACITY = 2 * 1024 * 1024


def tiles(arena: Arena) -> list[tuple[int, int]]:
    """What is live and what is free, in order; must cover the arena without overlap."""
    return sorted((r.offset, r.end) for r in [*arena.regions(), *arena.holes()])


def assert_tiled(arena: Arena) -> None:
    end = 0
    for start, its_end in tiles(arena):
        assert start == end
        end = its_end
    assert end == arena.capacity_bytes
    holes = arena.holes()
    assert all(a.end < b.offset for a, b in pairwise(holes)), "neighbouring holes are one"
    assert arena.free_bytes == sum(h.bytes for h in holes)
    assert arena.largest_hole_bytes == max((h.bytes for h in holes), default=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10_000)), max_size=80))
def test_every_history_tiles_the_arena_and_takes_the_best_hole(history):
    arena, live = Arena(CAPACITY), []
    for take, nbytes, which in history:
        if take or not live:
            alignment = arena.alignment(nbytes)
            size = arena.held(nbytes)
            fitting = [
                (h.bytes, h.offset) for h in arena.holes() if aligned(h.offset, alignment) + size <= h.end and size
            ]
            region = arena.allocate(nbytes)
            if size == 0:
                assert region == Region(0, 0)
            elif not fitting:
                assert region is None
            else:
                assert region is not None and region.bytes == size and region.offset % alignment == 0
                hole = next((b, o) for b, o in fitting if o <= region.offset < o + b)
                if alignment == GRANULE_BYTES:
                    assert hole == min(fitting), "best fit: the smallest hole, the first of equal ones"
                live.append(region.offset)
        else:
            arena.free(live.pop(which % len(live)))
        assert_tiled(arena)
    for offset in live:
        arena.free(offset)
    assert arena.holes() == [Region(0, CAPACITY)] and arena.fragmentation == 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=40), st.sets(st.integers(0, 39), max_size=3))
def test_defragmentation_lands_on_free_bytes_and_keeps_every_byte(blocks, pinned_numbers):
    arena, memory, live = Arena(CAPACITY), bytearray(CAPACITY), {}
    regions = [(arena.allocate(n), keep) for n, keep in blocks]
    for number, (region, keep) in enumerate(regions):
        if region is None or region.bytes == 0:
            continue
        if keep:
            memory[region.offset : region.end] = bytes([number % 251 + 1]) * region.bytes
            live[region.offset] = (number, region)
        else:
            arena.free(region.offset)
    pinned = {offset for offset, (number, _) in live.items() if number in pinned_numbers}
    for move in defragment((region for _, region in live.values()), pinned=pinned):
        arena.shift(move.offset, move.to)  # refuses to land on live bytes
        memory[move.to : move.to + move.bytes] = memory[move.offset : move.offset + move.bytes]
        number, region = live.pop(move.offset)
        live[move.to] = (number, Region(move.to, region.bytes))
        assert move.offset not in pinned
        assert_tiled(arena)
    for number, region in live.values():
        assert memory[region.offset : region.end] == bytes([number % 251 + 1]) * region.bytes
        assert blocks[number][0] < LARGE_BYTES or region.offset % PAGE_BYTES == 0
    if not pinned:
        gaps = arena.holes()[:-1]
        assert all(gap.bytes < PAGE_BYTES for gap in gaps), "what is left between blocks is alignment"


def test_small_blocks_share_pages_and_large_ones_do_not():
    arena = Arena(CAPACITY)
    small = [arena.allocate(n) for n in (1, 64, 65)]
    large = arena.allocate(LARGE_BYTES + 1)
    assert [r.bytes for r in small] == [64, 64, 128] and small[2].end == 256
    assert large.offset == PAGE_BYTES and large.bytes == LARGE_BYTES + PAGE_BYTES
    assert arena.allocate(10).offset == 256, "the gap before the page is free for small blocks"


def test_where_only_an_awkward_hole_is_left_it_is_found():
    """More holes than are tried first, all but the last too crooked for a page-aligned block."""
    arena = Arena(64 * 4 * PAGE_BYTES)
    while arena.allocate(PAGE_BYTES, PAGE_BYTES) is not None:
        pass
    starts = [r.offset for r in arena.regions()]
    for base in starts[:80:4]:  # two pages long, but a granule past a page
        arena.cut(base, [64, PAGE_BYTES - 64])
        arena.cut(base + 2 * PAGE_BYTES, [64, PAGE_BYTES - 64])
        for freed in (base + 64, base + PAGE_BYTES, base + 2 * PAGE_BYTES):
            arena.free(freed)
    assert [h.bytes for h in arena.holes()] == [2 * PAGE_BYTES] * 20
    assert arena.allocate(2 * PAGE_BYTES, PAGE_BYTES) is None
    arena.free(starts[-1])
    arena.free(starts[-2])
    assert arena.allocate(2 * PAGE_BYTES, PAGE_BYTES) == Region(starts[-2], 2 * PAGE_BYTES)


def test_a_region_is_cut_into_pieces_that_are_freed_one_by_one():
    arena = Arena(4096)
    whole = arena.allocate(640)
    pieces = arena.cut(whole.offset, [128, 0, 512])
    assert pieces == [Region(0, 128), Region(0, 0), Region(128, 512)]
    arena.free(0)
    assert_tiled(arena)
    with pytest.raises(ValueError, match="add up"):
        arena.cut(128, [64])


def test_shift_refuses_live_bytes_and_changes_nothing():
    arena = Arena(4096)
    for _ in range(3):
        arena.allocate(64)
    before = tiles(arena)
    with pytest.raises(ValueError, match="not free"):
        arena.shift(128, 0)
    assert tiles(arena) == before and live(arena) == [0, 64, 128]


def live(arena: Arena) -> list[int]:
    return [r.offset for r in arena.regions()]


@pytest.mark.parametrize("capacity", [0, 1, 63, 64, 65, 4097])
def test_odd_capacities(capacity):
    arena = Arena(capacity)
    assert arena.capacity_bytes == capacity // 64 * 64
    assert_tiled(arena)
    assert (arena.allocate(1) is None) == (capacity < 64)


def test_wrong_use():
    with pytest.raises(ValueError, match="-1 bytes"):
        Arena(-1)
    with pytest.raises(ValueError, match="multiple of 64"):
        Arena(4096).allocate(10, alignment=100)
    with pytest.raises(KeyError):
        Arena(4096).free(0)
    booked = BookedArena()
    booked.book(0x1000, 10)
    with pytest.raises(ValueError, match="booked already"):
        booked.book(0x1000, 10)
    assert booked.allocate(1) is None
