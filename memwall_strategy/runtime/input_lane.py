"""Input as a lane: the next batch is fetched, and copied to the device, while the present one is trained on.

What is done ahead must not be seen, so there are two degrees:

- *fetched and copied ahead*, by the lane's thread, as soon as the batch before it was handed out. Only where fetching
  runs none of the user's code in this process, which could draw random numbers at another moment than a plain loop
  does: worker processes load, memwall deals the order of samples from its own generator, and the loader's ``__iter__``
  is DataLoader's (``runtime.data`` decides).
- *copied on a stream of its own*, on the training thread, right after the fetch: everywhere else. The copy then need
  not wait for the last step's kernels, which the device still works on.

A batch counts as consumed when it is handed out, and an error of the loader is raised where its batch is asked for:
positions in checkpoints, ends of passes and exceptions are those of a plain loop. A batch that was fetched ahead when a
pass is left is dropped; the next pass starts where training was.

Batches on a stream of their own need care, so only what is understood to the last tensor is moved: plain strided
tensors in dicts, ``UserDict``s (a tokenizer's ``BatchEncoding``), lists, tuples and dataclasses. A batch that holds
anything else with a ``.to`` goes on as the loader made it, and the trainer moves it in place. Nothing is pinned here:
what the loader pins (``pin_memory=True``) is copied without a stop of the host.

On CPU there is nothing to copy, so there is no lane: loaders are as they were.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from memwall_strategy.config import OverlapConfig
from memwall_strategy.core.lane import Lane, Transfer
from memwall_strategy.runtime.input_clock import InputClock

MOST_LOADERS = 64
"""Whose next batches may be on their way at a time; more wait for each other."""

Move = Callable[[Any], Any]
"""Puts a batch on the device, as the trainer would."""


class Copies(Protocol):
    """Where copies run beside the computation."""

    def copy(self, move: Move, batch: Any) -> tuple[Any, Any]:
        """Start to move a batch; return what it becomes, and a mark that is passed when it is there. Any thread."""
        ...

    def hand_over(self, batch: Any, mark: Any) -> None:
        """Let what the calling thread does with the batch from now on wait for its mark."""
        ...


class CudaCopies:
    """Copies on a CUDA stream of their own.

    What orders what:

    - the copies before their use: ``hand_over`` lets the stream that computes wait for the event that the copies'
      stream records behind them;
    - the use before a later copy into the same memory: it was allocated on the copies' stream, whose allocator would
      take it back as soon as the last reference goes, although kernels of the other stream still read it.
      ``record_stream`` tells the allocator to wait for those;
    - the copies before the host's memory goes: torch keeps what it pinned itself, and copies from pageable memory stop
      the host. For memory that somebody else pinned, the source is held until its event has passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._sources: deque[tuple[torch.cuda.Event, Any]] = deque()

    def copy(self, move: Move, batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):  # of the calling thread alone
            moved = move(batch)
            mark = torch.cuda.Event()
            mark.record(self._stream)
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        self._sources.append((mark, batch))
        return moved, mark

    def hand_over(self, batch: Any, mark: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark)
        for leaf in leaves(batch):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(stream)


STREAMS: dict[str, Callable[[torch.device], Copies]] = {"cuda": CudaCopies}
"""Device type -> what copies to it; other devices have no lane."""


