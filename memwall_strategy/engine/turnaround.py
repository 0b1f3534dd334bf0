"""The backward's first gathers, started when the forward's last unit is through.

The engine asks for them when the backward starts. But what lies between the last unit and that moment, the root's own
layers and the loss, needs no link and hides them. They fill the buffers that the backward's start would fill first, so
they hold no more than it does.

When to start what is seen, not guessed: the last step tells after which unit its backward came, and which units that
backward asked for first. A step whose micro-batches differ in this, or that ran its last unit twice before a backward,
starts nothing early in the next one. Every rank sees the same, since gathers are collectives.

The weights cannot change before their use: a forward that starts first drops what is there (``engine.fresh``).

Relied on: ``FSDPState`` calls its group's ``post_forward`` and ``pre_backward`` on the instance; the latter returns at
once in the state PRE_BACKWARD; ``_prefetch_unshard`` is how the engine itself gathers ahead of a backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw  # whether autograd is running a backward

from memwall_strategy.engine.fsdp import FSDPParamGroup, TrainingState, fsdp_roots, fsdp_states, state_groups
from memwall_strategy.engine.gathered import Wrap


class Turnaround:
    """Watches where forwards turn into backwards.

    Args:
        model: sharded and watched by ``engine.fresh.keep_fresh``.
        units: how many units to gather at the turn.

    Attributes:
        started: gathers that were started at a turn.
    """

    def __init__(self, model: nn.Module, units: int) -> None:
        self.started = 0
        self._units = units
        self._forwards: Counter[FSDPParamGroup] = Counter()
        """Since the last backward."""
        self._last: FSDPParamGroup | None = None
        self._in_backward = False
        self._turns: list[tuple[FSDPParamGroup | None, list[FSDPParamGroup]]] = []
        """Of this step: the last unit before each backward, None where it had run twice, and the backward's first."""
        self._after: FSDPParamGroup | None = None
        self._first: list[FSDPParamGroup] = []
        self._wraps: list[Wrap] = []
        self._groups: list[FSDPParamGroup] = []
        roots = fsdp_roots(model)
        for state in fsdp_states(model):
            for group in state_groups(state):
                if not hasattr(group, "memwall_gathers"):
                    continue
                self._groups.append(group)
                if state._modules[0] not in roots:  # what a root holds stays gathered until its backward
                    self._wraps.append(Wrap(group, "post_forward", self._after_forward_of(group)))
                    self._wraps.append(Wrap(group, "pre_backward", self._before_backward_of(group)))

    def step_ended(self) -> None:
        """Do in the next step as this one showed."""
        turns, self._turns, self._in_backward = self._turns, [], False
        self._forwards.clear()
        same = bool(turns) and turns.count(turns[0]) == len(turns)
        self._after, first = turns[0] if same else (None, [])
        self._first = first[: self._units]

    def limit(self, units: int) -> None:
        """Gather so many units at a turn; the next step shows again which."""
        self._units = units
        self._after, self._first = None, []

    def forget(self) -> None:
        """Drop what waits for a backward that did not come; the lanes must be at rest."""
        for group in self._groups:
            if group._all_gather_result is not None:
                self._drop(group)

    def close(self) -> None:
        """Watch no more, and drop what waits for a backward; the lanes must be at rest."""
        for wrap in reversed(self._wraps):
            wrap.remove()
        self._wraps.clear()
        for group in self._groups:
            self._drop(group)
        self._after, self._first = None, []

    @staticmethod
    def _drop(group: FSDPParamGroup) -> None:
        if group.memwall_gathers.left:  # nobody waits for it, and nothing is on its way
            group._all_gather_result = None
            group.memwall_gathers.drop()

    def _after_forward_of(self, group: FSDPParamGroup) -> Callable[..., Callable[..., Any]]:
        def around(inner: Callable[..., Any]) -> Callable[..., Any]:
            def post_forward(*args: Any) -> Any:
                output = inner(*args)
                if torch.is_grad_enabled() and not is_bw():  # else an evaluation, or a recomputation
                    self._in_backward = False
                    self._last = group
                    self._forwards[group] += 1
                    if group is self._after:
                        self._start()
                return output

            return post_forward

        return around

    def _before_backward_of(self, group: FSDPParamGroup) -> Callable[..., Callable[..., Any]]:
        def around(inner: Callable[..., Any]) -> Callable[..., Any]:
            def pre_backward(*args: Any) -> Any:
                if group._training_state != TrainingState.PRE_BACKWARD:
                    self._note(group)
                return inner(*args)

            return pre_backward

        return around

    def _note(self, group: FSDPParamGroup) -> None:
        if not self._in_backward:
            self._in_backward = True
            once = self._last is not None and self._forwards[self._last] == 1
            self._turns.append((self._last if once else None, []))
            self._forwards.clear()
        _, first = self._turns[-1]
        if len(first) < self._units and group not in first:
            first.append(group)

    def _start(self) -> None:
        for group in self._first:
            at_rest = group.is_sharded and not group.memwall_gathers.kept.hidden
            if at_rest and group._all_gather_result is None and group._training_state == TrainingState.IDLE:
                group._prefetch_unshard(group, "backward")
                self.started += group._all_gather_result is not None
