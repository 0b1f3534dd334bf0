"""Raw copies beside page-ins: what a plain copy of the same bytes takes at the same moment.

Both copy as many bytes, in the same thread, one right after the other, in turn the one and the other first. The memory
of the raw copies is laid out like the state's (a home for each unit, a slot for each slot) and as old: with each
page-out the raw slot is copied to the raw home, in the lane's thread too. What it has not is the optimizer's arithmetic
on the slot.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from memwall_strategy.pool.state_homes import Pairs, StateHomes


class BesideRaw:
    """Watches the page-ins of an optimizer's state.

    Attributes:
        measuring: False: both are made, and nothing is noted.
        sizes, page_s, raw_s: bytes and seconds of both, page-in by page-in.
    """

    def __init__(self) -> None:
        self.measuring = False
        self.sizes: list[int] = []
        self.page_s: list[float] = []
        self.raw_s: list[float] = []
        self._homes: dict[str, torch.Tensor] = {}
        self._slots: dict[int, torch.Tensor] = {}
        self._turns: dict[str, int] = {}

    def install(self, homes: StateHomes) -> None:
        """Put raw copies beside all that comes from these homes and goes to them."""
        homes.copy_in = self._beside(homes.copy_in)  # type: ignore[method-assign]
        homes.copy_out = self._after(homes.copy_out)  # type: ignore[method-assign]

    def _beside(self, copy: Callable[..., None]) -> Callable[..., None]:
        def both(pairs: Pairs, after: Any) -> None:
            unit, nbytes, home, slot = self._raw(pairs)
            turn = self._turns[unit] = 1 - self._turns.get(unit, len(self._turns) % 2)
            calls = [lambda: copy(pairs, after), lambda: ctypes.memmove(slot, home, nbytes)]
            seconds = [0.0, 0.0]
            for which in (turn, 1 - turn):
                start = time.perf_counter()
                calls[which]()
                seconds[which] = time.perf_counter() - start
            if self.measuring:
                self.sizes.append(nbytes)
                self.page_s.append(seconds[0])
                self.raw_s.append(seconds[1])

        return both

    def _after(self, copy: Callable[..., None]) -> Callable[..., None]:
        def both(pairs: Pairs, after: Any) -> None:
            copy(pairs, after)
            _, nbytes, home, slot = self._raw(pairs)
            ctypes.memmove(home, slot, nbytes)

        return both

    def _raw(self, pairs: Pairs) -> tuple[str, int, int, int]:
        """The unit, how many bytes, and the addresses of its raw home and of the raw slot."""
        field, memory = pairs[0]
        unit, nbytes = field.block.unit, sum(each.nbytes for each, _ in pairs)
        at = memory.data_ptr()
        return unit, nbytes, self._room(self._homes, unit, nbytes), self._room(self._slots, at, nbytes)

    @staticmethod
    def _room(rooms: dict[Any, torch.Tensor], key: Any, nbytes: int) -> int:
        if key not in rooms or rooms[key].numel() < nbytes:
            rooms[key] = torch.ones(nbytes, dtype=torch.uint8)  # resident
        return rooms[key].data_ptr()
