"""Weights & Biases, for real and offline: rows, plan, alerts, a service that dies, nothing left behind."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import ClusterSpec, ModelSpec, ParameterSpec, UnitSpec, plan
from memwall_strategy.telemetry.events import EVENTS, Event, EventKind, Events
from memwall_strategy.telemetry.options import WandbOptions
from memwall_strategy.telemetry.wandb_log import RunWandbLogger
from memwall_strategy.telemetry.wandb_run import PLAN_TABLE, WandbRun
from tests.ranks import ROOT

UNIT = UnitSpec("block", (ParameterSpec("block.w", (4, 4)),))
PLAN = plan(ModelSpec((UNIT,)), ClusterSpec(world=1))


class Run:
    """Notes what it is asked for; fails once it is told to."""

    def __init__(self) -> None:
        self.alerts: list[tuple[str, str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def alert(self, title: str, text: str, level: Any) -> None:
        if self.error:
            raise self.error
        self.alerts.append((title, text, level))

    def log(self, values: dict[str, Any], commit: bool) -> None:
        self.logged.append(values)


def tell(events: Events, kind: EventKind) -> None:
    events.emit(kind, **dict.fromkeys(EVENTS[kind].fields, "x"))


def test_every_kind_of_alert_once_a_while_and_the_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    run, events = Run(), Events()
    alerts = WandbRun(run, events, alert_every_s=60)
    alerts.follow(PLAN)
    alerts.follow(PLAN)
    (logged,) = run.logged
    assert logged[PLAN_TABLE].columns[0] == "kind" and ["param", 64, 64, 64, 64, 64][0] in logged[PLAN_TABLE].data[0]
    for kind in EventKind:
        tell(events, kind)
        tell(events, kind)
    wanted = {f"memwall: {kind}" for kind in EventKind if EVENTS[kind].severity and kind != EventKind.LOGGER_FAILED}
    assert {title for title, _, _ in run.alerts} == wanted and len(run.alerts) == len(wanted)
    clock.now_s = 61.0
    tell(events, EventKind.PEER_LOST)
    assert run.alerts[-1][1].endswith("(1 more since the last alert)") and run.alerts[-1][2] == wandb.AlertLevel.ERROR
    alerts.leave()
    clock.now_s = 200.0
    tell(events, EventKind.PEER_LOST)
    assert len(run.alerts) == len(wanted) + 1


def test_alerts_that_fail_are_left_out_and_told() -> None:
    run, events, seen = Run(), Events(), []
    events.subscribe(lambda event: seen.append(event.kind))
    WandbRun(run, events, alert_every_s=0).follow()
    run.error = ConnectionResetError("Connection lost")
    with pytest.warns(UserWarning, match="W&B failed and gets no more alerts: Connection lost"):
        tell(events, EventKind.MEMORY_HIGH)
    tell(events, EventKind.MEMORY_HIGH)
    assert seen == [EventKind.MEMORY_HIGH, EventKind.LOGGER_FAILED, EventKind.MEMORY_HIGH]


OFFLINE = """
import sys, os, signal, psutil, warnings
from pathlib import Path
from memwall_strategy.telemetry.events import EventKind, Events
from memwall_strategy.telemetry.options import WandbOptions
from memwall_strategy.telemetry.wandb_log import RunWandbLogger
folder = sys.argv[1]
logger = RunWandbLogger(WandbOptions(save_dir=folder, tags=("a",)), "project")
events, seen = Events(), []
events.subscribe(lambda event: seen.append(event.kind.value))
logger.start(events, {"seed": 1})
helpers = psutil.Process().children(recursive=True)
print("helpers", *[p.pid for p in helpers])
for step in range(3):
    logger.log_metrics({"train/loss": 1.0 / (step + 1)}, step=step)
    logger.log_metrics({"memwall/step_s": 0.5}, step=step)
if sys.argv[2] == "kill":
    for p in helpers:
        if "core" in p.name():
            p.kill(); p.wait()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3, 6):
            logger.log_metrics({"train/loss": 0.1}, step=step)
    print("warnings", len([w for w in told if "W&B failed" in str(w.message)]))
logger.finalize("success")
logger.finish(0)
logger.finish(0)
print("events", *seen)
"""


@pytest.mark.parametrize("way", ["finish", "kill"])
def test_offline_in_the_run_folder_and_nothing_left(tmp_path: Path, way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OFFLINE, str(tmp_path), way], cwd=ROOT, capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    helpers = [int(pid) for pid in out["helpers"].split()]
    assert helpers
    deadline = time.monotonic() + 20
    while (alive := [pid for pid in helpers if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive == [], "W&B's helpers outlive the process"
    assert [p.name for p in tmp_path.iterdir()] == ["wandb"]
    (offline,) = tmp_path.glob("wandb/offline-run-*")
    if way == "kill":
        assert (out["warnings"], out["events"]) == ("1", "logger_failed")
        return
    assert out["events"] == "" and f"wandb sync {offline}" in done.stdout
    rows, metrics = read_history(next(offline.glob("*.wandb")))
    kept = [{k: row[k] for k in ("trainer/global_step", "train/loss", "memwall/step_s")} for row in rows]
    assert kept == [
        {"trainer/global_step": step, "train/loss": 1.0 / (step + 1), "memwall/step_s": 0.5} for step in range(3)
    ], "one row a step"
    assert metrics.count("*") == 1, "everything is defined over the step, once"


def read_history(path: Path) -> tuple[list[dict[str, float]], list[str]]:
    """Rows and defined metrics of an offline run's file."""
    rows, metrics = [], []
    for data in read_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
        if record.HasField("metric"):
            metrics.append(record.metric.glob_name or record.metric.name)
    return rows, metrics


def read_records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, which W&B writes after a header of 7 bytes."""
    block, header, at, parts = 32768, struct.Struct("<IHB"), 7, b""
    while at + header.size <= len(data):
        if block - at % block < header.size:  # the rest of a block too small for a header is padding
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(data, at)
        at += header.size
        parts += data[at : at + length]
        at += length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_online_without_a_key_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(wandb, "init", lambda **_: (_ for _ in ()).throw(wandb.errors.UsageError("No API key")))
    logger = RunWandbLogger(WandbOptions(mode="online", save_dir=str(tmp_path)), "project")
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode=online: W&B could not start: No API key.*wandb login"):
        logger.start(Events(), {})
    logger.finish(0)


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode='onlin' is not one of offline, online\. Did you mean"):
        WandbOptions(mode="onlin")


def test_an_event_of_another_rank_names_it() -> None:
    run, events = Run(), Events(rank=3)
    WandbRun(run, events, alert_every_s=0).follow()
    event: Event = events.emit(EventKind.RUN_FAILED, error="E", message="m" * 5000)
    assert event.is_alert and run.alerts[0][1].startswith("rank 3, step 0: an error ended the run. error: E")
    assert len(run.alerts[0][1]) <= 1000
