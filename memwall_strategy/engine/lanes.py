"""Asynchronous gathers and reductions for FSDP2 on CPU.

On CUDA, FSDP2 hides communication with streams. On CPU its collectives block the training thread. Here they run on two
lanes, each with process groups of its own (``engine.lane_groups``), so that neither meets the other's or the user's
collectives:

- *gather*: a custom all-gather comm queues the collective and hands FSDP2 a ``Work`` to wait for in the unit's
  pre-forward or pre-backward. Units ahead are prefetched.
- *reduce*: see ``engine.reducer``.

Between ranks of one host both go through shared windows (``engine.shared_windows``) instead of gloo's sockets.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.optim import Optimizer

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.core.lane import Lane, Transfer
from memwall_strategy.engine.account import Account
from memwall_strategy.engine.early_gathers import EarlyGathers
from memwall_strategy.engine.exchange import all_gather
from memwall_strategy.engine.fsdp import (
    FSDPMeshInfo,
    FSDPParamGroup,
    fsdp_groups,
    fsdp_states,
    group_name,
    state_groups,
)
from memwall_strategy.engine.gather_order import GatherOrder
from memwall_strategy.engine.lane_groups import LaneGroups
from memwall_strategy.engine.reducer import GradientReducer
from memwall_strategy.engine.shared_ring import Lease
from memwall_strategy.engine.shared_windows import SharedMemory, SharedWindows, gather_bytes
from memwall_strategy.engine.turnaround import Turnaround

SLOTS_BESIDE = 2
"""Slots of the gather window beside those of units ahead: of a unit that is used, and of one for slower ranks."""


class LaneWork(dist.Work):
    """What FSDP2 waits for; lives as long as the gather's result."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._transfer = transfer

    def wait(self, timeout: object = None) -> bool:  # torch passes a timedelta; the lane has its own limit
        self._transfer.wait()
        return True

    def is_completed(self) -> bool:
        return self._transfer.done()


