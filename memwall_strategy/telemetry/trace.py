"""Chrome traces: the lanes' transfers, alone or put into what torch's profiler wrote, on one clock.

Lanes keep ``time.perf_counter``; the profiler has a clock of its own. ``ClockMarks`` names moments that both know: a
``record_function`` of no length, with the counter read just before. The profiler's time of a moment is never before the
counter's reading, so the smallest difference of several is the offset of the clocks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memwall_strategy.core.lane import Span

MARK = "memwall clock"
_LANES_PID_OFFSET = 1_000_000
"""Lanes appear as a process of their own, beside the profiler's, which has the number of the operating system's."""

_US = 1e6


class ClockMarks:
    """Moments known to both clocks."""

    def __init__(self) -> None:
        self._taken_s: list[float] = []

    def mark(self) -> None:
        """Note this moment; the profiler must be recording on this thread."""
        name = f"{MARK} {len(self._taken_s)}"
        self._taken_s.append(time.perf_counter())
        with torch.profiler.record_function(name):
            pass

    def offset_us(self, events: Sequence[dict[str, Any]]) -> float | None:
        """Profiler's time less the counter's, in microseconds; None where no mark was recorded."""
        seen = {event["name"]: event["ts"] for event in events if str(event.get("name", "")).startswith(MARK)}
        offsets = [
            float(seen[name]) - taken_s * _US
            for i, taken_s in enumerate(self._taken_s)
            if (name := f"{MARK} {i}") in seen
        ]
        return min(offsets, default=None)


def lane_events(spans: Sequence[Span], rank: int, *, offset_us: float = 0.0, pid: int | None = None) -> list[dict]:
    """Trace events of the spans: one named row a lane, times in microseconds plus ``offset_us``."""
    pid = rank if pid is None else pid
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in spans))}
    named: list[dict] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"memwall lanes, rank {rank}"}}
    ]
    for lane, number in lanes.items():
        label = "training thread" if lane == "train" else f"lane {lane}"
        row = {"ph": "M", "pid": pid, "tid": number}
        named.append({**row, "name": "thread_name", "args": {"name": label}})
        named.append({**row, "name": "thread_sort_index", "args": {"sort_index": number}})
    return named + [
        {
            "name": f"{span.transfer} {span.unit}".rstrip(), "cat": span.lane, "ph": "X", "pid": pid,
            "tid": lanes[span.lane], "ts": span.start_s * _US + offset_us, "dur": (span.end_s - span.start_s) * _US,
            "args": {"bytes": span.bytes},
        }
        for span in spans
    ]  # fmt: skip


def write_lanes(path: str | os.PathLike[str], spans: Sequence[Span], rank: int) -> Path:
    """Write the lanes alone as a Chrome trace (chrome://tracing, Perfetto)."""
    target = Path(path)
    target.write_text(json.dumps({"traceEvents": lane_events(spans, rank), "displayTimeUnit": "ms"}))
    return target


def add_lanes(path: Path, spans: Sequence[Span], rank: int, marks: ClockMarks) -> None:
    """Put the lanes into a trace that torch's profiler exported, in place.

    Raises:
        ValueError: the trace holds none of the marks, so that the clocks cannot be set against each other.
    """
    trace = json.loads(path.read_text())
    offset_us = marks.offset_us(trace["traceEvents"])
    if offset_us is None:
        raise ValueError(f"{path} holds no mark of memwall's clock")
    kept = [event for event in trace["traceEvents"] if not str(event.get("name", "")).startswith(MARK)]
    pid = _LANES_PID_OFFSET + rank
    trace["traceEvents"] = kept + lane_events(spans, rank, offset_us=offset_us, pid=pid)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(trace))
    os.replace(beside, path)
