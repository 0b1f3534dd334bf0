"""Which states of a run are kept: the last one always, the best ones by validation loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from memwall_strategy.cli.options import CheckpointsOptions
from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.run_folder import RunFolder

LAST = "last.ckpt"


class LastCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``: written anew every so many steps, or after each validation, and at the end of training.

    ``ModelCheckpoint(save_last=True)`` does so only when it saves one of the best too.
    """

    def __init__(self, folder: RunFolder, every_n_steps: int | None) -> None:
        self._folder, self._every = folder, every_n_steps
        self._saved_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._every is not None and trainer.global_step % self._every == 0:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._every is None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        if step == self._saved_step:
            return
        self._saved_step = step
        trainer.save_checkpoint(self._folder.checkpoints / LAST)


def checkpoint_callbacks(options: CheckpointsOptions, folder: RunFolder) -> list[Checkpoint]:
    """The callbacks that save; empty when saving is off."""
    if not options.enabled:
        return []
    best = ModelCheckpoint(
        dirpath=Path(folder.checkpoints),
        filename="best_step_{step}",
        auto_insert_metric_name=False,
        monitor=names.VAL_LOSS,
        save_top_k=options.keep_best,
    )
    return [*([best] if options.keep_best else []), LastCheckpoint(folder, options.every_n_steps)]
