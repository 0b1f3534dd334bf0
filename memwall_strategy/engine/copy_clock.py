"""CPU time that the training thread spends on copies in and out of communication buffers.

Even communication that is wholly hidden costs this: shards are copied into the flat buffer of a gather, gathered
weights out of it, gradients into the buffer of a reduction. It belongs to communication, not to the model's arithmetic,
and it is what remains between a step and a compute-only one once waiting and contention are taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from memwall_strategy.engine.fsdp import FSDPParamGroup

_METHODS = ("unshard", "wait_for_unshard")
"""FSDP2 copies in and out inside these two; both are looked up on the instance."""


class CopyClock:
    """Adds up CPU seconds of the training thread; what it waits for inside is not CPU time."""

    def __init__(self) -> None:
        self._copied_s = 0.0
        self._wrapped: list[tuple[FSDPParamGroup, str, Callable[..., Any] | None]] = []

    def watch(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Time the copies of all gathers of ``groups``."""
        for group in groups:
            for name in _METHODS:
                self._wrapped.append((group, name, vars(group).get(name)))
                setattr(group, name, self._timed(getattr(group, name)))

    def close(self) -> None:
        """Give the groups their methods back."""
        for group, name, before in self._wrapped:
            if before is None:
                delattr(group, name)
            else:
                setattr(group, name, before)
        self._wrapped.clear()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around a copy that is no gather's."""
        start_s = time.thread_time()
        try:
            yield
        finally:
            self._copied_s += time.thread_time() - start_s

    def take(self) -> float:
        """Seconds since the last call."""
        copied_s, self._copied_s = self._copied_s, 0.0
        return copied_s

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self._copied_s += time.thread_time() - start_s

        return timed