class InputLane:
    """The lane of one run's training batches.

    Args:
        copies: where copies run.
        move: puts a batch on the device.
        timeout_s: longest wait for a batch.
        trace: keep spans.

    Attributes:
        lane: whose thread fetches and copies ahead.
        closed: from then on everything is done where it is asked for.
    """

    def __init__(self, copies: Copies, move: Move, *, timeout_s: float, trace: bool = False) -> None:
        self._copies, self._move, self.closed = copies, move, False
        self.lane = Lane("input", capacity=MOST_LOADERS, timeout_s=timeout_s, record_spans=trace)

    def through(self, batches: Iterator[Any], *, ahead: bool) -> Iterator[Any]:
        """The same batches on the device.

        Args:
            batches: one pass; from now on nobody else asks it for any.
            ahead: whether they may be fetched before they are asked for, on another thread.
        """
        return _Ahead(self, batches) if ahead else map(self.place, batches)

    def place(self, batch: Any) -> Any:
        """A batch on the device, copied beside what the device still computes."""
        return self.receive(*self.send(batch))

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Start to copy a batch; ``receive`` takes what is returned. A batch that is not understood stays."""
        return self._copies.copy(self._move, batch) if understood(batch) else (batch, None)

    def receive(self, batch: Any, mark: Any) -> Any:
        """The batch, for the calling thread to use."""
        if mark is not None:
            self._copies.hand_over(batch, mark)
        return batch

    def rest(self) -> None:
        """Wait until nothing is fetched any more: a pass that was left may not be over yet."""
        self.lane.drain()

    def close(self) -> None:
        """End the thread; a fetch under way ends first. Idempotent."""
        self.closed = True
        self.lane.close()


class _Coming:
    """A batch on its way, or the error that came instead of it."""

    __slots__ = ("batch", "error", "mark", "transfer")

    transfer: Transfer

    def __init__(self) -> None:
        self.batch = self.mark = self.error = None


class _Ahead(Iterator[Any]):
    """One pass, a batch ahead of who asks."""

    def __init__(self, lane: InputLane, batches: Iterator[Any]) -> None:
        self._lane, self._batches = lane, batches
        self._coming: _Coming | None = None

    def _start(self) -> _Coming:
        lane, batches, coming = self._lane, self._batches, _Coming()

        def fetch() -> None:
            try:
                coming.batch, coming.mark = lane.send(next(batches))
            except BaseException as error:  # noqa: BLE001 - raised on the thread that asks for this batch
                coming.error = error

        coming.transfer = lane.lane.submit(fetch, transfer="fetch", unit="batch")
        return coming

    def __next__(self) -> Any:
        coming, self._coming = self._coming, None
        if coming is None:
            if self._lane.closed:
                return self._lane.place(next(self._batches))
            coming = self._start()
        coming.transfer.wait()
        error, coming.error = coming.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame by its traceback
        if not self._lane.closed:
            self._coming = self._start()
        return self._lane.receive(coming.batch, coming.mark)


# -- batches --


def leaves(batch: Any) -> Iterator[Any]:
    """What a batch holds below dicts, lists, tuples and dataclasses.

    One of these with a ``.to`` of its own may move more than its items, so it is a leaf, but for two that do not.
    """
    if hasattr(batch, "to") and not isinstance(batch, (UserDict, PackedSequence)):
        yield batch
        return
    if isinstance(batch, (dict, UserDict)):
        inner = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        inner = list(batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        inner = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        yield batch
        return
    for each in inner:
        yield from leaves(each)


def understood(batch: Any) -> bool:
    """Whether every tensor that moving the batch would make is found by ``leaves``."""
    return all(_is_plain(leaf) if isinstance(leaf, torch.Tensor) else not hasattr(leaf, "to") for leaf in leaves(batch))


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and not tensor.is_nested


# -- who uses it --


def lane_for(
    device: torch.device, move: Move, *, overlap: OverlapConfig, timeout_s: float, clock: InputClock
) -> InputLane | None:
    """The lane of a run; None where there is nothing to copy to, or ``overlap`` is off.

    Args:
        device: of this rank.
        move: puts a batch there, as the trainer would.
        clock: gets the lane's figures.
    """
    if not overlap.enabled or device.type not in STREAMS:
        return None
    made = InputLane(STREAMS[device.type](device), move, timeout_s=timeout_s, trace=overlap.trace)
    clock.lane = made.lane
    return made


def use_lane(loader: Any, lane: InputLane | None) -> None:
    """Let a positioned loader's passes go through a lane; nothing happens to others, or where there is none."""
    while lane is not None and loader is not None:
        if hasattr(loader, "positions"):
            loader.input_lane = lane
        loader = getattr(loader, "_loader", None)  # inside an EvenLoader
