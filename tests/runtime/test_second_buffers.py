"""Second buffers under budgets, on two ranks: losses are those of the free run to the last bit, whatever there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memwall_strategy.config import OverlapConfig
from memwall_strategy.core.block import Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import ClusterSpec
from memwall_strategy.planner.beside import bytes_beside
from memwall_strategy.planner.buffers import buffer_ladder
from memwall_strategy.pool import needed_device_bytes
from tests.lightning.checks import Here, on_ranks, rank_results
from tests.runtime.test_budgets import Run

__all__ = ["rank_results"]  # pytest finds the fixture here

OVERLAPS = {
    "windows": OverlapConfig(shared_memory=True),
    "sockets": OverlapConfig(shared_memory=False),
    "deep": OverlapConfig(prefetch=3, reduce_buffers=3),
}


def alike(value: Any) -> bool:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return all(each == found[0] for each in found)


@on_ranks(2, "windows", "deep")
def test_recompute_makes_room_first_and_buffers_come_back_first(here: Here) -> None:
    """Long batches that nothing but fewer buffers helps, then short ones."""
    overlap, sizes = OVERLAPS[here.case], [8] * 10 + [1] * 24
    free = Run(here, sizes, overlap=overlap).go()
    there: list[tuple[int, int]] = []
    comm: list[int] = []

    def look(run: Run) -> None:
        now = run.runtime.pool.second_buffers.now
        there.append((now.prefetch, now.reduce_buffers))
        metrics = run.runtime.metrics()
        assert there[-1] == (metrics["memwall/overlap/prefetch"], metrics["memwall/overlap/reduce_buffers"])
        comm.append(run.runtime.memory.current()["comm"])

    # Room for a step that recomputes everything, but not for all second buffers beside it.
    budget = {"windows": 166_000, "deep": 178_000}[here.case]
    run = Run(here, sizes, overlap=overlap, device_budget=budget).go(look)
    assert run.losses == free.losses
    relieved = [(e.step, e.fields["relief"]) for e in run.events if e.kind == "memory_relieved"]
    names = list(dict.fromkeys(name for _, name in relieved))
    assert names == ["optimizer state", "recompute", "second buffers"], relieved
    short = max(step for step, _ in relieved)
    assert short < 8 and max(run.peaks[short:]) <= budget, (relieved, run.peaks)
    changes = run.told("buffers_changed")
    down = [each for each in changes if each["cause"] == "a step was short"]
    back = [each for each in changes if each["cause"] == "there is room again"]
    assert len(down) == len(back) and len(changes) == 2 * len(down) and back[-1]["bytes"] == down[0]["before_bytes"]
    restored = [fields["relief"] for fields in run.told("memory_restored")]
    assert restored[: len(back)] == ["second buffers"] * len(back), restored
    asked = (overlap.prefetch, overlap.reduce_buffers)
    assert there[0] == asked == there[-1] and there[9] < asked
    # Windows are all that is held for communication between two steps: told as booked, to the byte.
    assert comm[9] == down[-1]["bytes"] and comm[-1] == back[-1]["bytes"] == down[0]["asked_bytes"]
    assert alike([there, changes])


@on_ranks(2, "windows", "sockets", "deep")
def test_what_has_no_room_is_left_out_at_set_up_as_planned(here: Here) -> None:
    """Room for the fewest, for some, for all: each budget trains within it, and the ranks agree."""
    overlap, sizes = OVERLAPS[here.case], [1] * 5
    free = Run(here, sizes, overlap=overlap).go()
    rungs = buffer_ladder(overlap, "cpu")
    probe = Run(here, [1], overlap=overlap, device_budget="1MiB", activations="keep")
    least = needed_device_bytes(probe.runtime, fewest_buffers=True)
    needs = [
        bytes_beside(
            probe.runtime.model_spec, ClusterSpec(2), precision="32-true", accumulate=2, accumulate_how="sharded",
            overlap=rung.within(overlap), device_type="cpu",
        )
        for rung in rungs
    ]  # fmt: skip
    probe.runtime.close()
    beside_state = least - needs[-1]
    for height, need in enumerate(needs):
        first = needs.index(need)  # rungs that need as much as an earlier one are never reached
        budget = beside_state + need
        # Rank 1 is the one that is short; ``keep`` counts no activations, so that the plan alone decides.
        budgets = ["1MiB", budget]
        run = Run(here, sizes, overlap=overlap, activations="keep", device_budget=budgets, host_budget="16MiB").go()
        assert run.losses == free.losses, height
        now = rungs[first]
        changes = run.told("buffers_changed")
        if first == 0:
            assert not changes
        else:
            (change,) = changes
            assert change["cause"] == "set-up" and change["bytes"] < change["asked_bytes"]
            assert (change["prefetch"], change["reduce_buffers"], change["early"]) == (
                now.prefetch, now.reduce_buffers, now.early,
            )  # fmt: skip
        if here.rank == 1:
            assert max(run.peaks) <= budget + 64 * 4 and run.rest[Tier.DEVICE] == 0, (height, run.peaks, budget)
    with pytest.raises(ConfigError, match=r"rank 1: device tier: 2 slots .* are missing"):
        Run(here, sizes, overlap=overlap, activations="keep", device_budget=["1MiB", least - 64], host_budget="16MiB")


@on_ranks(2)
def test_weights_that_thaw_take_the_place_of_buffers(here: Here) -> None:
    """What is placed anew between two steps may need more: then buffers go, on both ranks, and not the run."""

    def thaw(run: Run) -> None:
        if run.runtime.steps == 3:
            run.runtime.model.blocks.requires_grad_(True)

    sizes = [1] * 8
    free = Run(here, sizes, frozen=3).go(thaw)
    run = Run(here, sizes, frozen=3, activations="keep", device_budget=["1MiB", 130_000], host_budget="16MiB").go(thaw)
    assert run.losses == free.losses
    (change,) = (event for event in run.events if event.kind == "buffers_changed")
    assert change.step == 3 and change.fields["cause"] == "set-up" and change.fields["reduce_buffers"] == 1
    if here.rank == 1:
        assert max(run.peaks) <= 130_000
