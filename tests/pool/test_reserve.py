"""The reserve: a visible block that shrinks while it is lent, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import ConfigError, PoolFull
from memwall_strategy.pool.arena import BookedArena
from memwall_strategy.pool.device import ENGINE
from memwall_strategy.pool.reserve import Reserve
from memwall_strategy.pool.table import AddressTable
from memwall_strategy.telemetry.events import Event, Events


def open_reserve(nbytes: int = 1000, capacity_bytes: int = 5000) -> tuple[Reserve, AddressTable, list[Event]]:
    table, reserve, events, told = AddressTable(), Reserve(), Events(), []
    events.subscribe(told.append)
    table.open_tier(Tier.DEVICE, capacity_bytes)
    table.add_arena(Tier.DEVICE, ENGINE, BookedArena())
    reserve.attach(table, nbytes, events)
    return reserve, table, told


def rows(table: AddressTable) -> dict[str, int]:
    found: dict[str, int] = {}
    for block, placement in table:
        found[block.kind] = found.get(block.kind, 0) + placement.bytes
    return found


def test_a_loan_shrinks_the_block_and_leaves_the_others_their_room() -> None:
    reserve, table, told = open_reserve()
    free = table.free_bytes(Tier.DEVICE)
    assert rows(table) == {Kind.RESERVE: 1000} and free == 4000
    with reserve.lend("second buffer", 300) as loan:
        assert rows(table) == {Kind.RESERVE: 700, Kind.LENT: 300}
        assert table.free_bytes(Tier.DEVICE) == free and table.used_bytes(Tier.DEVICE, kind=Kind.LENT) == 300
        other = reserve.lend("snapshot", 700)
        assert rows(table) == {Kind.LENT: 1000} and reserve.free_bytes == 0
        with pytest.raises(PoolFull, match=r"asks the reserve for 1 B.*1 bytes\) are missing\. Raise pool\.res") as e:
            reserve.lend("snapshot", 1)
        assert (e.value.tier, e.value.missing_bytes) == (Tier.DEVICE, 1)
        other.close()
        other.close()
        table.check()
    assert loan.open is False and rows(table) == {Kind.RESERVE: 1000}
    assert [(e.kind, e.fields["bytes"], e.fields["left_bytes"]) for e in told] == [
        ("reserve_lent", 300, 700), ("reserve_lent", 700, 0), ("reserve_returned", 700, 700),
        ("reserve_returned", 300, 1000),
    ]  # fmt: skip


def test_a_full_tier_lends_and_ordinary_blocks_never_get_the_reserve() -> None:
    reserve, table, _ = open_reserve()
    table.book(Block("u", "p", "exp_avg"), 4000, Tier.DEVICE, 0, arena=ENGINE)
    with pytest.raises(PoolFull):
        table.book(Block("u", "q", "exp_avg"), 1, Tier.DEVICE, 5000, arena=ENGINE)
    with reserve.lend("migration", 1000):
        table.check()
        assert table.free_bytes(Tier.DEVICE, lend=True) == 0
    assert table.free_bytes(Tier.DEVICE) == 0 and table.free_bytes(Tier.DEVICE, lend=True) == 1000


def test_there_is_none_before_the_tier_is_open_or_without_the_option() -> None:
    with pytest.raises(PoolFull, match="asks the reserve"):
        Reserve().lend("anything", 1)
    reserve, table, _ = open_reserve(0)
    with pytest.raises(PoolFull):
        reserve.lend("anything", 1)
    with pytest.raises(ValueError, match="-1"):
        reserve.lend("anything", -1)
    with reserve.lend("nothing", 0):
        table.check()


def test_loans_outlive_a_tier_that_is_opened_anew_and_steps_do_not() -> None:
    reserve, table, _ = open_reserve()
    loan = reserve.lend("snapshot", 400)
    assert reserve.relieve(10_000) == 600 and reserve.free_bytes == 0
    reserve.detach()
    table.close_tier(Tier.DEVICE)
    reserve.end_steps()
    table.open_tier(Tier.DEVICE, 2000)
    with pytest.raises(ConfigError, match=r"pool\.reserve=300 B is below the 400 B that are lent"):
        reserve.attach(table, 300, Events())
    reserve.attach(table, 500, Events())
    assert rows(table) == {Kind.RESERVE: 100, Kind.LENT: 400}
    loan.close()
    table.check()
    assert rows(table) == {Kind.RESERVE: 500}


def test_a_step_gets_it_first_and_gives_it_back_whole() -> None:
    reserve, table, _ = open_reserve()
    assert reserve.relieve(300) == 300 and reserve.relieve(900) == 700 and reserve.relieve(1) == 0
    assert reserve.restore(699) == 0 and reserve.restore(700) == 700
    assert reserve.restore(10_000) == 300 and reserve.restore(10_000) == 0
    assert rows(table) == {Kind.RESERVE: 1000}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 600)), max_size=30))
def test_whatever_the_order_it_is_exact(moves: list[tuple[bool, int]]) -> None:
    reserve, table, _ = open_reserve()
    loans: list[Any] = []
    for lend, number in moves:
        if lend:
            try:
                loans.append(reserve.lend("x", number))
            except PoolFull:
                assert number > 1000 - sum(each.bytes for each in loans)
        elif loans:
            loans.pop(number % len(loans)).close()
        held = sum(each.bytes for each in loans)
        assert (reserve.lent_bytes, reserve.free_bytes) == (held, 1000 - held)
        assert table.free_bytes(Tier.DEVICE) == 4000 and table.used_bytes(Tier.DEVICE) == held
        table.check()
