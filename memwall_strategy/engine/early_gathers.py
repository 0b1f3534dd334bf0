"""The first gathers of the next iteration, started while the optimizer still steps.

A forward cannot start before its first units are whole. Their new weights are there as soon as the optimizer has
stepped them; what comes until the forward (the other units' steps, hooks, loggers, the next batch) hides their gathers.
They fill the buffers that the forward would fill first, so they hold no more than its start does.

Nothing stale is read. Between step and forward anybody may edit the weights, even through ``.data``, which leaves no
trace but the numbers. So the forward's start compares, bit by bit, each rank's own part of a buffer with what a gather
would send now (1/ranks of the unit's bytes), and the ranks agree in one small all-reduce: a buffer whose unit was
edited on any rank is dropped and gathered anew on all of them. Whatever else asks for such a unit first
(``module.unshard()``, a backward without a forward) drops the buffer, see ``engine.fresh``.

The order on the lane is the same on every rank: that in which the last forward gathered, and unit by unit only as far
as every unit before it in that order was stepped.

The global norm of gradients changes nothing here: clipping comes before the first step, so the ordinary order is kept.
A speculative step before the norm is known could hide no more than the norm's own exchange and the optimizer's
arithmetic, and would hold a second copy of weights and state; see README for the figure.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_param_all_gather_inputs

from memwall_strategy.core.lane import Lane, Transfer
from memwall_strategy.engine.fsdp import (
    FSDPMeshInfo,
    FSDPParamGroup,
    TrainingState,
    fsdp_states,
    group_name,
    state_groups,
)
from memwall_strategy.engine.lane_groups import LaneGroups

EDITS_IN_A_ROW = 3
"""After so many iterations in which its weights were edited between step and forward, a unit is gathered early no more:
every such gather is made twice."""


class EarlyGathers:
    """Starts gathers ahead of the next forward, and looks whether they still hold when it starts.

    Args:
        model: sharded and watched by ``engine.fresh.keep_fresh``.
        lane, groups: where the ranks agree; its collectives must be submitted in the same order on every rank.
        units: how many parameter groups to gather early, the root's included.

    Attributes:
        dropped: buffers that were not used because the weights were edited.
    """

    def __init__(self, model: nn.Module, lane: Lane, groups: LaneGroups, *, units: int) -> None:
        self.dropped = 0
        self._lane, self._groups, self._units = lane, groups, units
        self._order: list[FSDPParamGroup] = []
        self._stepped: set[str] = set()
        self._started = 0
        self._edits: Counter[FSDPParamGroup] = Counter()
        names = {module: name for name, module in model.named_modules()}
        self._watched: dict[FSDPParamGroup, str] = {
            group: group_name(group, names) or "root"
            for state in fsdp_states(model)
            for group in state_groups(state)
            if hasattr(group, "memwall_gathers")
        }
        for group in self._watched:
            group.memwall_gathers.early = self

    def close(self) -> None:
        """Drop what is there; the lanes must be at rest."""
        self.forget()
        for group in self._watched:
            group.memwall_gathers.early = None

    def limit(self, units: int) -> None:
        """Gather so many groups early from the next forward on; nothing may be on its way."""
        self._units = units
        self._order.clear()

    # -- what others tell --

    def gathered(self, group: FSDPParamGroup) -> None:
        """The engine needs ``group`` in a forward now: in the next iteration it will, too, in this order."""
        if len(self._order) < self._units and group not in self._order:
            self._order.append(group)

    def unit_stepped(self, name: str) -> None:
        """Unit ``name`` has its new weights, outside of any backward: gather as far as the order allows."""
        self._stepped.add(name)
        while self._started < len(self._order) and self._watched[self._order[self._started]] in self._stepped:
            self._start_next()

    def step_ended(self) -> None:
        """Every unit has its new weights."""
        while self._started < len(self._order):
            self._start_next()
        self._stepped.clear()

    def pending(self) -> bool:
        """Whether gathers were started that no forward has looked at yet."""
        return any(group.memwall_gathers.unchecked for group in self._watched)

    def forget(self) -> None:
        """After an aborted step or before the end: nothing that was gathered early is used."""
        for group in self._watched:
            if group.memwall_gathers.unchecked:
                group.memwall_gathers.unchecked = False
                group._all_gather_result = None
        self._stepped.clear()
        self._started = 0

    def _start_next(self) -> None:
        group = self._order[self._started]
        self._started += 1
        if self._edits[group] < EDITS_IN_A_ROW and _can_start(group):
            group._prefetch_unshard(group, "forward")
            group.memwall_gathers.unchecked = group._all_gather_result is not None

    # -- the next forward --

    def settle(self, groups: Collection[FSDPParamGroup]) -> None:
        """A forward of ``groups`` starts: drop the buffers of those that were edited on any rank since their gather."""
        self._started = 0
        self._stepped.clear()
        self._order = [group for group in self._order if group not in groups]
        by_ranks: dict[dist.ProcessGroup, list[FSDPParamGroup]] = {}
        for group in groups:
            if group in self._watched and group.memwall_gathers.unchecked:
                ranks = self._groups.twin(group.mesh_info.shard_process_group)
                by_ranks.setdefault(ranks, []).append(group)
        agreed = [(same, *self._agree(same, ranks)) for ranks, same in by_ranks.items()]
        for same, edited, transfer in agreed:
            transfer.wait()
            for group, was_edited in zip(same, edited.tolist(), strict=True):
                group.memwall_gathers.unchecked = False
                if was_edited:
                    self.dropped += 1
                    self._edits[group] += 1
                    group.memwall_gathers.left = True  # what goes when a forward starts
                else:
                    self._edits[group] = 0
                    group.memwall_gathers.holds = True

    def _agree(self, groups: Iterable[FSDPParamGroup], ranks: dist.ProcessGroup) -> tuple[torch.Tensor, Transfer]:
        with torch.inference_mode(False):  # the lane's thread writes into it, and an evaluation may start here
            edited = torch.tensor([not _holds(group) for group in groups], dtype=torch.int32)
        job = functools.partial(dist.all_reduce, edited, op=dist.ReduceOp.MAX, group=ranks)
        return edited, self._lane.submit(job, transfer="edited", unit="all", nbytes=edited.nbytes)


def _can_start(group: FSDPParamGroup) -> bool:
    """Whether the group is at rest, shared by several ranks, and gathers its shards as they are."""
    return (
        isinstance(group.mesh_info, FSDPMeshInfo)
        and group.mesh_info.shard_mesh_size > 1
        and group.is_sharded
        and not group.memwall_gathers.kept.hidden
        and group._all_gather_result is None
        and group._training_state == TrainingState.IDLE
        and not any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in group.fsdp_params)
    )


@torch.no_grad()
def _holds(group: FSDPParamGroup) -> bool:
    """Whether this rank's part of the buffer is, bit by bit, what it would send now."""
    result = group._all_gather_result
    process_group = group.mesh_info.shard_process_group
    sent = result.all_gather_output.view(process_group.size(), -1)[process_group.rank()]
    now = chain.from_iterable(_get_param_all_gather_inputs(group.fsdp_params))
    return all(_same_bits(a, b) for a, b in zip(sent.split(result.all_gather_input_split_sizes), now, strict=True))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Numbers compare as numbers (NaN differs from itself, -0 equals 0), and several times slower than bytes."""
    b = b.contiguous()
    return a.nbytes == b.nbytes and not _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes)


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
