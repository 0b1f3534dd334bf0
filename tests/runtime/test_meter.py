"""Figures of a step, from a clock and a counter that the test turns by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from memwall_strategy.core.lane import LaneStats
from memwall_strategy.engine import flops
from memwall_strategy.runtime import meter
from memwall_strategy.runtime.meter import StepMeter

PEAK = 1e9


class Clock:
    """Seconds that only the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter.time, "perf_counter", clock.perf_counter)
    return clock


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Calls of the peak's measurement, which says PEAK."""
    calls: list[tuple] = []

    def measure(device: torch.device, dtype: torch.dtype) -> float:
        calls.append((device, dtype))
        return PEAK

    monkeypatch.setattr(meter, "measured_peak_flops", measure)
    return calls


def make(world: int = 2) -> StepMeter:
    return StepMeter(torch.device("cpu"), torch.float32, world)


def one_step(
    watch: StepMeter, clock: Clock, *, seconds: float = 2.0, tokens: int = 0, rows: int = 0,
    lanes: dict[str, LaneStats] | None = None,
) -> dict[str, float]:  # fmt: skip
    watch.begin()
    if rows:
        torch.ones(rows, 8) @ torch.ones(8, 4)
    if tokens:
        watch.add_tokens(tokens)
    clock.now_s += seconds
    return watch.end(lanes or {})


def test_time_alone(clock: Clock, peaks: list) -> None:
    assert one_step(make(), clock) == {"memwall/step_s": 2.0}
    assert peaks == []


def test_tokens_of_all_ranks_per_second(clock: Clock, peaks: list) -> None:
    watch = make(world=3)
    watch.begin()
    watch.add_tokens(10)
    watch.add_tokens(20)
    clock.now_s += 0.5
    assert watch.end({})["memwall/tokens_per_s"] == 30 * 3 / 0.5
    assert "memwall/tokens_per_s" not in one_step(watch, clock), "tokens of the step before"


def test_exposed_time_is_summed_over_lanes_and_busy_time_named(clock: Clock, peaks: list) -> None:
    lanes = {"gather": LaneStats(3, 100, 1.5, 0.25), "reduce": LaneStats(2, 50, 1.0, 0.5)}
    figures = one_step(make(), clock, lanes=lanes)
    assert figures["memwall/overlap/exposed_s"] == 0.75
    assert figures["memwall/overlap/exposed_fraction"] == 0.375
    assert figures["memwall/overlap/lane_busy_s/gather"] == 1.5
    assert figures["memwall/overlap/lane_busy_s/reduce"] == 1.0


