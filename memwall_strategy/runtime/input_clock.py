"""How long the training thread waits for its next batch.

One clock a run. What waits for a batch does so inside ``with clock:`` (the trainer's fetch, a loader's ``next``, the
copy to the device); the meter takes the sum at the end of each optimizer step, so the batches of every micro-batch
count, and those of a validation between two steps do not where their loaders are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from memwall_strategy.core.lane import Lane
from memwall_strategy.engine.loader import clone_loader
from memwall_strategy.runtime.data import PositionedLoader
from memwall_strategy.runtime.even import EvenLoader


class InputClock:
    """Adds up waits; a context manager, entered by the training thread alone. Waits within a wait count once.

    Attributes:
        lane: what fetches and copies batches ahead; None where nothing does.
    """

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self._waited_s = 0.0
        self._start_s = 0.0
        self._depth = 0
        self._used = False

    def __enter__(self) -> None:
        if self._depth == 0:
            self._start_s = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._waited_s += time.perf_counter() - self._start_s
            self._used = True

    def take(self) -> float | None:
        """Seconds waited since the last call; None where nothing has been timed, so that nothing is claimed."""
        if not self._used:
            return None
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def take_lane(self) -> dict[str, float]:
        """Figures of the lane since the last call. What was waited for it is part of ``take``'s seconds."""
        if self.lane is None:
            return {}
        stats = self.lane.take_stats()
        return {
            "memwall/overlap/lane_exposed_s/input": stats.exposed_s,
            "memwall/overlap/lane_busy_s/input": stats.busy_s,
        }


class _TimedLoader(DataLoader):
    """Mixed into the class of a loader by ``timed``."""

    input_clock: InputClock

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        while True:
            # Validation loops run without gradients; they are not what a training step waits for.
            if torch.is_grad_enabled():
                with self.input_clock:
                    batch = next(batches, self)
            else:
                batch = next(batches, self)
            if batch is self:  # never a batch
                return
            yield batch


def timed(loader: Any, clock: InputClock) -> Any:
    """A loader whose batches are waited for inside ``clock``, where gradients are on; for loops that users write.

    The loader is a DataLoader, positioned or not, or an ``EvenLoader``; anything else is returned as it is.
    """
    if isinstance(loader, EvenLoader):
        loader.input_clock = clock
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader, _TimedLoader):
        return loader
    name = type(loader).__name__
    bases = (_TimedLoader,) if type(loader) is DataLoader else (_TimedLoader, type(loader))
    timed_class = type(name, bases, {})
    if isinstance(loader, PositionedLoader):
        loader.__class__ = timed_class
        loader.input_clock = clock
        return loader
    return clone_loader(loader, timed_class, input_clock=clock)
