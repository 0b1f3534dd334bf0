"""Process groups whose inner group can be replaced in place; a lost peer raises one sticky, named error everywhere.

``register_backend()`` adds the backend ``"memwall"`` to torch.distributed. ``init_process_group("memwall")`` and every
group made after it then are ``SwapGroup``s (``group_proxy``) over gloo (``inner_group``). When a collective fails, all
ranks agree on who was lost (``peer_watch``); from then on every collective of every group, on every rank and thread,
raises ``PeerLost`` with the same ``ranks``, until ``configure(epoch)`` builds new inner groups. Meshes, FSDP2 modules
and DTensors keep the groups that they hold, so a replacement process takes a logical rank by making the same groups and
calling ``configure`` with the same epoch as the survivors.

A process that builds its model before it takes a rank registers with ``stand_in=True``: its groups do nothing until
``configure``. The store must outlive the rank that is replaced: keep it in a process of its own.

What it does not do: it does not see a peer that merely hangs before the group's timeout; it does not mix with other
backends in one group (torch would drop the others: ``"cpu:memwall,cuda:nccl"`` loses NCCL, see ``cuda=``);
``monitored_barrier`` stays gloo's own, because torch offers it by the name of the backend.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions  # private: what an ``extended_api`` backend is given

from memwall_strategy.core.errors import CollectiveError, ConfigError, MemwallError
from memwall_strategy.engine.group_proxy import BACKEND, SwapGroup, SwapWork
from memwall_strategy.engine.inner_group import CudaBackend, GroupSpec, InnerGroup
from memwall_strategy.engine.leavable_wait import Helper, end_helpers
from memwall_strategy.engine.peer_notes import PeerNotes
from memwall_strategy.engine.peer_verdict import Progress, brief
from memwall_strategy.engine.peer_watch import DEFAULT_GRACE_S, PeerWatch

_EXIT_WAIT_S = 1.0
"""At exit: how long other threads get to leave the collectives that were just ended for them."""
_EXIT_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group of this process."""

    name: str
    """Name that torch.distributed gave it."""

    ranks: tuple[int, ...]
    """Global ranks of its members."""

    issued: int
    """Collectives that this process issued on it in this epoch, point-to-point calls not counted."""


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """How this process's swappable groups are."""

    epoch: int
    """Number of the present inner groups: 0 until ``configure``; -1 for a stand-in or where there are no groups."""

    settling: bool
    """A failure was noticed and the ranks have not yet agreed what it was."""

    error: MemwallError | None
    """What every collective raises, or None while all is well."""

    groups: tuple[GroupState, ...]
    """The groups, oldest first."""


# -- the calls that other layers use --


def register_backend(*, cuda: CudaBackend = "gloo", grace_s: float = DEFAULT_GRACE_S, stand_in: bool = False) -> None:
    """Make ``init_process_group("memwall")`` known to torch.distributed. Idempotent; options hold from the next init.

    Args:
        cuda: backend for CUDA tensors where there is a GPU.
        grace_s: how long a rank may take to answer after a failure before it counts as lost.
        stand_in: groups do nothing until ``configure(epoch)`` joins the other ranks.
    """
    global _options
    _options = _Options(cuda=cuda, grace_s=grace_s, stand_in=stand_in)
    if BACKEND.upper() not in dist.Backend._plugins:  # private: the table that ``register_backend`` fills
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        atexit.register(_at_exit)


def live_groups() -> tuple[SwapGroup, ...]:
    """The swappable groups of this process, oldest first."""
    return tuple(_groups.live) if _groups is not None else ()


