"""float32 copies of weights of a coarser type, which the optimizer steps in their stead.

An update below the resolution of ``bfloat16`` would be lost on the weight; on the copy it adds up. The copy is state
like any other, under the key ``master``: placed, paged and saved block by block. The weight is rounded from it after
each step. A weight that is no longer its copy rounded was loaded or edited since: the copy then starts anew from it,
for the whole of this rank's part of that parameter. Other state becomes float32 too; what the optimizer's constructor
made in the coarse type (Adagrad's sums) is taken over as it is.

The gradients in float32 lie in one scratch buffer, as large as the widest unit needs, made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.optimizer_parts import MASTER, needs_master
from memwall_strategy.engine.optimizer_step import spread_like, stand_in
from memwall_strategy.pool.arena import GRANULE_BYTES, aligned
from memwall_strategy.pool.device import ENGINE
from memwall_strategy.pool.slots import SLOT_UNIT
from memwall_strategy.pool.state_fields import UnitState
from memwall_strategy.pool.table import AddressTable

_CHUNK_ELEMENTS = 2**20
"""Weights compared with their copies at a time: what the comparison's temporaries take does not grow with them."""


class MasterCopies:
    """The copies of one optimizer's weights.

    Args:
        optimizer: whose.
        units: as they step.
        table: where the scratch buffer is booked.
        name: of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, units: Sequence[UnitState], table: AddressTable, name: str) -> None:
        self._optimizer, self._table = optimizer, table
        self._block = Block(SLOT_UNIT, f"{name}.float32 gradients", Kind.STAGING)
        nbytes = scratch_bytes(units)
        coarse = next((p for u in units for p in u.parameters if needs_master(p.dtype)), None)
        device = torch.device("cpu") if coarse is None else local_tensor(coarse).device
        self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if nbytes:
            table.book(self._block, nbytes, Tier.DEVICE, self._scratch.data_ptr(), arena=ENGINE)

    def stand_ins(self, unit: UnitState) -> dict[torch.Tensor, torch.nn.Parameter]:
        """What to step in the stead of a unit's coarse weights that have a gradient; the gradients are copied."""
        stands: dict[torch.Tensor, torch.nn.Parameter] = {}
        offset = 0
        for parameter in unit.parameters:
            if parameter.grad is None or not needs_master(parameter.dtype):
                continue
            local = local_tensor(parameter.grad)
            memory = self._scratch[offset : offset + local.numel() * 4].view(torch.float32).view(local.shape)
            offset += aligned(local.numel() * 4, GRANULE_BYTES)
            stands[parameter] = stand_in(parameter, self.of(parameter, local_tensor(parameter)), memory.copy_(local))
        return stands

    def of(self, parameter: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter's copy, current: made now where there is none, or anew from an edited weight.

        Args:
            parameter: whose copy.
            weight: this rank's part of its value, where the copy is.
        """
        entries = self._optimizer.state[parameter]
        if MASTER not in entries:
            entries[MASTER] = spread_like(parameter, weight.detach().to(torch.float32, copy=True))
            return local_tensor(entries[MASTER])
        master = local_tensor(entries[MASTER])
        follow_edits(master, weight.detach())
        return master

    @staticmethod
    def round(stands: dict[torch.Tensor, torch.nn.Parameter]) -> None:
        """Write the stepped copies into the weights."""
        for parameter, stand in stands.items():
            local_tensor(parameter).copy_(local_tensor(stand))

    def close(self) -> None:
        """Give the scratch buffer back."""
        if self._block in self._table:
            self._table.drop(self._block)
        self._scratch = self._scratch[:0].clone()


def follow_edits(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Set ``master`` to ``weight`` unless the weight is the master rounded. On CUDA without waiting for the device."""
    if master.dim() == 0:
        master, weight = master.view(1), weight.view(1)
    rows = max(1, _CHUNK_ELEMENTS // max(1, master[:1].numel()))
    chunks = list(zip(master.split(rows), weight.split(rows), strict=True))
    same = torch.ones((), dtype=torch.bool, device=weight.device)
    for mine, now in chunks:
        same &= (mine.to(now.dtype) == now).all()
    if weight.device.type == "cpu" and bool(same):
        return
    for mine, now in chunks:
        mine.copy_(torch.where(same, mine, now.to(mine.dtype)))


def scratch_bytes(units: Iterable[UnitState]) -> int:
    """Bytes of the float32 gradients of the widest unit."""
    return max((sum(_gradient_bytes(p) for p in unit.parameters) for unit in units), default=0)


def _gradient_bytes(parameter: torch.Tensor) -> int:
    return aligned(local_tensor(parameter).numel() * 4, GRANULE_BYTES) if needs_master(parameter.dtype) else 0
