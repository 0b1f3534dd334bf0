"""Gives the runtime's figures to the trainer's loggers, and keeps what the summary needs.

Once an optimizer step it reads ``strategy.runtime.metrics()``, a dict that the runtime has at hand, and passes it on.
It makes no collective: the figures are those of each rank, and loggers write rank 0's.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as L

from memwall_strategy.core.block import Kind
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.telemetry import names


class Telemetry(L.Callback):
    """Logs the runtime's figures every ``log_every_n_steps``.

    Attributes:
        last: figures of the last step, whether logged or not.
        peak_bytes: phase -> kind -> most bytes held, at any step; empty without an account.
        train_s: time from the first batch to the end of training, validation and saving included.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.peak_bytes: dict[str, dict[str, int]] = {}
        self.train_s = 0.0
        self._start_s = 0.0
        self._seen_step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "runtime"):
            raise ConfigError(
                f"Telemetry shows memwall's runtime, and strategy {type(trainer.strategy).__name__} has none. "
                'Use Trainer(strategy="memwall"), or leave the callback out.'
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_s = time.perf_counter()
        self._seen_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen_step:  # a micro-batch that accumulates
            return
        self._seen_step = trainer.global_step
        self.last = trainer.strategy.runtime.metrics()
        # Lightning counts a step of each optimizer, its loggers count batches that stepped.
        step = trainer.global_step // max(1, len(trainer.optimizers)) - 1
        if (step + 1) % trainer.log_every_n_steps == 0 and trainer.is_global_zero:
            rates = {names.LEARNING_RATE: trainer.optimizers[0].param_groups[0]["lr"]} if trainer.optimizers else {}
            for logger in trainer.loggers:
                logger.log_metrics({**self.last, **rates}, step=step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.train_s = time.perf_counter() - self._start_s
        runtime = trainer.strategy.runtime
        deep = runtime.config.pool.deep_accounting
        self.peak_bytes = {
            str(phase): {str(kind): n for kind, n in kinds.items() if kind != Kind.ACTIVATION or deep}
            for phase, kinds in runtime.kind_peaks.items()
        }
