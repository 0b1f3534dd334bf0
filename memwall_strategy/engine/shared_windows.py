"""Shared windows of one lane: gathers and reduce-scatters between ranks of one host without a copy on the way.

*Gather.* The ranks share one flat buffer. FSDP2 asks the comm to allocate the gather's output, copies this rank's shard
into its place there, and later copies all shards from there into the weights. When the output is the shared buffer,
that is the whole gather: each shard is written once and read once by each rank; the collective itself only waits.

*Reduce-scatter.* Gradients are packed straight into this rank's window, and each rank adds up its own part of all
windows in place (``engine.shared_reduce``, which also says in which order).

The ring of slots is made at set-up, from the largest units, and never grows: what does not fit (several units gathered
by hand at once, tensor subclasses that gather more than their size) goes through the process group, on every rank
alike, since all ask in the same order. When a swappable group gets a new inner group, the first use makes a new ring.

Only whole groups on one host use windows: same boot, same network namespace, same user (``engine.shared_peers``).
Others, and the all-reduce over replicas, stay with the process group.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist

from memwall_strategy.core.block import Kind
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.core.lane import Lane
from memwall_strategy.engine.account import Account
from memwall_strategy.engine.fsdp import FSDPMeshInfo, FSDPParamGroup, trainable
from memwall_strategy.engine.group_proxy import BACKEND, SwapGroup
from memwall_strategy.engine.shared_peers import Refusal, connect
from memwall_strategy.engine.shared_ring import Lease, SharedRing, layout

SharedMemory = bool | Literal["auto"]
"""``OverlapConfig.shared_memory``."""

_WORTH_COUNTING_S = 1e-4
"""A slot that is free at once is no wait."""
_PART_OF_LIMIT = 0.9
"""The lane's own limit, which names nobody, must not come first."""
_STAND_IN = -1
_NO_EPOCH = 0
"""Of a group that cannot be replaced."""