def configure(epoch: int, *, timeout_s: float | None = None) -> None:
    """Build new inner groups for every swappable group, with every rank that calls this; clears the sticky error.

    Args:
        epoch: higher than every earlier one, and the same on all ranks.
        timeout_s: how long to wait for the other ranks; default: the default group's timeout.

    Raises:
        PeerLost: not every rank came.
        ConfigError: the epoch is not new, or this process has no swappable group.
    """
    if _groups is None or not _groups.live:
        raise ConfigError("configure: this process has no group of the backend 'memwall'. Call init_process_group.")
    limit_s = _groups.live[0].spec.timeout.total_seconds() if timeout_s is None else timeout_s
    _groups.configure(epoch, limit_s)


def teardown() -> None:
    """Close this process's connections on every swappable group; ``configure`` builds them anew."""
    if _groups is not None:
        _groups.teardown()


def report_failure(reason: str) -> MemwallError | None:
    """Tell every rank that this one cannot go on (out of memory, say): their collectives raise instead of waiting.

    Returns:
        What all ranks raise from now on, or None where this process has no peers to tell.
    """
    if _groups is None or _groups.watch is None:
        return None
    return _groups.watch.fail(_groups.epoch, _groups.watch.failure("", reason))


def peer_notes() -> PeerNotes | None:
    """What the ranks write to each other without collectives, in the present epoch; None where there is nobody."""
    return _groups.watch.notes() if _groups is not None and _groups.watch is not None else None


def group_health() -> GroupHealth:
    """How this process's swappable groups are. Never waits."""
    if _groups is None:
        return GroupHealth(epoch=-1, settling=False, error=None, groups=())
    states = tuple(GroupState(group.spec.name, group.spec.ranks, group.issued) for group in _groups.live)
    error = peer_lost()
    return GroupHealth(epoch=_groups.epoch, settling=_groups.tripped() and error is None, error=error, groups=states)


def peer_lost() -> MemwallError | None:
    """The sticky error, once agreed: ``PeerLost``, or ``CollectiveError`` where every rank is alive. Never waits."""
    return _groups.watch.error() if _groups is not None and _groups.watch is not None else None


def raise_if_lost() -> None:
    """Raise the sticky error, if there is one; waits for the verdict where a failure was just noticed."""
    if _groups is not None and _groups.tripped():
        raise _groups.refusal("raise_if_lost")


# -- this process's groups --


@dataclass(frozen=True, slots=True)
class _Options:
    """See ``register_backend``."""

    cuda: CudaBackend = "gloo"
    grace_s: float = DEFAULT_GRACE_S
    stand_in: bool = False


_options = _Options()
_groups: _Groups | None = None
_sessions = 0  # default groups that this process made or joined; stale keys of earlier ones must not be read


