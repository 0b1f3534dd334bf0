"""Gathered weights that stay from one micro-batch to the next.

FSDP2 can keep them (``set_reshard_after_backward(False)``), but then modules show whole tensors between micro-batches,
and what a callback does to "the weights" there is lost. Here a backward takes a unit's whole tensors off its modules,
as a reshard does, and only does not free them: between micro-batches everybody sees the sharded weights. The next
forward first compares, bit for bit, this rank's shards with its part of what was gathered, and the ranks that share the
weights tell each other by one small all-reduce. Only units that no rank changed are used again; others are gathered
anew. So an edit by whatever way (a callback, ``.data``, a checkpoint that was loaded) is seen by the next forward.

Relied on: ``FSDPParamGroup.reshard`` is what a backward calls, found on the instance; ``_sharded_state`` decides what
``unshard`` and ``_to_sharded`` do; ``FSDPParam.all_gather_inputs`` is what a gather would send, and
``all_gather_outputs[0]`` holds the ranks' parts behind each other where the weight is sharded on dim 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from memwall_strategy.engine.fsdp import FSDPMeshInfo, FSDPParam, FSDPParamGroup, TrainingState

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KeptWeights:
    """What of one parameter group is kept over the end of a backward.

    Args:
        group: of the sharded model.

    Attributes:
        wanted: the next backward keeps the weights; where that cannot be (``can_keep``) it frees them as ever.
        hidden: the whole tensors hold their memory, while the modules show the sharded weights.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self.wanted = False
        self.hidden = False
        self._current = False

    def can_keep(self) -> bool:
        """Whether what was gathered can be compared with what would be gathered now."""
        info = self._group.mesh_info
        if not isinstance(info, FSDPMeshInfo) or info.shard_mesh_size == 1:
            return False  # nothing would be gathered: there is nothing to save
        return all(
            param.fsdp_placement.dim == 0
            and not param.offload_to_cpu
            and not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
            for param in self._group.fsdp_params
        )

    def hide(self) -> bool:
        """At the end of a backward: keep the whole tensors, out of sight. False where they must go."""
        group = self._group
        if not (self.wanted and group.is_unsharded and group._training_state == TrainingState.POST_BACKWARD):
            return False
        if not self.can_keep():
            return False
        for param in group.fsdp_params:
            param._setattr_on_modules(param.sharded_param)
            param.sharded_state = ShardedState.SHARDED
        group._sharded_state = ShardedState.SHARDED
        self.hidden, self._current = True, False
        return True

    def restore(self) -> bool:
        """Instead of a gather: show the whole tensors again. False where they are not current; they are freed then."""
        if not self._current or self._group._training_state == TrainingState.IDLE:  # IDLE: the user's own unshard
            self.free()
            return False
        self.hidden = False
        self._group._to_unsharded()
        return True

    def free(self) -> None:
        """Let go of what is hidden."""
        if self.hidden:
            self.hidden = False
            self._group._sharded_state = ShardedState.UNSHARDED  # so that the engine's own reshard frees the memory
            self._group._to_sharded()

    @torch.no_grad()
    def differs(self) -> torch.Tensor:
        """Whether this rank's shards are no longer what was gathered: a bool on the device."""
        rank, world = self._group.mesh_info.shard_mesh_rank, self._group.mesh_info.shard_mesh_size
        found = [_differs(param, rank, world) for param in self._group.fsdp_params]
        return torch.stack(found).any() if found else torch.tensor(False, device=self._group.device)


def _differs(param: FSDPParam, rank: int, world: int) -> torch.Tensor:
    now = param.all_gather_inputs[0]
    then = param.all_gather_outputs[0].view(world, -1)[rank]
    if now.dtype != then.dtype or now.numel() != then.numel():
        return torch.tensor(True, device=then.device)
    bits = _BITS.get(now.element_size())
    if bits is not None:  # so that a NaN equals itself, and -0.0 is not 0.0
        now, then = now.contiguous().view(bits), then.view(bits)
    return (now != then).any()


@torch.no_grad()
def confirm(kept: Sequence[KeptWeights]) -> None:
    """At the start of a forward: find out together which hidden weights are current, and free the others.

    Every rank that shares the weights calls it with the same units, as it would gather them.
    """
    by_group: dict[dist.ProcessGroup, list[KeptWeights]] = {}
    for each in kept:
        by_group.setdefault(each._group.mesh_info.shard_process_group, []).append(each)
    for process_group, units in by_group.items():
        flags = torch.stack([unit.differs() for unit in units]).to(torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=process_group)
        for unit, changed in zip(units, flags.tolist(), strict=True):
            unit._current = not changed
            if changed:
                unit.free()
