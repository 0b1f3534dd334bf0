"""Plans: arithmetic by hand, verdict, advice, and how a plan is written."""

from __future__ import annotations

import itertools
import json

import pytest

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import (
    ActivationSpec,
    Budgets,
    ClusterSpec,
    ModelSpec,
    ParameterSpec,
    UnitSpec,
    plan,
)

MIB = 1 << 20


def square_model(layers: int = 4, side: int = 512) -> ModelSpec:
    """Layers of one square matrix each: 1 MiB in float32 for the default side."""
    units = tuple(UnitSpec(f"l.{i}", (ParameterSpec(f"l.{i}.w", (side, side)),)) for i in range(layers))
    table = ParameterSpec("embed", (side, side), used_before=True)
    return ModelSpec(units, UnitSpec("root", (table,)))


def saved(layers: int = 4, each: int = MIB) -> ActivationSpec:
    return ActivationSpec((each,) * layers, 2 * each, 8, "estimated")


def test_by_hand_on_two_ranks():
    made = plan(square_model(), ClusterSpec(2), lanes=False, prefetch=0, reduce_buffers=1)
    resident = {"param": 2.5, "grad": 2.5, "exp_avg": 2.5, "exp_avg_sq": 2.5}
    assert made.resident == {k: v * MIB for k, v in resident.items()} | {"buffer": 0, "optimizer": 5 * 4}
    # forward: root and one unit gathered, the flat buffer of this unit and of the one before
    assert made.kind_peaks["forward"]["gathered"] == 2 * MIB
    assert made.kind_peaks["forward"]["comm"] == 2 * MIB
    # backward: root and one unit gathered; the next unit's flat buffer beside the reduction's input and half of output
    assert made.kind_peaks["backward"]["gathered"] == 2 * MIB
    assert made.kind_peaks["backward"]["comm"] == 2.5 * MIB
    assert made.kind_peaks["step"] == pytest.approx(made.resident | {"gathered": 0, "comm": 0, "activation": 0})


def test_a_prefetched_unit_costs_one_flat_buffer():
    plans = [plan(square_model(8), ClusterSpec(2), prefetch=n) for n in (1, 2, 3)]
    comm = [p.kind_peaks["forward"]["comm"] for p in plans]
    assert [b - a for a, b in itertools.pairwise(comm)] == [MIB, MIB]


def test_a_reduction_in_flight_costs_its_input():
    plans = [plan(square_model(8), ClusterSpec(2), reduce_buffers=n) for n in (1, 2, 3)]
    comm = [p.kind_peaks["backward"]["comm"] for p in plans]
    assert [b - a for a, b in itertools.pairwise(comm)] == [MIB, MIB]


def test_gradients_kept_whole_are_kept_whole():
    sharded = plan(square_model(), ClusterSpec(4), accumulate=4)
    whole = plan(square_model(), ClusterSpec(4), accumulate=4, accumulate_how="whole")
    assert whole.kind_peaks["forward"]["grad"] == 5 * MIB
    assert sharded.kind_peaks["forward"]["grad"] <= 5 * MIB / 4 + MIB  # and what is in flight


def test_replicas_do_not_share():
    assert plan(square_model(), ClusterSpec(4, replicate=2)).resident == plan(square_model(), ClusterSpec(2)).resident


def test_precision_by_kind():
    by_precision = {
        name: plan(square_model(), ClusterSpec(2), precision=name) for name in ("32-true", "bf16-mixed", "bf16-true")
    }
    param = {name: made.resident["param"] / MIB for name, made in by_precision.items()}
    gathered = {name: made.kind_peaks["forward"]["gathered"] / MIB for name, made in by_precision.items()}
    assert param == {"32-true": 2.5, "bf16-mixed": 2.5, "bf16-true": 1.25}
    assert gathered == {"32-true": 2, "bf16-mixed": 1, "bf16-true": 1}


def test_activations_grow_with_the_batch_and_are_named():
    small = plan(square_model(), ClusterSpec(2), activations=saved(), micro_batch=8)
    large = plan(square_model(), ClusterSpec(2), activations=saved(), micro_batch=16)
    assert small.kind_peaks["backward"]["activation"] == 6 * MIB
    assert large.kind_peaks["backward"]["activation"] == 12 * MIB
    assert (small.activations, plan(square_model(), ClusterSpec(2)).activations) == ("estimated", "not counted")


