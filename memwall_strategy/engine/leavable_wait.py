"""Waiting for gloo in a way that can be left: gloo itself does not free everybody when a connection ends.

A pair of gloo that closes tells the buffers that are posted on it, but not the one whose transfer is half way: neither
a send that the socket did not take whole, nor a receive whose header has arrived (``Pair::signalException`` passes over
``rx_`` and over the unbound buffers in ``tx_``; torch 2.13). Whoever waits for such a buffer sleeps until the group's
timeout, whatever happened to the peer, and neither ``abort()`` nor ``shutdown()`` wakes it. So nobody sleeps in gloo
without a look now and then whether the group was cut, and, rarely, whether its connections still stand:

- a collective's work is waited for in slices: its ``wait`` with a limit just stops waiting, the work goes on;
- a send's or receive's work may not be, because gloo closes every connection when that limit runs out: a helper thread
  sleeps in its stead.

What is left behind: gloo's own thread, or the helper, and the tensors of that one call, until the group's timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

_SLICE_S = 0.25
"""Between two looks; a look at a collective costs an exception of torch's."""

_PROBE_AFTER_S = 1.0
"""Wait before the first look at the connections; the next ones come at twice the distance each time."""

_LONGEST_PROBE_DISTANCE_S = 30.0


class WaitedGroup(Protocol):
    """What is waited for is a call on this group."""

    def was_cut(self) -> bool:
        """Whether it was cut so long ago that what has not ended by now will not."""

    def broken(self) -> str:
        """What ended one of its connections, or an empty string; costs each peer a small message."""


class WaitLeft(RuntimeError):
    """The wait could not end any more."""


class _Lookout:
    """One wait's looks at its group."""

    def __init__(self, group: WaitedGroup) -> None:
        self._group = group
        self._distance_s = _PROBE_AFTER_S
        self._probe_s = time.monotonic() + self._distance_s

    def look(self) -> None:
        """Raise ``WaitLeft`` where there is nothing to wait for."""
        if self._group.was_cut():
            raise WaitLeft("the group was cut while it was half way")
        if time.monotonic() < self._probe_s:
            return
        self._distance_s = min(2 * self._distance_s, _LONGEST_PROBE_DISTANCE_S)
        self._probe_s = time.monotonic() + self._distance_s
        if (why := self._group.broken()) and not self._group.was_cut():
            raise WaitLeft(why)


def wait_in_slices(work: dist.Work, limit: timedelta | None, group: WaitedGroup) -> bool:
    """Wait for a collective's work.

    Args:
        limit: the caller's own; None: the group's.

    Raises:
        WaitLeft: the group was cut, or a peer is gone.
        RuntimeError: what the work raises; ``"Operation timed out"`` where ``limit`` ran out.
    """
    lookout = None
    deadline_s = None if limit is None else time.monotonic() + limit.total_seconds()
    slice_s = _SLICE_S
    while True:
        if deadline_s is not None:
            slice_s = max(0.001, min(_SLICE_S, deadline_s - time.monotonic()))
        try:
            return work.wait(timedelta(seconds=slice_s))
        except RuntimeError as error:
            if work.is_completed():
                return work.wait()  # what it ended with, also where that was just after the slice
            if not str(error).startswith("Operation timed out"):
                raise
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise
        lookout = lookout or _Lookout(group)
        lookout.look()


def wait_by_helper(wait: Callable[[], bool], group: WaitedGroup) -> bool:
    """Run ``wait`` on a helper thread and return, or raise, what it does.

    Raises:
        WaitLeft: the group was cut, or a peer is gone; the helper is given up.
    """
    helper = _take_helper()
    helper.start(wait)
    lookout = None
    while not helper.done.wait(_SLICE_S):
        lookout = lookout or _Lookout(group)
        lookout.look()
    error, helper.error = helper.error, None
    result = helper.result
    with _lock:
        _idle.append(helper)
    if error is not None:
        raise error
    return result


class Helper:
    """A thread that waits in somebody's stead."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.result = False
        self._call: Callable[[], bool] | None = None
        self._called = threading.Semaphore(0)
        self._thread = threading.Thread(target=self.run, name="memwall-wait", daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], bool]) -> None:
        """Begin to wait."""
        self.done.clear()
        self._call = call
        self._called.release()

    def end(self) -> None:
        """End the thread, which is idle."""
        self._call = None
        self._called.release()
        self._thread.join()

    def run(self) -> None:
        """The thread's life."""
        while True:
            self._called.acquire()  # bounded by end(): the thread is a daemon and idle here
            if self._call is None:
                return
            try:
                self.result = self.sleep()
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits, never swallowed
                self.error = error
            self._call = None
            self.done.set()

    def sleep(self) -> bool:
        """Inside gloo."""
        return self._call()


_lock = threading.Lock()
_idle: list[Helper] = []


def end_helpers() -> None:
    """End the threads that wait for nothing."""
    with _lock:
        helpers, _idle[:] = list(_idle), []
    for helper in helpers:
        helper.end()


def _take_helper() -> Helper:
    with _lock:
        return _idle.pop() if _idle else Helper()
