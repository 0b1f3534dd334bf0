"""No forward uses weights that were gathered for an earlier one.

FSDP2 keeps gathered weights beyond a forward in three cases, and its next forward takes them as they are:

- what the root holds stays whole from a forward to its backward; without a backward (evaluation) it stays for good, and
  ``model.parameters()`` returns the whole tensors, so that an edit or a copy of "the weights" misses the sharded ones;
- a unit that was prefetched, by module order, but did not run (a skipped or reordered block) stays gathered;
- the same holds for a forward with gradients whose backward never came.

Training alone never notices. A callback that evaluates with averaged weights and puts the others back does: its next
training step computes with a mixture. Here whole weights go when a forward without gradients ends, and what an earlier
forward left is dropped when a new one starts. What the user gathered (``module.unshard()``), or asked to keep
(``set_reshard_after_backward(False)``), stays. What memwall keeps over micro-batches (``engine.kept``) is used again
only where it is still what a gather would bring.

One more trap is mended at the same moment: a unit that was frozen as a whole when FSDP2 first looked has no dtypes for
its gradients once it is thawed. They are looked up then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw  # whether autograd is running a backward

from memwall_strategy.engine.fsdp import (
    FSDPParamGroup,
    FSDPState,
    TrainingState,
    fsdp_states,
    state_groups,
    trainable,
)
from memwall_strategy.engine.kept import KeptWeights, confirm

if TYPE_CHECKING:
    from memwall_strategy.engine.early_gathers import EarlyGathers


def keep_fresh(model: nn.Module) -> None:
    """Watch every forward of a sharded model. Idempotent.

    Relies on hooks of the module calling these on the instance: ``FSDPState._root_pre_forward`` before every forward,
    which starts an iteration where ``_state_ctx.iter_forward_root`` is None; ``FSDPParamGroup.unshard`` and
    ``reshard`` and ``post_forward``.
    """
    for state in fsdp_states(model):
        if "_root_pre_forward" in vars(state):
            continue
        state._root_pre_forward = functools.partial(_start_forward, state, state._root_pre_forward)
        for group in state_groups(state):
            _Gathers(group)


class _Gathers:
    """What the engine gathered for one group, and when it must go.

    Attributes:
        left: the group's weights are whole, or on their way, because a forward left them so.
        early: what gathers ahead of the next forward (``engine.early_gathers``), if anything does.
        unchecked: gathered early, and nobody has looked yet whether the weights were edited since.
        holds: gathered early, and found to hold for the forward that starts.
        kept: what stays over the end of a backward.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self.left = self.unchecked = self.holds = False
        self.early: EarlyGathers | None = None
        self.kept = KeptWeights(group)
        group.memwall_gathers = self
        group.unshard = functools.partial(self._unshard, group.unshard)
        group.reshard = functools.partial(self._reshard, group.reshard)
        group.post_forward = functools.partial(self._post_forward, group.post_forward)

    def _unshard(self, inner: Callable[..., None], async_op: bool = False) -> None:
        group = self._group
        if self.unchecked:  # not by way of a forward's start
            self.unchecked, self.left = False, True
            self.drop()
        if self.early is not None and group._training_state == TrainingState.FORWARD:
            self.early.gathered(group)
        if self.kept.hidden and self.kept.restore():
            self.left = True
            return
        before = group._all_gather_result
        inner(async_op)
        if group._all_gather_result is not before:
            self.left = group._training_state != TrainingState.IDLE  # IDLE: the user's own module.unshard()

    def _reshard(self, inner: Callable[[], None]) -> None:
        if self.kept.hidden:
            self.kept.free()
        elif not self.kept.hide():
            inner()

    def _post_forward(self, inner: Callable[..., Any], *args: Any) -> Any:
        output = inner(*args)
        if not torch.is_grad_enabled() and not is_bw():
            self._group._to_sharded()
        return output

    def drop(self) -> None:
        """Let go of what an earlier forward left."""
        group = self._group
        if self.holds:  # it is this forward's own
            self.holds, self.left = False, True
            return
        if not self.left:
            return
        self.left = False
        if (result := group._all_gather_result) is not None:
            if isinstance(result.all_gather_work, dist.Work):
                result.all_gather_work.wait()
            if result.all_gather_event is not None:
                group.device_handle.current_stream().wait_event(result.all_gather_event)
            group._all_gather_result = None
        if group.is_unsharded and group.reshard_after_backward:
            group._to_sharded()


def _start_forward(state: FSDPState, inner: Callable[..., Any], *args: Any) -> Any:
    if state._state_ctx.iter_forward_root is None and not is_bw():
        groups = [group for other in state._state_ctx.all_states for group in state_groups(other)]  # none at first
        all_gathers = [found for group in groups if (found := getattr(group, "memwall_gathers", None)) is not None]
        if (early := next((gathers.early for gathers in all_gathers if gathers.early is not None), None)) is not None:
            early.settle(groups)
        for gathers in all_gathers:  # without those that a user sharded since
            gathers.drop()
        for group in groups:
            if group._orig_dtype is None and trainable(group):
                group._init_mp_dtypes()
        if hidden := [gathers.kept for gathers in all_gathers if gathers.kept.hidden]:
            confirm(hidden)
    return inner(*args)
