"""Time that telemetry takes of the training thread, and CPU time of the threads that it started.

As for the memory account, an overhead below a percent drowns in the noise of an A/B, so every entrance to telemetry is
timed from outside: wall time on the training thread (its CPU time and whatever it waits for), the clock's own reading
included. W&B works on threads of its own too: their CPU time is read from the system.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memwall_strategy.runtime import Runtime
from memwall_strategy.runtime.meter import StepMeter
from memwall_strategy.telemetry.callback import TelemetryMethods
from memwall_strategy.telemetry.events import Events
from memwall_strategy.telemetry.progress import StepProgress
from memwall_strategy.telemetry.run_log import RunLogMethods
from memwall_strategy.telemetry.wandb_log import RunWandbLogger

ENTRANCES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (TelemetryMethods, ("on_train_batch_end",)),
    (StepProgress, ("on_train_batch_end",)),
    (RunLogMethods, ("log_metrics",)),
    (RunWandbLogger, ("log_metrics",)),
    (Events, ("emit",)),
    (Runtime, ("metrics",)),
    (StepMeter, ("begin", "end", "add_tokens")),
)
"""Where a step enters telemetry; one inside another is counted once."""

_NS = 1e-9


class TelemetryClock:
    """Wall seconds inside telemetry since ``install``, on the training thread.

    Attributes:
        inside_s: so far; cpu_s: that part of it in which the thread ran.
    """

    def __init__(self) -> None:
        self.inside_s = self.cpu_s = 0.0
        self._inside = False

    def install(self) -> None:
        """Time every entrance, for the rest of the process."""
        for kind, methods in ENTRANCES:
            for name in methods:
                setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self._inside = True
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - start_cpu_s
                self.inside_s += time.perf_counter() - start_s
                self._inside = False

        return timed


def wandb_threads_s() -> float:
    """CPU seconds that W&B's threads of this process have had."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.lower().startswith("wandb")]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in threads) * _NS
