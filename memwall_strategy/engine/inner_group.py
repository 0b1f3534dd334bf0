"""The real process group inside a swappable one: built for one epoch, cut when a peer was lost, never reused.

An inner group is an ordinary ``ProcessGroup`` over gloo (or, for CUDA tensors and on request, NCCL), so the dispatcher,
the profiler and ``CommDebugMode`` see the collectives that they always saw. A stand-in has the same shape over torch's
fake backend: its collectives return at once and move nothing, for a process that builds its model before it joins.

Cutting: ``abort()`` of gloo does not free a thread that is stuck in a collective. What frees it is gloo's own rule that
a receive which times out closes every connection of its context: a receive that nobody answers, given one
millisecond, therefore ends all collectives of this process on this group, and closes the sockets to its peers. All but
those that are half way through a transfer with a peer: whoever waits for these leaves a moment after the cut, see
``leavable_wait``.

A cut group is leaked on purpose: its destructor joins gloo's threads, and a run must not depend on them ending.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

# Private: the constructors that torch.distributed itself calls in ``_new_process_group_helper``.
from torch._C._distributed_c10d import Backend, FakeProcessGroup, ProcessGroupGloo
from torch.distributed import ProcessGroup

from memwall_strategy.core.errors import ConfigError

CudaBackend = Literal["gloo", "nccl"]

_CUT_TAG = 0x6D77
"""Tag of the receive that nobody answers; point-to-point calls of users must not wait on this one."""

_PROBE_TAG = 0x6D78
"""Tag of the receives that only try whether a connection stands."""

_CUT_TIMEOUT = timedelta(milliseconds=1)

_LEAVE_AFTER_S = 1.0
"""After a cut: how long a waiting thread gives gloo to say itself what happened."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What stays the same when a group is built anew."""

    name: str
    """Name that torch.distributed gave the group; the same on every member."""

    ranks: tuple[int, ...]
    """Global ranks of the members, in group order."""

    rank: int
    """This process's rank within the group."""

    timeout: timedelta
    """Longest time of one collective, and of building the group."""

    cuda: CudaBackend = "gloo"
    """Backend for CUDA tensors, where there is a GPU."""

    def __str__(self) -> str:
        return f"group {self.name!r} (ranks {', '.join(map(str, self.ranks))})"


class InnerGroup:
    """One epoch's real group."""

    __slots__ = ("_cut_s", "backends", "epoch", "group", "is_gloo")

    def __init__(self, epoch: int, group: ProcessGroup, backends: dict[str, Backend]) -> None:
        self.epoch = epoch
        self.group = group
        self.backends = backends
        self.is_gloo = all(isinstance(backend, ProcessGroupGloo) for backend in backends.values())
        """Whether every work of it is gloo's: NCCL's ends with ``abort``, and takes a wait's limit as a failure."""
        self._cut_s: float | None = None

    def was_cut(self) -> bool:
        """Whether it was cut so long ago that what has not ended by now will not."""
        return self._cut_s is not None and time.monotonic() - self._cut_s > _LEAVE_AFTER_S

    def broken(self) -> str:
        """What ended one of the connections of gloo, or an empty string."""
        # A receive is posted on an open connection in silence, and refused on one that has ended.
        for peer in self._peers():
            try:
                self.group.recv([torch.empty(1)], peer, _PROBE_TAG)
            except RuntimeError as error:
                return str(error)
        return ""

    def cut(self) -> None:
        """Close every connection to the peers, so that nothing of this group stays stuck, here or there."""
        for device, backend in self.backends.items():
            if isinstance(backend, ProcessGroupGloo):
                if device == "cpu":  # the same object serves every device
                    self._cut_gloo()
            elif not isinstance(backend, FakeProcessGroup):
                backend.abort()
        self._cut_s = time.monotonic()
        self.leak()

    def leak(self) -> None:
        """Keep the group for as long as the process lives, so that its destructor never runs."""
        for held in (self.group, *self.backends.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    def _cut_gloo(self) -> None:
        # Private: relies on gloo's UnboundBuffer::waitRecv, which on a time-out of its own calls
        # Context::signalException on ALL pairs ("Application timeout caused pair closure").
        # A receive from a peer that is gone already fails in another way and closes nothing: try the next.
        for peer in self._peers():
            try:
                self.group.recv([torch.empty(1)], peer, _CUT_TAG).wait(_CUT_TIMEOUT)
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.group.size()) if rank != self.group.rank()]


def build(spec: GroupSpec, store: dist.Store, epoch: int) -> InnerGroup:
    """Connect to the other members through ``store``; returns when all of them are there.

    Raises:
        RuntimeError: a member did not come within ``spec.timeout`` (torch's own message).
        ConfigError: NCCL was asked for and this torch has none.
    """
    size = len(spec.ranks)
    gloo = ProcessGroupGloo(store, spec.rank, size, spec.timeout)
    gloo._set_sequence_number_for_group()
    backends: dict[str, Backend] = {"cpu": gloo}
    if torch.cuda.is_available():
        backends["cuda"] = _nccl(spec, dist.PrefixStore("nccl", store)) if spec.cuda == "nccl" else gloo
    elif spec.cuda == "nccl":
        raise ConfigError(f"{spec}: cuda='nccl' needs a GPU, and this process sees none. Use cuda='gloo'.")
    return InnerGroup(epoch, _assemble(spec, store, backends, ProcessGroup.BackendType.GLOO), backends)


def stand_in(spec: GroupSpec) -> InnerGroup:
    """Return a group of the same shape whose collectives do nothing."""
    # Private: the fake backend's factory, as in torch.testing's fake process group.
    fake = FakeProcessGroup._create_internal(spec.rank, len(spec.ranks))
    backends: dict[str, Backend] = {"cpu": fake}
    if torch.cuda.is_available():
        backends["cuda"] = fake
    return InnerGroup(-1, _assemble(spec, dist.HashStore(), backends, ProcessGroup.BackendType.CUSTOM), backends)


def _assemble(
    spec: GroupSpec, store: dist.Store, backends: dict[str, Backend], default: ProcessGroup.BackendType
) -> ProcessGroup:
    # Private: the same four calls as ``_new_process_group_helper`` makes for a group of torch's own.
    group = ProcessGroup(store, spec.rank, len(spec.ranks))
    group._set_default_backend(default)
    for device, backend in backends.items():
        own_type = default if backend is backends["cpu"] else ProcessGroup.BackendType.NCCL
        group._register_backend(torch.device(device), own_type, backend)
    group._set_group_name(spec.name)
    return group


def _nccl(spec: GroupSpec, store: dist.Store) -> Backend:
    if not dist.is_nccl_available():
        raise ConfigError(f"{spec}: cuda='nccl' needs a torch built with NCCL. Use cuda='gloo'.")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = spec.timeout  # private: as torch.distributed sets it
    options.global_ranks_in_group = list(spec.ranks)
    options.group_name = spec.name
    backend = dist.ProcessGroupNCCL(store, spec.rank, len(spec.ranks), options)
    backend._set_sequence_number_for_group()
    return backend
