"""What the lanes and the training thread did when: kept while somebody traces, written as a Chrome trace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.core.lane import Lane, Span
from memwall_strategy.telemetry.trace import write_lanes


class SpanKeeper:
    """Spans of one rank.

    Args:
        lanes: gives the lanes that there are now.
        always: keep every span of the run (``overlap.trace``), not only between ``start`` and ``stop``.

    Attributes:
        on: whether spans are kept now.
    """

    def __init__(self, lanes: Callable[[], Iterable[Lane]], *, always: bool) -> None:
        self.on = self._always = always
        self._lanes = lanes
        self._spans: list[Span] = []

    def add(self, name: str, start_s: float) -> None:
        """The training thread did ``name`` from ``start_s`` (``time.perf_counter``) to now."""
        if self.on:
            self._spans.append(Span("train", name, "", start_s, time.perf_counter(), 0))

    def collect(self) -> None:
        """Take over what the lanes recorded."""
        for lane in self._lanes():
            self._spans += lane.take_spans()

    def start(self) -> float:
        """Keep spans from now on; returns now (``time.perf_counter``)."""
        self._record(True)
        return time.perf_counter()

    def stop(self, since_s: float) -> list[Span]:
        """The spans that began since then; no more are kept unless all are."""
        self.collect()
        taken = [span for span in self._spans if span.start_s >= since_s]
        if not self._always:
            self._record(False)
            self._spans.clear()
        return taken

    def write(self, path: str | os.PathLike[str], rank: int) -> Path:
        """Write all spans as a Chrome trace.

        Raises:
            ConfigError: none were kept because ``overlap.trace`` is off.
        """
        if not self._always:
            raise ConfigError("there is no trace: set overlap.trace=true before training.")
        self.collect()
        return write_lanes(path, self._spans, rank)

    def _record(self, on: bool) -> None:
        self.on = on
        for lane in self._lanes():
            lane.record_spans = on
