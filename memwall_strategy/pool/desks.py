"""Arithmetic on the host for weights on another device: gradients and weights go down, new weights come up.

A desk is room on the host for the weights and gradients of one unit that is stepped there. There are as many as units
may be under way: while one is stepped, the next one's come down and the last one's weights go up. The optimizer steps
this rank's part of each parameter as a plain tensor on the CPU (so it must be one that treats elements alone, see
``is_elementwise``), with the fused kernel where it has one; its state stays in its home on the host. The host's
kernels are not the device's: results differ in the last digits.

What orders what:

- the copy down of a unit waits for an event behind everything that the training thread gave its stream before
  (gradients reduced and clipped), and for the copy up of the desk's former unit;
- the host's arithmetic begins after ``Transfer.wait`` of the copy down, on the thread that steps;
- the copy up is submitted after the arithmetic; it waits for an event behind whatever still reads the weights;
- ``rest``, at the end of the step, waits for every copy up: the next forward is launched after the weights arrived;
- every transfer waits only for transfers that were submitted before it, so the two lanes cannot wait in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.lane import Transfer
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.optimizer_parts import needs_master
from memwall_strategy.engine.optimizer_step import localised
from memwall_strategy.pool.arena import GRANULE_BYTES, aligned
from memwall_strategy.pool.extent import extent_of
from memwall_strategy.pool.master_copies import MasterCopies
from memwall_strategy.pool.slots import SLOT_UNIT
from memwall_strategy.pool.state_fields import UnitState
from memwall_strategy.pool.state_pager import StatePager

_FUSED = (Adam, SGD, Adagrad)
"""Have a fused kernel on the CPU; AdamW is an Adam."""


@dataclass(slots=True)
class _Sheet:
    """One parameter on a desk: its weight and gradient as they are, and the gradient in float32 where a copy steps."""

    parameter: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor
    fine: torch.Tensor | None


@dataclass(slots=True)
class _Desk:
    block: Block
    memory: torch.Tensor
    occupant: int | None = None
    sheets: list[_Sheet] = field(default_factory=list)
    coming: Transfer | None = None
    leaving: Transfer | None = None


class Desks:
    """The desks of one optimizer.

    Args:
        optimizer: whose.
        pager: of its state; the units in its ``on_host`` are stepped here.
        count: how many units may be under way, at least 2.
        masters: float32 copies, where the optimizer steps them.
    """

    def __init__(self, optimizer: Optimizer, pager: StatePager, count: int, masters: MasterCopies | None) -> None:
        self._optimizer, self._pager, self._masters = optimizer, pager, masters
        homes = pager.homes
        self._table, self._copier = homes.table, homes.stores[Tier.HOST].copier
        width = max(desk_bytes(pager.units[index], master=masters is not None) for index in pager.on_host)
        self._desks: list[_Desk] = []
        for i in range(count):
            block = Block(SLOT_UNIT, f"{pager.name}.desk{i}", Kind.STAGING)
            place = self._table.allocate(block, width, Tier.HOST)
            self._desks.append(_Desk(block, homes.stores[Tier.HOST].bytes_of(place)))

    def bring(self, indices: Sequence[int]) -> None:
        """Start to copy down what the first of these units need, for those that are stepped here and not there yet."""
        wanted = [index for index in indices if index in self._pager.on_host][: len(self._desks)]
        for index in wanted:
            if all(desk.occupant != index or desk.leaving is not None for desk in self._desks):
                free = [desk for desk in self._desks if desk.occupant not in wanted or desk.leaving is not None]
                self._bring(min(free, key=lambda d: (d.occupant is not None, d.leaving is None)), index)

    def _bring(self, desk: _Desk, index: int) -> None:
        unit, before = self._pager.units[index], desk.leaving
        desk.sheets = list(self._sheets(desk.memory, unit))
        pairs = []
        for sheet in desk.sheets:
            pairs.append((extent_of(sheet.weight), extent_of(local_tensor(sheet.parameter).detach().contiguous())))
            pairs.append((extent_of(sheet.gradient), extent_of(local_tensor(sheet.parameter.grad).contiguous())))
        after = self._pager.homes.stores[Tier.DEVICE].copier.now()

        def down() -> None:
            if before is not None:
                before.wait(exposed=False)
            self._copier.copy(pairs, after)

        desk.occupant, desk.leaving = index, None
        nbytes = sum(target.nbytes for target, _ in pairs)
        desk.coming = self._pager.lanes[1].submit(down, transfer="gradients to host", unit=unit.name, nbytes=nbytes)

    def _sheets(self, memory: torch.Tensor, unit: UnitState) -> Iterator[_Sheet]:
        offset = 0

        def cut(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            nonlocal offset
            nbytes = like.numel() * dtype.itemsize
            part = memory[offset : offset + nbytes].view(dtype).view(like.shape)
            offset += aligned(nbytes, GRANULE_BYTES)
            return part

        for parameter in unit.parameters:
            if parameter.grad is None:
                continue
            local = local_tensor(parameter)
            fine = self._masters is not None and needs_master(parameter.dtype)
            yield _Sheet(
                parameter, cut(local, local.dtype), cut(local, local.dtype), cut(local, torch.float32) if fine else None
            )

    @contextmanager
    def stepping(self, index: int) -> Iterator[dict[torch.Tensor, torch.nn.Parameter]]:
        """Around a unit's arithmetic: gives the tensors to step in its parameters' stead; sends up the new weights."""
        desk = next(desk for desk in self._desks if desk.occupant == index and desk.leaving is None)
        desk.coming.wait()
        unit = self._pager.units[index]
        stands: dict[torch.Tensor, torch.nn.Parameter] = {}
        for sheet in desk.sheets:
            if sheet.fine is None:
                stand = torch.nn.Parameter(sheet.weight)
                stand.grad = sheet.gradient
            else:
                stand = torch.nn.Parameter(self._masters.of(sheet.parameter, sheet.weight))
                stand.grad = sheet.fine.copy_(sheet.gradient)
            stands[sheet.parameter] = stand
        with localised(self._optimizer, unit.parameters), self._kernel(unit):
            yield stands
        pairs = []
        for sheet in desk.sheets:
            if sheet.fine is not None:
                sheet.weight.copy_(stands[sheet.parameter].detach())
            pairs.append((extent_of(local_tensor(sheet.parameter).detach()), extent_of(sheet.weight)))
        after = self._pager.homes.stores[Tier.DEVICE].copier.now()
        nbytes = sum(target.nbytes for target, _ in pairs)
        desk.coming = None
        desk.leaving = self._pager.lanes[0].submit(
            lambda: self._copier.copy(pairs, after), transfer="weights from host", unit=unit.name, nbytes=nbytes
        )

    @contextmanager
    def _kernel(self, unit: UnitState) -> Iterator[None]:
        """The host's fused kernel in place of the device's; what a scaler gave the device's comes along."""
        if all(local_tensor(parameter).device.type == "cpu" for parameter in unit.parameters):
            yield  # the same kind of device: the same kernel, and the same bits
            return
        groups = self._optimizer.param_groups
        held = [(group, {key: group[key] for key in ("fused", "foreach") if key in group}) for group in groups]
        own = vars(self._optimizer)
        scaler = {key: own[key] for key in ("grad_scale", "found_inf") if key in own}
        try:
            for group, options in held:
                group.update({key: key == "fused" and isinstance(self._optimizer, _FUSED) for key in options})
            own.update({k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in scaler.items()})
            yield
        finally:
            for group, options in held:
                group.update(options)
            own.update(scaler)

    def rest(self) -> None:
        """Wait until nothing is on its way: the weights are up."""
        for desk in self._desks:
            for transfer in (desk.coming, desk.leaving):
                if transfer is not None:
                    transfer.wait()
        self.forget()

    def forget(self) -> None:
        """What lies on a desk counts no more."""
        for desk in self._desks:
            desk.occupant = desk.coming = desk.leaving = None
            desk.sheets = []

    def close(self) -> None:
        """Give the desks back; nothing may be on its way."""
        for desk in self._desks:
            self._table.drop(desk.block)
        self._desks = []


def desk_bytes(unit: UnitState, *, master: bool) -> int:
    """Bytes of a desk for one unit."""
    total = 0
    for parameter in unit.parameters:
        local = local_tensor(parameter)
        total += 2 * aligned(local.numel() * local.dtype.itemsize, GRANULE_BYTES)
        if master and needs_master(local.dtype):
            total += aligned(local.numel() * 4, GRANULE_BYTES)
    return total


def can_step_on_host(optimizer: Optimizer) -> str:
    """Why an optimizer's options keep its arithmetic on the device; empty where nothing does."""
    for group in optimizer.param_groups:
        tensors: Mapping[str, object] = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        if group.get("capturable"):
            return "capturable=True keeps its counters on the device"
        if any(value.device.type != "cpu" for value in tensors.values()):
            return f"{', '.join(tensors)} of its param groups are tensors on the device"
    return ""
