"""Activations that give way when steps are short: units recompute more of them, then send them to the host.

Units go up a ladder, the first units of the forward first, since theirs are alive for longest: all units from
``keep`` to ``selective``, then all to ``recompute``, then in segments of sqrt(n), where that is predicted to hold less
(it is for very deep models: a segment brings all of its units' activations back at once).

What a step on the ladder frees is predicted from the activations that were measured while every unit kept them. Ranks
agree on the smallest, since all must take the same steps: segments gather weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from memwall_strategy.planner.activations import KEPT_BY_RECOMPUTE, KEPT_BY_SELECTIVE
from memwall_strategy.pool.activations import Activations, Mode, sqrt_plan

OFFLOADING_UNITS = 2
"""Units whose activations are on the device although all offload: one leaves while the next runs."""


@dataclass(frozen=True, slots=True)
class Rung:
    """What units do at one height of the ladder.

    Attributes:
        modes: unit -> what it does, of all that the ladder may change.
        together: segments that recompute together.
        share: part of the kept activations that is alive then, between 0 and 1.
    """

    modes: Mapping[str, Mode]
    together: tuple[tuple[str, ...], ...]
    share: float


def ladder(units: Sequence[str], *, selective: bool = True) -> list[Rung]:
    """Every height, the one where all keep first; the shares fall.

    Args:
        units: in forward order.
        selective: whether units can be.
    """
    count = len(units)
    if not count:
        return [Rung({}, (), 1.0)]
    steps = [(Mode.SELECTIVE, KEPT_BY_SELECTIVE)] if selective else []
    steps.append((Mode.RECOMPUTE, KEPT_BY_RECOMPUTE))
    rungs = [Rung(dict.fromkeys(units, Mode.KEEP), (), 1.0)]
    for mode, kept in steps:
        before = rungs[-1]
        for done in range(1, count + 1):
            modes = {**before.modes, **dict.fromkeys(units[:done], mode)}
            share = before.share + done * (kept / count - before.share / count)
            rungs.append(Rung(modes, (), share))
    segments = sqrt_plan(units)
    together = (len(segments) * KEPT_BY_RECOMPUTE + max(map(len, segments))) / count
    single = KEPT_BY_RECOMPUTE + 1 / count  # in backward, one unit's activations are there as well
    if together < single:
        rungs.append(Rung({}, segments, rungs[-1].share * together / single))
    return rungs


class RecomputeRelief:
    """Climbs the ladder.

    Args:
        activations: the units' switches.
        least: agrees on the smallest of a number over the ranks.
        chosen: units whose modes the user chose; they are left alone.
    """

    name = "recompute"
    alike = True
    remedy = ""

    def __init__(
        self, activations: Activations, least: Callable[[int], int], chosen: Callable[[], Collection[str]]
    ) -> None:
        self._activations, self._least, self._chosen = activations, least, chosen
        self._rungs: list[Rung] = []
        self._heights: list[int] = [0]
        self._freed: list[int] = []
        self.kept_bytes = 0
        """Activations of a step in which every unit kept them."""

    def measured(self, activation_bytes: int) -> None:
        """Activations that were alive at most in a step; while units keep them, the ladder's measure."""
        if self._heights[-1] == 0:
            self.kept_bytes = max(self.kept_bytes, activation_bytes)

    def relieve(self, missing_bytes: int) -> int:
        """Climb until what is missing is free, as predicted."""
        if not self._rungs:
            self._rungs = self._climbable()
        kept_bytes, height = self._least(self.kept_bytes), self._heights[-1]
        if height + 1 >= len(self._rungs):
            return 0
        if kept_bytes == 0:  # nobody measured yet (out of memory in the first step): as much as there is
            return self._climb(self._highest_single(), missing_bytes)
        start = self._rungs[height].share
        goal = next(
            (n for n in range(height + 1, len(self._rungs))
             if (start - self._rungs[n].share) * kept_bytes >= missing_bytes),
            len(self._rungs) - 1,
        )  # fmt: skip
        return self._climb(goal, math.ceil((start - self._rungs[goal].share) * kept_bytes))

    def _climbable(self) -> list[Rung]:
        units = [u for u, mode in self._activations.modes.items() if mode is Mode.KEEP and u not in self._chosen()]
        if why := self._activations.refusal(units, Mode.RECOMPUTE):
            self.remedy = why
            return [Rung({}, (), 1.0)]
        return ladder(units, selective=not self._activations.refusal(units, Mode.SELECTIVE))

    def _highest_single(self) -> int:
        return max(n for n, rung in enumerate(self._rungs) if not rung.together)

    def _climb(self, height: int, freed: int) -> int:
        self._set(height)
        self._heights.append(height)
        self._freed.append(freed)
        return freed

    def _set(self, height: int) -> None:
        rung, chosen = self._rungs[height], set(self._chosen())
        modes = {unit: mode.value for unit, mode in rung.modes.items() if unit not in chosen}
        together = [part for segment in rung.together if (part := [u for u in segment if u not in chosen])]
        self._activations.set(modes, together)

    def restore(self, room_bytes: int) -> int:
        """Come down by the last climb, where that fits into the room."""
        if not self._freed or self._freed[-1] > room_bytes:
            return 0
        self._heights.pop()
        self._set(self._heights[-1])
        return self._freed.pop()


class OffloadRelief:
    """Sends units' activations to the host, the first units first.

    Args:
        activations: the units' switches.
        least: as for ``RecomputeRelief``.
        chosen: as for ``RecomputeRelief``.
        kept_bytes: activations of a step in which every unit kept them.
    """

    name = "offload"
    alike = True
    remedy = ""

    def __init__(
        self,
        activations: Activations,
        least: Callable[[int], int],
        chosen: Callable[[], Collection[str]],
        kept_bytes: Callable[[], int],
    ) -> None:
        self._activations, self._least, self._chosen, self._kept_bytes = activations, least, chosen, kept_bytes
        self._before: list[tuple[dict[str, str], int]] = []
        self._now_bytes = 0

    def measured(self, activation_bytes: int) -> None:
        """Activations that were alive at most in the last measured step."""
        self._now_bytes = activation_bytes

    def relieve(self, missing_bytes: int) -> int:
        """Offload so many more units that what is missing is free, as predicted."""
        modes = self._activations.wanted_modes
        left = [u for u, mode in modes.items() if mode is not Mode.OFFLOAD and u not in self._chosen()]
        if not left:
            return 0
        if why := self._activations.refusal(left, Mode.OFFLOAD):
            self.remedy = why
            return 0
        unit_bytes = self._least(self._kept_bytes()) // len(modes)
        now_bytes = self._least(self._now_bytes)
        each = (now_bytes - OFFLOADING_UNITS * unit_bytes) // len(modes)
        if each <= 0 and now_bytes:
            return 0
        count = min(len(left), math.ceil(missing_bytes / each)) if now_bytes else len(left)
        freed = count * each if now_bytes else missing_bytes
        self._before.append(({unit: modes[unit].value for unit in left[:count]}, freed))
        self._activations.set(dict.fromkeys(left[:count], Mode.OFFLOAD.value))
        return freed

    def restore(self, room_bytes: int) -> int:
        """Let the units that were sent last do what they did before, where that fits into the room."""
        if not self._before or self._before[-1][1] > room_bytes:
            return 0
        modes, freed = self._before.pop()
        chosen = set(self._chosen())
        self._activations.set({unit: mode for unit, mode in modes.items() if unit not in chosen})
        return freed
