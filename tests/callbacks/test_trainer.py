"""The callbacks in a trainer, on ranks: same effect as the strategy's options, two fits, evaluation alone, files."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from memwall_strategy.config import MemwallConfig, OverlapConfig, PoolConfig
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.lightning import strategy_class
from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.csv_log import read_csv
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import loss_of, make_loader, make_module, make_trainer, mean_over_ranks, module_class

MODULES = {name: f"memwall_strategy.callbacks.{name}" for name in ("lightning", "pytorch_lightning")}


def callbacks_of(namespace: str) -> Any:
    return import_module(MODULES[namespace])


def loader(here: Here, steps: int = 3) -> DataLoader:
    return make_loader("gpt", steps * 2 * here.world, 2, rank=here.rank, world=here.world)


@on_ranks(2, "lightning", "pytorch_lightning")
def test_callbacks_have_the_effect_of_options(here: Here) -> None:
    """Same configuration, same losses; a subclass's own hooks run; the mesh's options are settled before it is made."""
    ours = callbacks_of(here.case)
    seen: list[str] = []

    class Mine(ours.PooledMemory):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.strategy.config.overlap.prefetch)

    module = make_module("gpt", here.case)
    trainer = make_trainer(
        here.world, namespace=here.case,
        callbacks=[Mine(device_budget="64MiB"), ours.Overlap(prefetch=2, trace=True), ours.Rollback(enabled=False)],
    )  # fmt: skip
    trainer.fit(module, loader(here))
    wanted = MemwallConfig(
        pool=PoolConfig(device_budget="64MiB"), overlap=OverlapConfig(prefetch=2, trace=True),
        resilience=trainer.strategy.config.resilience,
    )  # fmt: skip
    assert trainer.strategy.config == trainer.strategy.runtime.config == wanted
    assert trainer.strategy.runtime.budget_bytes == 64 << 20
    assert names.UTILIZATION in trainer.strategy.runtime.metrics()
    assert seen == [2, 2, 2]

    plain = make_module("gpt", here.case)
    strategy = strategy_class(here.case)(pool=wanted.pool, overlap=wanted.overlap, resilience=wanted.resilience)
    make_trainer(here.world, namespace=here.case, strategy=strategy).fit(plain, loader(here))
    assert mean_over_ranks(module.losses) == mean_over_ranks(plain.losses)

    # validation alone takes them up too
    trainer = make_trainer(here.world, namespace=here.case, callbacks=[ours.PooledMemory(enabled=False)])
    trainer.validate(make_module("gpt", here.case), loader(here), verbose=False)
    assert trainer.strategy.runtime.memory is None


@on_ranks(2)
def test_a_second_fit_takes_what_is_there_then(here: Here) -> None:
    ours = callbacks_of("lightning")
    trainer = make_trainer(here.world, callbacks=[ours.Overlap(lanes=False), ours.PooledMemory(enabled=False)])
    trainer.fit(make_module("gpt"), loader(here))
    assert trainer.strategy.runtime.memory is None and not trainer.strategy.config.overlap.lanes
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, ours.PooledMemory)]
    trainer.fit_loop.max_epochs = 2
    module = make_module("gpt")
    trainer.fit(module, loader(here))
    assert len(module.losses) == 3
    assert trainer.strategy.runtime.memory is not None, "a callback that was dropped is the default again"
    assert not trainer.strategy.config.overlap.lanes


@on_ranks(2, "two", "conflict", "foreign", "budget", "configure_callbacks")
def test_mistakes_are_refused_on_every_rank_before_any_waits(here: Here) -> None:
    ours = callbacks_of("lightning")
    module, strategy, callbacks = make_module("gpt"), "memwall", []
    if here.case == "two":
        callbacks, message = [ours.PooledMemory(), ours.PooledMemory()], "two of one kind"
    elif here.case == "conflict":
        strategy, callbacks = strategy_class("lightning")(overlap=OverlapConfig(prefetch=3)), [ours.Overlap(prefetch=2)]
        message = "overlap is set twice"
    elif here.case == "foreign":
        strategy, callbacks, message = "ddp", [ours.Overlap()], "this trainer has DDPStrategy"
    elif here.case == "budget":
        callbacks, message = [ours.PooledMemory(device_budget="8000GiB")], "that are there"
    else:
        module.configure_callbacks = lambda: [ours.Overlap(), ours.Overlap()]
        message = "two of one kind"
    trainer = make_trainer(here.world, strategy=strategy, callbacks=callbacks)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(module, loader(here))


class Manual(module_class("lightning")):
    """Steps its optimizer inside ``training_step`` and says afterwards how many tokens that was."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        optimizer = self.optimizers()
        loss = loss_of(self.net, batch)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.log("train/loss", loss)
        return {"loss": loss.detach() * (float("nan") if batch_idx == 1 else 1.0), "tokens": batch[0].numel()}


