"""What gives way, decided from numbers alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwall_strategy.core.block import Block
from memwall_strategy.core.errors import ConfigError, PoolFull
from memwall_strategy.pool.activation_relief import OffloadRelief, RecomputeRelief, ladder
from memwall_strategy.pool.activations import Mode
from memwall_strategy.pool.state_placement import Room, StatePlacement, place_state
from memwall_strategy.pool.state_relief import StateRelief, held_bytes, lowest

GIB = 2**30
UNITS = [{Block(f"u{i}", f"p{j}", "exp_avg"): 640 for j in range(10)} for i in range(8)]
SIZES = {block: size for unit in UNITS for block, size in unit.items()}


def place(device_bytes: int, host_bytes: int = GIB) -> StatePlacement:
    return place_state(UNITS, Room(device_bytes, host_bytes), slots=2)


@given(st.integers(0, 60_000), st.integers(0, 60_000))
def test_the_lowest_placement_is_the_first_that_is_possible(low: int, more: int) -> None:
    found, why = lowest(place, low, low + more)
    possible = 12_800  # all of it passes through two slots of one unit
    if low + more < possible:
        assert found is None and "slots" in why
    else:
        assert found is not None
        assert held_bytes(found, SIZES) <= max(low, possible + 64)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=8))
def test_state_gives_way_by_what_is_missing_to_within_a_block_and_comes_back(missing: list[int]) -> None:
    moved: list[StatePlacement] = []
    relief = StateRelief(place, moved.append)
    start = place(51_200)
    relief.start(start, SIZES)
    held = [held_bytes(start, SIZES)]
    freed = []
    for wanted in missing:
        gone = relief.relieve(wanted)
        if gone:
            freed.append(gone)
            held.append(held[-1] - gone)
            assert held_bytes(moved[-1], SIZES) == held[-1]
        assert gone >= wanted or held[-1] <= 12_800 + 64
        assert gone < wanted + 3 * 640 or not freed[:-1]  # the first time, slots appear
    while freed:
        assert relief.restore(freed[-1] - 1) == 0
        assert relief.restore(freed[-1]) == freed.pop()
    assert relief.restore(GIB) == 0
    assert not moved or moved[-1] == start


def test_a_host_without_room_is_named_and_a_tier_that_fails_changes_nothing() -> None:
    relief = StateRelief(lambda size: place(size, 10_000), lambda _: None)
    relief.start(place(51_200), SIZES)
    assert 0 < relief.relieve(40_000) < 20_000
    assert "no room for block" in relief.remedy and "Raise pool.host_budget" in relief.remedy

    def refuse(_: StatePlacement) -> None:
        raise PoolFull("full", tier="host", owner=0, missing_bytes=1)

    relief = StateRelief(place, refuse)
    assert relief.relieve(100) == 0, "before the state is placed"
    relief.start(place(51_200), SIZES)
    assert relief.relieve(20_000) == 0 and relief.restore(GIB) == 0


@pytest.mark.parametrize("selective", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 48, 1000])
def test_the_ladder_goes_down_step_by_step(count: int, selective: bool) -> None:
    units = [f"blocks.{i}" for i in range(count)]
    rungs = ladder(units, selective=selective)
    shares = [rung.share for rung in rungs]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1.0 and shares[-1] >= 0
    for before, after in itertools.pairwise(rungs):
        if not after.together:
            assert sum(before.modes[u] != after.modes[u] for u in units) == 1
    if count:
        assert set(rungs[(1 + selective) * count].modes.values()) == {Mode.RECOMPUTE}
    assert [rung for rung in rungs if rung.together] == rungs[-1:] * (count == 1000)  # see the module's docstring
    assert count != 1000 or [u for segment in rungs[-1].together for u in segment] == units


class Switches:
    """Stands for ``Activations``."""

    def __init__(self, count: int, refused: tuple[str, ...] = ()) -> None:
        self.modes = {f"u{i}": Mode.KEEP for i in range(count)}
        self.refused = refused

    @property
    def wanted_modes(self) -> dict[str, Mode]:
        return dict(self.modes)

    def refusal(self, units: Any, mode: Mode) -> str:
        return f"cannot be {mode}" if mode in self.refused else ""

    def set(self, modes: dict[str, str], together: Any = ()) -> None:
        self.modes |= {unit: Mode(mode) for unit, mode in modes.items()}


def test_recomputation_climbs_as_far_as_it_must() -> None:
    switches = Switches(4)
    chosen: set[str] = {"u3"}
    relief = RecomputeRelief(switches, lambda value: value, lambda: chosen)
    relief.measured(16_000)
    assert relief.relieve(1500) >= 1500
    assert list(switches.modes.values()) == [Mode.SELECTIVE, Mode.KEEP, Mode.KEEP, Mode.KEEP]
    relief.measured(1)  # not everything is kept: no measure of what was
    assert relief.kept_bytes == 16_000
    assert relief.relieve(10**9) > 0 and relief.relieve(1) == 0
    assert list(switches.modes.values()) == [Mode.RECOMPUTE] * 3 + [Mode.KEEP]
    assert relief.restore(0) == 0 and relief.restore(10**9) > 0 and relief.restore(10**9) > 0
    assert set(switches.modes.values()) == {Mode.KEEP} and relief.restore(10**9) == 0


def test_what_was_never_measured_gives_way_at_once() -> None:
    switches = Switches(3)
    relief = RecomputeRelief(switches, lambda value: value, set)
    assert relief.relieve(77) == 77 and set(switches.modes.values()) == {Mode.RECOMPUTE}
    offload = OffloadRelief(switches, lambda value: value, set, lambda: relief.kept_bytes)
    assert offload.relieve(5) == 5 and set(switches.modes.values()) == {Mode.OFFLOAD}
    assert offload.relieve(5) == 0 and offload.restore(5) == 5
    assert set(switches.modes.values()) == {Mode.RECOMPUTE}


def test_units_that_cannot_are_passed_over_and_the_reason_is_kept() -> None:
    relief = RecomputeRelief(Switches(3, ("recompute",)), lambda value: value, set)
    relief.measured(1000)
    assert relief.relieve(10) == 0 and relief.remedy == "cannot be recompute"
    whole = Switches(3, ("selective",))
    relief = RecomputeRelief(whole, lambda value: value, set)
    relief.measured(3000)
    assert relief.relieve(10) > 10 and list(whole.modes.values()) == [Mode.RECOMPUTE, Mode.KEEP, Mode.KEEP]
    offload = OffloadRelief(Switches(3, ("offload",)), lambda value: value, set, lambda: 0)
    assert offload.relieve(10) == 0 and offload.remedy == "cannot be offload"
    assert RecomputeRelief(Switches(0), lambda value: value, set).relieve(10) == 0


def test_offloading_counts_the_units_on_their_way() -> None:
    switches = Switches(10)
    offload = OffloadRelief(switches, lambda value: value, set, lambda: 10_000)
    offload.measured(2000)  # two units' worth: nothing would be won
    assert offload.relieve(100) == 0
    offload.measured(10_000)
    assert offload.relieve(1500) == 1600 and list(switches.modes.values()).count(Mode.OFFLOAD) == 2


def test_bad_places_raise() -> None:
    with pytest.raises(ConfigError):
        place(100)
