"""The recorder on a stand-in runtime: rows to any sink and file, alerts once, a summary; no trainer in sight."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memwall_strategy.core.block import Kind, Phase
from memwall_strategy.planner import ClusterSpec, ModelSpec, ParameterSpec, UnitSpec, plan
from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.csv_log import read_csv
from memwall_strategy.telemetry.events import Event, EventKind, Events
from memwall_strategy.telemetry.options import TelemetryConfig
from memwall_strategy.telemetry.recorder import Recorder
from memwall_strategy.telemetry.run_folder import RunFolder


class Runtime:
    """What the recorder reads of a runtime; the test sets the share of the budget that is held."""

    def __init__(self, rank: int = 0) -> None:
        self.events = Events(rank)
        self.steps, self.share, self.device, self.budget_bytes = 0, 0.5, "cpu", 1000
        self.kind_peaks = {Phase.STEP: {Kind.PARAM: 64, Kind.ACTIVATION: 0}}
        self.config = SimpleNamespace(pool=SimpleNamespace(deep_accounting=False))
        self.mesh = SimpleNamespace(size=lambda: 2)

    def metrics(self) -> dict[str, float]:
        peak = self.share * self.budget_bytes
        return {names.STEP_S: 0.25, names.UTILIZATION: self.share, names.DEVICE_PEAK_BYTES: peak}


def run(runtime: Runtime, recorder: Recorder, losses: list[float]) -> None:
    for loss in losses:
        runtime.steps += 1
        runtime.events.step = runtime.steps
        recorder.step({names.TRAIN_LOSS: loss})


def test_rows_files_and_summary_without_a_trainer(tmp_path: Path) -> None:
    runtime, seen = Runtime(), []
    unit = UnitSpec("block", (ParameterSpec("block.w", (4, 4)),))
    made = plan(ModelSpec((unit,)), ClusterSpec(world=1))
    runtime.events.emit(EventKind.RUN_RESUMED, path="before the recorder was made")
    recorder = Recorder(
        runtime, [lambda values, step: seen.append((step, values))], folder=RunFolder(tmp_path / "a" / "b"), plan=made
    )
    run(runtime, recorder, [5.0, 4.0, 3.0])
    recorder.close()
    assert [step for step, _ in seen] == [1, 2, 3]
    assert seen[0][1][names.PREDICTED_DEVICE_BYTES] == made.resident_bytes > 0
    rows = read_csv(tmp_path / "a" / "b" / "metrics.csv")[1]
    assert [(row["step"], row[names.TRAIN_LOSS], row[names.STEP_S]) for row in rows] == [
        ("1", "5", "0.25"), ("2", "4", "0.25"), ("3", "3", "0.25"),
    ]  # fmt: skip
    summary = json.loads((tmp_path / "a" / "b" / "summary.json").read_text())
    assert summary["figures"]["train/loss_ratio"] == pytest.approx(4.0 / 5.0)
    assert summary["memory"]["measured"] == {"step": {"param": 64}} and summary["events"] == {"plan": 1}
    events = (tmp_path / "a" / "b" / "events.jsonl").read_text().splitlines()
    assert [json.loads(event)["kind"] for event in events] == ["run_resumed", "plan"]
    assert json.loads(events[1])["fields"]["resident_bytes"] == made.resident_bytes


def test_other_ranks_write_nothing_but_alerts(tmp_path: Path) -> None:
    runtime, seen = Runtime(rank=1), []
    recorder = Recorder(runtime, [lambda values, step: seen.append(step)], folder=RunFolder(tmp_path))
    run(runtime, recorder, [5.0, float("inf")])
    recorder.close("failed")
    assert seen == [] and recorder.last[names.STEP_S] == 0.25
    assert [p.name for p in tmp_path.iterdir()] == ["events.jsonl"]


def test_alerts_are_told_once_until_they_are_over() -> None:
    runtime, seen = Runtime(), []
    runtime.events.subscribe(lambda event: seen.append((event.kind.value, event.step)))
    recorder = Recorder(runtime, config=TelemetryConfig(memory_alert=0.9))
    nan = float("nan")
    for share, loss in ((0.5, 1.0), (0.9, nan), (0.99, nan), (0.5, 1.0), (0.95, -nan)):
        runtime.share = share
        run(runtime, recorder, [loss])
    assert seen == [("memory_high", 2), ("loss_not_finite", 2), ("memory_high", 5), ("loss_not_finite", 5)]
    quiet: list[Event] = []
    other = Runtime()
    other.share = 1.0
    other.events.subscribe(quiet.append)
    run(other, Recorder(other, config=TelemetryConfig(memory_alert=None)), [1.0])
    assert quiet == []


def test_every_so_many_steps() -> None:
    runtime, seen = Runtime(), []
    sink: Any = lambda values, step: seen.append(step)  # noqa: E731
    run(runtime, Recorder(runtime, [sink], config=TelemetryConfig(every_n_steps=3)), [1.0] * 7)
    assert seen == [3, 6]