class _Groups:
    """The swappable groups of this process, from its default group's making to its end, and the watch over them.

    Is the ``GroupOwner`` of its groups and the ``WatchedGroups`` of its watch.
    """

    def __init__(self, options: _Options) -> None:
        self.options = options
        self.live: list[SwapGroup] = []
        self.watch: PeerWatch | None = None
        self.store_prefix = ""
        self.pid = os.getpid()
        self._retired: list[InnerGroup] = []
        self._closed_here = False

    @property
    def epoch(self) -> int:
        return self.watch.epoch if self.watch is not None else -1

    def tripped(self) -> bool:
        return self.watch is not None and self.watch.tripped(self.watch.epoch)

    def add(self, spec: GroupSpec, store: dist.Store) -> SwapGroup:
        group = SwapGroup(spec, store, self)
        self.live.append(group)
        if self.options.stand_in and self.watch is None:
            group.stand_in()
            return group
        try:
            if self.watch is None:
                self._start_watch(store, spec, session=_sessions + 1)
            self._build(group)
            if len(self.live) == 1:
                self.watch.connected()
        except BaseException:
            self.remove(group)
            raise
        return group

    def configure(self, epoch: int, timeout_s: float) -> None:
        default = self.live[0]
        if self.watch is None:
            self._start_watch(default._store, default.spec, session=None)
        if epoch <= self.epoch:
            raise ConfigError(f"configure({epoch}): epochs only grow, and this process is in {self.epoch} already.")
        self.teardown()
        self.watch.begin(epoch, timeout_s)
        for group in self.live:
            self._build(group)
        self._closed_here = False

    def teardown(self) -> None:
        self._closed_here = True
        for group in self.live:
            group.teardown()

    def remove(self, group: SwapGroup) -> None:
        if group in self.live:
            self.live.remove(group)
        if not self.live:
            self.stop()

    def stop(self) -> None:
        global _groups
        if self.watch is not None:
            self.watch.stop()
        end_helpers()
        if _groups is self:
            _groups = None

    def fail(self, epoch: int, name: str, spec: GroupSpec, detail: str) -> MemwallError:
        if self.watch is None or (self._closed_here and not self.watch.tripped(epoch)):
            return CollectiveError(f"{name} on {spec}: this process closed the group ({detail})")
        return self.watch.fail(epoch, self.watch.failure(name, detail, spec.name, spec.ranks))

    def refusal(self, what: str) -> MemwallError:
        if self.tripped():
            return self.watch.fail(self.watch.epoch, None)
        return CollectiveError(f"{what}: the group is closed. Call configure() with the next epoch.")

    def retire(self) -> None:
        self._retired += [inner for group in self.live if (inner := group.retire()) is not None]

    def cut_retired(self) -> None:
        while self._retired:
            self._retired.pop().cut()

    def progress(self) -> Progress:
        return {group.spec.name: (group.issued, group.last) for group in self.live}

    def _start_watch(self, store: dist.Store, spec: GroupSpec, session: int | None) -> None:
        global _sessions
        world, grace_s = len(spec.ranks), self.options.grace_s
        self.watch = PeerWatch(store, self, session=session, rank=spec.rank, world=world, grace_s=grace_s)
        _sessions = self.watch.session
        self.store_prefix = f"memwall/{_sessions}"

    def _build(self, group: SwapGroup) -> None:
        try:
            group.configure(self.epoch)
        except MemwallError:
            raise
        except RuntimeError as error:
            raise self.watch.fail(
                self.epoch, self.watch.failure("connecting", brief(error), group.spec.name, group.spec.ranks)
            ) from error


def _create(options: _DistributedBackendOptions, backend_options: object = None) -> SwapGroup:
    """What torch.distributed calls to make a group."""
    global _groups
    if backend_options is not None:
        raise ConfigError(f"backend 'memwall' takes no pg_options, got a {type(backend_options).__name__}")
    members = tuple(options.global_ranks_in_group)  # private convention of torch: empty for the default group
    if not members:
        _groups = _Groups(_options)
    elif _groups is None:
        raise ConfigError("a group of the backend 'memwall' needs 'memwall' as the default group's backend too")
    spec = GroupSpec(
        name=options.group_id,
        ranks=members or tuple(range(options.group_size)),
        rank=options.group_rank,
        timeout=options.timeout,
        cuda=_groups.options.cuda,
    )
    return _groups.add(spec, options.store)


def _at_exit() -> None:
    """A process that ends without ``destroy_process_group`` (Lightning's do) says goodbye too, and ends at once."""
    if _groups is None or _groups.pid != os.getpid():  # a forked child has no part in this
        return
    groups = _groups
    groups.stop()
    # A thread that returns from C++ while the interpreter ends would abort the process: end what it waits for first.
    if _threads_waiting():
        groups.teardown()
        deadline = time.monotonic() + _EXIT_WAIT_S
        while _threads_waiting() and time.monotonic() < deadline:
            time.sleep(_EXIT_POLL_S)
    for group in groups.live:
        inner = group.retire()
        if inner is not None:
            inner.leak()  # its destructor would wait for what is in flight


def _threads_waiting() -> bool:
    """Whether a thread is inside ``SwapWork.wait``, or a helper inside gloo."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code in (SwapWork.wait.__code__, Helper.sleep.__code__):
                return True
            frame = frame.f_back
    return False
