"""Time, tokens, operations and exposed communication of each step."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping

import torch
from torch import nn

from memwall_strategy.core.lane import LaneStats
from memwall_strategy.engine.flops import FlopCount, is_compiled, measured_peak_flops

_UNCOUNTED_STEPS = 1
"""The operations of the step after these are counted: the first one also builds what is built lazily."""

_RATED_STEPS = 31
"""Steps whose fastest transfers tell the link's rate."""


class StepMeter:
    """Figures of a rank's last step.

    Args:
        device, dtype: where and in what the arithmetic runs; the peak of MFU is measured there.
        world: data-parallel ranks; tokens per second are those of this rank times ``world``.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, world: int) -> None:
        self._device, self._dtype, self._world = device, dtype, world
        self._countable = True
        self._count: FlopCount | None = None
        self._flops_per_step = 0
        self._flops_tokens = 0
        self._peak = 0.0
        self._given_peak: float | None = None
        self._start_s = self._start_cpu_s = 0.0
        self._rates: deque[float] = deque(maxlen=_RATED_STEPS)
        self._tokens = 0
        self._ended = 0
        # steps that ended within the present micro-batch (manual optimization): their tokens may be told later.
        # A loop that marks no micro-batches means one step by it.
        self._marked = False
        self._batch_s = 0.0
        self._batch_tokens = 0

    def look_at(self, model: nn.Module) -> None:
        """Compiled modules hide their operations: MFU is then left out."""
        self._countable = not any(is_compiled(module) for module in model.modules())

    def begin_batch(self) -> None:
        """A micro-batch comes: no step has ended in it yet."""
        self._marked, self._batch_s, self._batch_tokens = True, 0.0, 0

    def begin(self) -> None:
        """Start the clock."""
        self._tokens = 0
        if not self._marked:
            self._batch_s, self._batch_tokens = 0.0, 0
        if self._ended >= _UNCOUNTED_STEPS and self._countable and not self._flops_per_step:
            self._peak = self._given_peak or measured_peak_flops(self._device, self._dtype)
            self._count = FlopCount()
            self._count.__enter__()
        self._start_s, self._start_cpu_s = time.perf_counter(), time.thread_time()

    def add_tokens(self, tokens: int) -> None:
        """Tokens of one micro-batch of this rank."""
        self._tokens += tokens

    def add_late_tokens(self, tokens: int) -> dict[str, float]:
        """Tokens of a micro-batch in which one or more steps ended already; return what they change.

        Steps that share a micro-batch (two optimizers, say) share its tokens: the rate is over the time of all.
        """
        if not self._batch_s:
            return {}
        self._batch_tokens += tokens
        return {"memwall/tokens_per_s": self._batch_tokens * self._world / self._batch_s}

    def use_peak(self, flops: float) -> None:
        """Take MFU over this many operations per second of one device instead of measuring its peak."""
        self._given_peak = flops

    def end(
        self,
        lanes: Mapping[str, LaneStats],
        input_s: float | None = None,
        *,
        copied_s: float = 0.0,
        other_waits_s: float = 0.0,
    ) -> dict[str, float]:
        """Stop the clock and return the step's figures. Runs on the thread that ``begin`` ran on.

        Args:
            input_s: time in which the training thread waited for the step's batches; None where nothing tells.
            copied_s: its CPU time for copies in and out of communication buffers.
            other_waits_s: what it waited for besides batches and ``lanes`` (paging).
        """
        step_s, cpu_s = time.perf_counter() - self._start_s, time.thread_time() - self._start_cpu_s
        self._ended += 1
        self._batch_s += step_s
        self._batch_tokens += self._tokens
        self._stop_counting()
        exposed_s = sum(stats.exposed_s for stats in lanes.values())
        figures = {"memwall/step_s": step_s}
        if input_s is not None:
            figures["memwall/input/exposed_s"] = input_s
        if lanes:
            figures["memwall/overlap/exposed_s"] = exposed_s
            figures["memwall/overlap/exposed_fraction"] = exposed_s / step_s
            # Neither waiting nor computing: there was work, but lanes (or somebody else) had the core.
            waited_s = exposed_s + other_waits_s + (input_s or 0.0)
            figures["memwall/overlap/contention_s"] = max(0.0, step_s - cpu_s - waited_s)
            figures["memwall/overlap/copy_s"] = copied_s
            figures["memwall/overlap/shared_bytes"] = float(sum(stats.shared_bytes for stats in lanes.values()))
            for name, stats in lanes.items():
                figures[f"memwall/overlap/lane_exposed_s/{name}"] = stats.exposed_s
                figures[f"memwall/overlap/lane_busy_s/{name}"] = stats.busy_s
                figures[f"memwall/overlap/lane_bytes/{name}"] = float(stats.bytes)
            figures |= self._saturation(lanes, step_s)
        if self._tokens:
            figures["memwall/tokens_per_s"] = self._tokens * self._world / step_s
        if self._flops_per_step:
            share = self._tokens / self._flops_tokens if self._flops_tokens and self._tokens else 1.0
            figures["memwall/mfu"] = self._flops_per_step * share / step_s / self._peak
        return figures

    def _saturation(self, lanes: Mapping[str, LaneStats], step_s: float) -> dict[str, float]:
        """Each lane's bytes over what the link could have moved in the step; the lanes share one link.

        Its rate is the median over steps of each step's fastest transfer: most transfers share the link with another
        lane's, and a peer's bytes may be there already when a late rank asks for them.
        """
        if best := max((stats.best_bytes_per_s for stats in lanes.values()), default=0.0):
            self._rates.append(best)
        if not self._rates:
            return {}
        rate = statistics.median(self._rates)
        return {f"memwall/overlap/lane_saturation/{name}": stats.bytes / step_s / rate for name, stats in lanes.items()}

    def abort(self) -> None:
        """The step broke: forget what was counted."""
        if self._count is not None:
            self._count.__exit__(None, None, None)
            self._count = None

    def _stop_counting(self) -> None:
        if self._count is not None:
            self._count.__exit__(None, None, None)
            self._flops_per_step, self._flops_tokens = self._count.flops, self._tokens
            self._count = None
