"""The reduce lane of FSDP2 on CPU: gradients leave the training thread as soon as a unit's backward ends.

Replaces ``FSDPParamGroup.post_backward`` on the instance. The training thread copies a unit's gradients into one flat
buffer (on one host: this rank's shared window), frees them and goes on; the lane then does, in order, the in-rack
reduce-scatter, the sum with what earlier micro-batches left, the all-reduce over replicas and the user's all-reduce
hook.

A reduction is *finished* (sharded gradient set or added, post-accumulate hooks run) on the training thread: in order,
when more than ``reduce_buffers`` are in flight, and at the end of the backward at the latest, inside autograd's final
callback. So when ``backward()`` returns, every gradient is in place as under stock FSDP2, whatever ran before it:
accumulation, gradients that were there already, several backwards of one forward, recompute. Only inside ``hold()``
(micro-batches whose gradients nobody may look at) may reductions go on into the next forward.

A parameter without a gradient on this rank is reduced as zeros, so the buffers agree on every rank; one small
all-reduce at the end of the backward tells which parameters had a gradient anywhere. The others keep ``grad=None``.

What this does not do: a unit whose forward runs on some ranks only cannot be reduced (nor gathered, by FSDP2 itself).
"""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    _get_gradient_divide_factors,
    foreach_reduce_scatter_copy_in,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import _get_dim0_padded_size

from memwall_strategy.core.block import Kind
from memwall_strategy.core.errors import MemwallError
from memwall_strategy.core.lane import Lane, Transfer
from memwall_strategy.engine.account import Account, NoAccount
from memwall_strategy.engine.copy_clock import CopyClock
from memwall_strategy.engine.exchange import reduce_scatter
from memwall_strategy.engine.fsdp import (
    DDPMeshInfo,
    FSDPMeshInfo,
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    TrainingState,
    fsdp_states,
    group_name,
    local_tensor,
    state_groups,
    trainable,
)
from memwall_strategy.engine.lane_groups import LaneGroups
from memwall_strategy.engine.shared_reduce import reduce_scatter_shared
from memwall_strategy.engine.shared_ring import Lease
from memwall_strategy.engine.shared_windows import SharedMemory, SharedWindows, reduce_bytes


@dataclass(slots=True)
class _Reduction:
    """One unit's gradients on their way; ``output`` is set by the lane, read after ``transfer`` ended."""

    group: FSDPParamGroup
    params: list[FSDPParam]
    padded_sizes: tuple[torch.Size, ...]
    present: list[bool]
    complete: bool
    """False: a partial sum that rests on the lane until the last micro-batch."""
    lease: Lease | None = None
    """The window's slot that holds the whole gradients; None: a buffer of their own."""
    transfer: Transfer | None = None
    output: torch.Tensor | None = None
    deferred: dict[int, torch.Tensor] = field(default_factory=dict)
    """Shards of parameters without a gradient here, by position, until it is known whether any rank had one."""


