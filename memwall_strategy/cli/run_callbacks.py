"""What a run adds to the trainer beside telemetry and checkpoints."""

from __future__ import annotations

import lightning.pytorch as L

from memwall_strategy.telemetry.run_folder import RunFolder

TRACE = "trace.json"


class DescribedPeak(L.Callback):
    """Takes MFU over the peak of the hardware that the run was configured for."""

    def __init__(self, flops: float) -> None:
        self._flops = flops

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.runtime.use_peak_flops(self._flops)


class TraceFile(L.Callback):
    """Writes rank 0's trace (``overlap.trace=true``) into the run folder when training ends, or breaks."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path / TRACE
        self._written = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        runtime = getattr(trainer.strategy, "runtime", None)
        if trainer.is_global_zero and runtime is not None and not self._written:
            self._written = True
            runtime.write_trace(self._path)
