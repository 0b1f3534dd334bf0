"""Bring a sharded model back to rest after a forward or backward that was aborted half way.

``FSDPModule.reset_iter_state`` (torch >= 2.12) reshards and clears the trackers, but leaves whole gradients on the
unsharded parameters: the next backward would add to them (its first gradient came out doubled). It also waits again for
a gather that already failed. Both are mended here, and torch 2.11, which has no such method, is reset by hand.
"""

from __future__ import annotations

from torch import nn

from memwall_strategy.engine.fsdp import (
    FSDPParamGroup,
    TrainingState,
    fsdp_roots,
    fsdp_state,
    fsdp_states,
    own_states,
    state_groups,
)
from memwall_strategy.engine.lanes import FsdpLanes


def reset_aborted_step(model: nn.Module, lanes: FsdpLanes | None = None) -> int:
    """Drop everything the aborted step left: pending gathers and reductions, partial sums, whole gradients.

    Sharded gradients (``parameter.grad``) stay: whether earlier micro-batches still count is the caller's decision.

    Returns:
        How many stale whole gradients were dropped.
    """
    if lanes is not None:
        lanes.rest()
    dropped = 0
    for state in fsdp_states(model):
        for group in state_groups(state):
            # The gather's work failed or its peers are gone: waiting for it again would only raise again.
            group._all_gather_result = None
            if (gathers := getattr(group, "memwall_gathers", None)) is not None:
                gathers.kept.free()  # other ranks may have got further, and keep other units
            dropped += _drop_whole_gradients(group)
    for root in fsdp_roots(model):
        if hasattr(root, "reset_iter_state"):
            if fsdp_state(root)._is_root:  # None until the first forward: then there is nothing to reset
                root.reset_iter_state()
        else:
            _reset_by_hand(root)
    return dropped


def _drop_whole_gradients(group: FSDPParamGroup) -> int:
    dropped = 0
    for param in group.fsdp_params:
        whole = getattr(param, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            whole.grad = None
            dropped += 1
        if param.unsharded_accumulated_grad is not None:
            param.unsharded_accumulated_grad = None
            dropped += 1
    return dropped


def _reset_by_hand(root: nn.Module) -> None:
    """torch 2.11: the same end state as ``reset_iter_state``. CPU only needs no stream to wait for; on CUDA the
    caller has synchronized the device, because an aborted step is not a hot path."""
    states = own_states(root)
    context = fsdp_state(root)._comm_ctx
    context.all_gather_state = None
    context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for state in states:
        state._training_state = TrainingState.IDLE
        for group in state_groups(state):
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    shared = fsdp_state(root)._state_ctx
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
