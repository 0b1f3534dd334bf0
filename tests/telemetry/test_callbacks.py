"""RunLog, Telemetry and StepProgress on a stand-in trainer; the whole is tried in tests/cli/test_train.py."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from memwall_strategy.callbacks.lightning import Telemetry
from memwall_strategy.core.block import Kind, Phase
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.csv_log import read_csv
from memwall_strategy.telemetry.events import Events
from memwall_strategy.telemetry.progress import StepProgress
from memwall_strategy.telemetry.run_folder import RunFolder
from memwall_strategy.telemetry.run_log import run_log_class

RunLog = run_log_class("lightning")


def trainer(*, deep: bool = False, **more: Any) -> Any:
    """What the callbacks read of a trainer under memwall."""
    runtime = SimpleNamespace(
        metrics=lambda: {names.STEP_S: 0.25, names.TOKENS_PER_S: 4096.0, names.EXPOSED_FRACTION: 0.031},
        kind_peaks={Phase.STEP: {Kind.PARAM: 64, Kind.ACTIVATION: 0}},
        config=SimpleNamespace(pool=SimpleNamespace(deep_accounting=deep)),
        events=Events(),
        steps=0,
    )
    parameter = torch.nn.Parameter(torch.zeros(1))
    return SimpleNamespace(**{
        "strategy": SimpleNamespace(runtime=runtime, events=runtime.events), "ckpt_path": None,
        "global_step": 0, "log_every_n_steps": 1, "is_global_zero": True,
        "optimizers": [torch.optim.SGD([parameter], lr=0.5)], "loggers": [], "max_steps": 20,
        "callback_metrics": {}, "sanity_checking": False, "estimated_stepping_batches": 20, **more,
    })  # fmt: skip


def run_steps(made: Any, steps: int, *callbacks: Any) -> None:
    for callback in callbacks:
        callback.on_train_start(made, None)
    for step in range(1, steps + 1):
        made.global_step = made.strategy.runtime.steps = step
        made.callback_metrics[names.TRAIN_LOSS] = torch.tensor(5.0 - 0.1 * step)
        for callback in callbacks:
            callback.on_train_batch_end(made, None, None, None, step - 1)


def test_parts_of_a_step_become_one_row(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path))
    log.log_metrics({names.STEP_S: 0.5}, step=0)  # Telemetry
    log.log_metrics({names.TRAIN_LOSS: 5.0, "epoch": 0}, step=0)  # the module
    log.log_metrics({names.VAL_LOSS: 4.0, "epoch": 0}, step=0)  # the validation that followed
    assert not (tmp_path / "metrics.csv").exists()
    log.log_metrics({names.STEP_S: 0.4}, step=1)
    assert len(read_csv(tmp_path / "metrics.csv")[1]) == 1, "written when the next step begins"
    log.finalize("failed")
    rows = read_csv(tmp_path / "metrics.csv")[1]
    assert [(row["step"], row[names.STEP_S]) for row in rows] == [("1", "0.5"), ("2", "0.4")]
    assert (rows[0][names.TRAIN_LOSS], rows[0][names.VAL_LOSS], rows[1][names.TRAIN_LOSS]) == ("5", "4", "")
    assert (log.name, log.version, log.save_dir) == ("", "", str(tmp_path)), "checkpoints go to save_dir/checkpoints"


def test_telemetry_logs_each_optimizer_step_once(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: seen.append((step, metrics[names.LEARNING_RATE])))
    made, telemetry = trainer(loggers=[logger], log_every_n_steps=2), Telemetry()
    run_steps(made, 6, telemetry)
    telemetry.on_train_batch_end(made, None, None, None, 6)  # a micro-batch that accumulates: the step is the same
    assert seen == [(1, 0.5), (3, 0.5), (5, 0.5)]
    assert telemetry.last[names.STEP_S] == 0.25


@pytest.mark.parametrize("deep", [True, False])
def test_activations_that_are_not_counted_are_not_zero(deep: bool) -> None:
    telemetry, made = Telemetry(), trainer(deep=deep)
    telemetry.on_train_start(made, None)
    telemetry.on_train_end(made, None)
    assert telemetry.peak_bytes == {"step": {"param": 64} | ({"activation": 0} if deep else {})}


def test_telemetry_under_another_strategy_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"callbacks=\[Telemetry\(\.\.\.\)\] works with memwall's strategy"):
        Telemetry().setup(SimpleNamespace(strategy=object()), None, "fit")


def test_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    progress = StepProgress(10, Console(file=out, width=120))
    made = trainer()
    run_steps(made, 20, progress)
    made.callback_metrics[names.VAL_LOSS] = torch.tensor(2.5)
    progress.on_validation_end(made, None)
    progress.on_train_end(made, None)
    assert out.getvalue().splitlines() == [
        "step 1/20 | loss 4.900 | 0.250 s/step | 4,096 tokens/s | exposed communication 3.1%",
        "step 10/20 | loss 4.000 | 0.250 s/step | 4,096 tokens/s | exposed communication 3.1%",
        "step 20/20 | loss 3.000 | 0.250 s/step | 4,096 tokens/s | exposed communication 3.1%",
        "step 20/20 | val/loss 2.5000",
    ]


def test_a_bar_on_a_terminal_and_nothing_on_other_ranks() -> None:
    out = io.StringIO()
    progress = StepProgress(10, Console(file=out, width=120, force_terminal=True, color_system=None))
    made = trainer()
    run_steps(made, 3, progress)
    progress.on_exception(made, None, RuntimeError())
    assert "3/20" in out.getvalue() and "loss 4.700" in out.getvalue()
    other = io.StringIO()
    run_steps(trainer(is_global_zero=False), 20, StepProgress(10, Console(file=other)))
    assert other.getvalue() == ""
