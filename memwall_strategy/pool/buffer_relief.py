"""Second buffers that give way when nothing else is left, and come back first.

They hide communication, so they belong to what a run asks for: set-up plans its memory with them, and a step that is
short pages out optimizer state, recomputes more and offloads to make room for them. A run has fewer in two cases only:

- ``fit``: the budget does not even hold the weights, gradients and gathers of a step beside them. Then set-up leaves
  out as many as it must; these stay out until the optimizers are placed anew.
- ``relieve``: a step is short although everything else gave way. They come back before anything else does.

Either is decided by all ranks together, from bytes that are the same everywhere, and told (``buffers_changed``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memwall_strategy.config import OverlapConfig
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner.buffers import Buffers, buffer_ladder
from memwall_strategy.telemetry.events import EventKind

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime


class BufferRelief:
    """Climbs down ``planner.buffers.buffer_ladder`` and up again."""

    name = "second buffers"
    alike = True
    remedy = ""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._rungs: tuple[Buffers, ...] = ()
        self._heights = [0]
        """As set-up left it, then after each time that it gave way; the rungs count from the top."""
        self._freed: list[int] = []
        self._in_use = 0

    def attach(self, runtime: Runtime) -> None:
        """A run begins, with what its options ask for."""
        self._runtime = runtime
        self._rungs = buffer_ladder(runtime.config.overlap, runtime.device.type)
        self._heights, self._freed, self._in_use = [0], [], 0

    @property
    def now(self) -> Buffers:
        """What there is."""
        return self._rungs[self._in_use]

    @property
    def planned(self) -> OverlapConfig:
        """The run's options with the buffers that set-up left: what memory is planned with, whatever gave way since."""
        return self._rungs[self._heights[0]].within(self._runtime.config.overlap)

    # -- set-up --

    def fit(self, place: Callable[[OverlapConfig], object]) -> int:
        """The first rung that a placement is possible with on this rank; nothing changes.

        Args:
            place: decides on a placement with such options, or raises ``ConfigError``.

        Raises:
            ConfigError: none is; as ``place`` says with the fewest buffers.
        """
        for height, rung in enumerate(self._rungs):
            try:
                place(rung.within(self._runtime.config.overlap))
            except ConfigError:
                if height == len(self._rungs) - 1:
                    raise
            else:
                return height
        raise AssertionError("unreachable")

    def start(self, height: int) -> None:
        """Have the buffers of a rung from now on, whatever gave way before. All ranks, with the same rung."""
        self._heights, self._freed = [height], []
        self._use(height, "set-up")

    def leaner(self) -> bool:
        """One rung fewer for good, because memory is placed anew; False where there is none. All ranks."""
        height = self._heights[0] + 1
        if height >= len(self._rungs):
            return False
        self._heights = [height, *(max(height, each) for each in self._heights[1:])]
        self._use(self._heights[-1], "set-up")
        return True

    # -- as a relief --

    def relieve(self, missing_bytes: int) -> int:
        """Go down to the first rung that frees what is missing, or to the last."""
        here = self._heights[-1]
        freed = {height: self._held(here) - self._held(height) for height in range(here + 1, len(self._rungs))}
        if not freed or max(freed.values()) <= 0:
            return 0
        goal = next((height for height, each in freed.items() if each >= missing_bytes), len(self._rungs) - 1)
        self._heights.append(goal)
        self._freed.append(freed[goal])
        self._use(goal, "a step was short")
        return freed[goal]

    def restore(self, room_bytes: int) -> int:
        """Come up by what gave way last, where that fits into the room."""
        if not self._freed or self._freed[-1] > room_bytes:
            return 0
        self._heights.pop()
        self._use(self._heights[-1], "there is room again")
        return self._freed.pop()

    # -- inside --

    def _held(self, height: int) -> int:
        buffers, rung = self._runtime.second_buffers, self._rungs[height]
        if buffers is None:
            return 0
        return buffers.held_bytes(prefetch=rung.prefetch, reduce_buffers=rung.reduce_buffers, early=rung.early)

    def _use(self, height: int, cause: str) -> None:
        if height == self._in_use:
            return
        before, rung = self._held(self._in_use), self._rungs[height]
        self._in_use = height
        self._runtime.second_buffers.use(
            prefetch=rung.prefetch, reduce_buffers=rung.reduce_buffers, early=rung.early
        )
        self._runtime.events.emit(
            EventKind.BUFFERS_CHANGED, prefetch=rung.prefetch, reduce_buffers=rung.reduce_buffers, early=rung.early,
            before_bytes=before, bytes=self._held(height), asked_bytes=self._held(0), cause=cause,
        )  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """Figures of the interface; none where a run has no second buffers, or all it asks for and no budget."""
        if len(self._rungs) < 2 or (self._runtime.budget_bytes is None and self._in_use == 0):
            return {}
        return {
            "memwall/overlap/prefetch": float(self.now.prefetch),
            "memwall/overlap/reduce_buffers": float(self.now.reduce_buffers),
        }
