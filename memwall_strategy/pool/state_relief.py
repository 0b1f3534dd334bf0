"""Optimizer state that leaves the device when steps are short, and comes back when there is room."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memwall_strategy.core.block import Block, Tier
from memwall_strategy.core.errors import ConfigError, PoolFull
from memwall_strategy.pool.arena import GRANULE_BYTES, aligned
from memwall_strategy.pool.state_placement import StatePlacement


def held_bytes(placement: StatePlacement, sizes: Mapping[Block, int]) -> int:
    """Device bytes of a placement: what stays there, and the slots that the rest passes through."""
    kept = (aligned(sizes[b], GRANULE_BYTES) for b, home in placement.homes.items() if home is Tier.DEVICE)
    return sum(kept) + placement.staging_bytes


def lowest(
    place: Callable[[int], StatePlacement], low_bytes: int, high_bytes: int
) -> tuple[StatePlacement | None, str]:
    """The placement in the least room from ``low_bytes`` up to ``high_bytes`` that is possible, to the granule.

    Args:
        place: decides in so much room, or raises ``ConfigError``; what is possible in some room is so in more.
        low_bytes, high_bytes: bounds.

    Returns:
        The placement, None where none is possible; and what stood in the way of a smaller one.
    """
    found, why = None, ""
    low, high = low_bytes, high_bytes
    try:
        return place(low), ""
    except ConfigError as error:
        why = str(error)
    while high - low > GRANULE_BYTES or found is None:
        middle = high if found is None else (low + high) // 2
        try:
            found, high = place(middle), middle
        except ConfigError as error:
            if found is None:
                return None, str(error)
            low, why = middle, str(error)
    return found, why


class StateRelief:
    """Pages more of the optimizers' state.

    Args:
        place: device bytes for state -> placement, from ``place_state``.
        move: gives the state these places.
    """

    name = "optimizer state"
    alike = False
    """Each rank pages what it misses itself: results do not depend on it, and nobody waits for it."""
    may_move = True
    """False while an optimizer that is not pooled is inside its ``step``."""

    def __init__(self, place: Callable[[int], StatePlacement], move: Callable[[StatePlacement], None]) -> None:
        self._place, self._move = place, move
        self._sizes: dict[Block, int] = {}
        self._placements: list[StatePlacement] = []
        self._why = ""

    @property
    def remedy(self) -> str:
        """Which option lets more state leave; empty where all of it has, or only slots are left."""
        return self._why if "no room for block" in self._why else ""

    @property
    def held_bytes(self) -> int:
        """Device bytes of the state as it is placed now."""
        return held_bytes(self._placements[-1], self._sizes) if self._placements else 0

    def start(self, placement: StatePlacement, sizes: Mapping[Block, int]) -> None:
        """The state was placed at set-up: what gave way before is forgotten."""
        self._placements, self._sizes, self._why = [placement], dict(sizes), ""

    def relieve(self, missing_bytes: int) -> int:
        """Place the state in a room that is smaller by what is missing, or as small as can be."""
        if not self._placements or not self._sizes or not self.may_move:
            return 0
        held = held_bytes(self._placements[-1], self._sizes)
        placement, self._why = lowest(self._place, max(0, held - missing_bytes), held)
        freed = 0 if placement is None else held - held_bytes(placement, self._sizes)
        if freed <= 0 or not self._moved(placement):
            return 0
        self._placements.append(placement)
        return freed

    def restore(self, room_bytes: int) -> int:
        """Give the state the places that it had before it gave way last, where they fit into the room."""
        if len(self._placements) < 2:
            return 0
        now, before = (held_bytes(each, self._sizes) for each in (self._placements[-1], self._placements[-2]))
        if before - now > room_bytes or not self._moved(self._placements[-2]):
            return 0
        self._placements.pop()
        return before - now

    def _moved(self, placement: StatePlacement) -> bool:
        try:
            self._move(placement)
        except (PoolFull, ConfigError) as error:  # a tier has no room after all; the state rests where it did
            self._why = str(error)
            return False
        return True
