"""How far training is, and what the pool does about it.

The training phase is judged once in a window of steps, from the learning rate, and from the medians of loss and
gradient norm over windows, summed over ranks by one small all-reduce: every rank judges the same.

- ``warmup``: the learning rate rises.
- ``converging``: it has decayed (to ``DECAYED`` of its peak, or with the last ``LAST`` of a known number of steps), or
  the loss no longer falls clearly, within its own noise, twice in a row, while the gradient norm does not grow.
- ``steady``: everything else.

What follows: retention (``pool.retention``) has the room in every phase: near weights save most bytes a step, in
warm-up as well as later. Converging gives the room that is left to accumulation: whole gradients, reduced once a step,
not once a micro-batch. Not earlier, because that changes the order of sums, and runs are compared bit for bit while
they are young; what it costs is rounding, and what it saves is every reduction but one. It does not take the room of
retained weights: for the same bytes a retained weight saves 2k - 1 transfers of k micro-batches, a whole gradient
k - 1.

The step phase is followed too, by what is there already: optimizer state that rests elsewhere comes in for the step
only (``pool.state_pager``), gathered weights are gone when the optimizer steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from memwall_strategy.config import PoolConfig
from memwall_strategy.engine import agreement
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.pool.retention import Retention
from memwall_strategy.telemetry.events import EventKind

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime

DECAYED = 0.3
"""Share of its peak below which the learning rate counts as decayed."""
LAST = 0.2
"""Share of a known number of steps that counts as its end, if the learning rate is below its peak by then."""
FLAT = 0.005
"""A fall of the median loss from window to window below this share of it is none."""
SURE = 2.0
"""Standard errors of the difference of two medians within which it is noise."""
CLEAR = 1.5
"""How many times either brings training back from converging to steady: the gap keeps the phase from flapping."""
GROWING = 1.2
"""A gradient norm that grows by this factor from window to window: no convergence."""
PATIENCE = 2
"""Windows in a row that must show a trend, or a learning rate that rises again, before the phase changes."""
_MEDIAN_ERROR = 1.2533 * 1.4826
"""Standard error of a median over median absolute deviation / sqrt(n), for a normal distribution."""


class TrainingPhase(StrEnum):
    """How far training is."""

    WARMUP = "warmup"
    STEADY = "steady"
    CONVERGING = "converging"


@dataclass(frozen=True, slots=True)
class Window:
    """What a window of steps showed, the same on every rank.

    Attributes:
        first_rate, last_rate: learning rate in its first and last step; NaN where unknown.
        loss: median over steps of the mean over ranks; NaN where unknown.
        error: standard error of that median.
        norm: gradient norm at its end; NaN where unknown.
        progress: share of a known number of steps that is done; NaN where the number is open.
    """

    first_rate: float
    last_rate: float
    loss: float
    error: float
    norm: float
    progress: float


def window_of(
    rates: Sequence[float], losses: Sequence[float], norm: float = math.nan, progress: float = math.nan
) -> Window:
    """Sum up the steps of a window; losses that are not finite count as not told."""
    told = [loss for loss in losses if math.isfinite(loss)]
    loss = error = math.nan
    if told and len(told) * 2 >= len(losses):
        loss = statistics.median(told)
        spread = statistics.median(abs(each - loss) for each in told)
        error = _MEDIAN_ERROR * spread / math.sqrt(len(told))
    return Window(rates[0], rates[-1], loss, error, norm, progress)


class PhaseDetector:
    """Judges windows one after the other; pure.

    Attributes:
        phase: the present one; training starts in ``warmup``.
    """

    def __init__(self) -> None:
        self.phase = TrainingPhase.WARMUP
        self._before: Window | None = None
        self._peak_rate = 0.0
        self._candidate: TrainingPhase | None = None
        self._times = 0

    @property
    def judged(self) -> bool:
        """Whether a window was seen."""
        return self._before is not None

    def judge(self, window: Window) -> str | None:
        """Take a window up; the cause where the phase changed, else None."""
        found, cause, at_once = self._look(window)
        if math.isfinite(window.last_rate):
            self._peak_rate = max(self._peak_rate, window.last_rate, window.first_rate)
        self._before = window
        if found is self.phase:
            self._candidate, self._times = None, 0
            return None
        self._times = self._times + 1 if found is self._candidate else 1
        self._candidate = found
        if not at_once and self._times < PATIENCE:
            return None
        self.phase, self._candidate, self._times = found, None, 0
        return cause

    def _look(self, window: Window) -> tuple[TrainingPhase, str, bool]:
        """Phase that the window speaks for, why, and whether it needs no second one."""
        first, last = window.first_rate, window.last_rate
        if last > first:  # false for NaN
            return TrainingPhase.WARMUP, f"the learning rate rises, {first:.3g} to {last:.3g}", False
        if self.phase is TrainingPhase.CONVERGING and self._before and last > GROWING * self._before.last_rate:
            return TrainingPhase.STEADY, f"the learning rate was raised to {last:.3g}", True
        if self._peak_rate > 0 and last <= DECAYED * self._peak_rate:
            share = last / self._peak_rate
            return TrainingPhase.CONVERGING, f"the learning rate fell to {share:.0%} of its peak", True
        if window.progress >= 1 - LAST and last < self._peak_rate:
            return TrainingPhase.CONVERGING, f"{window.progress:.0%} of all steps are done and the rate falls", True
        if self.phase is TrainingPhase.WARMUP:
            return TrainingPhase.STEADY, "the learning rate no longer rises", True
        return self._look_at_trend(window)

    def _look_at_trend(self, window: Window) -> tuple[TrainingPhase, str, bool]:
        before = self._before
        if before is None or not (math.isfinite(window.loss) and math.isfinite(before.loss)):
            return self.phase, "no trend is known", False
        fall = before.loss - window.loss
        limit = max(FLAT * abs(before.loss), SURE * math.hypot(window.error, before.error))
        text = f"the median loss went from {before.loss:.4g} to {window.loss:.4g}"
        if self.phase is TrainingPhase.CONVERGING:
            if abs(fall) > CLEAR * limit:
                return TrainingPhase.STEADY, f"{text}: it moves again", False
            return self.phase, text, False
        if abs(fall) <= limit and not window.norm > GROWING * before.norm:
            return TrainingPhase.CONVERGING, f"{text}: flat within {limit:.2g}", False
        return TrainingPhase.STEADY, text, False

    def state_dict(self) -> dict[str, Any]:
        """Everything that later judgements depend on."""
        return {
            "phase": str(self.phase), "before": None if self._before is None else asdict(self._before),
            "peak_rate": self._peak_rate, "candidate": self._candidate and str(self._candidate), "times": self._times,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` returned."""
        self.phase = TrainingPhase(state["phase"])
        self._before = None if state["before"] is None else Window(**state["before"])
        self._peak_rate, self._times = float(state["peak_rate"]), int(state["times"])
        self._candidate = None if state["candidate"] is None else TrainingPhase(state["candidate"])


