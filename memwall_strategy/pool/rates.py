"""Copy rates between tiers, measured on the pool itself: what the cost model starts from.

Each route is timed at two lengths, a small one for what a transfer costs at all and a large one for the rate behind
it, the routes taking turns, so that a slow moment of the machine hits all of them. Medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.store import MemoryStore

SMALL_BYTES = 4096
LARGE_BYTES = 8 * 1024 * 1024
REPEATS = 5
MOST_S = 0.5
"""A slow disk is not measured longer than this, however few repeats that leaves (at least one)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What moving bytes over one route takes: ``latency_s + bytes / bytes_per_s``."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: int) -> float:
        """Time for ``nbytes``."""
        return self.latency_s + nbytes / self.bytes_per_s


def measure(pool: Pool, *, large_bytes: int = LARGE_BYTES, repeats: int = REPEATS) -> dict[tuple[Tier, Tier], Rate]:
    """Rates of every route between the pool's tiers that are joined directly, as (from, to).

    Args:
        pool: nothing may be under way; every tier needs ``large_bytes`` of room for the while.
        large_bytes: length of the long transfer.
        repeats: of each route and length.

    Raises:
        PoolFull: no room to measure in.
    """
    times: dict[tuple[Tier, Tier, int], list[float]] = {}
    with _scratch(pool, large_bytes) as places:
        routes = [(a, b) for a in places for b in places if a is not b and (Tier.HOST in (a, b))]
        started = time.perf_counter()
        for turn in range(repeats + 1):  # the first turn only warms up: pages, streams, threads
            for a, b in routes:
                for size in (SMALL_BYTES, large_bytes):
                    taken = _timed(_copy(pool, places[a], places[b], size))
                    if turn:
                        times.setdefault((a, b, size), []).append(taken)
            if turn and time.perf_counter() - started > MOST_S:
                break
    rates = {}
    for a, b in routes:
        small = statistics.median(times[a, b, SMALL_BYTES])
        large = statistics.median(times[a, b, large_bytes])
        rate = (large_bytes - SMALL_BYTES) / max(large - small, 1e-9)
        rates[a, b] = Rate(max(0.0, small - SMALL_BYTES / rate), rate)
    return rates


@contextmanager
def _scratch(pool: Pool, nbytes: int) -> Iterator[dict[Tier, Placement]]:
    blocks: dict[Tier, Block] = {}
    try:
        for tier in pool.stores:
            block = Block("pool", f"rate of {tier}", Kind.STAGING)
            pool.table.allocate(block, nbytes, tier)
            blocks[tier] = block
        yield {tier: pool.table.locate(block) for tier, block in blocks.items()}
    finally:
        for block in blocks.values():
            pool.table.drop(block)


def _copy(pool: Pool, source: Placement, target: Placement, size: int) -> Callable[[], None]:
    """The transfer of the first ``size`` bytes, as the pool does it."""
    a, b = pool.stores[source.tier], pool.stores[target.tier]
    part = [Placement(p.tier, p.owner, p.arena, p.offset, size) for p in (source, target)]
    if isinstance(a, MemoryStore):
        memory = a.extent_of(part[0])
        return lambda: b.write([(part[1], memory)])
    assert isinstance(b, MemoryStore)  # one end of every route is the host
    memory = b.extent_of(part[1])
    return lambda: a.read([(part[0], memory)])


def _timed(transfer: Callable[[], None]) -> float:
    start = time.perf_counter()
    transfer()
    return time.perf_counter() - start
