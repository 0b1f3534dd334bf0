"""The training phase: what shows it, and what follows from it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from typing import Any

import pytest
import torch

from memwall_strategy.pool.escalation import FIRST_STEPS
from memwall_strategy.pool.phases import PhaseDetector, TrainingPhase, Window, window_of
from memwall_strategy.telemetry.events import EventKind
from tests.engine.lane_cases import GPT, weights
from tests.lightning.checks import Here, on_ranks, rank_results
from tests.pool.test_retention import running

__all__ = ["rank_results"]

W, S, C = TrainingPhase.WARMUP, TrainingPhase.STEADY, TrainingPhase.CONVERGING


def phases_of(windows: list[Window]) -> list[TrainingPhase]:
    detector = PhaseDetector()
    found = []
    for window in windows:
        before = detector.phase
        cause = detector.judge(window)
        assert (cause is None) == (before is detector.phase)
        found.append(detector.phase)
    return found


def windows(rates: list[float], losses: list[float], size: int = 10, total: int = 0) -> list[Window]:
    return [
        window_of(rates[i : i + size], losses[i : i + size], progress=(i + size) / total if total else math.nan)
        for i in range(0, len(rates), size)
    ]


def noisy(losses: list[float], seed: int = 0) -> list[float]:
    noise = random.Random(seed)
    return [loss * (1 + noise.gauss(0, 0.03)) for loss in losses]


FALLING = noisy([4 * 0.99**i for i in range(60)])
FLAT = noisy([2.0] * 60)


def test_a_rising_rate_is_warmup_and_a_decayed_one_is_convergence():
    rates = [i / 20 for i in range(20)] + [1.0] * 20 + [1 - i / 20 for i in range(20)]
    assert phases_of(windows(rates, FALLING)) == [W, W, S, S, S, C]
    assert phases_of(windows(rates, [math.nan] * 60)) == [W, W, S, S, S, C], "the rate is enough"


def test_the_end_of_a_known_number_of_steps_counts_where_the_rate_falls():
    cosine = [0.5 * (1 + math.cos(math.pi * i / 100)) for i in range(60)]  # decays further than it is followed here
    assert (
        phases_of(windows(cosine, FALLING, total=60))[-2:] == [S, C]
        or phases_of(windows(cosine, FALLING, total=60))[-1] is C
    )
    assert phases_of(windows([1.0] * 60, FALLING, total=60)) == [S] * 6, "a constant rate: the loss decides"


def test_a_flat_loss_is_convergence_after_two_windows_and_a_moving_one_ends_it():
    assert phases_of(windows([1.0] * 60, FALLING)) == [S] * 6
    assert phases_of(windows([1.0] * 60, FLAT)) == [S, S, C, C, C, C]
    rising = noisy([2 + 0.1 * i for i in range(60)])
    assert phases_of(windows([1.0] * 120, [*FLAT, *rising]))[-1] is S, "also where it gets worse"


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_make_it_flap(seed):
    found = phases_of(windows([1.0] * 2000, noisy([2.0] * 2000, seed), size=20))
    changes = sum(a is not b for a, b in itertools.pairwise(found))
    assert changes <= 3, found


def test_one_spike_and_one_nan_change_nothing():
    losses = list(FLAT)
    losses[33], losses[45], losses[55] = 1e9, math.nan, math.inf
    assert phases_of(windows([1.0] * 60, losses)) == phases_of(windows([1.0] * 60, FLAT))
    lost = [math.nan] * 10
    assert phases_of(windows([1.0] * 60, [*FLAT[:20], *lost, *FLAT[30:]]))[2] is S, "no trend is no verdict"


def test_a_growing_gradient_norm_is_no_convergence():
    made = windows([1.0] * 60, FLAT)
    growing = [Window(w.first_rate, w.last_rate, w.loss, w.error, 2.0**i, w.progress) for i, w in enumerate(made)]
    assert phases_of(growing) == [S] * 6


def test_rates_that_start_again():
    restart = [1 - (i % 30) / 30 for i in range(90)]
    assert W not in phases_of(windows(restart, noisy([2.0] * 90)))
    triangle = [*(i / 30 for i in range(30)), *(1 - i / 30 for i in range(30)), *(i / 30 for i in range(30))]
    found = phases_of(windows(triangle, noisy([2.0] * 90)))
    assert found[2] is W and found[5] is C and found[8] is W


@pytest.mark.parametrize("rate", [0.0, math.nan, 1e-30])
def test_odd_rates_judge_nothing_wrong(rate):
    assert phases_of(windows([rate] * 40, [1.0] * 40))[0] is S


def test_state_goes_on_where_it_was():
    made = windows([i / 20 for i in range(20)] + [1.0] * 100, [*FALLING, *noisy([FALLING[-1]] * 60)])
    whole = phases_of(made)
    assert {W, S, C} == set(whole)
    for cut in range(len(made)):
        first, second = PhaseDetector(), PhaseDetector()
        for window in made[:cut]:
            first.judge(window)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = []
        for window in made[cut:]:
            second.judge(window)
            rest.append(second.phase)
        assert rest == whole[cut:]


# -- a run --

STEPS = 28


def run(here: Here, resume: tuple | None = None, steps: int = STEPS, **pool: Any) -> dict[str, Any]:
    """A rate that rises for 8 steps, stays for 8 and falls for 12; each rank tells other losses."""
    options = {"device_budget": "72KiB", "phase_window": 4, "shared": False} | pool
    with running(here, GPT, **options) as (runtime, optimizer):
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: (i + 1) / 8 if i < 8 else 1.0 if i < 16 else max(0.1, 1 - (i - 15) / 8)
        )
        told: list[Any] = []
        runtime.events.subscribe(told.append)
        if resume is not None:
            state, values, moments, rates = copy.deepcopy(resume)
            for name, parameter in runtime.model.named_parameters():
                parameter.to_local().data.copy_(values[name])
            optimizer.load_state_dict(moments)
            schedule.load_state_dict(rates)
            runtime.load_state_dict(state)
        losses, mapping, saved = [], [], {}
        for step in range(runtime.steps, steps):
            batches = [runtime.model.batch(100 * step + 10 * i + here.rank) for i in range(2)]
            losses.append(runtime.step(batches, runtime.model.loss, optimizer).item())
            schedule.step()
            retention = runtime.pool.retention
            mapping.append((str(runtime.pool.phases.phase), retention.retained, retention.whole))
            state = json.loads(json.dumps(runtime.state_dict()))
            rest = (optimizer.state_dict(), schedule.state_dict())
            saved[step] = copy.deepcopy((state, weights(runtime.model), *rest))
        changes = [e.fields | {"step": e.step} for e in told if e.kind == EventKind.PHASE_CHANGED]
        assert runtime.memory.peak_bytes <= 72 * 1024
        return {"losses": losses, "mapping": mapping, "changes": changes, "saved": saved}


@on_ranks(2)
def test_the_mapping_follows_the_phase_of_a_run(here):
    followed = run(here)
    assert [(c["before"], c["phase"]) for c in followed["changes"]] == [("warmup", "steady"), ("steady", "converging")]
    first, second = (c["step"] for c in followed["changes"])
    assert first == 12 and second in (16, 20, 24)
    retained = {step[1] for step in followed["mapping"][FIRST_STEPS:]}
    assert len(retained) == 1 and len(retained.pop()) >= 3, "room for near weights in every phase"
    assert [bool(step[2]) for step in followed["mapping"]] == [False] * second + [True] * (STEPS - second)

    frozen = run(here, phases=False)
    assert frozen["changes"] == [] and {step[2] for step in frozen["mapping"]} == {()}
    same = second + 1  # the first loss after the change is still that of the weights before
    assert followed["losses"][:same] == frozen["losses"][:same], "the arithmetic order is the same until then"
    assert followed["losses"] == pytest.approx(frozen["losses"], rel=1e-3)

    resumed = run(here, resume=followed["saved"][second - 5])
    assert resumed["changes"] == followed["changes"][1:]
    assert resumed["losses"] == followed["losses"][second - 4 :]
    assert resumed["mapping"][FIRST_STEPS:] == followed["mapping"][second - 4 + FIRST_STEPS :]

    unknown = run(here, device_budget=None, steps=13)
    assert [c["phase"] for c in unknown["changes"]] == ["steady"] and unknown["mapping"][-1][1:] == ((), ())