class GradientReducer:
    """Reduces the gradients of every unit of one model on the reduce lane.

    Args:
        model: the sharded model; ``install`` overrides its FSDP2 groups' ``post_backward``.
        lane: the reduce lane.
        buffers: most reductions in flight; each holds one unit's whole gradient.
        account: where flat buffers are booked.
        shared_memory: whether ranks of one host reduce through shared windows.

    Attributes:
        buffers: as given; may be changed while nothing is in flight.
        copies: the clock of copies into flat buffers.
        flats: the lane's process group -> bytes of each unit's flat buffer.
        windows: the shared windows.
    """

    def __init__(
        self,
        model: nn.Module,
        lane: Lane,
        *,
        buffers: int,
        account: Account | None = None,
        shared_memory: SharedMemory = False,
    ) -> None:
        self._model, self._lane, self.buffers = model, lane, buffers
        self.flats: dict[dist.ProcessGroup, list[int]] = {}
        self._account = account or NoAccount()
        self.copies = CopyClock()
        self.windows = SharedWindows(lane, divided=True, wanted=shared_memory, account=account)
        self._groups = LaneGroups()
        self._pending: deque[_Reduction] = deque()
        self._undecided: list[_Reduction] = []
        self._newest: dict[FSDPParamGroup, _Reduction] = {}  # of the undecided ones
        self._partial: dict[FSDPParamGroup, torch.Tensor] = {}
        self._partial_present: dict[FSDPParamGroup, list[bool]] = {}
        self._unreduced: dict[FSDPParamGroup, None] = {}  # took part in a backward whose gradients rest whole; ordered
        self._held = False
        self._names = {module: name for name, module in model.named_modules()}

    @property
    def groups(self) -> LaneGroups:
        """The lane's process groups."""
        return self._groups

    # -- set-up --

    def install(self) -> None:
        """Take over ``post_backward`` of every group and the end of every backward; open the windows."""
        for state in fsdp_states(self._model):
            for group in state_groups(state):
                if isinstance(group.mesh_info, FSDPMeshInfo):
                    twin = self._groups.twin(group._reduce_scatter_process_group)
                    self.flats.setdefault(twin, []).append(reduce_bytes(group))
                if isinstance(group.mesh_info, DDPMeshInfo):
                    self._groups.twin(group._all_reduce_process_group)
                # autograd's node calls ctx.param_group.post_backward(): an attribute of the instance wins.
                group.post_backward = functools.partial(self._post_backward, group)
            # Queued as a bound method of whichever state meets the backward first, looked up on the instance.
            state._root_post_backward_final_callback = functools.partial(
                self._end_of_backward, state, state._root_post_backward_final_callback
            )
        for twin, sizes in self.flats.items():
            self.windows.open(twin, heapq.nlargest(self.buffers, sizes))

    def uninstall(self) -> None:
        """Give the groups back their own methods and end the process groups."""
        for state in fsdp_states(self._model):
            state.__dict__.pop("_root_post_backward_final_callback", None)
            for group in state_groups(state):
                group.__dict__.pop("post_backward", None)
        self.abort()
        self.windows.close()
        self._groups.close()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backwards inside may leave reductions in flight; the next backward outside, or ``finish``, ends them."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    # -- one backward --

    def _post_backward(self, group: FSDPParamGroup, *unused: object) -> None:
        used = group._training_state == TrainingState.PRE_BACKWARD
        group._training_state = TrainingState.POST_BACKWARD
        for param in group.fsdp_params:
            param.accumulate_unsharded_grad_if_needed()
        if not group.reduce_grads:
            if used:
                self._unreduced[group] = None
            if group.reshard_after_backward:
                group.reshard()
            for param in group.fsdp_params:
                param.to_accumulated_grad_if_needed()
            return
        self._take_and_submit(group, used)

    def _take_and_submit(self, group: FSDPParamGroup, used: bool) -> None:
        params, gradients, present = _take_gradients(group, used or self._waits(group))
        self._unreduced.pop(group, None)
        if group.reshard_after_backward:
            group.reshard()
        if params:  # none where the unit is frozen, or took no part
            self._submit(group, params, gradients, present)

    def _waits(self, group: FSDPParamGroup) -> bool:
        """Whether earlier micro-batches left something to reduce, though this one may have skipped the unit.

        Asked of what every rank knows alike: a rank may have no gradient in a unit that the others have one in.
        """
        return group in self._unreduced or (group in self._partial_present and group.all_reduce_grads)

    def _submit(
        self, group: FSDPParamGroup, params: list[FSDPParam], gradients: list[torch.Tensor], present: list[bool]
    ) -> None:
        while len(self._pending) >= self.buffers:
            self._decide_later(self._finish_oldest())
        sharded = isinstance(group.mesh_info, FSDPMeshInfo)
        shard_group = self._groups.twin(group._reduce_scatter_process_group) if sharded else None
        replica_group = (
            self._groups.twin(group._all_reduce_process_group) if isinstance(group.mesh_info, DDPMeshInfo) else None
        )
        world = shard_group.size() if shard_group is not None else 1
        dtypes = {gradient.dtype for gradient in gradients}
        if len(dtypes) > 1 and group._reduce_dtype is not None:
            # Sums over micro-batches that were not reduced rest in the reduce dtype, a first gradient does not.
            gradients[:] = [gradient.to(group._reduce_dtype) for gradient in gradients]
            dtypes = {group._reduce_dtype}
        if len(dtypes) != 1:
            raise MemwallError(
                f"gradients of unit {group_name(group, self._names)!r} have several dtypes: "
                f"{sorted(map(str, dtypes))}. Put modules of another dtype into units of their own (unit_classes)."
            )
        reduce_dtype = group._reduce_dtype or dtypes.pop()
        with self.copies.copying():
            _lay_out_by_shard(params, gradients, world)
        padded = tuple(_get_dim0_padded_size(g.size(), world) for g in gradients)
        lease = self._reserve(shard_group, sum(s.numel() for s in padded) * reduce_dtype.itemsize)
        with self.copies.copying():
            if lease is not None:
                flat = lease.part(shard_group.rank(), reduce_dtype)
            else:
                flat = torch.empty(sum(s.numel() for s in padded), dtype=reduce_dtype, device=group.device)
            foreach_reduce_scatter_copy_in(gradients, flat, world)
        gradients.clear()  # the copies are in `flat`: the whole gradients can go
        complete = replica_group is None or group.all_reduce_grads
        if (earlier := self._partial_present.pop(group, None)) is not None:
            present = [a or b for a, b in zip(present, earlier, strict=True)]
        if not complete:
            self._partial_present[group] = present
        item = _Reduction(group, params, padded, present, complete, lease)
        factors = _get_gradient_divide_factors(
            shard_group, replica_group, reduce_dtype, group.device.type,
            group.gradient_divide_factor, group.force_sum_reduction_for_comms,
        )  # fmt: skip
        job = functools.partial(self._reduce, item, [flat], shard_group, replica_group, factors)
        self._account.track(flat, Kind.COMM, group.modules[0])
        item.transfer = self._lane.submit(
            job, transfer="reduce", unit=group_name(group, self._names), nbytes=flat.nbytes * (world - 1) // world,
            rated=lease is None,
        )
        self._pending.append(item)

    def _reserve(self, group: dist.ProcessGroup | None, nbytes: int) -> Lease | None:
        """A window's slot, after as many of the oldest reductions as hold what is large enough were finished."""
        if group is None or not self.windows.fits(group, nbytes):
            return None
        while (lease := self.windows.reserve(group, nbytes, "reduce-scatter")) is None:
            self._decide_later(self._finish_oldest())
        return lease

    def _reduce(  # on the lane's thread
        self,
        item: _Reduction,
        box: list[torch.Tensor],
        shard_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
        factors: tuple,
    ) -> None:
        group, flat = item.group, box.pop()  # the closure must not keep the buffer: it is freed on return
        before, after, shard_op, replica_op = factors
        with torch.no_grad():
            if before is not None and before != 1:
                flat.div_(before)
            if shard_group is not None and shard_group.size() > 1:
                output = flat.new_empty(flat.numel() // shard_group.size())
                if item.lease is not None:
                    reduce_scatter_shared(item.lease, output, shard_op, shard_group)
                else:
                    reduce_scatter(output, flat, shard_op, shard_group)
            else:
                output = flat
                if after is None and group.gradient_divide_factor is not None:  # the collective would have divided
                    output = flat / group.gradient_divide_factor
            self._account.track(output, Kind.GRAD, group.modules[0])
            del flat
            if replica_group is not None:
                if (partial := self._partial.pop(group, None)) is not None:
                    output.add_(partial)
                if not item.complete:
                    self._partial[group] = output
                    return
                dist.all_reduce(output, op=replica_op, group=replica_group)
            if group._all_reduce_hook is not None:
                group._all_reduce_hook(output)
            if after is not None and after != 1:
                output.div_(after)
            item.output = output.to(group._orig_dtype)
            self._account.track(item.output, Kind.GRAD, group.modules[0])

    def _finish_oldest(self) -> _Reduction:
        item = self._pending[0]
        item.transfer.wait()
        self._pending.popleft()
        if item.lease is not None:
            item.lease.ring.free(item.lease)
        if not item.complete:
            return item
        output, item.output = item.output, None
        offset = 0
        for i, (param, size) in enumerate(zip(item.params, item.padded_sizes, strict=True)):
            shard = torch.as_strided(output, param.sharded_size, param.contiguous_sharded_stride, offset)
            if item.present[i]:
                _accumulate(param, shard)
            else:
                item.deferred[i] = shard
            offset += size.numel() // _shard_count(item.group)
        return item

    def _decide_later(self, item: _Reduction) -> None:
        """Keep a finished reduction until the ranks have told which parameters had a gradient anywhere.

        Those of one unit are merged, so that many held micro-batches keep no more than one: where no rank had a
        gradient the shard is zero, and adds nothing.
        """
        if not item.complete:
            return
        earlier = self._newest.get(item.group)
        if earlier is None or earlier.params != item.params:
            self._undecided.append(item)
            self._newest[item.group] = item
            return
        earlier.present = [a or b for a, b in zip(earlier.present, item.present, strict=True)]
        for i, shard in item.deferred.items():
            if i in earlier.deferred:
                earlier.deferred[i].add_(shard)
            else:
                earlier.deferred[i] = shard.clone()  # a view would keep the unit's whole shard alive

    def finish(self) -> None:
        """Wait for every reduction and put its gradient in place. Runs on the training thread.

        What earlier micro-batches left is reduced: the last one may not have reached its root.
        """
        for group in list(self._unreduced | self._partial_present):
            if group.reduce_grads and self._waits(group):
                self._take_and_submit(group, used=False)
        self._finish_all()

    def _finish_all(self) -> None:
        # Queued behind the reductions, so that its latency hides behind theirs.
        exchanges = self._exchange_presence([*self._undecided, *(i for i in self._pending if i.complete)])
        while self._pending:
            self._finish_oldest()
        self._undecided.clear()
        self._newest.clear()
        for items, counts, transfer in exchanges:
            transfer.wait()
            used = iter(counts.tolist())
            for item in items:
                anywhere = [next(used) > 0 for _ in item.params]
                for i, shard in item.deferred.items():
                    if anywhere[i]:
                        _accumulate(item.params[i], shard)

    def _exchange_presence(self, items: list[_Reduction]) -> list[tuple[list[_Reduction], torch.Tensor, Transfer]]:
        """Count, for every parameter, the ranks that had a gradient; one exchange for each set of process groups."""
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[_Reduction]] = {}
        for item in items:
            by_groups.setdefault(self._peers(item.group), []).append(item)
        exchanges = []
        for groups, same in by_groups.items():
            counts = torch.tensor([flag for item in same for flag in item.present], dtype=torch.int32)
            job = functools.partial(_all_reduce_over, counts, groups)
            transfer = self._lane.submit(job, transfer="presence", unit="all", nbytes=counts.nbytes)
            exchanges.append((same, counts, transfer))
        return exchanges

    def _peers(self, group: FSDPParamGroup) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks together share this unit's gradient."""
        peers = []
        if isinstance(group.mesh_info, FSDPMeshInfo):
            peers.append(self._groups.twin(group._reduce_scatter_process_group))
        if isinstance(group.mesh_info, DDPMeshInfo):
            peers.append(self._groups.twin(group._all_reduce_process_group))
        return tuple(peers)

    def _end_of_backward(self, state: FSDPState, original) -> None:
        original()
        if not self._held:
            self._finish_all()

    def abort(self) -> None:
        """Drop every reduction in flight. The lane must be at rest or failing; partial sums are dropped too."""
        self.windows.reset()
        self._pending.clear()
        self._undecided.clear()
        self._newest.clear()
        self._partial.clear()
        self._partial_present.clear()
        self._unreduced.clear()