def test_contention_is_what_neither_computes_nor_waits(
    clock: Clock, peaks: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_s = iter([5.0, 6.0, 10.0, 12.5])
    monkeypatch.setattr(meter.time, "thread_time", lambda: next(cpu_s))
    watch, lanes = make(), {"gather": LaneStats(exposed_s=0.25), "reduce": LaneStats(exposed_s=0.125)}
    watch.begin()
    clock.now_s += 2.0
    figures = watch.end(lanes, 0.0625, copied_s=0.5, other_waits_s=0.03125)
    assert figures["memwall/overlap/contention_s"] == 2.0 - 1.0 - 0.25 - 0.125 - 0.0625 - 0.03125
    assert figures["memwall/overlap/copy_s"] == 0.5
    assert figures["memwall/overlap/lane_exposed_s/reduce"] == 0.125
    watch.begin()
    clock.now_s += 2.0  # the threads' clock ran further: two clocks are never quite the same
    assert watch.end(lanes)["memwall/overlap/contention_s"] == 0.0


def test_saturation_is_of_the_links_usual_best(clock: Clock, peaks: list) -> None:
    """One step's freak (bytes that were there already) does not count; the lanes share the link."""
    watch = make()
    steps = [(100.0, 1000), (100.0, 1000), (9000.0, 1000), (0.0, 50)]
    found = [
        one_step(watch, clock, lanes={
            "gather": LaneStats(bytes=moved, best_bytes_per_s=best),
            "reduce": LaneStats(bytes=moved // 2, best_bytes_per_s=best / 2),
        }) for best, moved in steps
    ]  # fmt: skip
    for figures, (_, moved) in zip(found, steps, strict=True):
        assert figures["memwall/overlap/lane_saturation/gather"] == moved / 2.0 / 100.0
        assert figures["memwall/overlap/lane_saturation/reduce"] == moved / 2 / 2.0 / 100.0
        assert figures["memwall/overlap/lane_bytes/gather"] == moved
    small = one_step(make(), clock, lanes={"gather": LaneStats(bytes=10)})
    assert not any("saturation" in name for name in small), "no transfer large enough to tell a rate"


def test_without_lanes_nothing_is_said_of_them(clock: Clock, peaks: list) -> None:
    """A figure nobody measured is not printed."""
    assert not any("overlap" in name for name in one_step(make(), clock, tokens=5))


def test_mfu_counts_the_second_step_once(clock: Clock, peaks: list) -> None:
    watch = make()
    assert "memwall/mfu" not in one_step(watch, clock, rows=4)
    wanted = 2 * 4 * 8 * 4 / 2.0 / PEAK
    assert one_step(watch, clock, rows=4)["memwall/mfu"] == pytest.approx(wanted)
    assert one_step(watch, clock, seconds=4.0)["memwall/mfu"] == pytest.approx(wanted / 2)
    assert peaks == [(torch.device("cpu"), torch.float32)]


def test_mfu_follows_the_tokens(clock: Clock, peaks: list) -> None:
    """A step with twice the tokens did twice the work."""
    watch = make()
    one_step(watch, clock)
    counted = one_step(watch, clock, rows=4, tokens=32)["memwall/mfu"]
    assert one_step(watch, clock, tokens=64)["memwall/mfu"] == pytest.approx(2 * counted)


def test_compiled_modules_have_no_mfu(clock: Clock, peaks: list) -> None:
    watch = make()
    watch.look_at(nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")))
    for _ in range(3):
        assert "memwall/mfu" not in one_step(watch, clock, rows=4)
    assert peaks == []


def test_modules_compiled_in_place_have_no_mfu(clock: Clock, peaks: list) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile(backend="eager")
    watch = make()
    watch.look_at(model)
    for _ in range(3):
        assert "memwall/mfu" not in one_step(watch, clock, rows=4)


def test_an_aborted_step_is_counted_anew(clock: Clock, peaks: list) -> None:
    watch = make()
    one_step(watch, clock)
    watch.begin()
    torch.ones(100, 8) @ torch.ones(8, 4)
    watch.abort()
    torch.ones(100, 8) @ torch.ones(8, 4)  # nobody counts between steps
    figures = one_step(watch, clock, rows=4)
    assert figures["memwall/mfu"] == pytest.approx(2 * 4 * 8 * 4 / 2.0 / PEAK)
    watch.abort()  # nothing to abort: no error


def test_flops_of_attention_and_its_backward() -> None:
    """Forward of scaled dot product attention is two products, its backward five (one is recomputed)."""
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with flops.FlopCount() as forward:
        out = nn.functional.scaled_dot_product_attention(q, k, v)
    with flops.FlopCount() as backward:
        out.sum().backward()
    product = 2 * 2 * 3 * 16 * 16 * 8
    assert forward.flops == 2 * product
    assert backward.flops == 5 * product


def test_peak_is_a_rate() -> None:
    peak = flops.measured_peak_flops(torch.device("cpu"), torch.float32)
    assert math.isfinite(peak) and peak > 1e6


def test_tokens_told_after_the_step_belong_to_it(clock: Clock, peaks: list) -> None:
    """Manual optimization: the optimizer steps inside ``training_step``, which returns the tokens."""
    watch = make(world=2)
    watch.begin_batch()
    assert "memwall/tokens_per_s" not in one_step(watch, clock, seconds=0.5)
    assert watch.add_late_tokens(30) == {"memwall/tokens_per_s": 30 * 2 / 0.5}


def test_steps_of_one_batch_share_its_tokens(clock: Clock, peaks: list) -> None:
    watch = make(world=1)
    watch.begin_batch()
    watch.begin()
    watch.add_tokens(5)  # of a batch before this one, in which no optimizer stepped
    watch.begin_batch()
    clock.now_s += 1.0
    watch.end({})
    one_step(watch, clock, seconds=3.0)
    assert watch.add_late_tokens(15) == {"memwall/tokens_per_s": 20 / 4.0}
    watch.begin_batch()
    assert watch.add_late_tokens(15) == {}, "no step ended in this batch"


def test_a_loop_without_batches_has_one_step_a_batch(clock: Clock, peaks: list) -> None:
    watch = make(world=1)
    for _ in range(3):
        one_step(watch, clock, seconds=2.0)
        assert watch.add_late_tokens(10) == {"memwall/tokens_per_s": 5.0}