class Phases:
    """Watches a run, and moves the mapping with its phase.

    Args:
        config: the pool's options.
        retention: whose room is given away.
    """

    def __init__(self, config: PoolConfig, retention: Retention) -> None:
        self._config, self._retention = config, retention
        self._detector = PhaseDetector()
        self._runtime: Runtime | None = None
        self._rates: list[float] = []
        self._losses: list[list[torch.Tensor]] = []
        self._square = math.nan

    def attach(self, runtime: Runtime) -> None:
        """A run begins."""
        self._runtime = runtime
        self._detector = PhaseDetector()
        self._forget()

    @property
    def phase(self) -> TrainingPhase | None:
        """The present training phase; None where it is not followed."""
        return self._detector.phase if self._follows else None

    @property
    def _follows(self) -> bool:
        return self._config.phases and self._runtime is not None and bool(self._runtime.optimizers)

    @property
    def _ends_window(self) -> bool:
        return (self._runtime.steps + 1) % self._config.phase_window == 0

    def before_step(self) -> None:
        """The mapping of the present phase; the step's learning rate."""
        if self._follows:
            self._retention.accumulate(self._detector.phase is TrainingPhase.CONVERGING)
            self._rates.append(_rate(self._runtime.optimizers))

    def after_backward(self) -> None:
        """Gradients are in place: at the end of a window their norm is taken."""
        scaled = self._runtime is not None and self._runtime.precision == "16-mixed"  # by a factor that changes
        if self._follows and self._ends_window and not scaled:
            self._square = _squared_norm(self._runtime.model)

    def after_step(self) -> None:
        """The step's loss; at the end of a window, the judgement. Collective then."""
        if not self._follows or not self._rates:
            return
        self._losses.append(list(self._runtime.losses))
        if self._runtime.steps % self._config.phase_window:
            return
        before = self._detector.phase
        cause = self._detector.judge(self._agreed_window())
        self._forget()
        if cause is not None:
            self._runtime.events.emit(
                EventKind.PHASE_CHANGED, phase=str(self._detector.phase), before=str(before), cause=cause
            )

    def _agreed_window(self) -> Window:
        """The window as all ranks together saw it.

        A step that some rank could not tell the loss of, or whose loss is not finite somewhere, counts as not told.
        """
        size = self._config.phase_window
        means = [float(torch.stack(step).float().mean()) if step else math.nan for step in self._losses]
        own = means[-size:]
        own = [math.nan] * (size - len(own)) + own
        rates = [self._rates[0], self._rates[-1]]
        values = [*own, *rates, self._square]
        ranks = self._runtime.mesh.size()
        known = [float(math.isfinite(value)) for value in values]
        plain = [value if math.isfinite(value) else 0.0 for value in values]
        sums = agreement.summed(self._runtime.mesh, [*plain, *known])
        means = [
            total / ranks if count == ranks else math.nan
            for total, count in zip(sums[: len(values)], sums[len(values) :], strict=True)
        ]
        total_steps = self._runtime.total_steps
        return window_of(
            means[size : size + 2],
            means[:size],
            norm=math.sqrt(means[-1]) if means[-1] >= 0 else math.nan,
            progress=self._runtime.steps / total_steps if total_steps else math.nan,
        )

    def _forget(self) -> None:
        self._rates, self._losses, self._square = [], [], math.nan

    def state_dict(self) -> dict[str, Any]:
        """The phase and what it was judged by, once there is any; steps of the present window are not told."""
        return self._detector.state_dict() if self._detector.judged else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` returned."""
        self._detector.load_state_dict(state)
        self._forget()


def _rate(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    rates = [float(group["lr"]) for o in optimizers for group in o.param_groups if "lr" in group]
    return max(rates, default=math.nan)


@torch.no_grad()
def _squared_norm(model: torch.nn.Module) -> float:
    """Of this rank's gradients; NaN where units have stepped inside the backward."""
    gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    if not gradients:
        return math.nan
    return float(torch.nn.utils.get_total_norm(gradients)) ** 2
