"""The run folder as one of Lightning's loggers: what is logged under any logger lands in ``metrics.csv`` too.

Lightning logs a step in parts: what the module logged, what ``Telemetry`` adds, and, when it validates there, the
validation's means. Parts of one step become one row, which is written when the next step's first part comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from lightning_utilities.core.rank_zero import rank_zero_only  # the one that both Lightning packages use

from memwall_strategy.telemetry.csv_log import STEP, CsvLog
from memwall_strategy.telemetry.events import Events
from memwall_strategy.telemetry.run_folder import RunFolder


@runtime_checkable
class StartedLogger(Protocol):
    """A logger that starts before any rank exists, so that it can be refused, and is ended after the run."""

    def start(self, events: Events, config: Mapping[str, Any]) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class RunLogMethods:
    """Writes ``metrics.csv``; on other ranks than 0 it does nothing. See ``run_log_class``."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self._csv = CsvLog(folder.metrics)
        self._row: dict[str, float] = {}

    # A ModelCheckpoint without a folder of its own saves in save_dir/name/version/checkpoints.
    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.folder.path)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add to the row of a step. Lightning counts them from 0; a row says how many steps are done."""
        done = (step or 0) + 1
        if self._row.get(STEP, done) != done:
            self._write()
        self._row |= {STEP: done, **metrics}

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The run folder has the whole configuration already."""

    @rank_zero_only
    def flush(self) -> None:
        """Write the row that has not been written yet."""
        self._write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last row; called at the end and when the run failed."""
        self._write()
        self._csv.close()

    def _write(self) -> None:
        if self._row:
            self._csv.write(self._row)
            self._row = {}


@cache
def run_log_class(namespace: str) -> type:
    """``RunLog`` for ``lightning`` or ``pytorch_lightning``; it takes a ``RunFolder``."""
    package = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}[namespace]
    base = import_module(f"{package}.loggers").Logger
    return type("RunLog", (RunLogMethods, base), {"__doc__": RunLogMethods.__doc__, "__module__": __name__})
