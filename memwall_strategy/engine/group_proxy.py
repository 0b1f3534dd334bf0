"""The process group that torch.distributed, meshes and FSDP2 hold: passes every call to the present inner group.

``SwapGroup`` is a ``ProcessGroup`` written in Python, so it can stay where it is while its inner group is replaced.
Each collective costs one Python call more than the inner group's own, and its work is wrapped, so that what the inner
group raises, when called or when waited for, comes out with a name.

What a failure means is not decided here: the ``GroupOwner`` asks the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from memwall_strategy.core.errors import CollectiveError, MemwallError
from memwall_strategy.engine import inner_group
from memwall_strategy.engine.inner_group import GroupSpec, InnerGroup
from memwall_strategy.engine.leavable_wait import wait_by_helper, wait_in_slices
from memwall_strategy.engine.peer_verdict import brief

BACKEND = "memwall"

_NO_TIMEOUT = timedelta(0)  # torch's own mark for "the group's timeout"

_MISUSE = ("ProcessGroupGloo::", "Invalid scalar type", "Cannot use ReduceOp", "Tag must be")
"""How gloo begins a message about wrong arguments: nothing was sent, the group is sound, the error is the caller's."""


class GroupOwner(Protocol):
    """What a group needs of the keeper of all groups."""

    store_prefix: str
    """Prefix of the keys under which inner groups meet; differs for each default group of a job."""

    def fail(self, epoch: int, name: str, spec: GroupSpec, detail: str) -> MemwallError:
        """Agree with the other ranks on what a failed collective means, and return the error to raise."""

    def refusal(self, what: str) -> MemwallError:
        """The error for a call on a group that has no inner group at the moment."""

    def remove(self, group: SwapGroup) -> None:
        """The group was shut down."""


class SwapWork(dist.Work):
    """A collective in flight: the inner group's work, whose failure is named."""

    def __init__(self, work: dist.Work, group: SwapGroup, name: str, inner: InnerGroup) -> None:
        super().__init__()
        self._work, self._group, self._name, self._inner = work, group, name, inner

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the collective ended.

        Raises:
            PeerLost: a member of the job was lost.
            CollectiveError: it failed or timed out with everybody alive; or the caller's own ``timeout`` ran out.
        """
        try:
            return self._wait(timeout)
        except RuntimeError as error:
            self._group._raise_named(self._name, self._inner, error, timeout)

    def _wait(self, timeout: timedelta) -> bool:
        work, inner = self._work, self._inner
        if inner.is_gloo and self._name in POINT_TO_POINT:
            return wait_by_helper(partial(work.wait, timeout), inner)
        if inner.is_gloo and self._name in COLLECTIVES:
            return wait_in_slices(work, None if timeout == _NO_TIMEOUT else timeout, inner)
        return work.wait(timeout)

    def get_future(self) -> torch.futures.Future:
        """The inner future; a failure's text begins with the named error, torch makes it a RuntimeError."""
        return self._work.get_future().then(self._value)

    def _value(self, future: torch.futures.Future) -> Any:
        try:
            return future.value()
        except RuntimeError as error:
            self._group._raise_named(self._name, self._inner, error, _NO_TIMEOUT)


def _forward(name: str) -> Callable[[SwapWork], Any]:
    def method(self: SwapWork) -> Any:
        return getattr(self._work, name)()

    method.__name__ = name
    return method


for _name in ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank", "synchronize",
              "block_current_stream", "_get_op_type", "_get_duration"):  # fmt: skip
    setattr(SwapWork, _name, _forward(_name))


