"""Prefetch along the order in which units really run, each as far ahead as its gather needs.

Units are first prefetched by module order (``engine.sharding.set_prefetch``). Here the forwards of each step are
watched: when units ran in another order (a reordered, skipped or shared block), the lists follow it from the next step
on. Every rank sees the same order, or FSDP2 itself could not run, so nothing is exchanged for this.

Where more than one unit ahead is allowed, the times of the first steps say how far each must go: a large unit behind
small ones is started early, and where a gather is hidden by the unit before it nothing more is held ahead. These times
differ from rank to rank; those that share the weights take the longest gather and the shortest compute of all, in one
small all-reduce.

Small neighbours are not put into one collective: FSDP2 gathers exactly one parameter group at a time into one flat
buffer and copies it out for that group's own parameters. To gather several modules together, shard them together
(``fully_shard([a, b])``, or a larger class in ``unit_classes``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw  # whether autograd is running a backward

from memwall_strategy.engine.fsdp import (
    FSDPMeshInfo,
    FSDPParamGroup,
    fsdp_roots,
    fsdp_state,
    fsdp_states,
    own_states,
    state_groups,
)
from memwall_strategy.engine.sharding import prefetch_along

TIMED_STEPS = 3
"""Steps of one order before its times are trusted; the last one's count."""

MARGIN = 1.5
"""A gather must fit into the compute before it so many times: transfers share the link with reductions."""


def units_ahead(gather_s: Sequence[float], compute_s: Sequence[float], most: int) -> list[int]:
    """How many units each must prefetch, so that every gather is there when its unit starts, if that can be.

    The gathers run one after the other on one lane. From the last to the first, each must start so early that it ends
    before its unit starts and before the next gather's latest start.

    Args:
        gather_s, compute_s: of each unit, in the order in which they run.
        most: never more than this, never less than one.
    """
    count = len(gather_s)
    starts = [sum(compute_s[:i]) for i in range(count + 1)]  # when a unit would start if nothing waited
    ahead = [1] * count
    latest = float("inf")
    for unit in reversed(range(count)):
        latest = min(starts[unit], latest) - gather_s[unit] * MARGIN
        for before in range(max(0, unit - most), unit):
            if starts[before + 1] > latest:  # the one after it starts too late, so this one has to ask
                ahead[before] = max(ahead[before], unit - before)
                break
    return [min(depth, most) for depth in ahead]


class GatherOrder:
    """Watches in which order the units of a model run, and how long they take.

    Args:
        model: sharded, prefetched by module order.
        most: units gathered ahead at most; 0: no prefetch, nothing to do.
        gather_seconds: time of a group's last gather.
        largest: puts into each number of a tensor the largest of the ranks of a process group.

    Attributes:
        ahead: module names of units -> how many they prefetch, as last decided; empty before.
    """

    def __init__(
        self,
        model: nn.Module,
        most: int,
        gather_seconds: Callable[[FSDPParamGroup], float],
        largest: Callable[[torch.Tensor, dist.ProcessGroup], None],
    ) -> None:
        self._most, self._gather_seconds, self._largest = most, gather_seconds, largest
        self._names = {module: name for name, module in model.named_modules()}
        self.ahead: dict[str, int] = {}
        self._roots = fsdp_roots(model)
        self._ran: dict[FSDPParamGroup, float] = {}
        """Group -> seconds of its own compute in this step's first forward; in order."""
        self._last: tuple[FSDPParamGroup, float] | None = None
        self._steps = 0
        self._watched: list[FSDPParamGroup] = []
        self._applied: list[FSDPParamGroup] = []
        if not most:
            return
        for state in fsdp_states(model):
            for group in state_groups(state):
                self._watched.append(group)
                # FSDPState._pre_forward calls fsdp_param_group.pre_forward(...): an attribute of the instance wins.
                group.pre_forward = functools.partial(self._pre_forward, group, group.pre_forward)
        self._applied = list(self._watched)

    def limit(self, most: int) -> None:
        """Gather so far ahead at most from the next forward on. Does nothing where prefetch was off from the start."""
        if self._watched:
            self._most, self._steps, self.ahead = most, 0, {}
            self._apply([most] * len(self._applied))

    def close(self) -> None:
        """Watch no more."""
        for group in self._watched:
            group.__dict__.pop("pre_forward", None)
        self._watched = []

    def _pre_forward(self, group: FSDPParamGroup, inner: Callable[..., Any], *args: Any) -> Any:
        watching = torch.is_grad_enabled() and not is_bw()
        if watching and self._last is not None:
            before, since_s = self._last
            self._ran[before] = self._ran[before] or time.perf_counter() - since_s
        output = inner(*args)
        if watching:
            self._last = None
            if group not in self._ran:
                self._ran[group] = 0.0
                self._last = group, time.perf_counter()
        return output

    def step_ended(self) -> None:
        """Let the lists follow this step's order, and its times once they can be trusted."""
        ran, self._ran, self._last = self._ran, {}, None
        if not ran:
            return
        order = list(ran)
        if order != self._applied:
            self._applied, self._steps = order, 0
            self._apply([self._most] * len(order))
        self._steps += 1
        if self._most > 1 and self._steps == TIMED_STEPS:
            self._decide(ran)

    def _decide(self, ran: dict[FSDPParamGroup, float]) -> None:
        shared = {
            tuple(dist.get_process_group_ranks(process_group)): process_group
            for group in ran
            if isinstance(group.mesh_info, FSDPMeshInfo) and (process_group := group.mesh_info.shard_process_group)
        }
        if len(shared) != 1:
            return  # nothing is gathered, or units are shared by different ranks, which could decide differently
        times = torch.tensor([[self._gather_seconds(group) for group in ran], [-each for each in ran.values()]])
        self._largest(times, *shared.values())
        ahead = units_ahead(times[0].tolist(), (-times[1]).tolist(), self._most)
        self.ahead = {self._names[group.modules[0]]: depth for group, depth in zip(ran, ahead, strict=True)}
        self._apply(ahead)

    def _apply(self, ahead: Sequence[int]) -> None:
        for root in self._roots:
            mine = [state._modules[0] for state in own_states(root)]
            depths: dict[nn.Module, int] = {}
            if not state_groups(fsdp_state(root)):
                depths[root] = self._most
            for group, depth in zip(self._applied, ahead, strict=True):
                if (module := group.modules[0]) in mine:
                    depths[module] = max(depth, depths.get(module, 0))
            for module in mine:
                if module not in depths:  # it did not run
                    module.set_modules_to_forward_prefetch([])
                    module.set_modules_to_backward_prefetch([])
            prefetch_along(list(depths), list(depths.values()), root)
