"""The figures of a run for a Lightning trainer's loggers: the ``Telemetry`` callback, for either Lightning package."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.events import EventKind
from memwall_strategy.telemetry.options import TelemetryConfig, telemetry_config
from memwall_strategy.telemetry.recorder import Recorder
from memwall_strategy.telemetry.run_folder import RunFolder
from memwall_strategy.telemetry.run_log import RunLogMethods, run_log_class

if TYPE_CHECKING:
    from memwall_strategy.planner import Plan
    from memwall_strategy.telemetry.wandb_run import WandbRun


class TelemetryMethods:
    """Gives the runtime's figures to every logger of the trainer, and writes what no logger does.

    Once an optimizer step it reads ``strategy.runtime.metrics()`` and passes it on where the step is one that is
    logged. With a folder it also writes ``metrics.csv`` (everything that any logger gets), ``events.jsonl``,
    ``summary.json`` and the profile. To Weights & Biases it adds alerts and, where there is a plan, its table.

    Args:
        config: a ``TelemetryConfig``; or its fields as keywords.
        folder: where files go; None: none are written, unless a ``RunLog`` is among the trainer's loggers already.
        plan: of this run, from ``memwall_strategy.planner``.
        options: fields of ``TelemetryConfig``.

    Attributes:
        last: figures of the last step, whether logged or not.
        peak_bytes: phase -> kind -> most bytes held, at any step; empty without an account.
        event_counts: kind -> how often it happened while training; of the last run that ended.
        train_s: time from the first batch to the end of training, validation and saving included.

    Raises:
        ConfigError: an unknown option, or a value that cannot be.
    """

    memwall_namespace: ClassVar[str]

    def __init__(
        self,
        config: TelemetryConfig | None = None,
        *,
        folder: str | Path | None = None,
        plan: Plan | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if config is not None and options:
            raise ConfigError(f"Telemetry: give either a TelemetryConfig or single options, not both: {[*options]}.")
        self.memwall_config = telemetry_config(options) if config is None else config
        self.plan = plan
        self.last: dict[str, float] = {}
        self.peak_bytes: dict[str, dict[str, int]] = {}
        self.event_counts: dict[str, int] = {}
        self.train_s = 0.0
        self._given_folder = None if folder is None else RunFolder(Path(folder))
        self._recorder: Recorder | None = None
        self._wandb: list[WandbRun] = []
        self._every = 1
        self._start_s = 0.0
        self._seen_step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._given_folder is not None:
            self._given_folder.make()
            if self._folder(trainer) != self._given_folder:
                trainer.loggers = [*trainer.loggers, run_log_class(self.memwall_namespace)(self._given_folder)]
        folder = self._folder(trainer)
        if folder is not None:
            trainer.strategy.events.subscribe(folder.write_event)
        elif self.memwall_config.profile:
            raise ConfigError("Telemetry(profile=True) needs a place for the trace: Telemetry(..., folder='runs/a').")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._start_s = time.perf_counter()
        self._seen_step = trainer.global_step
        runtime, config = trainer.strategy.runtime, self.memwall_config
        self._every = config.every_n_steps or trainer.log_every_n_steps

        def log(row: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(row, step=step)

        for run in self._wandb:  # of a fit before this one; not left at its end: the strategy tells of errors later
            run.leave()
        if trainer.is_global_zero and (loggers := _wandb_loggers(trainer.loggers)):
            from memwall_strategy.telemetry.wandb_run import WandbRun  # imports wandb

            self._wandb = [
                WandbRun(each.experiment, runtime.events, alert_every_s=config.alert_every_s) for each in loggers
            ]
            for run in self._wandb:
                run.follow(self.plan)
        folder = self._folder(trainer)
        self._recorder = Recorder(runtime, [log], config=config, folder=folder, metrics_csv=False, plan=self.plan)
        if trainer.ckpt_path:
            runtime.events.emit(EventKind.RUN_RESUMED, path=str(trainer.ckpt_path))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._seen_step:  # a micro-batch that accumulates
            return
        self._seen_step = trainer.global_step
        # Lightning counts a step of each optimizer, its loggers count batches that stepped.
        step = trainer.global_step // max(1, len(trainer.optimizers)) - 1
        logged = (step + 1) % self._every == 0
        extra = {}
        if logged and trainer.optimizers:
            extra[names.LEARNING_RATE] = trainer.optimizers[0].param_groups[0]["lr"]
        loss = _loss(outputs) if logged else None
        self.last = self._recorder.step(extra, step=step, logged=logged, loss=loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.train_s = time.perf_counter() - self._start_s
        self.peak_bytes = self._recorder.peak_bytes() if self._recorder is not None else {}
        trainer.strategy.events.emit(EventKind.RUN_ENDED, steps=trainer.strategy.runtime.steps)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        failed = isinstance(exception, Exception)
        if hasattr(trainer.strategy, "runtime"):
            kind = EventKind.RUN_FAILED if failed else EventKind.RUN_STOPPED
            trainer.strategy.events.emit(kind, error=type(exception).__name__, message=str(exception))
        self._close(trainer, "failed" if failed else "stopped")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close(trainer, "success")

    def _close(self, trainer: Any, status: str) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            for log in _run_logs(trainer):
                log.flush()  # the summary is made from the file
            recorder.close(status)
            self.event_counts = recorder.counts

    def _folder(self, trainer: Any) -> RunFolder | None:
        logs = _run_logs(trainer)
        return logs[-1].folder if logs else None


def _run_logs(trainer: Any) -> list[RunLogMethods]:
    return [logger for logger in trainer.loggers if isinstance(logger, RunLogMethods)]


def _wandb_loggers(loggers: list[Any]) -> list[Any]:
    """Lightning's W&B loggers, of either package and subclassed, without importing one that is not in use."""
    return [each for each in loggers if any(kind.__name__ == "WandbLogger" for kind in type(each).__mro__)]


def _loss(outputs: Any) -> float | None:
    """The loss that ``training_step`` returned, a tensor or a dict with one."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(loss) if hasattr(loss, "item") and loss.numel() == 1 else None
