"""In which order a run does without second buffers."""

from __future__ import annotations

import itertools

import pytest

from memwall_strategy.config import OverlapConfig
from memwall_strategy.planner import ClusterSpec, ModelSpec, ParameterSpec, UnitSpec
from memwall_strategy.planner.beside import bytes_beside
from memwall_strategy.planner.buffers import Buffers, buffer_ladder

MODEL = ModelSpec(
    tuple(UnitSpec(f"blocks.{i}", (ParameterSpec(f"blocks.{i}.w", (64, 64), "float32"),)) for i in range(5)),
    UnitSpec("root", (ParameterSpec("head.w", (32, 64), "float32"),)),
    (),
)


def test_depth_goes_first_and_prefetch_last() -> None:
    rungs = buffer_ladder(OverlapConfig(prefetch=3, reduce_buffers=3), "cpu")
    assert [(each.prefetch, each.reduce_buffers, each.early) for each in rungs] == [
        (3, 3, True), (2, 3, True), (1, 3, True), (1, 2, True), (1, 1, True), (1, 1, False), (0, 1, False),
    ]  # fmt: skip
    assert rungs[0] == Buffers.of(OverlapConfig(prefetch=3, reduce_buffers=3))


@pytest.mark.parametrize(
    ("device", "options", "fewest"),
    [
        ("cpu", {}, (0, 1, False)),
        ("cpu", {"prefetch": 0, "reduce_buffers": 1, "next_iteration_early": False}, (0, 1, False)),
        ("cpu", {"next_iteration_early": False, "prefetch": 0}, (0, 1, False)),
        ("cpu", {"lanes": False}, (1, 2, True)),
        ("cuda", {"enabled": False, "prefetch": 4}, (4, 2, True)),
        ("cuda", {"prefetch": 3}, (1, 1, True)),
        ("cuda", {"prefetch": 0, "reduce_buffers": 2}, (0, 1, True)),
    ],
)
def test_the_fewest_of_each_engine(device: str, options: dict, fewest: tuple[int, int, bool]) -> None:
    rungs = buffer_ladder(OverlapConfig(**options), device)
    assert (rungs[-1].prefetch, rungs[-1].reduce_buffers, rungs[-1].early) == fewest
    assert len(set(rungs)) == len(rungs)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_rung_needs_less_and_the_last_needs_least(shared: bool, accumulate: int) -> None:
    overlap = OverlapConfig(prefetch=3, reduce_buffers=3, shared_memory="auto" if shared else False)
    needs = [
        bytes_beside(
            MODEL, ClusterSpec(2), precision="32-true", accumulate=accumulate, accumulate_how="sharded",
            overlap=rung.within(overlap), device_type="cpu",
        )
        for rung in buffer_ladder(overlap, "cpu")
    ]  # fmt: skip
    assert all(after <= before for before, after in itertools.pairwise(needs)), needs
    assert needs[-1] < needs[0]