def _all_reduce_over(counts: torch.Tensor, groups: tuple[dist.ProcessGroup, ...]) -> None:
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(counts, group=group)


def _take_gradients(group: FSDPParamGroup, used: bool) -> tuple[list[FSDPParam], list[torch.Tensor], list[bool]]:
    """Move a group's whole gradients out of its parameters; zeros where there is none, if there is any at all.

    Returns nothing when the group took no part in this backward.
    """
    params, gradients, present = [], [], []
    for param in trainable(group):
        if not hasattr(param, "_unsharded_param"):
            return [], [], []  # never gathered: its forward did not run
        whole = param._unsharded_param
        if param.unsharded_accumulated_grad is not None:
            gradient = param.unsharded_accumulated_grad_data
            param.unsharded_accumulated_grad = None
        elif whole.grad is not None:
            gradient = param.unsharded_grad_data
            whole.grad = None
        else:
            gradient = None
        params.append(param)
        gradients.append(gradient)
        present.append(gradient is not None)
    if not (used or any(present)):
        return [], [], []
    dtype = next((g.dtype for g in gradients if g is not None), None)
    for i, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
        if gradient is None:
            zeros = torch.zeros_like(param._unsharded_param, requires_grad=False)  # shape and dtype, not data
            gradients[i] = local_tensor(zeros if dtype is None else zeros.to(dtype))
    return params, gradients, present


def _lay_out_by_shard(params: list[FSDPParam], gradients: list[torch.Tensor], world: int) -> None:
    """Put the parts for one rank behind each other where a parameter is sharded on another dim than 0."""
    for i, param in enumerate(params):
        dim = param.fsdp_placement.dim
        if dim != 0 and world > 1:
            gradients[i] = torch.cat(torch.chunk(gradients[i], world, dim=dim), dim=0)


def _shard_count(group: FSDPParamGroup) -> int:
    return group.mesh_info.shard_mesh_size if isinstance(group.mesh_info, FSDPMeshInfo) else 1


@torch.no_grad()
def _accumulate(param: FSDPParam, shard: torch.Tensor) -> None:
    """Set or add a sharded gradient, then run the parameter's post-accumulate hooks: the data is there."""
    sharded = param.sharded_param
    if sharded.grad is None:
        sharded.grad = param.to_sharded_dtensor(shard)
    else:
        local_tensor(sharded.grad).add_(shard)
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None) or {}  # what register_post_accumulate_grad_hook fills
    for hook in list(hooks.values()):
        hook(sharded)
