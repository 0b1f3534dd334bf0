"""Lanes: ordered, bounded, asynchronous queues, one for each kind of transfer.

A lane owns one thread that runs its transfers strictly in the order of submission. It accepts at most ``capacity``
unfinished transfers; a further ``submit`` waits. What fails on the lane's thread is raised on the thread that waits,
submits or drains next, with lane, transfer and unit named, and stays raised until ``reset``: later transfers would
read what the failed one did not write.

A lane measures three things, each cheap enough to stay on: the time that other threads waited for it (exposed), the
time its own thread worked (busy) and the bytes it moved (and how many of them through shared memory).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from memwall_strategy.core.errors import MemwallError, TransferError

DEFAULT_TIMEOUT_S = 1800.0
"""Longest wait for a lane; the same as the default of torch.distributed's process groups."""


RATED_BYTES = 256 * 1024
"""Transfers of fewer bytes say nothing about a link's rate: latency decides."""


@dataclass(slots=True)
class LaneStats:
    """Counters of one lane since the last ``Lane.take_stats``; seconds and bytes."""

    transfers: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    best_bytes_per_s: float = 0.0
    """Of the fastest transfer of at least ``RATED_BYTES``; 0 where there was none."""
    shared_bytes: int = 0
    """Those of ``bytes`` that were read from other ranks' memory, in place."""


@dataclass(frozen=True, slots=True)
class Span:
    """One finished transfer, for traces; times are ``time.perf_counter`` seconds."""

    lane: str
    transfer: str
    unit: str
    start_s: float
    end_s: float
    bytes: int


