"""The W&B logger of ``memwall-train``: offline unless asked, in the run folder, never the end of a run.

What cannot start is refused before any rank exists. What fails later (W&B's service was killed, the disk is full) costs
W&B's part of the run and nothing else: a warning, a ``logger_failed`` event, and training goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.telemetry.events import EventKind, Events
from memwall_strategy.telemetry.options import WandbOptions

_START_LIMIT_S = 60.0
"""Longest wait for W&B's server."""


class RunWandbLogger(WandbLogger):
    """Lightning's ``WandbLogger`` that a failing W&B cannot end the run by."""

    def __init__(self, options: WandbOptions, project: str) -> None:
        super().__init__(
            project=options.project or project, save_dir=options.save_dir, offline=options.mode == "offline",
            mode=options.mode, entity=options.entity, group=options.group, tags=list(options.tags) or None,
            settings=wandb.Settings(init_timeout=_START_LIMIT_S, silent=True),  # its own account of the run is long
        )  # fmt: skip
        self.mode = options.mode
        self.events: Events | None = None
        self._failed = self._started = False
        self._row: dict[str, float] = {}
        self._row_step: int | None = None

    @rank_zero_only
    def start(self, events: Events, config: Mapping[str, Any]) -> None:
        """Start the W&B run; called before any rank exists.

        Raises:
            ConfigError: it cannot start.
        """
        self.events = events
        try:
            self.experiment.config.update(dict(config))
        except (OSError, wandb.Error) as error:
            raise ConfigError(
                f"logger.wandb.mode={self.mode}: W&B could not start: {' '.join(str(error).split())} "
                "Log in with `wandb login` and look at the network, or take logger.wandb.mode=offline."
            ) from error
        self._started = True

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Parts of one step go to W&B together, when the next step's first part comes: each call costs."""
        if step != self._row_step:
            self._send()
            self._row_step = step
        self._row |= metrics

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._send()
        if not self._failed:
            super().finalize(status)

    def _send(self) -> None:
        row, self._row = self._row, {}
        if not row or self._failed:
            return
        try:
            super().log_metrics(row, self._row_step)
        except (OSError, wandb.Error) as error:
            self._fail(error)

    @rank_zero_only
    def finish(self, exit_code: int) -> None:
        """End the W&B run and write what is left of it. Idempotent."""
        if not self._started:
            return
        self._started = False
        self._send()
        try:
            folder = Path(self.experiment.dir).parent
            self.experiment.finish(exit_code=exit_code)
            if self.mode == "offline" and not self._failed:
                print(f"W&B: offline run; to upload it: wandb sync {folder}", flush=True)
        except (OSError, wandb.Error) as error:
            if not self._failed:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        warnings.warn(f"W&B failed and gets no more figures: {error}", stacklevel=3)
        if self.events is not None:
            self.events.emit(EventKind.LOGGER_FAILED, logger=type(self).__name__, message=str(error))


def wandb_logger(*, run_name: str = "memwall", tags: Sequence[str] = (), **options: Any) -> RunWandbLogger:
    """Build from plain options, as a configuration file gives them."""
    return RunWandbLogger(WandbOptions(tags=tuple(tags), **options), run_name)
