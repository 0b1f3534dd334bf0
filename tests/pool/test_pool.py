"""The pool: bytes through every tier, order, full tiers, failures and what they leave."""

from __future__ import annotations

import errno
import os
import random
import threading

import pytest
import torch

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import BlockError, MemwallError, PoolFull, TransferError
from memwall_strategy.pool.arena import LARGE_BYTES
from memwall_strategy.pool.entry import Content
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.rates import measure
from tests.pool.conftest import MIB

SIZES = [0, 1, 63, 64, 65, 4095, 4096, 4097, 70_001, LARGE_BYTES, LARGE_BYTES + 7]
TIERS = [Tier.DEVICE, Tier.HOST, Tier.DISK]


def block(name: object, unit: str = "blocks.0") -> Block:
    return Block(unit, str(name), Kind.EXP_AVG)


def fill(pool: Pool, sizes=SIZES, tier: Tier = Tier.HOST) -> dict[Block, torch.Tensor]:
    values = {block(i): torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    pool.allocate_group({b: t.numel() for b, t in values.items()}, tier)
    pool.write(values).wait(30)
    return values


def assert_holds(pool: Pool, values: dict[Block, torch.Tensor]) -> None:
    got = {b: torch.full_like(t, 0xAA) for b, t in values.items()}
    pool.read(got).wait(30)
    assert all(torch.equal(got[b], values[b]) for b in values)
    pool.table.check()


@pytest.mark.parametrize("first", TIERS)
def test_every_route_between_tiers_keeps_every_byte(pool, first):
    values = fill(pool, tier=first)
    for tier in random.Random(first).sample(TIERS * 3, 9):
        pool.move(values, tier).wait(30)
        assert {pool.table.locate(b).tier for b in values} == {tier}
        assert pool.table.used_bytes(tier, kind=Kind.EXP_AVG) == pool.table.used_bytes(kind=Kind.EXP_AVG)
        assert_holds(pool, values)


def test_a_handle_returns_before_the_bytes_are_there(pool):
    """And the lanes work in the order of submission, whoever waits for what."""
    values = fill(pool)
    go, order = threading.Event(), []
    pool.page_out.submit(lambda: go.wait(30), transfer="hold", unit="test")
    moves = [pool.move([b], Tier.DISK) for b in list(values)[:4]]
    pool.page_out.submit(lambda: order.append("after"), transfer="mark", unit="test")
    assert not any(move.done() for move in moves) and not order
    assert all(pool.table.locate(b).tier is Tier.HOST for b in values), "until then the source counts"
    go.set()
    moves[-1].wait(30)
    assert all(move.done() for move in moves)
    pool.drain()
    assert order == ["after"] and pool.table.locate(block(3)).tier is Tier.DISK
    assert_holds(pool, values)


def test_a_read_after_a_write_sees_it_on_whichever_lane(pool):
    fill(pool, [100_000])
    for turn in range(20):
        value = torch.full((100_000,), turn, dtype=torch.uint8)
        pool.write({block(0): value})
        out = torch.empty_like(value)
        pool.read({block(0): out}).wait(30)
        assert torch.equal(out, value)
        pool.move([block(0)], TIERS[turn % 3])
    pool.drain()
    assert pool.table.locate(block(0)).generation == 21


def test_views_are_the_memory_and_updates_raise_the_generation(pool):
    pool.allocate(block("w"), 40, Tier.HOST)
    pool.write({block("w"): torch.zeros(10)})
    view = pool.view(block("w"), torch.float32, (10,))
    with pool.updating([block("w")]):
        view.add_(1.5)
    assert pool.table.locate(block("w")).generation == 2
    pool.move([block("w")], Tier.DEVICE)
    assert torch.equal(pool.view(block("w"), torch.float32, (2, 5)), torch.full((2, 5), 1.5))
    with pytest.raises(ZeroDivisionError), pool.updating([block("w")]):
        raise ZeroDivisionError
    assert pool.table.content(block("w")) is Content.TORN
    with pytest.raises(BlockError, match="its last write failed"):
        pool.read({block("w"): torch.empty(10)})
    with pytest.raises(BlockError, match="no block"), pool.updating([block("w"), block("unknown")]):
        pass
    assert pool.table.content(block("w")) is Content.TORN, "still"
    pool.write({block("w"): torch.ones(10)}).wait(30)
    pool.move([block("w")], Tier.DISK).wait(30)
    with pytest.raises(BlockError, match="no address"):
        pool.view(block("w"), torch.float32, (10,))


def test_nothing_is_copied_for_blocks_never_written(pool):
    pool.allocate(block("w"), 40, Tier.HOST)
    pool.move([block("w")], Tier.DISK).wait(30)
    pool.move([block("w")], Tier.DISK).wait(30)
    assert pool.table.content(block("w")) is Content.EMPTY and pool.table.locate(block("w")).tier is Tier.DISK
    with pytest.raises(BlockError, match="nothing was written"):
        pool.read({block("w"): torch.empty(10)})


def test_a_full_tier_waits_for_what_leaves_and_refuses_at_once_otherwise(pool):
    half = MIB - 4096
    fill(pool, [half, half], Tier.DEVICE)
    with pytest.raises(PoolFull, match=r"pool\.device_budget"):
        pool.allocate(block("new"), half, Tier.DEVICE)
    go = threading.Event()
    pool.page_out.submit(lambda: go.wait(30), transfer="hold", unit="test")
    pool.move([block(0)], Tier.HOST)
    threading.Timer(0.05, go.set).start()
    pool.allocate(block("new"), half, Tier.DEVICE)
    assert pool.table.locate(block(0)).tier is Tier.HOST
    pool.table.check()


def test_all_blocks_of_a_move_get_room_or_none_moves(pool):
    values = fill(pool, [700_000] * 3, Tier.HOST)
    before = pool.table.to_records()
    with pytest.raises(PoolFull):
        pool.move(values, Tier.DEVICE)
    assert pool.table.to_records() == before
    with pytest.raises(BlockError, match="no block"):
        pool.move([*values, block("unknown")], Tier.DISK)
    assert pool.table.to_records() == before
    assert_holds(pool, values)


def test_tensors_that_do_not_fit_are_refused_before_anything_starts(pool):
    values = fill(pool, [48, 48])
    for wrong in (torch.zeros(11), torch.zeros(4, 3).t()):
        with pytest.raises(BlockError):
            pool.write({block(0): torch.zeros(12), block(1): wrong})
        with pytest.raises(BlockError):
            pool.read({block(1): wrong})
    assert_holds(pool, values)


def test_a_failed_write_leaves_its_block_torn_and_the_rest_whole(pool, monkeypatch):
    values = fill(pool, [5000, 5000, LARGE_BYTES], Tier.DISK)
    real = os.pwritev

    def full(fd, buffers, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        failed = pool.write({block(2): torch.zeros(LARGE_BYTES, dtype=torch.uint8)})
        with pytest.raises(TransferError, match="No space left on device"):
            failed.wait(30)
    assert os.pwritev is real
    with pytest.raises(MemwallError):
        pool.write({block(0): values[block(0)]})
    assert pool.table.content(block(2)) is Content.TORN
    pool.reset()
    assert pool.table.content(block(0)) is Content.WHOLE, "refused before a byte of it changed"
    assert_holds(pool, {b: values[b] for b in (block(0), block(1))})
    pool.write({block(2): values[block(2)]}).wait(30)
    assert_holds(pool, values)


def test_a_failed_move_keeps_its_source_and_what_waits_behind_it_is_undone(pool, monkeypatch):
    values = fill(pool, [LARGE_BYTES, 100, 100])
    used = pool.table.used_bytes()
    go = threading.Event()
    pool.page_out.submit(lambda: go.wait(30), transfer="hold", unit="test")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        moves = [pool.move([b], Tier.DISK) for b in values]
        go.set()
        for move in moves:
            with pytest.raises(TransferError):
                move.wait(30)
    pool.reset()
    assert pool.table.used_bytes() == used and {pool.table.locate(b).tier for b in values} == {Tier.HOST}
    assert_holds(pool, values)
    pool.move(values, Tier.DISK)
    assert_holds(pool, values)


def test_a_write_that_never_ran_leaves_its_block_as_it_was(pool, monkeypatch):
    values = fill(pool, [5000, 5000], Tier.DISK)
    go = threading.Event()
    pool.page_out.submit(lambda: go.wait(30), transfer="hold", unit="test")
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    writes = [pool.write({b: torch.zeros(5000, dtype=torch.uint8)}) for b in values]
    go.set()
    for write in writes:
        with pytest.raises(TransferError):
            write.wait(30)
    pool.reset()
    assert [pool.table.content(b) for b in values] == [Content.TORN, Content.WHOLE]
    assert_holds(pool, {block(1): values[block(1)]})


def test_replicas_are_made_refreshed_and_served(pool):
    values = fill(pool, [1000, LARGE_BYTES], Tier.DEVICE)
    pool.replicate(values, Tier.HOST).wait(30)
    assert pool.table.readable(block(0), tier=Tier.HOST).tier is Tier.HOST
    new = {b: t.flip(0) for b, t in values.items()}
    pool.write(new).wait(30)
    assert pool.table.readable(block(0), tier=Tier.HOST).tier is Tier.DEVICE
    pool.replicate(values, Tier.HOST).wait(30)
    assert [p.generation for p in pool.table.replicas(block(0))] == [2]
    with pytest.raises(ZeroDivisionError), pool.updating(values):
        raise ZeroDivisionError
    for b in values:
        pool.table.promote(b, Tier.HOST)
    assert_holds(pool, new)


@pytest.mark.parametrize(("tier", "arena"), [(Tier.DEVICE, "device"), (Tier.HOST, "node0"), (Tier.DISK, "file")])
def test_defragmentation_closes_gaps_and_keeps_every_byte(pool, tier, arena):
    values = fill(pool, SIZES * 2, tier)
    for b in list(values)[::2]:
        pool.drop(b)
        del values[b]
    before = pool.table.fragmentation(tier, arena)
    assert pool.defragment(tier, arena) > 0
    assert pool.table.fragmentation(tier, arena) < before
    assert_holds(pool, values)
    staging = [p for b, p in pool.table if b.kind == Kind.STAGING]
    assert pool.stores[Tier.DISK]._buffers.qsize() == len(staging)
    addresses = {buffer.address for buffer in list(pool.stores[Tier.DISK]._buffers.queue)}
    assert addresses == {pool.stores[Tier.HOST].bytes_of(p).data_ptr() for p in staging}, "I/O keeps its buffers"


def test_random_traffic_from_three_threads(pool):
    values = fill(pool, [n for n in SIZES if n < LARGE_BYTES] * 3)
    failures = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        mine = [b for i, b in enumerate(values) if i % 3 == seed]
        try:
            for turn in range(40):
                some = rng.sample(mine, 3)
                match rng.randrange(4):
                    case 0:
                        for b in some:
                            values[b] = torch.randint(0, 256, values[b].shape, dtype=torch.uint8)
                        pool.write({b: values[b] for b in some})
                    case 1:
                        out = {b: torch.empty_like(values[b]) for b in some}
                        pool.read(out).wait(30)
                        assert all(torch.equal(out[b], values[b]) for b in some), turn
                    case _:
                        pool.move(some, rng.choice(TIERS))
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert_holds(pool, values)


def test_closing_in_the_middle_leaves_nothing(pool, folder):
    values = fill(pool)
    pool.move(values, Tier.DISK)
    pool.close()
    assert len(pool.table) == 0 and pool.table.tiers() == [] and list(folder.iterdir()) == []
    with pytest.raises(BlockError):
        pool.move(values, Tier.HOST)


def test_closing_after_a_failure_leaves_nothing(pool, monkeypatch):
    values = fill(pool, [LARGE_BYTES, 100])
    go = threading.Event()
    pool.page_out.submit(lambda: go.wait(30), transfer="hold", unit="test")
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    for b in values:
        pool.move([b], Tier.DISK)
    go.set()
    pool.close()
    assert len(pool.table) == 0 and pool.table.tiers() == []


def test_lanes_count_what_they_moved(pool):
    values = fill(pool, [1000, LARGE_BYTES])
    pool.drain()
    pool.page_out.take_stats()
    pool.move(values, Tier.DISK).wait(30)
    pool.move(values, Tier.DEVICE).wait(30)
    out, back = pool.page_out.take_stats(), pool.page_in.take_stats()
    assert (out.transfers, out.bytes) == (back.transfers, back.bytes) == (1, 1000 + LARGE_BYTES)


def test_rates_are_measured_on_every_route_and_leave_nothing(pool):
    before = pool.table.to_records()
    rates = measure(pool, large_bytes=512 * 1024, repeats=2)
    assert set(rates) == {
        (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE), (Tier.HOST, Tier.DISK), (Tier.DISK, Tier.HOST)
    }  # fmt: skip
    for rate in rates.values():
        assert rate.latency_s >= 0 and rate.bytes_per_s > 0
        assert rate.seconds(10**9) == pytest.approx(rate.latency_s + 1e9 / rate.bytes_per_s)
    assert pool.table.to_records() == before
    with pytest.raises(PoolFull, match="rate of device"):
        measure(pool, large_bytes=3 * MIB)
    assert pool.table.to_records() == before
