"""Where optimizer state rests, decided from sizes alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwall_strategy.core.block import Block, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.arena import GRANULE_BYTES, aligned
from memwall_strategy.pool.state_placement import Room, StatePlacement, place_state, slot_bytes

GIB = 2**30


def units_of(*sizes: list[int]) -> list[dict[Block, int]]:
    return [{Block(f"u{i}", f"p{j}", "exp_avg"): size for j, size in enumerate(row)} for i, row in enumerate(sizes)]


def held(units: list[dict[Block, int]], placement: StatePlacement, tier: Tier) -> int:
    sizes = {block: size for unit in units for block, size in unit.items()}
    return sum(aligned(sizes[block], GRANULE_BYTES) for block, home in placement.homes.items() if home is tier)


SIZES = st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=6), min_size=1, max_size=8)


@given(SIZES, st.integers(0, 120_000), st.integers(2, 4))
def test_every_budget_is_kept_and_used_to_within_one_block(sizes: list[list[int]], budget: int, slots: int) -> None:
    units = units_of(*sizes)
    try:
        placement = place_state(units, Room(budget, GIB), slots=slots)
    except ConfigError as error:
        widest = max(slot_bytes(list(unit.values())) for unit in units)
        assert "pool.device_budget" in str(error) and slots * widest > budget
        return
    on_device = held(units, placement, Tier.DEVICE) + placement.staging_bytes
    assert on_device <= budget
    assert set(placement.homes) == {block for unit in units for block in unit}
    for unit in units:  # a slot is wide enough for what any unit pages
        paged = [size for block, size in unit.items() if placement.homes[block] is not Tier.DEVICE]
        assert not paged or slot_bytes(paged) <= placement.slot_bytes
    if placement.slots:
        largest = max(aligned(size, GRANULE_BYTES) for unit in units for size in unit.values())
        everything = sum(aligned(size, GRANULE_BYTES) for unit in units for size in unit.values())
        more = place_state(units, Room(budget + largest, GIB), slots=slots)
        assert held(units, more, Tier.DEVICE) >= held(units, placement, Tier.DEVICE)
        assert everything > budget


@given(SIZES, st.integers(0, 60_000), st.integers(1, 60_000))
def test_what_rests_on_the_device_grows_with_the_budget(sizes: list[list[int]], budget: int, more: int) -> None:
    units = units_of(*sizes)
    kept = []
    for device_bytes in (budget, budget + more):
        try:
            kept.append(held(units, place_state(units, Room(device_bytes, GIB), slots=2), Tier.DEVICE))
        except ConfigError:
            kept.append(-1)
    assert kept[0] <= kept[1]


def test_shares_between_nothing_and_everything_are_told_apart() -> None:
    """Budgets in steps of a tenth land on ten different placements."""
    units = units_of(*[[640] * 10 for _ in range(10)])
    whole = 64_000
    found = []
    for tenth in range(3, 11):
        placement = place_state(units, Room(whole * tenth // 10, GIB), slots=2)
        on_device = held(units, placement, Tier.DEVICE) + placement.staging_bytes
        assert 0 <= whole * tenth // 10 - on_device <= 640 + 2 * 640
        found.append(held(units, placement, Tier.DEVICE))
    assert found == sorted(set(found))


def test_host_first_then_disk_and_paged_shares_are_alike() -> None:
    units = units_of(*[[640] * 4 for _ in range(5)])
    placement = place_state(units, Room(7000, 3000, GIB), slots=2)
    paged = [sum(placement.homes[block] is not Tier.DEVICE for block in unit) for unit in units]
    assert max(paged) - min(paged) <= 1 and min(paged) > 0
    assert held(units, placement, Tier.HOST) <= 3000 < held(units, placement, Tier.HOST) + 640
    assert held(units, placement, Tier.DISK) > 0


@pytest.mark.parametrize(
    ("room", "text"),
    [
        (Room(100, GIB), r"2 slots .* 5\.0 KiB, but 100 B are left .*missing.*Raise pool\.device_budget"),
        (Room(-500, GIB), r"but 0 B are left"),
        (Room(6000, 0), r"host tier: no room for block u\d/p\d/exp_avg.*or give pool\.disk_budget"),
        (Room(6000, 0, 700), r"host and disk tiers: no room .*Raise pool\.host_budget or pool\.disk_budget"),
    ],
)
def test_no_room_is_named(room: Room, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        place_state(units_of([640] * 4, [640] * 4, [640] * 4), room, slots=2)


def test_edges() -> None:
    assert place_state([], Room(0), slots=2) == StatePlacement()
    assert place_state([{}], Room(-1), slots=2).slots == 0
    with pytest.raises(ConfigError, match="optimizer_units"):
        place_state(units_of([1]), Room(0), slots=1)