class Transfer:
    """Handle of one submitted transfer."""

    __slots__ = ("_error", "_event", "_fn", "_lane", "name", "nbytes", "rated", "seconds", "unit")

    def __init__(
        self, lane: Lane, fn: Callable[[], object], name: str, unit: str, nbytes: int, rated: bool = True
    ) -> None:
        self._lane, self._fn = lane, fn
        self.name, self.unit, self.nbytes, self.rated = name, unit, nbytes, rated
        self._event = threading.Event()
        self._error: BaseException | None = None
        self.seconds = 0.0  # on the lane's thread; set when it ended

    def done(self) -> bool:
        """Whether the transfer ended, well or not. Never blocks."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None, *, exposed: bool = True) -> None:
        """Block until the transfer ended; the blocked time counts as exposed.

        Args:
            timeout_s: longest wait; the lane's where None.
            exposed: False where another lane waits, and not a thread that has work to do.

        Raises:
            MemwallError: what the transfer raised (a ``TransferError`` where it was not memwall's own error), or
                that the wait ran past ``timeout_s`` (default: the lane's).
        """
        if not self._event.is_set():
            limit = self._lane.timeout_s if timeout_s is None else timeout_s
            start = time.perf_counter()
            ended = self._event.wait(limit)
            if exposed:
                self._lane._add_exposed(time.perf_counter() - start)
            if not ended:
                raise TransferError(
                    f"{self} did not end within {limit:.0f} s. A peer may hang: look at the other ranks' output, "
                    "or raise the process group's timeout if the link is that slow."
                )
        if self._error is not None:
            raise self._error

    def __str__(self) -> str:
        return f"lane {self._lane.name!r}: {self.name} of unit {self.unit!r}"


class Lane:
    """An ordered queue of transfers with its own thread.

    Args:
        name: kind of transfer, e.g. ``"gather"``; appears in metrics, traces and errors.
        capacity: most transfers that may be unfinished at a time (>= 1).
        timeout_s: longest wait of ``Transfer.wait``, ``submit`` and ``drain``.
        record_spans: keep a ``Span`` of each transfer (for traces) until ``take_spans``.
    """

    def __init__(
        self, name: str, *, capacity: int = 8, timeout_s: float = DEFAULT_TIMEOUT_S, record_spans: bool = False
    ) -> None:
        if capacity < 1:
            raise ValueError(f"lane {name!r}: capacity must be at least 1, got {capacity}")
        self.name, self.capacity, self.timeout_s, self.record_spans = name, capacity, timeout_s, record_spans
        self._queue: deque[Transfer] = deque()
        self._unfinished = 0
        self._running: Transfer | None = None
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stats = LaneStats()
        self._spans: list[Span] = []

    def submit(
        self, fn: Callable[[], object], *, transfer: str, unit: str, nbytes: int = 0, rated: bool = True
    ) -> Transfer:
        """Queue ``fn`` and return at once, unless ``capacity`` transfers are unfinished: then wait for room.

        Args:
            nbytes: that it moves.
            rated: its time tells a link's rate; not so where it only waits for memory to be written.

        Raises:
            MemwallError: an earlier transfer of this lane failed, or no room came within the lane's timeout.
            RuntimeError: the lane is closed, or a transfer tries to submit to its own lane.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"a transfer of lane {self.name!r} may not submit to its own lane")
        item = Transfer(self, fn, transfer, unit, nbytes, rated)
        with self._changed:
            self._wait_locked(
                lambda: self._closed or self._error is not None or self._unfinished < self.capacity, f"room for {item}"
            )
            if self._closed:  # perhaps while this waited: the thread may have looked for work for the last time
                raise RuntimeError(f"lane {self.name!r} is closed")
            if self._error is not None:
                raise self._error
            self._queue.append(item)
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"memwall-{self.name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return item

    def drain(self) -> None:
        """Wait until every submitted transfer ended; raise what the first failed one raised."""
        with self._changed:
            self._wait_locked(lambda: self._unfinished == 0, f"lane {self.name!r} to drain")
            if self._error is not None:
                raise self._error

    def reset(self) -> None:
        """Forget an error after its cause is mended. Waits for the running transfer; queued ones were cancelled."""
        with self._changed:
            self._wait_locked(lambda: self._unfinished == 0, f"lane {self.name!r} to come to rest")
            self._error = None

    def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent; never raises a transfer's error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self.timeout_s)

    def count_shared(self, nbytes: int) -> None:
        """Note bytes that a transfer read from other ranks' memory."""
        with self._changed:
            self._stats.shared_bytes += nbytes

    def take_stats(self) -> LaneStats:
        """Return the counters since the last call and set them back to zero."""
        with self._changed:
            taken, self._stats = replace(self._stats), LaneStats()
        return taken

    @property
    def exposed_s(self) -> float:
        """Time that others waited for this lane since the last ``take_stats``."""
        return self._stats.exposed_s

    def take_spans(self) -> list[Span]:
        """Return the recorded spans and forget them."""
        with self._changed:
            taken, self._spans = self._spans, []
        return taken

    # -- the lane's own thread --

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()  # bounded by close(): the thread is a daemon and idle here
                if not self._queue:
                    return
                item = self._running = self._queue.popleft()
                error = self._error
            start = time.perf_counter()
            if error is None:
                try:
                    item._fn()
                except BaseException as caught:  # noqa: BLE001 - handed to the thread that waits, never swallowed
                    error = self._name_error(item, caught)
            end = time.perf_counter()
            item.seconds = end - start
            item._fn = _nothing  # drops the buffers that the closure holds
            with self._changed:
                item._error = error
                if error is not None and self._error is None:
                    self._error = error
                self._stats.transfers += 1
                self._stats.bytes += item.nbytes
                self._stats.busy_s += end - start
                if item.rated and item.nbytes >= RATED_BYTES and error is None:
                    self._stats.best_bytes_per_s = max(self._stats.best_bytes_per_s, item.nbytes / (end - start))
                if self.record_spans:
                    self._spans.append(Span(self.name, item.name, item.unit, start, end, item.nbytes))
                self._unfinished -= 1
                self._running = None
                item._event.set()
                self._changed.notify_all()
            del item, error

    @staticmethod
    def _name_error(item: Transfer, caught: BaseException) -> BaseException:
        if isinstance(caught, MemwallError):
            caught.add_note(f"met in {item}")
            return caught
        named = TransferError(f"{item} failed: {type(caught).__name__}: {caught}")
        named.__cause__ = caught
        return named

    def _add_exposed(self, seconds: float) -> None:
        with self._changed:
            self._stats.exposed_s += seconds

    def _wait_locked(self, ready: Callable[[], bool], what: str) -> None:
        if ready():
            return
        start = time.perf_counter()
        if not self._changed.wait_for(ready, self.timeout_s):
            raise TransferError(f"waited {self.timeout_s:.0f} s for {what}: {self._running or 'a transfer'} hangs")
        self._stats.exposed_s += time.perf_counter() - start


def _nothing() -> None:
    return None