class LaneAllGather(AllGather):
    """All-gather comm of one unit that runs on the gather lane.

    Where the unit's group has a window, the output is allocated in it: FSDP2's own copies are then the gather, and the
    lane only waits for the other ranks. The window's slot is let go when the weights have been copied out of it.
    """

    def __init__(
        self, unit: str, group: FSDPParamGroup, lane: Lane, groups: LaneGroups, windows: SharedWindows
    ) -> None:
        self._unit, self._group, self._lane, self._groups, self._windows = unit, group, lane, groups, windows
        self._lease: Lease | None = None
        self._last: Transfer | None = None
        # Private: called once a gather, right after FSDP2 copied the weights out of the flat buffer.
        self._to_unsharded = group._to_unsharded
        group._to_unsharded = self._copied_out

    @property
    def seconds(self) -> float:
        """Of the last gather; 0 before the first."""
        return self._last.seconds if self._last is not None else 0.0

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._lease is not None:  # of a gather whose result nobody took (its weights were edited since)
            if self._lease.ring.is_current(self._lease) and self._last is not None:
                self._last.wait()  # the lane still looks for the others' parts in this slot
            self.let_go()
        (numel,) = size
        twin = self._groups.twin(self._group._all_gather_process_group)
        self._lease = self._windows.reserve(twin, numel * dtype.itemsize, "all-gather")
        if self._lease is not None:
            return self._lease.whole(dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        nbytes = output_tensor.nbytes - input_tensor.nbytes
        # FSDP2 filled input_tensor (a slice of output_tensor) on this thread just before: program order suffices.
        if (lease := self._lease) is not None:
            lease.ring.arrive(lease, "all-gather")
            job = functools.partial(lease.ring.wait, lease, "all-gather", nbytes)
        else:
            job = functools.partial(all_gather, output_tensor, input_tensor, self._groups.twin(group))
        transfer = self._last = self._lane.submit(
            job, transfer="all-gather", unit=self._unit, nbytes=nbytes, rated=lease is None
        )
        if async_op:
            return LaneWork(transfer)
        transfer.wait()
        return None

    def _copied_out(self) -> None:
        self._to_unsharded()
        self.let_go()

    def let_go(self) -> None:
        """The window's slot, if the last gather has one, may be written again."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.ring.release(lease)
            lease.ring.free(lease)

    def uninstall(self) -> None:
        """Give the group its method back."""
        self._group.__dict__.pop("_to_unsharded", None)


class FsdpLanes:
    """Both lanes of one sharded model.

    Args:
        model: model after ``fully_shard``, on CPU, before its first forward.
        prefetch: units gathered ahead.
        reduce_buffers: most reductions in flight.
        timeout_s: longest wait.
        trace: keep spans.
        account: where communication buffers are booked.
        early: gather the first units of the next iteration after the step; see ``engine.early_gathers``.
        shared_memory: see ``OverlapConfig.shared_memory``.

    Attributes:
        gather, reduce: the lanes.
        order: in which order units run, and how far ahead each gathers.
        turn: gathers a backward's first units; None without prefetch.
        reducer: what reduces gradients.
        early: None where it is off.
        windows: the gather lane's shared windows; the reducer has its own.
        flats: the gather lane's process group -> bytes of each unit's flat buffer.

    Raises:
        ConfigError: ``shared_memory`` is True and some group cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        prefetch: int,
        reduce_buffers: int,
        timeout_s: float,
        trace: bool = False,
        account: Account | None = None,
        early: bool = False,
        shared_memory: SharedMemory = "auto",
    ) -> None:
        self._model = model
        capacity = reduce_buffers + 2  # the presence exchange, and one spare: the reducer itself bounds the buffers
        self.gather = Lane("gather", capacity=prefetch + 3, timeout_s=timeout_s, record_spans=trace)
        self.reduce = Lane("reduce", capacity=capacity, timeout_s=timeout_s, record_spans=trace)
        self.windows = SharedWindows(self.gather, divided=False, wanted=shared_memory, account=account)
        self.reducer = GradientReducer(
            model, self.reduce, buffers=reduce_buffers, account=account, shared_memory=shared_memory
        )
        self._gather_groups = LaneGroups()
        self._replaced: list[tuple[FSDPParamGroup, AllGather, bool]] = []
        names = {module: name for name, module in model.named_modules()}
        self.flats: dict[dist.ProcessGroup, list[int]] = {}
        for state in fsdp_states(model):
            for group in state_groups(state):
                for info in (group.mesh_info, group.post_forward_mesh_info):
                    if isinstance(info, FSDPMeshInfo):
                        twin = self._gather_groups.twin(info.shard_process_group)
                        self.flats.setdefault(twin, []).append(gather_bytes(group))
                self._replaced.append((group, group._all_gather_comm, group.unshard_async_op))
                unit = group_name(group, names)
                group._all_gather_comm = LaneAllGather(unit, group, self.gather, self._gather_groups, self.windows)
                group.unshard_async_op = True  # so that the comm may return before the data is there
        self.reducer.install()
        for twin, sizes in self.flats.items():
            self.windows.open(twin, heapq.nlargest(prefetch + SLOTS_BESIDE, sizes))
        self.reducer.copies.watch(fsdp_groups(model))
        self.order = GatherOrder(model, prefetch, _gather_seconds, self._largest)
        self.turn = Turnaround(model, prefetch) if prefetch else None
        self.early: EarlyGathers | None = None
        if early:
            # The ranks agree on the reduce lane: nothing is on its way there when a forward starts.
            self.early = EarlyGathers(model, self.reduce, self.reducer.groups, units=prefetch + 1)

    def watch_steps(self, optimizers: Sequence[Optimizer]) -> None:
        """Where a single optimizer steps unit by unit and tells of each (``unit_stepped``), gather that far already."""
        if self.early is not None and len(optimizers) == 1 and hasattr(optimizers[0], "unit_stepped"):
            optimizers[0].unit_stepped = self.early.unit_stepped

    def step_ended(self) -> None:
        """The optimizer stepped everything: the next iteration may start to gather."""
        self.order.step_ended()
        if self.turn is not None:
            self.turn.step_ended()
        if self.early is not None:
            self.early.step_ended()

    @property
    def next_iteration_began(self) -> bool:
        """Whether gathers were started that no forward has looked at yet."""
        return self.early is not None and self.early.pending()

    def settle(self) -> None:
        """Between two steps: wait for what is on its way, and let go of what was gathered early. All ranks do so."""
        self.gather.drain()
        self.reduce.drain()
        if self.early is not None:
            self.early.forget()
        if self.turn is not None:
            self.turn.forget()
        for group, *_ in self._replaced:
            if group._all_gather_result is not None:  # the user's own unshard(async_op=True): it may as well end now
                group.wait_for_unshard()
            if isinstance(comm := group._all_gather_comm, LaneAllGather):  # else somebody put in another
                comm.let_go()

    def _largest(self, numbers: torch.Tensor, group: dist.ProcessGroup) -> None:
        twin = self.reducer.groups.twin(group)
        if twin.size() > 1:
            job = functools.partial(dist.all_reduce, numbers, op=dist.ReduceOp.MAX, group=twin)
            self.reduce.submit(job, transfer="times", unit="all", nbytes=numbers.nbytes).wait()

    def rest(self) -> None:
        """Wait until neither lane works; errors of aborted transfers are dropped. Used before a reset."""
        for lane in (self.gather, self.reduce):
            try:
                lane.drain()
            except MemwallError:
                lane.reset()
        self.windows.reset()
        self.reducer.abort()
        if self.early is not None:
            self.early.forget()

    def close(self) -> None:
        """End threads and process groups; the model is plain FSDP2 again."""
        for lane in (self.gather, self.reduce):
            lane.close()
        if self.early is not None:
            self.early.close()
        if self.turn is not None:
            self.turn.close()
        for group, comm, asynchronous in self._replaced:
            group._all_gather_comm.uninstall()
            group._all_gather_comm, group.unshard_async_op = comm, asynchronous
        self._replaced.clear()
        self.order.close()
        self.reducer.copies.close()
        self.windows.close()
        self.reducer.uninstall()
        self._gather_groups.close()


def _gather_seconds(group: FSDPParamGroup) -> float:
    comm = group._all_gather_comm
    return comm.seconds if isinstance(comm, LaneAllGather) else 0.0  # a user's own comm
