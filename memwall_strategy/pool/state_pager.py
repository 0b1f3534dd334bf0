"""Optimizer state on its way: where it rests, through a slot, and back when its unit was stepped.

Units are stepped in one of two places:

- on the device: their state comes into a slot and leaves it again (``slots``);
- where their state rests on the host (``StatePager.on_host``): nothing comes or goes, the arithmetic writes the home
  itself. While it does, the table knows the blocks as being written.

A unit's first step makes its state in torch's own memory, one unit at a time: the state goes to its home before the
next unit steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch.optim import Optimizer

from memwall_strategy.core.block import Block, Tier
from memwall_strategy.core.lane import Lane
from memwall_strategy.pool.slots import SLOT_UNIT, PageIn, Slots
from memwall_strategy.pool.state_fields import StateField, UnitState
from memwall_strategy.pool.state_homes import StateHomes
from memwall_strategy.pool.state_placement import StatePlacement
from memwall_strategy.pool.store import Store
from memwall_strategy.pool.table import AddressTable

__all__ = ["SLOT_UNIT", "PageIn", "StateField", "StatePager", "UnitState"]


class StatePager:
    """Pages the state of one optimizer, unit by unit.

    Args:
        optimizer: whose ``state`` it is.
        units: in the order in which they step.
        placement: from ``place_state`` for these units.
        table, stores: of this rank; every tier of the placement must be open.
        page_in, page_out: the lanes, shared by all optimizers of the rank; None where nothing is paged.
        name: of the optimizer; tells the slots of several apart.
        at_home: names of the units that may be stepped where their state rests, if all of it that is paged rests on
            the host.

    Attributes:
        homes: where the state rests.
        on_host: indices of the units that are stepped where their state rests.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[UnitState],
        placement: StatePlacement,
        *,
        table: AddressTable,
        stores: Mapping[Tier, Store],
        page_in: Lane | None,
        page_out: Lane | None,
        name: str = "optimizer",
        at_home: Collection[str] = (),
    ) -> None:
        self.name, self.lanes = name, (page_in, page_out)
        self.homes = StateHomes(optimizer, units, placement.homes, table=table, stores=stores)
        self._writing: list[Block] = []
        self._follow(placement, at_home)

    def _follow(self, placement: StatePlacement, at_home: Collection[str]) -> None:
        homes, (page_in, page_out) = self.homes, self.lanes
        self.placement = placement
        self._slots = Slots(
            homes, placement.slots, placement.slot_bytes, page_in=page_in, page_out=page_out, name=self.name
        )
        self.on_host = frozenset(
            index
            for index, paged in enumerate(homes.paged)
            if paged and homes.units[index].name in at_home and all(homes.tier_of(b) is Tier.HOST for b in paged)
        )

    @property
    def optimizer(self) -> Optimizer:
        """Whose state it is."""
        return self.homes.optimizer

    @property
    def units(self) -> list[UnitState]:
        """In the order in which they step."""
        return self.homes.units

    @property
    def history(self) -> deque[PageIn]:
        """The last page-ins."""
        return self._slots.history

    # -- one step --

    def prefetch(self, active: Sequence[int]) -> None:
        """Start to bring in the first units that will step; does nothing for those that are there.

        From here to ``enter`` the state must not be edited: the copy on its way would not see it.
        """
        active = [index for index in active if index not in self.on_host]
        for index in active[: max(0, len(self._slots) - 1)]:
            self._slots.bring(index, active)

    def enter(self, index: int, upcoming: Sequence[int]) -> None:
        """Return when unit ``index`` can be stepped; the ones behind it are on their way.

        Args:
            index: of the unit.
            upcoming: the units that step after it, in order.
        """
        wanted = [each for each in (index, *upcoming) if each not in self.on_host]
        slots = [self._slots.bring(each, wanted) for each in wanted[: len(self._slots)]]
        if index in self.on_host:
            for each in self.homes.existing(index):
                self.homes.table.begin_write(each.block)
                self._writing.append(each.block)
        elif slots and slots[0] is not None:
            slots[0].coming.wait()
            self._slots.show(slots[0])

    def leave(self, index: int) -> None:
        """Unit ``index`` was stepped: book what is new, and send home what is paged."""
        homes, slot = self.homes, self._slots.of(index)
        for block in self._writing:
            homes.table.end_write(block)
        self._writing.clear()
        homes.book_resident(homes.units[index])
        fresh = []
        for each in homes.paged[index].values():
            if (local := homes.local(each)) is None or not local.numel():  # not made; on disk, and nobody brought it
                continue
            if not (homes.shows_home(each, local) if slot is None else self._slots.shows(slot, local)):
                fresh.append(each)
        late = [f for f in fresh if slot is None or homes.table.locate(f.block).generation == 0]
        if late:
            self._slots.send(index, late)
        if slot is not None:
            self._slots.take_over(slot, [f for f in fresh if f not in late])
            self._slots.send_home(slot)

    def rest(self) -> None:
        """Wait until nothing is on its way, and show every state tensor at its home."""
        self._slots.wait()
        self.forget()

    def forget(self) -> None:
        """Show every state tensor at its home; what is in a slot and was not sent home counts no more.

        State that an arithmetic was writing where it rests, and did not finish, counts as torn from then on.
        """
        for block in self._writing:
            self.homes.table.abort_write(block)
        self._writing.clear()
        self._slots.forget()

    def adopt(self) -> None:
        """Take over state that others made (``load_state_dict``, a constructor): unit by unit to where it rests."""
        self.rest()
        self.homes.forget_resident()  # all of it: memory that one block left may be another's now
        for index, unit in enumerate(self.homes.units):
            self.homes.convert(unit)
            self.leave(index)

    # -- between steps --

    def attach(self, stores: Mapping[Tier, Store], lanes: Sequence[Lane]) -> None:
        """Take over stores and lanes (in, out) that were opened since, before ``replace``."""
        self.homes.stores, self.lanes = stores, tuple(lanes) or (None, None)

    def replace(
        self,
        units: Sequence[UnitState],
        placement: StatePlacement,
        *,
        at_home: Collection[str] = (),
        make_room: Callable[[Tier, int], None] | None = None,
    ) -> None:
        """Place the state anew, with other units or in another room; what exists moves from home to home.

        Args:
            units, placement, at_home: as when the pager was made; every tier of the placement must be open by now.
            make_room: as for ``StateHomes.replace``.

        Raises:
            PoolFull, ConfigError: a tier has no room; the state rests where it did, and slots are as before.
        """
        self.rest()
        history = self._slots.history
        before, names = self.placement, {self.homes.units[index].name for index in self.on_host}
        self._slots.drop()
        try:
            self.homes.replace(units, placement.homes, make_room)
        except BaseException:
            self._follow(before, names)
            raise
        self._follow(placement, at_home)
        self._slots.history.extend(history)

    # -- state, as others see it --

    def fetch(self, each: StateField) -> torch.Tensor:
        """A copy of a block's bytes in ordinary memory on the CPU, wherever it rests."""
        self.rest()
        return self.homes.fetch(each)

    def whole(self, each: StateField) -> torch.Tensor:
        """A copy of a state tensor on the CPU: a DTensor where the state is one."""
        self.rest()
        return self.homes.whole(each)

    def field_of(self, parameter: torch.Tensor, key: str) -> StateField | None:
        """The field that a state tensor is; None for what is never paged."""
        return self.homes.field_of(parameter, key)

    def owns(self, block: Block) -> bool:
        """Whether a block is state of this optimizer that rests off the device."""
        return any(block in paged for paged in self.homes.paged)

    def is_paged(self, block: Block) -> bool:
        """Whether a block rests off the device now."""
        return self.homes.is_paged(block)

    def close(self, *, keep: bool) -> None:
        """Give every home and slot back.

        Args:
            keep: leave the state as ordinary tensors on the parameters' device, for which there must be room.
                Otherwise parameters whose state was paged have none any more.
        """
        self._slots.wait(keep=keep)
        self.forget()
        self.homes.close(keep=keep)
        self._slots.drop()
