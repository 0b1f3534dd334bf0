"""Raw copies in turn with page-ins: what a plain copy of the same bytes takes in the same place.

Before every other page-in of a unit the same thread copies the unit's state from the same home into the same slot with
plain ``memmove``; that is measured instead of the page-in, which follows and finds warm memory. So both are measured on
the same memory, as old, with the same neighbours at work, and as often.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from memwall_strategy.pool.arena import GRANULE_BYTES
from memwall_strategy.pool.state_homes import Pairs, StateHomes


class BesideRaw:
    """Watches the page-ins of an optimizer's state.

    Attributes:
        measuring: False: both are made, and nothing is noted.
        page_ins, raw: bytes and seconds of each.
    """

    def __init__(self) -> None:
        self.measuring = False
        self.page_ins: list[tuple[int, float]] = []
        self.raw: list[tuple[int, float]] = []
        self._raw_next: dict[str, bool] = {}

    def install(self, homes: StateHomes) -> None:
        """Measure all that comes from these homes."""
        copy = homes.copy_in

        def measured(pairs: Pairs, after: Any) -> None:
            unit, nbytes = pairs[0][0].block.unit, sum(field.nbytes for field, _ in pairs)
            raw = raw_copy(homes, pairs)  # in both turns: it must not tell them apart
            if self._turn(unit):
                self._note(self.raw, nbytes, raw)
                copy(pairs, after)
            else:
                self._note(self.page_ins, nbytes, lambda: copy(pairs, after))

        homes.copy_in = measured  # type: ignore[method-assign]

    def _turn(self, unit: str) -> bool:
        now = self._raw_next.get(unit, len(self._raw_next) % 2 == 0)
        self._raw_next[unit] = not now
        return now

    def _note(self, noted: list[tuple[int, float]], nbytes: int, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        if self.measuring:
            noted.append((nbytes, seconds))


def raw_copy(homes: StateHomes, pairs: Pairs) -> Callable[[], None]:
    """The copy of a unit's state from its home on the host into memory, in as few pieces as it lies in."""
    pieces: list[tuple[int, int, int]] = []
    for field, memory in pairs:
        home = homes.table.readable(field.block)
        pieces.append((memory.data_ptr(), homes.stores[home.tier].extent_of(home).address, field.nbytes))
    joined: list[list[int]] = []
    for to, at, nbytes in sorted(pieces):
        if joined and to - joined[-1][0] == at - joined[-1][1] and to - sum(joined[-1][::2]) < GRANULE_BYTES:
            joined[-1][2] = to + nbytes - joined[-1][0]  # what lies between is padding
        else:
            joined.append([to, at, nbytes])

    def run() -> None:
        for to, at, nbytes in joined:
            ctypes.memmove(to, at, nbytes)

    return run
