"""Takes a runtime's figures once a step and hands them to sinks, whatever the trainer.

Under Lightning the ``Telemetry`` callback drives it. Anywhere else (Accelerate, Fabric, a plain loop)::

    recorder = Recorder(accelerator.memwall.runtime, [accelerator.log], folder=RunFolder(Path("runs/first")))
    for batch in loader:
        ...                                   # forward, backward, optimizer.step()
        recorder.step({"train/loss": loss.item()})
    recorder.close()

It makes no collective: the figures are those of its own rank. Trackers and files are written on rank 0; other ranks
append their alerts to ``events.jsonl``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memwall_strategy.core.block import Kind
from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.csv_log import STEP, CsvLog, read_csv
from memwall_strategy.telemetry.events import Event, EventKind
from memwall_strategy.telemetry.options import TelemetryConfig
from memwall_strategy.telemetry.profile import StepProfile
from memwall_strategy.telemetry.run_folder import PROFILE_JSON, RunFolder
from memwall_strategy.telemetry.summary import environment, run_figures

if TYPE_CHECKING:
    from memwall_strategy.planner import Plan
    from memwall_strategy.runtime.runtime import Runtime

Sink = Callable[[dict[str, float], int], object]
"""Called with a row of figures and its step."""


class Recorder:
    """The figures of one run.

    Args:
        runtime: set up.
        sinks: take rows on rank 0, such as ``accelerator.log``.
        config: see ``TelemetryConfig``.
        folder: where events, profile and summary are written; None: nowhere.
        metrics_csv: also write ``metrics.csv`` there; off where a logger does.
        plan: its predictions go beside what is measured (``memwall/plan/...``).

    Attributes:
        last: figures of the last step, whether logged or not.
        counts: how often each kind of event happened, on this rank.
    """

    def __init__(
        self,
        runtime: Runtime,
        sinks: Sequence[Sink] = (),
        *,
        config: TelemetryConfig | None = None,
        folder: RunFolder | None = None,
        metrics_csv: bool = True,
        plan: Plan | None = None,
    ) -> None:
        self.last: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._runtime, self._sinks = runtime, list(sinks)
        self._config = TelemetryConfig() if config is None else config
        self._folder = folder
        self._every = self._config.every_n_steps or 1
        self._predicted = {} if plan is None else predictions(plan)
        self._high = self._not_finite = False
        self._profile: StepProfile | None = None
        self._csv: CsvLog | None = None
        events = runtime.events
        events.subscribe(self._count)
        if folder is not None:
            folder.make()
            events.subscribe(folder.write_event, from_start=True)
            if events.rank == 0 and metrics_csv:
                self._csv = CsvLog(folder.metrics)
                self._sinks.append(self._write_row)
        if plan is not None:
            events.emit(
                EventKind.PLAN, resident_bytes=plan.resident_bytes, peak_bytes=plan.peak_bytes,
                limit_bytes=plan.limit_bytes, fits=plan.fits,
            )  # fmt: skip
        if folder is not None and events.rank == 0 and self._config.profile:
            self._profile = StepProfile(runtime, self._config, folder.path / PROFILE_JSON)

    def step(
        self,
        extra: Mapping[str, float] | None = None,
        *,
        step: int | None = None,
        logged: bool | None = None,
        loss: float | None = None,
    ) -> dict[str, float]:
        """An optimizer step ended: take its figures, hand them on where the step is one that is logged.

        Args:
            extra: figures of the caller's own, such as ``train/loss``.
            step: number that the sinks get; default: optimizer steps taken.
            logged: whether the step is one; default: each ``every_n_steps``.
            loss: looked at for NaN and infinity on logged steps; default: ``extra["train/loss"]``.

        Returns:
            The runtime's figures.
        """
        if self._profile is not None:
            self._profile.after_step()
        self.last = self._runtime.metrics()
        self._watch_memory()
        if self._runtime.steps % self._every == 0 if logged is None else logged:
            row = {**self.last, **self._predicted, **(extra or {})}
            self._watch_loss(row.get(names.TRAIN_LOSS) if loss is None else loss)
            if self._runtime.events.rank == 0:
                at = self._runtime.steps if step is None else step
                for sink in self._sinks:
                    sink(row, at)
        return self.last

    def peak_bytes(self) -> dict[str, dict[str, int]]:
        """Phase -> kind -> most bytes held at any step; activations where they were counted."""
        deep = self._runtime.config.pool.deep_accounting
        return {
            str(phase): {str(kind): n for kind, n in kinds.items() if kind != Kind.ACTIVATION or deep}
            for phase, kinds in self._runtime.kind_peaks.items()
        }

    def close(self, status: str = "success", *, threads: int = 1, more: Mapping[str, Any] | None = None) -> None:
        """The run is over: end the profile and write ``summary.json``. Events still reach ``events.jsonl``."""
        if self._profile is not None:
            self._profile.close()
        if self._csv is not None:
            self._csv.close()
        events = self._runtime.events
        if self._folder is not None and events.rank == 0:
            rows = read_csv(self._folder.metrics)[1] if self._folder.metrics.exists() else []
            self._folder.write_summary({
                "status": status,
                "figures": run_figures(rows),
                "memory": {"measured": self.peak_bytes()},
                "events": self.counts,
                "environment": environment(self._runtime.mesh.size(), threads, str(self._runtime.device)),
                **(more or {}),
            })  # fmt: skip
        events.unsubscribe(self._count)

    def _write_row(self, row: dict[str, float], step: int) -> None:
        assert self._csv is not None
        self._csv.write({STEP: step, **row})

    def _watch_memory(self) -> None:
        share, threshold = self.last.get(names.UTILIZATION), self._config.memory_alert
        if share is None or threshold is None:
            return
        if share >= threshold and not self._high:
            self._runtime.events.emit(
                EventKind.MEMORY_HIGH, peak_bytes=int(self.last[names.DEVICE_PEAK_BYTES]),
                budget_bytes=self._runtime.budget_bytes, utilization=share, threshold=threshold,
            )  # fmt: skip
        self._high = share >= threshold

    def _watch_loss(self, loss: float | None) -> None:
        if loss is None:
            return
        wrong = not math.isfinite(loss)
        if wrong and not self._not_finite:
            self._runtime.events.emit(EventKind.LOSS_NOT_FINITE, loss=float(loss))
        self._not_finite = wrong

    def _count(self, event: Event) -> None:
        self.counts[str(event.kind)] = self.counts.get(str(event.kind), 0) + 1


def predictions(plan: Plan) -> dict[str, float]:
    """What a plan predicts, under the names that stand beside the measured figures."""
    return {
        names.PREDICTED_DEVICE_BYTES: float(plan.resident_bytes),
        names.PREDICTED_DEVICE_PEAK_BYTES: float(plan.peak_bytes),
    }