class Kept(import_module("lightning.pytorch.loggers").Logger):
    """A user's logger: keeps the rows."""

    name, version = "kept", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@on_ranks(2)
def test_telemetry_to_any_logger_and_folder(here: Here) -> None:
    """Several loggers at once, files of the folder, a profile, alerts; tokens/s in manual optimization."""
    ours = callbacks_of("lightning")
    csv_logger = import_module("lightning.pytorch.loggers").CSVLogger(here.folder / "csv", flush_logs_every_n_steps=1)
    loggers: list[Any] = [Kept(), csv_logger]
    run = here.folder / "run"
    telemetry = ours.Telemetry(folder=run, every_n_steps=1, profile=True, profile_skip_steps=1, memory_alert=1e-6)
    trainer = make_trainer(
        here.world, logger=loggers, log_every_n_steps=1,
        callbacks=[telemetry, ours.PooledMemory(device_budget="64MiB")],
    )  # fmt: skip
    trainer.fit(Manual(make_module("gpt").net), loader(here, 5))
    for name in (names.STEP_S, names.TOKENS_PER_S, names.DEVICE_BYTES, names.EXPOSED_S):
        assert name in telemetry.last, (name, telemetry.last)
    trainer.strategy.barrier()
    if here.rank != 0:
        assert not any(names.STEP_S in row for _, row in loggers[0].rows)
        return
    kept = [step for step, row in loggers[0].rows if names.TOKENS_PER_S in row]
    assert kept == [0, 1, 2, 3, 4]
    assert names.STEP_S in next((here.folder / "csv").rglob("metrics.csv")).read_text()
    rows = read_csv(run / "metrics.csv")[1]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert all(row[names.TOKENS_PER_S] and row["train/loss"] and row[names.LEARNING_RATE] for row in rows)

    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["step"]) for e in events if e["rank"] == 0 and e["kind"] != "retention_changed"] == [
        ("run_started", 0), ("state_placed", 0), ("memory_high", 1), ("loss_not_finite", 2), ("profile_written", 4),
        ("run_ended", 5),
    ]  # fmt: skip
    assert {e["kind"] for e in events if e["rank"] == 1} == {"memory_high", "loss_not_finite"}, "alerts alone"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "success" and summary["events"]["run_ended"] == 1
    assert summary["figures"]["train/steps"] == 5 and summary["environment"]["ranks"] == 2, summary
    assert summary["memory"]["measured"]["step"]["param"] > 0

    trace = json.loads((run / "profile.json").read_text())["traceEvents"]
    rows_named = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert {"lane gather", "lane reduce", "training thread"} <= rows_named
    spans = [e for e in trace if e.get("ph") == "X"]
    operations = [e for e in spans if e["name"].startswith("Optimizer.step")]
    steps = [e for e in spans if e.get("cat") == "train" and e["name"] == "step"]
    assert len(operations) == len(steps) == 3
    for inner, outer in zip(*(sorted(each, key=lambda e: e["ts"]) for each in (operations, steps)), strict=True):
        slack_us = 1000
        assert outer["ts"] - slack_us < inner["ts"]
        assert inner["ts"] + inner["dur"] < outer["ts"] + outer["dur"] + slack_us
    assert sorted(p.name for p in run.iterdir()) == ["events.jsonl", "metrics.csv", "profile.json", "summary.json"]


@on_ranks(2)
def test_an_error_ends_the_run_as_an_event_of_every_rank(here: Here) -> None:
    ours = callbacks_of("lightning")

    class Broken(module_class("lightning")):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise MemwallError("it broke")
            return super().training_step(batch, batch_idx)

    run = Path(here.folder, "run")
    trainer = make_trainer(here.world, callbacks=[ours.Telemetry(folder=run)])
    with pytest.raises(MemwallError, match="it broke"):
        trainer.fit(Broken(make_module("gpt").net), loader(here))
    torch.distributed.barrier()
    if here.rank == 0:
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        for rank in (0, 1):
            kinds = [e["kind"] for e in events if e["rank"] == rank and e["severity"] == "error"]
            assert sorted(kinds) == ["run_failed", "step_aborted"], events
        assert json.loads((run / "summary.json").read_text())["status"] == "failed"
