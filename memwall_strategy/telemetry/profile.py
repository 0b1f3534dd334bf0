"""A profile of a few steps: torch's profiler and memwall's lanes in one Chrome trace."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from memwall_strategy.core.lane import Span
from memwall_strategy.telemetry.events import EventKind
from memwall_strategy.telemetry.options import TelemetryConfig
from memwall_strategy.telemetry.trace import ClockMarks, add_lanes

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime


class StepProfile:
    """Records steps ``skip + 1`` to ``skip + n`` of a run, counted from where it was made; used once.

    Args:
        path: of the trace, which opens in chrome://tracing and Perfetto.
    """

    def __init__(self, runtime: Runtime, config: TelemetryConfig, path: Path) -> None:
        self._runtime, self._config, self._path = runtime, config, path
        self._ended_steps = 0
        self._first_step = 0
        self._start_s = 0.0
        self._profiler: profile | None = None
        self._done = False
        self._marks = ClockMarks()
        if not config.profile_skip_steps:
            self._start()

    def after_step(self) -> None:
        """An optimizer step ended, so the next begins."""
        if self._done:
            return
        self._ended_steps += 1
        if self._profiler is not None:
            self._marks.mark()
            if self._ended_steps == self._config.profile_skip_steps + self._config.profile_steps:
                self._write()
        elif self._ended_steps == self._config.profile_skip_steps:
            self._start()

    def close(self) -> None:
        """Training ends: write the steps that were recorded, or say that there are none. Idempotent."""
        if self._done:
            return
        if self._profiler is not None and self._runtime.steps >= self._first_step:
            self._write()
            return
        self._done = True
        if self._profiler is not None:
            self._stop()
        warnings.warn(
            f"no profile was written: training ended after {self._ended_steps} steps and "
            f"profile_skip_steps={self._config.profile_skip_steps} of them are skipped.",
            stacklevel=2,
        )

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._runtime.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._first_step = self._runtime.steps + 1
        self._start_s = self._runtime.start_trace()
        self._marks.mark()

    def _stop(self) -> tuple[profile, list[Span]]:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)
        profiler.stop()
        return profiler, self._runtime.stop_trace(self._start_s)

    def _write(self) -> None:
        self._done = True
        profiler, spans = self._stop()
        profiler.export_chrome_trace(str(self._path))
        add_lanes(self._path, spans, self._runtime.events.rank, self._marks)
        self._runtime.events.emit(
            EventKind.PROFILE_WRITTEN, path=str(self._path), first_step=self._first_step,
            last_step=self._runtime.steps,
        )  # fmt: skip
