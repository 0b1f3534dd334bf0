"""The address table: rules, accounts, errors, threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.core.errors import BlockError, PoolFull
from memwall_strategy.pool.arena import Arena, BookedArena
from memwall_strategy.pool.entry import Content
from memwall_strategy.pool.table import AddressTable

KIB = 1024


def make_table(**capacities: int) -> AddressTable:
    """A table of rank 0 with one arena a tier, ``"a"``."""
    table = AddressTable()
    for name, capacity in (capacities or {"device": 64 * KIB, "host": 64 * KIB, "disk": 64 * KIB}).items():
        table.open_tier(Tier(name), capacity)
        table.add_arena(Tier(name), "a", Arena(capacity))
    return table


def block(name: str = "w", kind: str = Kind.EXP_AVG) -> Block:
    return Block("blocks.0", name, kind)


def written(table: AddressTable, name: str = "w", nbytes: int = 100, tier: Tier = Tier.HOST) -> Block:
    table.allocate(it := block(name), nbytes, tier)
    with table.writing(it):
        pass
    return it


def test_the_table_needs_no_torch():
    code = "import sys, memwall_strategy.pool.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_allocate_locate_drop():
    table = make_table()
    placement = table.allocate(block(), 100, Tier.HOST)
    assert placement == Placement(Tier.HOST, 0, "a", 0, 100, 0, 28)
    assert table.locate(block()) == placement and block() in table and len(table) == 1
    assert list(table) == [(block(), placement)]
    table.check()
    table.drop(block())
    assert len(table) == 0 and table.used_bytes() == 0
    table.check()
    for gone in (table.locate, table.drop, table.readable, table.begin_write, table.replicas, table.content):
        with pytest.raises(BlockError, match=r"no block blocks\.0/w/exp_avg"):
            gone(block())


def test_accounts_by_rank_tier_and_kind():
    table = make_table()
    table.open_tier(Tier.PEER, 4 * KIB, owner=3)
    table.add_arena(Tier.PEER, "b", Arena(4 * KIB), owner=3)
    table.allocate(block("a"), 100, Tier.HOST)
    table.allocate(block("b", Kind.MASTER), 64, Tier.HOST)
    table.allocate(block("c"), 1, Tier.PEER, owner=3)
    assert table.used_bytes() == 128 + 64 + 64
    assert table.used_bytes(Tier.HOST) == 192 and table.used_bytes(owner=3) == 64
    assert table.used_bytes(kind=Kind.EXP_AVG) == 192
    balance = table.balance(Tier.HOST, kind="exp_avg")
    assert (balance.blocks, balance.bytes, balance.padding_bytes) == (1, 100, 28)
    assert [account for account, _ in table.balances()] == [
        (0, Tier.HOST, "exp_avg"), (0, Tier.HOST, "master"), (3, Tier.PEER, "exp_avg")
    ]  # fmt: skip
    table.check()


def test_empty_blocks_take_no_room():
    table = make_table(host=64)
    for i in range(5):
        table.allocate(block(str(i)), 0, Tier.HOST)
    table.allocate(block("full"), 64, Tier.HOST)
    table.allocate(block("more"), 0, Tier.HOST)
    assert table.used_bytes() == 64
    table.check()
    for it, _ in list(table):
        table.drop(it)
    table.check()


def test_a_full_tier_says_who_where_how_much_and_what_would_help():
    table = make_table(device=4 * KIB)
    table.allocate(block("a"), 3 * KIB, Tier.DEVICE)
    with pytest.raises(PoolFull) as caught:
        table.allocate(block("b"), 3 * KIB, Tier.DEVICE)
    error = caught.value
    assert (error.tier, error.owner, error.missing_bytes) == ("device", 0, 2 * KIB)
    for part in ("blocks.0/b/exp_avg", "device tier of rank 0", "3.0 KiB", "1.0 KiB", "2048 bytes",
                 "pool.device_budget", "pool.host_budget"):  # fmt: skip
        assert part in str(error)
    assert block("b") not in table
    table.check()


def test_a_fragmented_tier_says_so():
    table = make_table(disk=4 * KIB)
    for i in range(4):
        table.allocate(block(str(i)), KIB, Tier.DISK)
    table.drop(block("0"))
    table.drop(block("2"))
    assert table.fragmentation(Tier.DISK, "a") == 0.5
    with pytest.raises(PoolFull, match=r"longest free stretch is 1\.0 KiB although 2\.0 KiB are free") as caught:
        table.allocate(block("big"), 2 * KIB, Tier.DISK)
    assert caught.value.missing_bytes == 0
    for it, placement, offset in table.plan_defragment(Tier.DISK, "a"):
        table.shift(it, placement, offset)
        table.check()
    table.allocate(block("big"), 2 * KIB, Tier.DISK)
    table.check()


def test_tiers_and_arenas_must_be_open():
    table = make_table(host=KIB)
    for wrong in (
        lambda: table.allocate(block(), 1, Tier.DISK),
        lambda: table.allocate(block(), 1, Tier.HOST, owner=1),
        lambda: table.allocate(block(), 1, Tier.HOST, arena="b"),
        lambda: table.open_tier(Tier.HOST, 1),
        lambda: table.open_tier(Tier.DISK, 1, reserve_bytes=2),
        lambda: table.add_arena(Tier.HOST, "a", Arena(1)),
        lambda: table.allocate(Block("pool", "reserve", Kind.RESERVE), 1, Tier.HOST),
    ):
        with pytest.raises(BlockError):
            wrong()
    table.allocate(block(), 1, Tier.HOST)
    with pytest.raises(BlockError, match="already"):
        table.allocate(block(), 1, Tier.HOST)
    with pytest.raises(BlockError, match="still holds blocks of kind exp_avg"):
        table.close_tier(Tier.HOST)
    table.drop(block())
    table.close_tier(Tier.HOST)
    assert table.tiers() == []


def test_generations_and_stale_replicas():
    table = make_table()
    it = written(table)
    with table.replicate(it, Tier.DISK) as copy:
        assert copy.source == table.locate(it)
        assert table.readable(it, tier=Tier.DISK).tier is Tier.HOST, "a replica under way is not served"
    assert table.readable(it, tier=Tier.DISK).tier is Tier.DISK
    assert table.used_bytes(kind=Kind.REPLICA) == 128
    with table.writing(it), pytest.raises(BlockError, match="being written"):
        table.readable(it)
    assert table.locate(it).generation == 2
    assert table.readable(it, tier=Tier.DISK).tier is Tier.HOST, "a stale replica is not served"
    assert table.replicas(it)[0].generation == 1
    with table.refresh(it, Tier.DISK):
        assert table.replicas(it)[0].generation == 0
        table.check()
    assert table.readable(it, tier=Tier.DISK).generation == 2
    table.drop_replica(it, Tier.DISK)
    assert table.replicas(it) == [] and table.used_bytes(Tier.DISK) == 0
    table.check()


def test_a_failed_refresh_leaves_the_replica_unreadable():
    table = make_table()
    it = written(table)
    with table.replicate(it, Tier.DISK):
        pass
    with pytest.raises(ZeroDivisionError), table.refresh(it, Tier.DISK):
        raise ZeroDivisionError
    assert table.readable(it, tier=Tier.DISK).tier is Tier.HOST
    with pytest.raises(BlockError, match="generation 0"):
        table.promote(it, Tier.DISK)
    table.check()


def test_nothing_reads_what_was_never_written_or_is_torn():
    table = make_table()
    table.allocate(block(), 8, Tier.HOST)
    with pytest.raises(BlockError, match="nothing was written"):
        table.readable(block())
    with pytest.raises(BlockError, match="nothing was written"):
        table.begin_replica(block(), Tier.DISK)
    with pytest.raises(ZeroDivisionError), table.writing(block()):
        raise ZeroDivisionError
    assert table.content(block()) is Content.TORN
    for wrong in (
        table.readable,
        lambda b: table.begin_move(b, Tier.DISK),
        lambda b: table.begin_replica(b, Tier.DISK),
    ):
        with pytest.raises(BlockError, match="its last write failed"):
            wrong(block())
    with table.writing(block()):
        pass
    assert table.readable(block()).generation == 1
    table.check()


def test_a_replica_heals_a_torn_block():
    table = make_table()
    it = written(table)
    with table.replicate(it, Tier.DISK):
        pass
    table.begin_write(it)
    table.abort_write(it)
    placement = table.promote(it, Tier.DISK)
    assert placement.tier is Tier.DISK and table.readable(it) == placement and placement.generation == 1
    assert table.used_bytes(Tier.HOST) == 0 and table.used_bytes(kind=Kind.REPLICA) == 0
    table.check()


def test_going_back_to_an_old_generation_makes_every_other_copy_stale():
    table = make_table()
    it = written(table)
    with table.replicate(it, Tier.DISK):
        pass
    with table.writing(it):
        pass
    with table.replicate(it, Tier.DEVICE):
        pass
    with pytest.raises(BlockError, match="has generation 1, wanted is 2"):
        table.promote(it, Tier.DISK)
    assert table.promote(it, Tier.DISK, generation=1).generation == 3
    assert table.readable(it, tier=Tier.DEVICE).tier is Tier.DISK
    table.check()


def test_a_move_holds_both_places_until_it_is_committed():
    table = make_table()
    it = written(table)
    copy = table.begin_move(it, Tier.DEVICE)
    assert table.used_bytes() == 256 and table.locate(it).tier is Tier.HOST
    table.check()
    for wrong in (
        lambda: table.begin_write(it),
        lambda: table.drop(it),
        lambda: table.begin_move(it, Tier.DISK),
        lambda: table.begin_replica(it, Tier.DISK),
        lambda: table.plan_defragment(Tier.HOST, "a"),
        lambda: table.shift(it, table.locate(it), 0),
    ):
        with pytest.raises(BlockError):
            wrong()
    assert table.commit(copy).tier is Tier.DEVICE
    assert table.used_bytes(Tier.HOST) == 0 and table.readable(it).generation == 1
    for again in (table.commit, table.abort):
        with pytest.raises(BlockError, match="before"):
            again(copy)
    with pytest.raises(ZeroDivisionError), table.move(it, Tier.DISK):
        raise ZeroDivisionError
    assert table.locate(it).tier is Tier.DEVICE and table.used_bytes(Tier.DISK) == 0
    with pytest.raises(BlockError, match="already"):
        table.begin_move(it, Tier.DEVICE)
    table.check()


def test_a_move_without_room_changes_nothing():
    table = make_table(host=KIB, device=64)
    it = written(table)
    with pytest.raises(PoolFull):
        table.begin_move(it, Tier.DEVICE)
    assert table.locate(it).tier is Tier.HOST
    table.check()


def test_the_reserve_is_visible_lent_and_returned():
    table = AddressTable()
    table.open_tier(Tier.HOST, 4 * KIB, reserve_bytes=KIB)
    table.add_arena(Tier.HOST, "a", Arena(4 * KIB))

    def reserve() -> int:
        return sum(p.bytes for b, p in table if b.kind == Kind.RESERVE)

    assert reserve() == KIB and table.to_records()[0]["role"] == "reserve"
    table.allocate(block("a"), 2 * KIB, Tier.HOST)
    with pytest.raises(PoolFull, match=r"1\.0 KiB of it kept as reserve|1\.0 KiB .*kept as reserve"):
        table.allocate(block("b"), 2 * KIB, Tier.HOST)
    table.allocate(block("b"), 2 * KIB - 64, Tier.HOST, lend=True)
    assert table.lent_bytes(Tier.HOST) == KIB - 64 and reserve() == 64
    table.check()
    with pytest.raises(PoolFull):
        table.allocate(block("c"), 1, Tier.HOST)
    table.drop(block("a"))
    assert table.lent_bytes(Tier.HOST) == 0 and reserve() == KIB, "freed bytes give back what was lent, whoever frees"
    table.resize_tier(Tier.HOST, reserve_bytes=0)
    assert reserve() == 0
    with pytest.raises(BlockError, match=r"pool\.reserve"):
        table.resize_tier(Tier.HOST, reserve_bytes=5 * KIB)
    table.check()


def test_a_capacity_is_lowered_only_to_what_is_held():
    table = make_table(host=4 * KIB)
    table.allocate(block(), KIB, Tier.HOST)
    with pytest.raises(PoolFull, match="Page blocks out first") as caught:
        table.resize_tier(Tier.HOST, capacity_bytes=KIB - 64)
    assert caught.value.missing_bytes == 64
    table.resize_tier(Tier.HOST, capacity_bytes=KIB)
    with pytest.raises(PoolFull):
        table.allocate(block("b"), 1, Tier.HOST)
    table.resize_tier(Tier.HOST, capacity_bytes=2 * KIB)
    table.allocate(block("b"), KIB, Tier.HOST)
    assert table.capacity_bytes(Tier.HOST) == 2 * KIB and table.free_bytes(Tier.HOST) == 0
    table.check()


def test_what_the_engine_holds_is_booked_under_the_same_cap():
    table = make_table(device=4 * KIB)
    table.add_arena(Tier.DEVICE, "engine", BookedArena())
    gathered = block("g", Kind.GATHERED)
    placement = table.book(gathered, 3000, Tier.DEVICE, 0x7F00_0000, arena="engine")
    assert placement.offset == 0x7F00_0000 and table.readable(gathered) == placement
    with pytest.raises(PoolFull):
        table.allocate(block(), 2 * KIB, Tier.DEVICE)
    with pytest.raises(PoolFull):
        table.book(block("h"), 3000, Tier.DEVICE, 0x7F10_0000, arena="engine")
    with pytest.raises(BlockError, match="booked already"):
        table.book(block("h"), 8, Tier.DEVICE, 0x7F00_0000, arena="engine")
    with pytest.raises(BlockError, match="hands out its own addresses"):
        table.book(block("h"), 8, Tier.DEVICE, 0, arena="a")
    with pytest.raises(BlockError, match="no addresses of its own"):
        table.plan_defragment(Tier.DEVICE, "engine")
    table.check()
    table.drop(gathered)
    table.allocate(block(), 4 * KIB, Tier.DEVICE)
    table.check()


def test_a_group_lies_in_one_piece_or_not_at_all():
    table = make_table(host=1024 * KIB)
    sizes = {block(str(i)): n for i, n in enumerate([0, 1, 300 * KIB, 70, 4096, 256 * KIB])}
    placed = table.allocate_group(sizes, Tier.HOST)
    assert list(placed) == list(sizes) and all(table.locate(b) == p for b, p in placed.items())
    spans = sorted((p.offset, p.offset + p.held_bytes) for p in placed.values() if p.bytes)
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert all(p.offset % 4096 == 0 for p in placed.values() if p.bytes >= 256 * KIB)
    table.check()
    before = table.to_records()
    with pytest.raises(PoolFull, match="and 1 more"):
        table.allocate_group({block("x"): 500 * KIB, block("y"): 1}, Tier.HOST)
    with pytest.raises(BlockError, match="already"):
        table.allocate_group({block("z"): 1, block("0"): 1}, Tier.HOST)
    assert table.to_records() == before and table.allocate_group({}, Tier.HOST) == {}
    for it in sizes:
        table.drop(it)
        table.check()
    assert table.used_bytes() == 0


def test_a_second_arena_is_used_when_the_first_is_full():
    table = AddressTable()
    table.open_tier(Tier.HOST, 2 * KIB)
    for name in ("node0", "node1"):
        table.add_arena(Tier.HOST, name, Arena(KIB))
    assert table.allocate(block("a"), KIB, Tier.HOST).arena == "node0"
    assert table.allocate(block("b"), KIB, Tier.HOST).arena == "node1"
    table.check()


def test_a_group_goes_to_an_arena_that_holds_it_whole():
    table = AddressTable()
    table.open_tier(Tier.HOST, 3 * KIB)
    for name, size in (("node0", KIB), ("node1", 2 * KIB)):
        table.add_arena(Tier.HOST, name, Arena(size))
    placed = table.allocate_group({block("a"): KIB, block("b"): KIB}, Tier.HOST)
    assert {p.arena for p in placed.values()} == {"node1"}
    table.check()


def test_records_are_plain_and_complete():
    table = make_table()
    it = written(table)
    with table.replicate(it, Tier.DISK):
        pass
    copy = table.begin_replica(it, Tier.DEVICE)
    rows = table.to_records()
    assert [(r["role"], r["tier"], r["current"]) for r in rows] == [
        ("authority", "host", True), ("replica", "disk", True), ("replica", "device", False)
    ]  # fmt: skip
    assert all(type(value) in (str, int, bool, type(None)) for row in rows for value in row.values())
    assert sum(r["bytes"] + r["padding_bytes"] for r in rows) == table.used_bytes()
    table.abort(copy)
    table.check()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t, e: setattr(e, "authority", Placement(Tier.HOST, 0, "a", 64, 100, 1, 28)), "overlap"),
        (lambda t, e: setattr(e, "content", Content.EMPTY), "empty at generation 1"),
        (lambda t, e: e.replicas.update(x=Placement(Tier.HOST, 0, "a", 512, 100, 1, 28)), "two copies in one arena"),
        (lambda t, e: e.replicas.update(x=Placement(Tier.DISK, 0, "a", 0, 100, 9, 28)), "newer than"),
        (lambda t, e: e.replicas.update(x=Placement(Tier.DISK, 0, "a", 0, 9, 1, 0)), "different lengths"),
        (lambda t, e: setattr(e, "authority", Placement(Tier.DISK, 1, "a", 0, 100, 1, 28)), "not open"),
        (lambda t, e: t._ledger.add(0, Tier.HOST, "exp_avg", 1, 0), "booked"),
        (lambda t, e: setattr(t._media[Tier.HOST, 0], "held_bytes", 1), "are counted"),
        (lambda t, e: setattr(t._media[Tier.HOST, 0], "capacity_bytes", 1), "are held of 1"),
        (lambda t, e: t._media[Tier.HOST, 0].arenas["a"].free(0), "not what blocks hold"),
        (lambda t, e: setattr(t._media[Tier.HOST, 0].arenas["a"], "used_bytes", 1), "counted as used"),
        (lambda t, e: t._media[Tier.HOST, 0].arenas["a"]._by_size.clear(), "largest hole"),
    ],
)
def test_check_finds_what_is_wrong(spoil, says):
    table = make_table()
    it = written(table)
    written(table, "neighbour")
    table.check()
    spoil(table, table._entries[it])
    with pytest.raises(BlockError, match=says):
        table.check()


def test_threads_leave_it_consistent():
    table = make_table(host=256 * KIB, disk=256 * KIB)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(60):
                it = Block(f"u{number}", str(i), Kind.MASTER)
                table.allocate(it, 64 + i, Tier.HOST)
                with table.writing(it):
                    pass
                with table.move(it, Tier.DISK):
                    pass
                with table.replicate(it, Tier.HOST):
                    pass
                assert table.readable(it, tier=Tier.HOST).tier is Tier.HOST
                if i % 2:
                    table.drop(it)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    assert not failures and len(table) == 6 * 30
    table.check()