def test_every_rank_holds_at_most_what_the_first_does():
    model = square_model(side=7)
    totals = [plan(model, ClusterSpec(5), rank=rank).resident_bytes for rank in range(5)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


# -- verdict and advice --


def verdict(limit: float, **settings) -> tuple[bool | None, str | None]:
    made = plan(square_model(), ClusterSpec(2), Budgets(device_bytes=int(limit * MIB)), **settings)
    return made.fits, made.advice


def test_fits_at_its_peak_and_not_a_byte_below():
    peak_bytes = plan(square_model(), ClusterSpec(2)).peak_bytes
    assert verdict(peak_bytes / MIB) == (True, None)
    fits, advice = verdict((peak_bytes - 1) / MIB)
    assert fits is False and advice.startswith("set overlap.prefetch=0 and overlap.reduce_buffers=1: the peak becomes")


def test_advice_is_a_plan_that_fits():
    lean = {"prefetch": 0, "reduce_buffers": 1}
    _, advice = verdict(17, **lean, activations=saved(), micro_batch=8)
    assert advice.startswith("lower the micro-batch to 4: the peak becomes")
    assert verdict(17, **lean, activations=saved(), micro_batch=4)[0]
    _, advice = verdict(8, **lean)
    assert advice.startswith("use 8 ranks: the peak becomes")
    assert plan(square_model(), ClusterSpec(8), **lean).peak_bytes <= 8 * MIB
    assert plan(square_model(), ClusterSpec(4), **lean).peak_bytes > 8 * MIB


def test_advice_when_nothing_helps():
    fits, advice = verdict(0.5)
    assert fits is False
    assert "no number of ranks" in advice and "the largest part of the peak is" in advice


def test_the_cluster_gives_the_limit_where_no_budget_does():
    assert plan(square_model(), ClusterSpec(2)).fits is None
    assert plan(square_model(), ClusterSpec(2, device_bytes=100 * MIB)).fits is True
    assert plan(square_model(), ClusterSpec(2, device_bytes=100 * MIB), Budgets(device_bytes=MIB)).fits is False


# -- writing --


def test_json_has_everything():
    made = plan(square_model(), ClusterSpec(2, device_bytes=MIB))
    read = json.loads(made.to_json())
    assert read["peak_bytes"] == made.peak_bytes == max(sum(kinds.values()) for kinds in made.peaks.values())
    assert read["resident"] == made.resident
    assert read["peaks"]["backward"] == made.peaks["backward"]
    assert (read["fits"], read["advice"]) == (False, made.advice)


def test_table_reads_well_in_a_log():
    made = plan(square_model(), ClusterSpec(4, replicate=2, device_bytes=8 * MIB), activations=saved(), micro_batch=8)
    lines = made.table().splitlines()
    assert lines[0] == (
        "memory plan: 1,310,720 parameters in 5 units, 4 ranks, weights over 2, adamw, 32-true, "
        "micro-batch 8 x 1, rank 0"
    )
    assert len({len(line) for line in lines[1:-2]}) == 1  # columns line up
    assert [line.split()[0] for line in lines[3:-3]] == [
        "param", "grad", "exp_avg", "exp_avg_sq", "optimizer", "gathered", "comm", "activation",
    ]  # fmt: skip
    assert "does NOT fit" in lines[-2] and "activations estimated" in lines[-2]
    assert lines[-1].startswith("advice: ")


def test_predicted_beside_measured():
    made = plan(square_model(), ClusterSpec(2))
    measured = {"forward": {"param": made.resident["param"], "comm": 4 * MIB}, "step": {"gathered": 0}}
    rows = [line.split() for line in made.beside(measured).splitlines()[2:]]
    assert rows == [
        ["forward", "param", "2.5", "MiB", "2.5", "MiB", "+0.0%"],
        ["forward", "comm", "1.0", "MiB", "4.0", "MiB", "-75.0%"],
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch": 0}, "micro_batch=0 must be at least 1"),
        ({"reduce_buffers": 0}, "reduce_buffers=0 must be at least 1"),
        ({"rank": 2}, "rank=2 is not below the 2 ranks"),
        ({"accumulate_how": "never"}, "accumulate_how='never' is not one of sharded, whole"),
        ({"activations": saved(layers=3)}, "given for 3 units, the model has 4"),
    ],
)
def test_settings_that_cannot_be_planned(settings, message):
    with pytest.raises(ConfigError, match=message):
        plan(square_model(), ClusterSpec(2), **settings)


def test_a_thousand_ranks_take_milliseconds():
    made = plan(square_model(layers=96, side=4096), ClusterSpec(1024, replicate=8), precision="bf16-mixed")
    assert made.resident["param"] == 97 * 4096 * 4096 * 4 // 128
