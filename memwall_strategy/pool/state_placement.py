"""Which optimizer state rests where: a pure decision from sizes and room to tiers.

While everything fits, everything stays on the device and nothing is paged. Otherwise a few slots on the device hold the
state of the units that are being stepped, paged in or paged out, and the rest of the room keeps blocks for good. What
is kept is spread over all units alike, block by block, because

- each unit then pages about the same share, so that a page-in hides behind the step of the unit before it;
- the slots, which are as large as the largest paged share of a unit, shrink as more is kept.

The order in which blocks are kept does not depend on the room, so that the bytes kept grow with the room, to within one
block of it.

Units that can be stepped where their state rests on the host need no slot. Where device and host have room for
everything in this way, it is done in this way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Block, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.arena import GRANULE_BYTES, Arena, aligned

_SLOTS = Arena(0)
"""Of the device: only its rule of what a block holds is used here."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a tier has for optimizer state. ``fixed_bytes``: state that is never paged (step counters)."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    fixed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StatePlacement:
    """Where each block rests.

    Attributes:
        homes: block -> tier.
        slots: how many units' state may be on its way at a time; 0 where nothing is paged.
        slot_bytes: length of each slot.
    """

    homes: dict[Block, Tier] = field(default_factory=dict)
    slots: int = 0
    slot_bytes: int = 0

    @property
    def staging_bytes(self) -> int:
        """Device bytes of all slots."""
        return self.slots * self.slot_bytes


def slot_bytes(sizes: Sequence[int]) -> int:
    """Length of a slot that holds blocks of these sizes, one behind the other, as the device's arena will hold it."""
    return _SLOTS.held(sum(aligned(size, GRANULE_BYTES) for size in sizes))


def place_state(
    units: Sequence[Mapping[Block, int]],
    room: Room,
    *,
    slots: int,
    at_home: Collection[int] = (),
    split: bool = True,
) -> StatePlacement:
    """Decide where every block of the optimizer's state rests.

    Args:
        units: for each unit, in the order in which they step, its blocks with their sizes in bytes.
        room: what the tiers have.
        slots: units whose state may be on its way at a time, at least 2: one steps while the next comes in.
        at_home: indices of the units that can be stepped where their state rests on the host.
        split: such a unit may have a part of its state on the device (the two are one kind of memory).

    Raises:
        ConfigError: no placement fits; says which block, which tier, how much is missing and which option helps.
    """
    if slots < 2:
        raise ConfigError(f"pool.optimizer_units={slots} must be at least 2: one steps while the next is paged in.")
    sizes = {block: size for unit in units for block, size in unit.items()}
    device_bytes = room.device_bytes - room.fixed_bytes
    if not sizes or sum(aligned(size, GRANULE_BYTES) for size in sizes.values()) <= device_bytes:
        return StatePlacement(dict.fromkeys(sizes, Tier.DEVICE))

    order = _spread(units)
    if at_home and (found := _without_slots(units, order, room, device_bytes, at_home, split)) is not None:
        return found
    kept, width = _keep(units, order, device_bytes, slots)
    placement = StatePlacement(dict.fromkeys(order[:kept], Tier.DEVICE), slots, width)
    short = placement.staging_bytes - device_bytes
    if kept == 0 and short > 0:
        raise ConfigError(
            f"device tier: {slots} slots for the optimizer state of a unit hold "
            f"{format_size(placement.staging_bytes)}, but {format_size(max(0, device_bytes))} are left beside weights, "
            f"gradients and buffers; {format_size(short)} ({short} bytes) are missing. Raise pool.device_budget, "
            + ("lower pool.optimizer_units, " if slots > 2 else "")
            + "or make units smaller with unit_classes=(...)."
        )
    left = {Tier.HOST: room.host_bytes, Tier.DISK: room.disk_bytes}
    tier = Tier.HOST
    for block in order[kept:]:
        held = sizes[block]
        if tier is Tier.HOST and aligned(held, GRANULE_BYTES) > left[tier]:
            tier = Tier.DISK  # for good: what is paged from disk is then spread over the units too
        if aligned(held, GRANULE_BYTES) > left[tier]:
            raise _no_room(block, order[kept:], sizes, room)
        left[tier] -= aligned(held, GRANULE_BYTES)
        placement.homes[block] = tier
    return placement


def _without_slots(
    units: Sequence[Mapping[Block, int]],
    order: Sequence[Block],
    room: Room,
    device_bytes: int,
    at_home: Collection[int],
    split: bool,
) -> StatePlacement | None:
    """Everything on device and host, what is on the host stepped there; None where that has no room."""
    held = {block: aligned(size, GRANULE_BYTES) for unit in units for block, size in unit.items()}
    unit_of = {block: index for index, unit in enumerate(units) for block in unit}
    homes = {block: Tier.DEVICE for block in order if unit_of[block] not in at_home}
    left = device_bytes - sum(held[block] for block in homes)
    if left < 0:
        return None
    parts = [[block] for block in order] if split else [list(unit) for unit in units]
    full = False
    for part in parts:
        if part and part[0] not in homes:
            needed = sum(held[block] for block in part)
            full = full or needed > left  # for good, so that what is kept grows with the room
            left -= 0 if full else needed
            homes |= dict.fromkeys(part, Tier.HOST if full else Tier.DEVICE)
    if sum(held[block] for block, home in homes.items() if home is Tier.HOST) > room.host_bytes:
        return None
    return StatePlacement(homes)


def _spread(units: Sequence[Mapping[Block, int]]) -> list[Block]:
    """The first block of every unit, then the second of every unit, and so on."""
    return [block for row in zip_longest(*units) for block in row if block is not None]


def _keep(
    units: Sequence[Mapping[Block, int]], order: Sequence[Block], device_bytes: int, slots: int
) -> tuple[int, int]:
    """How many blocks of ``order`` stay on the device beside the slots, and the length of a slot then."""
    paged = [sum(aligned(size, GRANULE_BYTES) for size in unit.values()) for unit in units]
    unit_of = {block: index for index, unit in enumerate(units) for block in unit}
    sizes = {block: size for unit in units for block, size in unit.items()}
    best, width, held = 0, _SLOTS.held(max(paged, default=0)), 0
    for count, block in enumerate(order, start=1):
        size = aligned(sizes[block], GRANULE_BYTES)
        held += size
        paged[unit_of[block]] -= size
        if held > device_bytes:
            break
        most = _SLOTS.held(max(paged))
        if held + slots * most <= device_bytes:
            best, width = count, most
    return best, width


def _no_room(block: Block, rest: Sequence[Block], sizes: Mapping[Block, int], room: Room) -> ConfigError:
    needed = sum(aligned(sizes[each], GRANULE_BYTES) for each in rest)
    missing = needed - room.host_bytes - room.disk_bytes
    tiers = "host and disk tiers" if room.disk_bytes else "host tier"
    remedy = "Raise pool.host_budget" + (" or pool.disk_budget." if room.disk_bytes else ", or give pool.disk_budget.")
    return ConfigError(
        f"{tiers}: no room for block {block}: the optimizer state that leaves the device holds {format_size(needed)}, "
        f"there are {format_size(room.host_bytes)} on the host and {format_size(room.disk_bytes)} on disk; "
        f"{format_size(max(missing, sizes[block]))} are missing. {remedy}"
    )
