"""Optimizer state that is given other homes between two steps, unit by unit; a part of ``StatePager``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import PoolFull
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.pool.state_placement import StatePlacement

if TYPE_CHECKING:
    from memwall_strategy.pool.state_pager import StateField, StatePager

MakeRoom = Callable[[Tier, int], None]


def replace(pager: StatePager, placement: StatePlacement, slots: list, make_room: MakeRoom | None) -> None:
    """Move what exists from home to home.

    Args:
        pager: at rest.
        placement: the new one, for the same units.
        slots: the new ones, without memory.
        make_room: called with a tier and bytes when a unit's blocks find no room there, before a second try.
    """
    table, before = pager._table, pager.placement.homes
    for slot in pager._slots:
        if slot.placement is not None:
            table.drop(slot.block)
    pager.placement, pager._slots = placement, slots
    for index, unit in enumerate(pager.units):
        moving = [f for f in unit.fields.values() if f.nbytes and before[f.block] is not placement.homes[f.block]]
        data = {f.block: _take(pager, f, before[f.block]) for f in moving}
        pager._paged[index] = {
            b: f for b, f in unit.fields.items() if placement.homes[b] is not Tier.DEVICE and f.nbytes
        }
        for tier in (Tier.HOST, Tier.DISK):
            here = [f for f in moving if placement.homes[f.block] is tier]
            _allocate(pager, {f.block: f.nbytes for f in here}, tier, make_room)
        away = [(f, data[f.block]) for f in moving if placement.homes[f.block] is not Tier.DEVICE]
        away = [(f, held) for f, held in away if held is not None]
        pager._copy_out(away, pager._stores[Tier.DEVICE].copier.now())
        for each, _ in away:
            pager._show_home(each)
        for each in moving:
            if placement.homes[each.block] is Tier.DEVICE and (held := data[each.block]) is not None:
                local = pager._local(each)
                local.data = held.to(local_tensor(each.parameter).device)
                pager._book_on_device(each.block, local)
    if slots and pager._stores[Tier.DEVICE].device.type == "cpu":
        for slot in slots:
            pager._ready(slot)


def _take(pager: StatePager, each: StateField, home: Tier) -> torch.Tensor | None:
    """A block's bytes, its home given back; None where there are none yet."""
    table, local, data = pager._table, pager._local(each), None
    if local is not None and home is Tier.DEVICE:
        data = local.contiguous()
    elif local is not None and table.locate(each.block).generation > 0:
        data = pager.fetch(each)
    if each.block in table:
        table.drop(each.block)
        pager._booked.discard(each.block)
    return data


def _allocate(pager: StatePager, sizes: dict[Block, int], tier: Tier, make_room: MakeRoom | None) -> None:
    if not sizes:
        return
    try:
        pager._table.allocate_group(sizes, tier)
    except PoolFull:
        if make_room is None:
            raise
        make_room(tier, 2 * sum(sizes.values()) + 4096)  # with room for alignment
        pager._table.allocate_group(sizes, tier)


def slot_blocks(name: str, count: int, unit: str) -> list[Block]:
    """The slots' addresses in the table."""
    return [Block(unit, f"{name}.slot{i}", Kind.STAGING) for i in range(count)]
