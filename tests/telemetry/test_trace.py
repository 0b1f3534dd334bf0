"""Lanes in a Chrome trace, alone and on the profiler's clock."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from memwall_strategy.core.lane import Span
from memwall_strategy.telemetry.trace import MARK, ClockMarks, add_lanes, lane_events, write_lanes

_SLACK_US = 500.0
"""Of the clocks' offset: a mark is exact to the time that its own recording takes."""


def test_lanes_alone(tmp_path: Path) -> None:
    spans = [Span("gather", "all-gather", "blocks.0", 1.0, 1.5, 64), Span("train", "forward", "", 1.1, 1.2, 0)]
    trace = json.loads(write_lanes(tmp_path / "t.json", spans, rank=2).read_text())
    named = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == {0: "lane gather", 1: "training thread"}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["tid"], e["pid"], e["ts"], e["dur"]) for e in events] == [
        ("all-gather blocks.0", 0, 2, 1e6, pytest.approx(5e5)), ("forward", 1, 2, 1.1e6, pytest.approx(1e5)),
    ]  # fmt: skip
    assert lane_events([], rank=0)[0]["args"]["name"] == "memwall lanes, rank 0"


def test_lanes_and_operations_are_on_one_clock(tmp_path: Path) -> None:
    """A span around an operation surrounds it in the merged trace too; so does the operation around a span."""
    marks, path = ClockMarks(), tmp_path / "p.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            marks.mark()
        start = time.perf_counter()
        with record_function("probe"):
            inner = time.perf_counter()
            time.sleep(0.02)
            torch.ones(8, 8) @ torch.ones(8, 8)
            inner_end = time.perf_counter()
        end = time.perf_counter()
        marks.mark()
    profiler.export_chrome_trace(str(path))
    add_lanes(path, [Span("a", "outer", "", start, end, 0), Span("a", "inner", "", inner, inner_end, 0)], 0, marks)
    events = json.loads(path.read_text())["traceEvents"]
    found = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"}
    assert found["outer"][0] - _SLACK_US < found["probe"][0] < found["inner"][0] + _SLACK_US
    assert found["inner"][1] - _SLACK_US < found["probe"][1] < found["outer"][1] + _SLACK_US
    assert found["inner"][0] < found["aten::mm"][0] < found["inner"][1]
    assert not any(name.startswith(MARK) for name in found), "the marks themselves are taken out"
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_a_trace_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [{"name": "x", "ph": "X", "ts": 1, "dur": 1}]}))
    with pytest.raises(ValueError, match="no mark of memwall's clock"):
        add_lanes(tmp_path / "t.json", [], 0, ClockMarks())