class _Group:
    """A process group as a ring sees it, in one epoch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world = group.rank(), group.size()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._group, self.epoch = group, epoch_of(group)

    def issue(self, name: str) -> None:
        if isinstance(self._group, SwapGroup):
            self._group.issue(name)

    def check(self, name: str) -> None:
        if isinstance(self._group, SwapGroup) and self._group.epoch != self.epoch:
            raise self._group.refusal(name)

    def failure(self, name: str, detail: str, error: type[MemwallError], ranks: tuple[int, ...]) -> MemwallError:
        if isinstance(self._group, SwapGroup):
            return self._group.failure(name, detail, self.epoch)
        return error(
            f"{name} through shared memory on ranks {', '.join(map(str, self.ranks))} failed: {detail}.", ranks
        )


class _Opened:
    """What became of one group: its ring, or why it has none."""

    def __init__(self, epoch: int | None, ring: SharedRing | None, reason: str) -> None:
        self.epoch, self.ring, self.reason = epoch, ring, reason
        self.booked_bytes = 0


class SharedWindows:
    """The rings of one lane, one for each process group whose ranks are on one host.

    Args:
        lane: whose waits for a slot count as exposed, and whose limit holds.
        divided: each rank has its own part of a slot (reductions); otherwise all share it (gathers).
        wanted: ``True`` raises where a group cannot have a ring, ``"auto"`` goes without, ``False`` never asks.
        account: where this rank's share of each ring is booked.
    """

    def __init__(self, lane: Lane, *, divided: bool, wanted: SharedMemory, account: Account | None) -> None:
        self._lane, self._divided, self._wanted, self._account = lane, divided, wanted, account
        self._sizes: dict[dist.ProcessGroup, tuple[int, ...]] = {}
        self._opened: dict[dist.ProcessGroup, _Opened] = {}

    def open(self, group: dist.ProcessGroup, sizes_bytes: Sequence[int]) -> None:
        """Make the ring of ``group``. Collective over the group; a stand-in's is made when it has joined.

        Args:
            sizes_bytes: flat buffers that are in use at a time at most.

        Raises:
            ConfigError: ``wanted`` is True and it cannot be; the same on every rank of the group.
        """
        sizes = _slots(sizes_bytes)
        if self._wanted is False or group.size() == 1 or not sizes:
            return
        self._sizes[group] = sizes
        self._ring(group)

    def reopen(self, group: dist.ProcessGroup, sizes_bytes: Sequence[int]) -> None:
        """Another ring in place of the group's, if it has one. Collective over the group; no slot may be leased."""
        if group not in self._sizes:
            return
        self._sizes[group] = _slots(sizes_bytes)
        opened = self._opened.get(group)
        if opened is not None and opened.ring is not None:
            self._close(opened)
            del self._opened[group]
            self._ring(group)

    def held_bytes(self, group: dist.ProcessGroup, sizes_bytes: Sequence[int]) -> int | None:
        """This rank's share of a ring with these slots; None where the group has no ring."""
        opened = self._opened.get(group)
        if opened is None or opened.ring is None:
            return None
        return layout(_slots(sizes_bytes), group.size(), divided=self._divided)[0] // group.size()

    def reason(self, group: dist.ProcessGroup) -> str:
        """Why ``group`` has no ring; empty where it has."""
        opened = self._opened.get(group)
        return "not asked for" if opened is None else opened.reason

    def fits(self, group: dist.ProcessGroup, nbytes: int) -> bool:
        """Whether a slot of the group's ring, taken or not, holds ``nbytes``."""
        ring = self._ring(group)
        return ring is not None and ring.fits(nbytes)

    def reserve(self, group: dist.ProcessGroup, nbytes: int, name: str) -> Lease | None:
        """A slot for the collective ``name``; None: it goes through the process group. See ``SharedRing.reserve``."""
        ring = self._ring(group)
        if ring is None:
            return None
        start = time.perf_counter()
        try:
            return ring.reserve(nbytes, name)
        finally:
            if (waited_s := time.perf_counter() - start) > _WORTH_COUNTING_S:
                self._lane._add_exposed(waited_s)

    def reset(self) -> None:
        """Void what is in flight; the lane is at rest. Every rank of each group does so after an aborted step."""
        for opened in self._opened.values():
            if opened.ring is not None:
                opened.ring.reset()

    def close(self) -> None:
        """Let go of the memory and tell the peers. Idempotent."""
        for opened in self._opened.values():
            self._close(opened)
        self._opened.clear()
        self._sizes.clear()

    # -- rings --

    def _ring(self, group: dist.ProcessGroup) -> SharedRing | None:
        sizes = self._sizes.get(group)
        if sizes is None:
            return None
        opened, epoch = self._opened.get(group), epoch_of(group)
        if opened is not None and opened.epoch == epoch:
            return opened.ring
        if epoch is None or epoch == _STAND_IN:
            return None  # torn down, or not joined yet: the process group says what that means
        if opened is not None:
            self._close(opened)
        opened = self._opened[group] = self._make(group, epoch, sizes)
        return opened.ring

    def _make(self, group: dist.ProcessGroup, epoch: int, sizes: tuple[int, ...]) -> _Opened:
        if (backend := dist.get_backend(group)) not in ("gloo", BACKEND):
            return self._without(epoch, Refusal(f"its backend is {backend}", ordinary=True))
        total_bytes, _, _ = layout(sizes, group.size(), divided=self._divided)
        connection = connect(group, total_bytes)
        if isinstance(connection, Refusal):
            return self._without(epoch, connection)
        ring = SharedRing(
            connection,
            _Group(group),
            sizes,
            divided=self._divided,
            timeout_s=lambda: timeout_of(group, self._lane),
            count=self._lane.count_shared,
        )
        opened = _Opened(epoch, ring, "")
        if self._account is not None:
            # Each rank books its share, so that the sum over the ranks is what they hold.
            opened.booked_bytes = total_bytes // group.size()
            self._account.add(Kind.COMM, opened.booked_bytes)
            for storage in ring.storages:
                self._account.ignore(storage, on_host=True)  # units of modules on the host use it, too
        return opened

    def _without(self, epoch: int, refusal: Refusal) -> _Opened:
        if self._wanted is True:
            raise ConfigError(
                f"overlap.shared_memory=true: a sharded group cannot share memory, because {refusal.reason}. Use "
                "overlap.shared_memory=auto, which uses it where it can."
            )
        if not refusal.ordinary:
            warnings.warn(
                f"ranks of one host exchange gradients and weights through sockets, because {refusal.reason}. "
                "Set overlap.shared_memory=false to do so without this warning.",
                stacklevel=2,
            )
        return _Opened(epoch, None, refusal.reason)

    def _close(self, opened: _Opened) -> None:
        if opened.ring is None:
            return
        opened.ring.close()
        if self._account is not None:
            self._account.remove(Kind.COMM, opened.booked_bytes)
            for storage in opened.ring.storages:
                self._account.heed(storage)
        opened.ring = None


# -- sizes --


def _slots(sizes_bytes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted((size for size in sizes_bytes if size), reverse=True))


def gather_bytes(group: FSDPParamGroup) -> int:
    """Bytes of the flat output of one gather of the unit; known before the first forward."""
    # Private: FSDP2 settles the dtypes at the first forward, from this policy (``FSDPParam.init_dtype_attrs``).
    dtype = group.mp_policy.param_dtype
    return shard_count(group) * sum(
        param.padded_sharded_param_size.numel() * (dtype or param.sharded_param.dtype).itemsize
        for param in group.fsdp_params
    )


def reduce_bytes(group: FSDPParamGroup) -> int:
    """Bytes of the flat input of one reduction of the unit, without what is frozen now."""
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype
    return shard_count(group) * sum(
        param.padded_sharded_param_size.numel() * (dtype or param.sharded_param.dtype).itemsize
        for param in trainable(group)
    )


def shard_count(group: FSDPParamGroup) -> int:
    """Ranks over which the unit is sharded."""
    return group.mesh_info.shard_mesh_size if isinstance(group.mesh_info, FSDPMeshInfo) else 1


# -- process groups --


def epoch_of(group: dist.ProcessGroup) -> int | None:
    """Number of a swappable group's inner group, None where it has none at the moment; 0 of any other group."""
    return group.epoch if isinstance(group, SwapGroup) else _NO_EPOCH


def timeout_of(group: dist.ProcessGroup, lane: Lane) -> float:
    """Longest wait in a collective: a little below the lane's and the group's, since this wait knows who is missing."""
    limit_s = group.spec.timeout.total_seconds() if isinstance(group, SwapGroup) else lane.timeout_s
    return _PART_OF_LIMIT * min(limit_s, lane.timeout_s)
