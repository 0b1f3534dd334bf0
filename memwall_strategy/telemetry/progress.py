"""Progress of a run: a bar on a terminal, one plain line every few steps anywhere else."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from memwall_strategy.config import format_size
from memwall_strategy.telemetry import names

_UPDATES_PER_S = 4
_LOG_WIDTH = 120
"""Columns of what is printed where there is no terminal to ask."""


def run_console() -> Console:
    """The console of a run: plain lines of one width where it is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


class StepProgress(L.Callback):
    """Shows step, loss and the runtime's figures on rank 0.

    Args:
        every_n_steps: steps between two lines where there is no terminal.
        console: where to; default: standard output.
    """

    def __init__(self, every_n_steps: int = 10, console: Console | None = None) -> None:
        self._every = every_n_steps
        self._console = run_console() if console is None else console
        self._bar: Progress | None = None
        self._seen_step = 0
        self._began = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen_step = trainer.global_step
        if trainer.is_global_zero and self._console.is_terminal:
            total = trainer.estimated_stepping_batches
            self._bar = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TimeRemainingColumn(compact=True),
                TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                console=self._console, refresh_per_second=_UPDATES_PER_S, expand=True,
            )  # fmt: skip
            self._bar.add_task("", total=total if total != float("inf") else None, completed=trainer.global_step)
            self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step or not trainer.is_global_zero:
            return
        first, self._began, self._seen_step = not self._began, True, step
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=self._figures(trainer))
        elif first or step % self._every == 0:
            self._console.print(f"step {step}{_of(trainer)} | {self._figures(trainer)}", soft_wrap=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        shown = " | ".join(f"{k} {v:.4f}" for k, v in trainer.callback_metrics.items() if k.startswith("val/"))
        if shown:
            self._console.print(f"step {trainer.global_step}{_of(trainer)} | {shown}", soft_wrap=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _figures(self, trainer: L.Trainer) -> str:
        loss = trainer.callback_metrics.get(names.TRAIN_LOSS)
        parts = [f"loss {float(loss):.3f}"] if loss is not None else []
        figures = trainer.strategy.runtime.metrics()
        for name, shown in _SHOWN.items():
            if name in figures:
                parts.append(shown(figures[name]))
        return " | ".join(parts)


_SHOWN = {
    names.STEP_S: lambda v: f"{v:.3f} s/step",
    names.TOKENS_PER_S: lambda v: f"{v:,.0f} tokens/s",
    names.DEVICE_BYTES: lambda v: f"{format_size(v)} a rank",
    names.MFU: lambda v: f"MFU {v:.0%}",
    names.EXPOSED_FRACTION: lambda v: f"exposed communication {v:.1%}",
}


def _of(trainer: L.Trainer) -> str:
    return f"/{trainer.max_steps}" if trainer.max_steps and trainer.max_steps > 0 else ""
