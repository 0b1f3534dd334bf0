"""How many second buffers the engine has, changed between two steps.

On CPU they are the lanes' (gathers ahead, reductions in flight, and the windows that stand for both); elsewhere the
engine's own, which its streams use.
"""

from __future__ import annotations

import heapq

from torch import nn

from memwall_strategy.engine.fsdp import fsdp_groups, fsdp_roots
from memwall_strategy.engine.lanes import SLOTS_BESIDE, FsdpLanes
from memwall_strategy.engine.sharding import set_prefetch
from memwall_strategy.engine.shared_windows import gather_bytes, reduce_bytes, shard_count


class SecondBuffers:
    """Those of one sharded model.

    Args:
        model: the model.
        lanes: None where communication is the engine's own.
    """

    def __init__(self, model: nn.Module, lanes: FsdpLanes | None) -> None:
        self._model, self._lanes = model, lanes
        self._prefetched = False

    def use(self, *, prefetch: int, reduce_buffers: int, early: bool) -> None:
        """Have so many from the next forward on. Between two steps; with lanes, collective.

        Args:
            prefetch: units gathered ahead.
            reduce_buffers: most reductions in flight.
            early: whether the next iteration's first units are gathered after the step; needs lanes made with it.

        Raises:
            ConfigError: ``overlap.shared_memory=true``, and the ranks cannot share memory any more.
            MemwallError: what was on its way failed.
        """
        if self._lanes is not None:
            self._use_on_lanes(self._lanes, prefetch, reduce_buffers, early)
            return
        # The engine prefetches one unit by itself; an explicit list goes further.
        if prefetch > 1 or self._prefetched:
            set_prefetch(self._model, prefetch)
            self._prefetched = True
        for root in fsdp_roots(self._model):
            if hasattr(root, "set_reduce_scatter_max_input_buffers"):  # torch >= 2.13
                root.set_reduce_scatter_max_input_buffers(reduce_buffers)

    @staticmethod
    def _use_on_lanes(lanes: FsdpLanes, prefetch: int, reduce_buffers: int, early: bool) -> None:
        lanes.settle()
        lanes.order.limit(prefetch)
        if lanes.turn is not None:
            lanes.turn.limit(prefetch)
        if lanes.early is not None:
            lanes.early.limit(prefetch + 1 if early else 0)
        for twin, sizes in lanes.flats.items():
            lanes.windows.reopen(twin, heapq.nlargest(prefetch + SLOTS_BESIDE, sizes))
        reducer = lanes.reducer
        reducer.buffers = reduce_buffers
        for twin, sizes in reducer.flats.items():
            reducer.windows.reopen(twin, heapq.nlargest(reduce_buffers, sizes))

    def held_bytes(self, *, prefetch: int, reduce_buffers: int, early: bool) -> int:
        """Device bytes that so many flat buffers take on this rank: windows as they are, others at most."""
        ahead = max(1, prefetch + early)  # gathered early, they lie beside the first one that is used
        lanes = self._lanes
        if lanes is None:
            groups = list(fsdp_groups(self._model))
            gathers = [gather_bytes(group) for group in groups if shard_count(group) > 1]
            reductions = heapq.nlargest(reduce_buffers, map(reduce_bytes, groups))
            return sum(heapq.nlargest(max(1, prefetch), gathers)) + sum(reductions)
        total = 0
        for twin, sizes in lanes.flats.items():
            window = lanes.windows.held_bytes(twin, heapq.nlargest(prefetch + SLOTS_BESIDE, sizes))
            plain = sum(heapq.nlargest(ahead, sizes)) if twin.size() > 1 else 0  # one rank gathers in place
            total += plain if window is None else window
        for twin, sizes in lanes.reducer.flats.items():
            largest = heapq.nlargest(reduce_buffers, sizes)
            window = lanes.reducer.windows.held_bytes(twin, largest)
            total += sum(largest) if window is None else window
        return total
