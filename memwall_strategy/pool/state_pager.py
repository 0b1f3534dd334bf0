"""Optimizer state on its way: from where it rests into a slot on the device, and back when its unit was stepped.

The state's tensors keep their identity; what changes is the memory behind them (``Tensor.data``). At rest it is the
block's home: the device, the host's arena, or nothing at all while the block is on disk (no elements, so that whoever
reads it by mistake gets an error and not old numbers). While its unit is in a slot it is the slot.

Two lanes, so that a page-in never waits behind page-outs it does not need. What orders what:

- a page-in into a slot starts after the page-out of the slot's former unit ended: its transfer waits for that one, and
  shows the former unit's tensors at their home, before it writes a byte. So a state tensor always shows current bytes;
- a unit's page-out is submitted by the thread that stepped it. On CPU its arithmetic is done by then; on CUDA the copy
  waits for an event recorded behind it (``Copier.now``);
- the training thread uses a slot after ``Transfer.wait`` of its page-in, which returns when the bytes are there.

A unit's first step makes its state in torch's own memory, one unit at a time: the state goes to its home before the
next unit steps, and slots on CUDA are allocated when the first page-in needs one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memwall_strategy.core.block import Block, Placement, Tier
from memwall_strategy.core.errors import BlockError, MemwallError
from memwall_strategy.core.lane import Lane, Transfer
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.pool.arena import GRANULE_BYTES, aligned
from memwall_strategy.pool.device import ENGINE
from memwall_strategy.pool.state_moves import MakeRoom, replace, slot_blocks
from memwall_strategy.pool.state_placement import StatePlacement
from memwall_strategy.pool.store import Store
from memwall_strategy.pool.table import AddressTable

SLOT_UNIT = "pool"
"""Under this unit the slots appear in the table."""

_HISTORY = 4096
"""Page-ins whose duration is remembered, for the latency figures."""


@dataclass(frozen=True, slots=True)
class StateField:
    """One state tensor of one parameter, whether it exists yet or not."""

    block: Block
    parameter: torch.nn.Parameter
    key: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Of this rank's part."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(slots=True)
class UnitState:
    """The state of the parameters that step together.

    Attributes:
        name: of the unit.
        parameters: in the order of the param groups.
        names: theirs.
        fields: block -> what it is.
    """

    name: str
    parameters: list[torch.nn.Parameter]
    names: list[str]
    fields: dict[Block, StateField] = field(default_factory=dict)

    def sizes(self) -> dict[Block, int]:
        """Bytes of every block."""
        return {block: each.nbytes for block, each in self.fields.items()}


@dataclass(slots=True)
class _Slot:
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


@dataclass(frozen=True, slots=True)
class PageIn:
    """One measured page-in; seconds on the lane's thread, without waiting for the slot."""

    unit: str
    bytes: int
    seconds: float


