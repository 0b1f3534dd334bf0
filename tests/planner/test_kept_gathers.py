"""Plans beside runs whose gathered weights stay, and whose next iteration begins to gather early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memwall_strategy.config import MemwallConfig, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Kind, Phase
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import ClusterSpec, ModelSpec, ParameterSpec, Plan, UnitSpec, plan
from memwall_strategy.planner.memory_plan import schedule_of
from tests.planner.test_beside_measured import GPT, nonzero
from tests.ranks import process_group, run_ranks

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
RUNS = [
    # precision, micro-batches, units that stay, early, options of overlap
    ("32-true", 1, (), True, {"shared_memory": False}),
    ("32-true", 1, (), False, {"shared_memory": False}),
    ("32-true", 3, BLOCKS[1:], True, {"shared_memory": False}),
    ("bf16-mixed", 2, (*BLOCKS, "root"), True, {"shared_memory": False, "prefetch": 2}),
    ("32-true", 2, (*BLOCKS, "root"), False, {"enabled": False}),
    ("32-true", 2, BLOCKS[:1], True, {}),
]


def measure(rank: int, world: int) -> list[dict[str, Any]]:
    from memwall_strategy.engine.sharding import data_parallel_mesh
    from memwall_strategy.runtime import Runtime

    found = []
    with process_group():
        for precision, accumulate, retained, early, options in RUNS:
            torch.manual_seed(0)
            overlap = OverlapConfig(next_iteration_early=early, **options)
            config = MemwallConfig(pool=PoolConfig(phases=False), overlap=overlap, unit_classes=("Block",))
            runtime = Runtime(config, mesh=data_parallel_mesh("cpu", world, 1), precision=precision)
            model = runtime.setup(GPT())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            runtime.add_optimizers([optimizer])
            runtime.pool.retention.set(retained)
            batches = [model.batch()] * accumulate
            for _ in range(3):
                runtime.step(batches, lambda x, model=model: model(x).float().square().mean(), optimizer)
            runtime.kind_peaks = {}
            runtime.step(batches, lambda x, model=model: model(x).float().square().mean(), optimizer)
            made = plan(
                runtime.model_spec, ClusterSpec(world), precision=precision, accumulate=accumulate, retained=retained,
                rank=rank, **schedule_of(overlap, "cpu"),
            )  # fmt: skip
            found.append({
                "resident": [nonzero(made.resident), nonzero(runtime.memory.current())],
                "phases": {
                    phase: [nonzero(made.kind_peaks[phase]), nonzero(runtime.kind_peaks[phase])]
                    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
                },
                "unit": max(unit.numel for unit in runtime.model_spec.units) * 4 + 64,
            })  # fmt: skip
            runtime.close()
        found.append(fills_the_room(world))
    return found


def fills_the_room(world: int) -> dict[str, Any]:
    """A run whose budget has room for some units: which it retains, and which its plan would."""
    from memwall_strategy.engine.sharding import data_parallel_mesh
    from memwall_strategy.pool.beside import SMALL_STATE_BYTES
    from memwall_strategy.pool.retention_plan import retained_bytes, units_for
    from memwall_strategy.runtime import Runtime

    told: list[dict[str, Any]] = []
    spec = ModelSpec.from_module(GPT(), BLOCKS)
    whole = plan(spec, ClusterSpec(world), accumulate=2, **schedule_of(OverlapConfig(), "cpu"))
    budget = whole.peak_bytes + SMALL_STATE_BYTES * len(spec.parameters) + 12_000  # one block of 7,536 bytes
    config = MemwallConfig(pool=PoolConfig(device_budget=budget, activations="keep"), unit_classes=("Block",))
    runtime = Runtime(config, mesh=data_parallel_mesh("cpu", world, 1))
    runtime.events.subscribe(lambda e: told.append(e.fields) if e.kind == "retention_changed" else None)
    model = runtime.setup(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    runtime.add_optimizers([optimizer])
    for _ in range(5):
        runtime.step([model.batch()], lambda x: model(x).float().square().mean(), optimizer)
    assert runtime.model_spec == spec
    cluster = ClusterSpec(world)
    planned = units_for(spec, cluster, "32-true", told[-1]["room_bytes"])
    sizes = retained_bytes(spec, cluster, "32-true", planned)
    runtime.close()
    return {
        "retained": sorted(told[-1]["units"]), "planned": sorted(planned),
        "bytes": [told[-1]["gathered_bytes"], sum(sizes.values())],
    }  # fmt: skip


def test_what_a_run_holds_is_what_its_plan_says() -> None:
    for results in run_ranks(measure, 2):
        filled = results.pop()
        assert filled["retained"] == filled["planned"] and 0 < len(filled["planned"]) < 4, filled
        assert filled["bytes"][0] == filled["bytes"][1]
        assert len(results) == len(RUNS)
        for case, result in zip(RUNS, results, strict=True):
            shared = case[-1] == {}
            predicted, held = result["resident"]
            comm, gathered_early = predicted.pop("comm", 0), held.pop("comm", 0)
            assert 0 <= gathered_early - comm <= (2048 if shared else 0), case  # flags, slots that begin a cache line
            assert bool(comm) == (case[3] or shared), case
            assert predicted.pop("grad") > 0 and predicted == held, case  # this loop has let go of its gradients
            for phase, (bound, seen) in result["phases"].items():
                assert seen.get("gathered", 0) == bound.get("gathered", 0), (case, phase)
                assert seen.get("grad", 0) <= bound["grad"], (case, phase)
                assert seen.get("comm", 0) <= bound.get("comm", 0) + result["unit"], (case, phase)


# -- from a description alone --

MODEL = ModelSpec(
    units=tuple(UnitSpec(f"u{i}", (ParameterSpec(f"u{i}.w", (64, 10 + i)),)) for i in range(4)),
    root=UnitSpec("root", (ParameterSpec("table", (64, 8), used_after=True),)),
)


def planned(**options: Any) -> Plan:
    return plan(MODEL, ClusterSpec(2), **{"prefetch": 1, "lanes": True, **options})


def test_retained_weights_take_their_bytes_and_no_gather() -> None:
    names = [unit.name for unit in MODEL.every_unit]
    none, some, every = planned(), planned(retained=names[2:4]), planned(retained=names)
    whole = {unit.name: unit.numel * 4 for unit in MODEL.every_unit}
    at = [made.kind_peaks[Phase.FORWARD][Kind.GATHERED] for made in (none, some, every)]
    assert at == [whole["root"] + whole["u3"], whole["root"] + whole["u2"] + whole["u3"], sum(whole.values())]
    assert every.kind_peaks[Phase.BACKWARD][Kind.GATHERED] == sum(whole.values())
    assert every.resident == none.resident, "nothing of them outlives the step"
    for accumulate in (2, 3, 9):  # they stay for the next micro-batch: its forward starts with all of them
        several = planned(retained=names, accumulate=accumulate)
        assert several.kind_peaks[Phase.FORWARD][Kind.GATHERED] == sum(whole.values())
        assert several.peak_bytes >= planned(accumulate=accumulate).peak_bytes
    with pytest.raises(ConfigError, match=r"retained='u9' is no unit.*Units are: u0, u1, u2, u3, root"):
        planned(retained=["u9"])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 9])
def test_an_early_start_moves_buffers_and_adds_none(prefetch: int, accumulate: int) -> None:
    """They are those that the forward would fill first: there between steps, and no more at the peak."""
    late = planned(prefetch=prefetch, accumulate=accumulate)
    early = planned(prefetch=prefetch, accumulate=accumulate, next_iteration_early=True)
    order = [MODEL.root, *MODEL.units][: prefetch + 1]
    assert early.resident[Kind.COMM] == sum(unit.numel * 4 for unit in order)
    assert Kind.COMM not in late.resident
    assert early.peak_bytes == late.peak_bytes
    assert early.peaks[Phase.BACKWARD] == late.peaks[Phase.BACKWARD]


def test_one_rank_gathers_nothing_early() -> None:
    made = plan(MODEL, ClusterSpec(1), next_iteration_early=True, retained=["u0"])
    assert Kind.COMM not in made.resident


def test_overlap_says_whether_it_starts_early() -> None:
    assert schedule_of(OverlapConfig(), "cpu")["next_iteration_early"]
    for overlap, device in (
        (OverlapConfig(next_iteration_early=False), "cpu"), (OverlapConfig(lanes=False), "cpu"),
        (OverlapConfig(enabled=False), "cpu"), (OverlapConfig(), "cuda"),
    ):  # fmt: skip
        assert not schedule_of(overlap, device)["next_iteration_early"]
