"""Slots: room on the device for the state of a few units, and what comes into it and leaves it.

Two lanes, so that a page-in never waits behind page-outs it does not need. What orders what:

- a page-in into a slot starts after the page-out of the slot's former unit ended: its transfer waits for that one, and
  shows the former unit's tensors at their home, before it writes a byte. So a state tensor always shows current bytes;
- a unit's page-out is submitted by the thread that stepped it. On CPU its arithmetic is done by then; on CUDA the copy
  waits for an event recorded behind it (``Copier.now``);
- the training thread uses a slot after ``Transfer.wait`` of its page-in, which returns when the bytes are there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.core.errors import MemwallError
from memwall_strategy.core.lane import Lane, Transfer
from memwall_strategy.pool.state_fields import StateField
from memwall_strategy.pool.state_homes import Pairs, StateHomes, offsets

SLOT_UNIT = "pool"
"""Under this unit the slots appear in the table."""

_HISTORY = 4096
"""Page-ins whose duration is remembered, for the latency figures."""


@dataclass(frozen=True, slots=True)
class PageIn:
    """One measured page-in; seconds on the lane's thread, without waiting for the slot."""

    unit: str
    bytes: int
    seconds: float


@dataclass(slots=True)
class Slot:
    """Room on the device for one unit's paged state.

    Attributes:
        occupant: index of the unit whose state is here, or on its way in or out.
        shown: index of the unit whose tensors show this slot; the page-in lane clears it when it takes the slot over.
        fields: what of the occupant is here; state that it makes while it is here goes home by itself.
        coming, leaving: the occupant's transfers; a unit that is leaving was stepped.
    """

    block: Block
    placement: Placement | None = None
    occupant: int | None = None
    shown: int | None = None
    fields: list[StateField] = field(default_factory=list)
    coming: Transfer | None = None
    leaving: Transfer | None = None


