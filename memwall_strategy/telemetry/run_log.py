"""The run folder as one of Lightning's loggers: what is logged under any logger lands in ``metrics.csv`` too.

Lightning logs a step in parts: what the module logged, what ``Telemetry`` adds, and, when it validates there, the
validation's means. Parts of one step become one row, which is written when the next step's first part comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from memwall_strategy.telemetry.csv_log import STEP, CsvLog
from memwall_strategy.telemetry.run_folder import RunFolder


class RunLog(Logger):
    """Writes ``metrics.csv`` and the checkpoints' events; on other ranks than 0 it does nothing."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self._folder = folder
        self._csv = CsvLog(folder.metrics)
        self._row: dict[str, float] = {}

    @property
    def name(self) -> str:
        return self._folder.path.parent.name

    @property
    def version(self) -> str:
        return self._folder.path.name

    @property
    def save_dir(self) -> str:
        return str(self._folder.path)

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
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Note a checkpoint that a ``ModelCheckpoint`` saved."""
        if checkpoint_callback.best_model_path:
            self._folder.event("checkpoint", path=Path(checkpoint_callback.best_model_path).name)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last row; called at the end and when the run failed."""
        self._write()
        self._csv.close()

    def _write(self) -> None:
        if self._row:
            self._csv.write(self._row)
            self._row = {}
