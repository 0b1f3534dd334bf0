"""What a plan expects to give way: the run's own rules, on known activations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memwall_strategy.config import OverlapConfig
from memwall_strategy.core.block import Kind
from memwall_strategy.planner import (
    ActivationSpec,
    Budgets,
    ClusterSpec,
    ModelSpec,
    OptimizerSpec,
    ParameterSpec,
    Plan,
    UnitSpec,
    plan,
)
from memwall_strategy.planner.activations import KEPT_BY_RECOMPUTE, under_mode
from memwall_strategy.planner.beside import bytes_beside, with_early_steps
from memwall_strategy.planner.buffers import buffer_ladder
from memwall_strategy.planner.memory_plan import schedule_of
from memwall_strategy.pool.relief_plan import with_reliefs
from memwall_strategy.pool.state_placement import Room, place_state
from memwall_strategy.pool.state_plan import fixed_state_bytes, state_units

GIB = 2**30
UNITS = 8


def unit(name: str) -> UnitSpec:
    return UnitSpec(name, tuple(ParameterSpec(f"{name}.w{i}", (64, 64), "float32") for i in range(3)))


MODEL = ModelSpec(tuple(unit(f"blocks.{i}") for i in range(UNITS)), None, ())
CLUSTER = ClusterSpec(world=2)
ACTIVATIONS = ActivationSpec((40_000,) * UNITS, 10_000, 1, "measured")
OVERLAP = OverlapConfig()
BESIDE = bytes_beside(
    MODEL, CLUSTER, precision="32-true", accumulate=1, accumulate_how="sharded", overlap=OVERLAP, device_type="cpu"
)


def planned(
    budget: int, *, reserve: int = 0, offload: bool = False, host: int = GIB, activations: ActivationSpec = ACTIVATIONS
) -> Plan:
    spec = OptimizerSpec.named("adamw")
    made = plan(MODEL, CLUSTER, Budgets(budget), optimizer=spec, accumulate=1, activations=activations)
    units = state_units(MODEL, CLUSTER, spec, 0, "32-true")
    room = Room(budget - reserve - BESIDE - fixed_state_bytes(MODEL), host)
    placement = place_state(units, room, slots=2)

    def place(size: int):
        return place_state(units, Room(size, host), slots=2)

    return with_reliefs(made, units, placement, place, activations, reserve, offload=offload)[0]


def test_the_cheapest_gives_way_first_and_no_more_than_must() -> None:
    whole = planned(GIB).peak_bytes
    assert planned(GIB).reliefs is None
    found = {}
    for missing in (1, 60_000, 150_000, 300_000):
        made = planned(whole - missing)
        found[missing] = dict(made.reliefs or {})
        assert made.fits and made.peak_bytes <= whole - missing, (missing, made)
        assert "expected to give way: " in made.table() and '"reliefs"' in made.to_json()
    assert list(found[1]) == ["optimizer state"] and list(found[300_000]) == ["optimizer state", "recompute"]
    made = planned(whole - 1, reserve=5_000)
    assert next(iter(made.reliefs)) == "reserve"


def test_what_does_not_help_is_said() -> None:
    head = replace(ACTIVATIONS, root_bytes=400_000)  # outside the units: nothing here helps against it
    made = planned(BESIDE + 101_000, activations=head)
    assert made.fits is False and list(made.reliefs) == ["recompute"] and made.advice
    more = planned(BESIDE + 101_000, activations=head, offload=True)
    assert more.peak_bytes <= made.peak_bytes


def test_second_buffers_go_last_and_only_as_far_as_they_must() -> None:
    spec, offload = OptimizerSpec.named("adamw"), False
    rungs = buffer_ladder(OVERLAP, "cpu")

    def planned_with(budget: int, activations: ActivationSpec) -> Plan:
        def made_with(rung) -> Plan:
            made = plan(
                MODEL, CLUSTER, Budgets(budget), optimizer=spec, activations=activations,
                **schedule_of(rung.within(OVERLAP), "cpu"),
            )  # fmt: skip
            return replace(made, buffers=None if rung == rungs[0] else rung)

        def place(size: int):
            return place_state(units, Room(size, GIB), slots=2)

        units = state_units(MODEL, CLUSTER, spec, 0, "32-true")
        placement = place(budget - BESIDE - fixed_state_bytes(MODEL))
        leaner = map(made_with, rungs[1:])
        return with_reliefs(
            made_with(rungs[0]), units, placement, place, activations, 0, offload=offload, leaner=leaner
        )[0]

    heights = []
    least = planned_with(BESIDE + 101_000, replace(ACTIVATIONS, root_bytes=50_000)).peak_bytes
    for more in range(0, 90_000, 10_000):  # outside the units, where only buffers help
        made = planned_with(BESIDE + 101_000, replace(ACTIVATIONS, root_bytes=50_000 + more))
        reliefs = list(made.reliefs or {})
        heights.append(0 if made.buffers is None else rungs.index(made.buffers))
        assert ("second buffers" in reliefs) == (heights[-1] > 0)
        if heights[-1]:
            assert reliefs == ["recompute", "second buffers"] and made.reliefs["second buffers"] > 0
            assert "fewer second buffers: prefetch" in made.table()
        assert made.fits == (made.peak_bytes <= made.limit_bytes)
        assert made.fits or heights[-1] == len(rungs) - 1
    assert least <= BESIDE + 101_000
    assert heights == sorted(heights) and heights[0] == 0 and heights[-1] == len(rungs) - 1, heights


@pytest.mark.parametrize("mode", ["auto", "keep", "selective", "recompute", "offload"])
def test_modes_hold_less(mode: str) -> None:
    spec = under_mode(ACTIVATIONS, mode)
    if mode in ("auto", "keep"):
        assert spec == ACTIVATIONS
    else:
        total = sum(spec.unit_bytes) + spec.root_bytes
        assert total < sum(ACTIVATIONS.unit_bytes) + ACTIVATIONS.root_bytes
        assert spec.root_bytes >= ACTIVATIONS.root_bytes
    if mode == "recompute":
        assert spec.unit_bytes == (int(40_000 * KEPT_BY_RECOMPUTE),) * UNITS and spec.root_bytes == 40_000


def test_steps_inside_the_backward_hold_fewer_gradients() -> None:
    early = OverlapConfig(optimizer_in_backward=True)
    common = {"precision": "32-true", "accumulate_how": "sharded", "device_type": "cpu"}
    one = bytes_beside(MODEL, CLUSTER, accumulate=1, overlap=early, **common)
    several = bytes_beside(MODEL, CLUSTER, accumulate=4, overlap=early, **common)
    assert one < BESIDE <= several == bytes_beside(MODEL, CLUSTER, accumulate=2, overlap=early, **common)
    made = plan(
        MODEL, CLUSTER, Budgets(one + 10), optimizer=OptimizerSpec("none"), gradients_in_forward=False,
        **schedule_of(early, "cpu"),
    )  # fmt: skip
    assert made.fits is False
    changed = with_early_steps(made, MODEL, CLUSTER, early)
    assert changed.fits and changed.advice is None and changed.resident[Kind.GRAD] == 0
    assert changed.peak_bytes == one