class SwapGroup(ProcessGroup):
    """A process group with a replaceable inner group. Made by torch.distributed through the backend ``"memwall"``.

    Attributes:
        spec: what stays the same over all inner groups.
        issued: collectives that this process issued on the present inner group, point-to-point calls not counted.
        last: name of the last of them.
    """

    def __init__(self, spec: GroupSpec, store: dist.Store, owner: GroupOwner) -> None:
        # Private: only the constructor (rank, size) makes an instance that C++ can call back into Python
        # (pybind11's trampoline ``PyProcessGroup``); functional collectives and DDP's reducer do.
        super().__init__(spec.rank, len(spec.ranks))
        self.spec, self.issued, self.last = spec, 0, ""
        self._store: dist.Store | None = store
        self._owner = owner
        self._inner: InnerGroup | None = None
        self._name, self._description = spec.name, ""

    def configure(self, epoch: int) -> None:
        """Build the inner group of ``epoch``; every member does so, in the same order of groups."""
        self.teardown()
        store = dist.PrefixStore(f"{self._owner.store_prefix}/{epoch}", self._store)
        inner = inner_group.build(self.spec, store, epoch)
        self.issued, self.last = 0, ""  # ranks may have stopped at different counts; from here on they agree
        self._inner = inner

    def stand_in(self) -> None:
        """Let every collective do nothing until ``configure``."""
        self._inner = inner_group.stand_in(self.spec)

    def retire(self) -> InnerGroup | None:
        """Issue nothing more; the caller gets the inner group to cut."""
        inner, self._inner = self._inner, None
        return inner

    def teardown(self) -> None:
        """Close this process's connections on the group; what is in flight on it fails, here and at its peers."""
        inner = self.retire()
        if inner is not None:
            inner.cut()

    abort = teardown

    def shutdown(self) -> None:
        """Give the group up in order, as ``destroy_process_group`` does; what is in flight may still end."""
        self._inner = self._store = None
        self._owner.remove(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Longest time of a collective from now on, also on later inner groups."""
        self.spec = replace(self.spec, timeout=timeout)
        for backend in self._present("set_timeout").backends.values():
            backend._set_default_timeout(timeout)

    # What a collective that does not go through the inner group (``engine.shared_windows``) needs of the group.

    @property
    def epoch(self) -> int | None:
        """Number of the present inner group: None where there is none at the moment, -1 for a stand-in."""
        inner = self._inner
        return None if inner is None else inner.epoch

    def issue(self, name: str) -> None:
        """Count a collective that this process arrived at."""
        self.issued += 1
        self.last = name

    def refusal(self, name: str) -> MemwallError:
        """The error for the collective ``name`` after the group was torn down, or its inner group replaced."""
        return self._owner.refusal(f"{name} on {self.spec}")

    def failure(self, name: str, detail: str, epoch: int) -> MemwallError:
        """The error for the collective ``name`` that failed in ``epoch``, agreed with the other ranks."""
        return self._owner.fail(epoch, name, self.spec, detail)

    def _raise_named(self, name: str, inner: InnerGroup, error: RuntimeError, timeout: timedelta) -> NoReturn:
        """Raise what ``error`` of the inner group means; may first agree on it with the other ranks."""
        text = str(error)
        if text.startswith(_MISUSE):
            error.add_note(f"{name} on {self.spec}")
            raise error
        if timeout != _NO_TIMEOUT and text.startswith("Operation timed out") and self._inner is inner:
            limit = f"the caller's limit of {timeout.total_seconds()} s"
            raise CollectiveError(f"{name} on {self.spec} took longer than {limit}") from error
        raise self._owner.fail(inner.epoch, name, self.spec, brief(error)) from error

    def _present(self, name: str) -> InnerGroup:
        inner = self._inner
        if inner is None:
            raise self._owner.refusal(f"{name} on {self.spec}")
        return inner

    # What C++ asks of a group under these names. It keeps a group's name in its backends, of which this class has none.

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    # Private: what torch.distributed's Python side asks. ``_device_types`` picks the device of object collectives,
    # ``_get_backend`` serves FSDP2's allocator and DCP, coalescing serves ``batch_isend_irecv`` and DTensor.

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._present("_device_types").backends]

    def _get_backend(self, device: torch.device) -> Any:
        return self._present("_get_backend").group._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the inner group has its own."""

    def _get_sequence_number_for_group(self) -> int:
        return self._present("_get_sequence_number_for_group").group._get_sequence_number_for_group()

    def _start_coalescing(self, device: torch.device) -> None:
        self._present("_start_coalescing").group._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> SwapWork:
        inner = self._present("_end_coalescing")
        return SwapWork(inner.group._end_coalescing(device), self, "coalesced collectives", inner)


def _collective(name: str) -> Callable[..., SwapWork]:
    inner_call = getattr(ProcessGroup, name)

    def collective(self: SwapGroup, *args: Any, **kwargs: Any) -> SwapWork:
        inner = self._inner
        if inner is None:
            raise self._owner.refusal(f"{name} on {self.spec}")
        self.issued += 1
        self.last = name
        try:
            work = inner_call(inner.group, *args, **kwargs)
        except RuntimeError as error:
            self._raise_named(name, inner, error, _NO_TIMEOUT)
        return SwapWork(work, self, name, inner)

    collective.__name__ = name
    collective.__doc__ = f"``ProcessGroup.{name}`` of the inner group."
    return collective


def _point_to_point(name: str) -> Callable[..., SwapWork]:
    """Like ``_collective``, but not counted: the ranks of a group make different numbers of these calls."""
    inner_call = getattr(ProcessGroup, name)

    def point_to_point(self: SwapGroup, *args: Any, **kwargs: Any) -> SwapWork:
        inner = self._present(name)
        try:
            work = inner_call(inner.group, *args, **kwargs)
        except RuntimeError as error:
            self._raise_named(name, inner, error, _NO_TIMEOUT)
        return SwapWork(work, self, name, inner)

    point_to_point.__name__ = name
    point_to_point.__doc__ = f"``ProcessGroup.{name}`` of the inner group."
    return point_to_point


# Private: the methods that torch.distributed's Python and C++ sides call on a group, in torch 2.11 to 2.13; some are
# older or newer names of the same collective.
COLLECTIVES = (
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
    "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "scatter",
)  # fmt: skip
POINT_TO_POINT = ("send", "recv", "recv_anysource")

for _names, _make in ((COLLECTIVES, _collective), (POINT_TO_POINT, _point_to_point)):
    for _name in _names:
        if hasattr(ProcessGroup, _name):
            setattr(SwapGroup, _name, _make(_name))
