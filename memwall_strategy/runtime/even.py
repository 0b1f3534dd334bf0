"""Ends loaders of unequal length together: five batches on one rank and four on the other do not hang.

Sharded training needs every rank in every step. Where ranks read data of their own (iterable datasets, files sharded
by rank, a sampler that deals by itself) one may run out before another. Before each batch the ranks tell each other
whether they still have one. A rank that has none repeats its last batch with weight 0, and those that have one weigh
more, until none is left: every batch is trained on once, and all ranks end in the same step.

It costs one small exchange between the ranks a batch, on the thread that asks for the batch, in the same order on every
rank. Loaders whose data memwall deals itself (``runtime.sampler``) end together without it.

What it does not do: the batches of a step count alike, whatever their sizes; and what a forward does besides the loss
(batch normalisation's statistics, logged metrics) sees a repeated batch as any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from memwall_strategy.core.errors import ConfigError

Gather = Callable[[Any], list[Any]]
"""Give each rank's value to all ranks, in the order of ranks. Called by all of them at the same time."""

TRAIL = 16
"""Batches looked back on: a trainer is at most the one in training and one prefetched ahead."""

_OWN = ("_loader", "_gather", "_length", "_weights", "ahead", "input_clock", "state_dict", "load_state_dict")


class EvenLoader:
    """Wraps any iterable of batches; in all else it is that iterable.

    Args:
        loader: yields this rank's batches.
        gather: see ``Gather``; over the data-parallel ranks.
        length: most batches that any rank has, None where a rank cannot tell.
    """

    def __init__(self, loader: Iterable[Any], gather: Gather, length: int | None) -> None:
        self._loader, self._gather, self._length = loader, gather, length
        self._weights: deque[float] = deque(maxlen=TRAIL)
        self.ahead: Callable[[], int] = lambda: 0
        self.input_clock: AbstractContextManager[Any] = nullcontext()  # see runtime.input_clock
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    @property
    def weight(self) -> float:
        """Weight of the batch in training: its mean loss times this, averaged over ranks, is the step's."""
        if not self._weights:
            return 1.0
        return self._weights[-min(max(1, self.ahead()), len(self._weights))]

    def __iter__(self) -> Iterator[Any]:
        batches, last, had_one = iter(self._loader), None, False
        while True:
            with self.input_clock:
                batch = next(batches, self)  # self: never a batch
                has_one = batch is not self
                who = self._gather(has_one)
            if not any(who):
                return
            if has_one:
                last, had_one = batch, True
            elif not had_one:
                raise ConfigError(
                    "This rank's training data has no batch at all while another rank's has. Give every rank at least "
                    "one, or let the trainer deal one map-style dataset over the ranks."
                )
            self._weights.append(len(who) / sum(who) if has_one else 0.0)
            yield last

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length on some rank")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet, or a loader without state
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)