class Slots:
    """The slots of one optimizer.

    On CUDA a slot is allocated when the first page-in needs it: a unit's first step makes its state in torch's own
    memory, and there is room for one or the other.

    Args:
        homes: where the state comes from and goes to.
        count: how many.
        nbytes: length of each.
        page_in, page_out: the lanes; None where ``count`` is 0.
        name: tells the slots of several optimizers apart.

    Attributes:
        history: the last page-ins.
    """

    def __init__(
        self, homes: StateHomes, count: int, nbytes: int, *, page_in: Lane | None, page_out: Lane | None, name: str
    ) -> None:
        self.history: deque[PageIn] = deque(maxlen=_HISTORY)
        self._homes, self._in, self._out, self._nbytes = homes, page_in, page_out, nbytes
        self._slots = [Slot(Block(SLOT_UNIT, f"{name}.slot{i}", Kind.STAGING)) for i in range(count)]
        if self._slots and homes.stores[Tier.DEVICE].device.type == "cpu":  # resident as touched
            for slot in self._slots:
                self._ready(slot)

    def __len__(self) -> int:
        return len(self._slots)

    def of(self, index: int) -> Slot | None:
        """The slot in which unit ``index`` was stepped."""
        return next((slot for slot in self._slots if slot.shown == index and slot.occupant == index), None)

    def bring(self, index: int, wanted: Sequence[int]) -> Slot | None:
        """Start unit ``index``'s page-in unless it is there; None where it has nothing to page, yet or at all.

        Args:
            index: of the unit.
            wanted: the units that step next, in order; the first ones are not put out.
        """
        if not (fields := self._homes.existing(index)):
            return None
        slot = next((slot for slot in self._slots if slot.occupant == index), None)
        if slot is not None and slot.leaving is None:
            return slot
        if slot is None:
            keep = set(wanted[: len(self._slots)])
            free = [s for s in self._slots if s.occupant not in keep]
            slot = min(free, key=lambda s: (s.occupant is not None, s.leaving is not None and not s.leaving.done()))
        before, former = slot.leaving, slot.shown
        pairs = self.layout(slot, index, fields)
        after = self._homes.stores[Tier.DEVICE].copier.now()  # torch may have taken the memory from pending work
        nbytes, name = sum(each.nbytes for each in fields), self._homes.units[index].name

        def page_in() -> None:
            if before is not None:
                before.wait(exposed=False)
            if former is not None:
                self._homes.show_homes(former)
                slot.shown = None
            start = time.perf_counter()
            self._homes.copy_in(pairs, after)
            self.history.append(PageIn(name, nbytes, time.perf_counter() - start))

        slot.occupant, slot.fields, slot.leaving = index, fields, None
        slot.coming = self._in.submit(page_in, transfer="page-in", unit=name, nbytes=nbytes)
        return slot

    def show(self, slot: Slot) -> None:
        """Let the occupant's state tensors show the slot."""
        for each, memory in self.layout(slot, slot.occupant, slot.fields):
            if (local := self._homes.local(each)) is not None:
                local.data = memory.view(each.dtype).view(each.shape)
        slot.shown = slot.occupant

    def shows(self, slot: Slot, local: torch.Tensor) -> bool:
        """Whether a state tensor shows the slot, and not memory that the optimizer made."""
        memory = self._homes.stores[Tier.DEVICE].bytes_of(slot.placement)
        return memory.data_ptr() <= local.data_ptr() < memory.data_ptr() + memory.numel()

    def take_over(self, slot: Slot, fresh: Sequence[StateField]) -> None:
        """What the optimizer replaced (it made a new tensor instead of writing into the old) goes into the slot."""
        for each, memory in self.layout(slot, slot.occupant, fresh):
            view = memory.view(each.dtype).view(each.shape)
            view.copy_(self._homes.contiguous(each))
            self._homes.local(each).data = view

    def send_home(self, slot: Slot) -> None:
        """Start the page-out of the occupant, which was stepped."""
        pairs = self.layout(slot, slot.occupant, slot.fields)
        slot.coming = None
        slot.leaving = self._page_out(self._homes.units[slot.occupant].name, pairs)

    def send(self, index: int, fields: Sequence[StateField]) -> None:
        """Send home state that torch just allocated, and wait: only one unit's may be there twice."""
        pairs = [(each, self._homes.contiguous(each)) for each in fields]
        self._page_out(self._homes.units[index].name, pairs).wait()
        for each in fields:
            self._homes.show_home(each)

    def _page_out(self, unit: str, pairs: Pairs) -> Transfer:
        after = self._homes.stores[Tier.DEVICE].copier.now()
        nbytes = sum(each.nbytes for each, _ in pairs)
        return self._out.submit(
            lambda: self._homes.copy_out(pairs, after), transfer="page-out", unit=unit, nbytes=nbytes
        )

    def wait(self, *, keep: bool = True) -> None:
        """Wait until nothing is on its way.

        Args:
            keep: False where what failed is given up.
        """
        for slot in self._slots:
            for transfer in (slot.coming, slot.leaving):
                if transfer is not None:
                    with suppress(*(() if keep else (MemwallError,))):
                        transfer.wait()

    def forget(self) -> None:
        """Show every state tensor at its home; what is in a slot and was not sent home counts no more."""
        for slot in self._slots:
            if slot.shown is not None:
                self._homes.show_homes(slot.shown)
            slot.occupant = slot.shown = slot.coming = slot.leaving = None

    def drop(self) -> None:
        """Give the slots' memory back; nothing may be in them."""
        for slot in self._slots:
            if slot.placement is not None:
                self._homes.table.drop(slot.block)
        self._slots = []

    def layout(self, slot: Slot, index: int, fields: Iterable[StateField]) -> Pairs:
        """Each field with its bytes in the slot; offsets depend on the unit only, not on which fields exist."""
        memory = self._homes.stores[Tier.DEVICE].bytes_of(self._ready(slot))
        begin, _ = offsets(self._homes.paged[index].values())
        return [(f, memory[begin[f.block] : begin[f.block] + f.nbytes]) for f in fields]

    def _ready(self, slot: Slot) -> Placement:
        if slot.placement is None:
            slot.placement = self._homes.table.allocate(slot.block, self._nbytes, Tier.DEVICE)
        return slot.placement