class StatePager:
    """Pages the state of one optimizer, unit by unit.

    Args:
        optimizer: whose ``state`` it is.
        units: in the order in which they step.
        placement: from ``place_state`` for these units.
        table, stores: of this rank; every tier of the placement must be open.
        page_in, page_out: the lanes, shared by all optimizers of the rank; None where nothing is paged.
        name: of the optimizer; tells the slots of several apart.
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
    ) -> None:
        self.optimizer, self.units, self.placement = optimizer, list(units), placement
        self.history: deque[PageIn] = deque(maxlen=_HISTORY)
        self._table, self._stores = table, stores
        self._in, self._out = page_in, page_out
        self._paged = [
            {block: f for block, f in unit.fields.items() if placement.homes[block] is not Tier.DEVICE and f.nbytes}
            for unit in self.units
        ]
        self._name = name
        self._slots = [_Slot(block) for block in slot_blocks(name, placement.slots, SLOT_UNIT)]
        self._nothing = torch.empty(0)
        self._fields = {(id(f.parameter), f.key): f for unit in self.units for f in unit.fields.values()}
        self._booked: set[Block] = set()
        self._entries_seen: dict[torch.nn.Parameter, int] = {}
        self._book_homes()
        if self._slots and self._stores[Tier.DEVICE].device.type == "cpu":  # resident as touched; on CUDA, see above
            for slot in self._slots:
                self._ready(slot)

    def _book_homes(self) -> None:
        for paged in self._paged:
            for tier in (Tier.HOST, Tier.DISK):
                sizes = {b: f.nbytes for b, f in paged.items() if self.placement.homes[b] is tier}
                if sizes:
                    self._table.allocate_group(sizes, tier)

    # -- one step --

    def prefetch(self, active: Sequence[int]) -> None:
        """Start to bring in the first units that will step; does nothing for those that are there.

        From here to ``enter`` the state must not be edited: the copy on its way would not see it.
        """
        for index in active[: max(0, len(self._slots) - 1)]:
            self._bring(index, active)

    def enter(self, index: int, upcoming: Sequence[int]) -> None:
        """Return when unit ``index`` can be stepped; the ones behind it are on their way.

        Args:
            upcoming: the units that step after it, in order.
        """
        wanted = [index, *upcoming]
        slots = [self._bring(each, wanted) for each in wanted[: len(self._slots)]]
        if slots and slots[0] is not None:
            slots[0].coming.wait()
            self._show_slot(slots[0])

    def leave(self, index: int) -> None:
        """Unit ``index`` was stepped: book what is new, and send home what is paged."""
        unit, paged = self.units[index], self._paged[index]
        slot = next((slot for slot in self._slots if slot.shown == index and slot.occupant == index), None)
        self._book_small(unit)
        fresh = []
        for each in unit.fields.values():
            if not each.nbytes or (local := self._local(each)) is None:
                continue
            if each.block not in paged:
                self._book_on_device(each.block, local)
            elif not self._is_ours(each, local, slot):
                fresh.append(each)
        late = [f for f in fresh if slot is None or self._table.locate(f.block).generation == 0]
        if late:
            self._first_time(unit, late)
        if slot is not None:
            self._copy_into(slot, [f for f in fresh if f not in late])
            self._send_home(slot)

    def rest(self) -> None:
        """Wait until nothing is on its way, and show every state tensor at its home."""
        for slot in self._slots:
            for transfer in (slot.coming, slot.leaving):
                if transfer is not None:
                    transfer.wait()
        self.forget()

    def forget(self) -> None:
        """Show every state tensor at its home; what is in a slot and was not sent home counts no more."""
        for slot in self._slots:
            if slot.shown is not None:
                self._show_homes(slot.shown)
            slot.occupant = slot.shown = slot.coming = slot.leaving = None

    def adopt(self) -> None:
        """Take over state that others made (``load_state_dict``, a constructor): unit by unit to where it rests."""
        self.rest()
        for index in range(len(self.units)):
            self.leave(index)

    def replace(
        self, units: Sequence[UnitState], placement: StatePlacement, *, make_room: MakeRoom | None = None
    ) -> None:
        """Place the state anew between two steps, with the same units; what exists moves from home to home."""
        self.rest()
        replace(self, placement, [_Slot(b) for b in slot_blocks(self._name, placement.slots, SLOT_UNIT)], make_room)

    def fetch(self, each: StateField) -> torch.Tensor:
        """A copy of a block's bytes in ordinary memory on the CPU, wherever it rests."""
        self.rest()
        out = torch.empty(each.shape, dtype=each.dtype)
        placement = self._table.readable(each.block)
        if placement.tier is Tier.DEVICE:
            out.copy_(self._local(each))
        else:
            self._stores[placement.tier].read([(placement, out)])
        return out

    def field_of(self, parameter: torch.Tensor, key: str) -> StateField | None:
        """The field that a state tensor is; None for what is never paged."""
        return self._fields.get((id(parameter), key))

    def whole(self, each: StateField) -> torch.Tensor:
        """A copy of a state tensor on the CPU: a DTensor where the state is one."""
        value, local = self.optimizer.state[each.parameter][each.key], self.fetch(each)
        if not isinstance(value, DTensor):
            return local
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )

    def is_paged(self, block: Block) -> bool:
        """Whether a block rests off the device now."""
        home = self.placement.homes.get(block, Tier.DEVICE)
        return home is not Tier.DEVICE and block in self._table and self._table.locate(block).generation > 0

    def close(self, *, keep: bool) -> None:
        """Give every home and slot back.

        Args:
            keep: leave the state as ordinary tensors on the parameters' device, for which there must be room.
                Otherwise parameters whose state was paged have none any more.
        """
        if keep:
            self.rest()
        else:
            for slot in self._slots:
                for transfer in (slot.coming, slot.leaving):
                    if transfer is not None:
                        with suppress(MemwallError):  # it ended, and what it moved is given up
                            transfer.wait()
            self.forget()
        for paged in self._paged:
            for block, each in paged.items():
                if (local := self._local(each)) is not None:
                    if keep and self._table.locate(block).generation > 0:
                        local.data = self.fetch(each).to(local_tensor(each.parameter).device)
                    elif not keep:
                        self.optimizer.state.pop(each.parameter)  # half a state is worse than none
                self._table.drop(block)
        for block in self._booked:
            self._table.drop(block)
        for slot in self._slots:
            if slot.placement is not None:
                self._table.drop(slot.block)
        self._slots, self._paged, self._booked = [], [], set()

    # -- slots --

    def _bring(self, index: int, wanted: Sequence[int]) -> _Slot | None:
        """Start unit ``index``'s page-in unless it is there; None where it has nothing to page, yet or at all."""
        if not (fields := self._existing(index)):
            return None
        slot = next((slot for slot in self._slots if slot.occupant == index), None)
        if slot is not None and slot.leaving is None:
            return slot
        if slot is None:
            keep = set(wanted[: len(self._slots)])
            free = [s for s in self._slots if s.occupant not in keep]
            slot = min(free, key=lambda s: (s.occupant is not None, s.leaving is not None and not s.leaving.done()))
        before, former = slot.leaving, slot.shown
        pairs = self._layout(slot, index, fields)
        after = self._stores[Tier.DEVICE].copier.now()  # torch may have taken the slot's memory from pending work
        nbytes = sum(each.nbytes for each in fields)

        def page_in() -> None:
            if before is not None:
                before.wait(exposed=False)
            if former is not None:
                self._show_homes(former)
                slot.shown = None
            start = time.perf_counter()
            self._copy_in(pairs, after)
            self.history.append(PageIn(self.units[index].name, nbytes, time.perf_counter() - start))

        slot.occupant, slot.fields, slot.leaving = index, fields, None
        slot.coming = self._in.submit(page_in, transfer="page-in", unit=self.units[index].name, nbytes=nbytes)
        return slot

    def _copy_in(self, pairs: Iterable[tuple[StateField, torch.Tensor]], after: torch.cuda.Event | None) -> None:
        by_tier: dict[Tier, list[tuple[Placement, torch.Tensor]]] = {}
        for each, target in pairs:
            home = self._table.readable(each.block)
            by_tier.setdefault(home.tier, []).append((home, target))
        for tier, wanted in by_tier.items():
            self._stores[tier].read(wanted, after)

    def _send_home(self, slot: _Slot) -> None:
        index = slot.occupant
        pairs = self._layout(slot, index, slot.fields)
        after = self._stores[Tier.DEVICE].copier.now()
        slot.coming = None
        slot.leaving = self._out.submit(
            lambda: self._copy_out(pairs, after),
            transfer="page-out",
            unit=self.units[index].name,
            nbytes=sum(each.nbytes for each, _ in pairs),
        )

    def _copy_out(self, pairs: Sequence[tuple[StateField, torch.Tensor]], after: torch.cuda.Event | None) -> None:
        for tier in (Tier.HOST, Tier.DISK):
            here = [(f, source) for f, source in pairs if self.placement.homes[f.block] is tier]
            if not here:
                continue
            with ExitStack() as stack:
                homes = [stack.enter_context(self._table.writing(each.block)) for each, _ in here]
                self._stores[tier].write(list(zip(homes, (source for _, source in here), strict=True)), after)

    def _first_time(self, unit: UnitState, fresh: Sequence[StateField]) -> None:
        """Send home state that torch just allocated, and wait: only one unit's may be there twice."""
        pairs = [(each, self._contiguous(each)) for each in fresh]
        after = self._stores[Tier.DEVICE].copier.now()
        self._out.submit(
            lambda: self._copy_out(pairs, after),
            transfer="page-out",
            unit=unit.name,
            nbytes=sum(each.nbytes for each in fresh),
        ).wait()
        for each in fresh:
            self._show_home(each)

    def _ready(self, slot: _Slot) -> Placement:
        if slot.placement is None:
            slot.placement = self._table.allocate(slot.block, self.placement.slot_bytes, Tier.DEVICE)
        return slot.placement

    def _existing(self, index: int) -> list[StateField]:
        """The paged fields of a unit whose home was written."""
        return [f for block, f in self._paged[index].items() if self._table.locate(block).generation > 0]

    def _layout(self, slot: _Slot, index: int, fields: Iterable[StateField]) -> list[tuple[StateField, torch.Tensor]]:
        """Each field with its bytes in the slot; offsets depend on the unit only, not on which fields exist."""
        memory = self._stores[Tier.DEVICE].bytes_of(self._ready(slot))
        offsets, offset = {}, 0
        for block, each in self._paged[index].items():
            offsets[block] = offset
            offset += aligned(each.nbytes, GRANULE_BYTES)
        return [(f, memory[offsets[f.block] : offsets[f.block] + f.nbytes]) for f in fields]

    # -- the state's tensors --

    def _local(self, each: StateField) -> torch.Tensor | None:
        value = self.optimizer.state.get(each.parameter, {}).get(each.key)
        return local_tensor(value) if isinstance(value, torch.Tensor) else None

    def _contiguous(self, each: StateField) -> torch.Tensor:
        local = self._local(each)
        if local.dtype != each.dtype or local.shape != each.shape:
            raise BlockError(
                f"block {each.block} was planned as {each.dtype} {tuple(each.shape)}, the optimizer made it "
                f"{local.dtype} {tuple(local.shape)}"
            )
        return local.contiguous()

    def _is_ours(self, each: StateField, local: torch.Tensor, slot: _Slot | None) -> bool:
        """Whether a paged state tensor shows memory of the pool, and not memory that the optimizer made."""
        if local.numel() == 0:
            return True  # on disk, and nobody brought it in
        if slot is not None:
            memory = self._stores[Tier.DEVICE].bytes_of(slot.placement)
            return memory.data_ptr() <= local.data_ptr() < memory.data_ptr() + memory.numel()
        home = self._table.locate(each.block)
        return home.tier is Tier.HOST and home.generation > 0 and local.data_ptr() == self._home_view(each).data_ptr()

    def _copy_into(self, slot: _Slot, fresh: Sequence[StateField]) -> None:
        """What the optimizer replaced (it made a new tensor instead of writing into the old) goes into the slot."""
        for each, memory in self._layout(slot, slot.occupant, fresh):
            view = memory.view(each.dtype).view(each.shape)
            view.copy_(self._contiguous(each))
            self._local(each).data = view

    def _show_slot(self, slot: _Slot) -> None:
        for each, memory in self._layout(slot, slot.occupant, slot.fields):
            if (local := self._local(each)) is not None:
                local.data = memory.view(each.dtype).view(each.shape)
        slot.shown = slot.occupant

    def _show_homes(self, index: int) -> None:
        for each in self._existing(index):
            self._show_home(each)

    def _show_home(self, each: StateField) -> None:
        if (local := self._local(each)) is not None:
            on_disk = self._table.locate(each.block).tier is Tier.DISK
            local.data = self._nothing.to(each.dtype) if on_disk else self._home_view(each)

    def _home_view(self, each: StateField) -> torch.Tensor:
        home = self._table.locate(each.block)
        return self._stores[home.tier].view(home, each.dtype, each.shape)

    def _book_on_device(self, block: Block, local: torch.Tensor) -> None:
        """Note where torch holds a block, again when the optimizer made it anew."""
        if block in self._table:
            if self._table.locate(block).offset == local.data_ptr():
                return
            self._table.drop(block)
        self._table.book(block, local.nbytes, Tier.DEVICE, local.data_ptr(), arena=ENGINE)
        self._booked.add(block)

    def _book_small(self, unit: UnitState) -> None:
        """Step counters and the like stay where they are; they are booked once."""
        for parameter, name in zip(unit.parameters, unit.names, strict=True):
            state = self.optimizer.state.get(parameter)
            if not state or self._entries_seen.get(parameter) == len(state):
                continue
            self._entries_seen[parameter] = len(state)
            for key, value in state.items():
                block = Block(unit.name, name, key)
                if isinstance(value, torch.Tensor) and value.numel() and block not in unit.fields:
                    self._book_on_device(block, local_tensor(value))
