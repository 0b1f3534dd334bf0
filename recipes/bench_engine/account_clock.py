"""CPU time that the training thread spends inside the memory account.

An overhead of a percent drowns in the noise of an A/B. Here every function of the account is timed instead, from
outside: what it calls of the engine (the wrapped gathers and reductions) is taken off, the clock's own reading is not,
so that the figure errs on the high side.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

from memwall_strategy.engine.gathered import GroupCounter, ModelCounter
from memwall_strategy.engine.memory import MemoryAccount
from memwall_strategy.engine.storages import Book


class AccountClock:
    """Seconds of CPU inside the account since ``install``; one thread only.

    Attributes:
        inside_s: so far.
    """

    def __init__(self) -> None:
        self.inside_s = 0.0
        self._depth = 0
        self._since = 0.0

    def install(self) -> None:
        """Time every method of the account's classes, for the rest of the process."""
        for kind in (MemoryAccount, Book, GroupCounter, ModelCounter):
            for name, method in inspect.getmembers(kind, inspect.isfunction):
                if name.startswith("_around_") or name in ("_watch_reduce_comm", "__init__"):
                    continue
                setattr(kind, name, self._inside(method))
        for name, factory in inspect.getmembers(GroupCounter, inspect.isfunction):
            if name.startswith("_around_"):
                setattr(GroupCounter, name, self._around(factory))

    def _inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth, self._since = 1, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside_s += time.thread_time() - self._since
                self._depth = 0

        return timed

    def _outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                return function(*args, **kwargs)
            self.inside_s += time.thread_time() - self._since
            self._depth = 0
            try:
                return function(*args, **kwargs)
            finally:
                self._depth, self._since = 1, time.thread_time()

        return timed

    def _around(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def timed(counter: GroupCounter, inner: Callable[..., Any]) -> Callable[..., Any]:
            return self._inside(factory(counter, self._outside(inner)))

        return timed
