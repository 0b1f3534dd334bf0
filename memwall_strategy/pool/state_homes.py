"""Where optimizer state rests: its homes in the table, and the tensors that show them.

The state's tensors keep their identity; what changes is the memory behind them (``Tensor.data``). At rest it is the
block's home: the device, the host's arena, or nothing at all while the block is on disk (no elements, so that whoever
reads it by mistake gets an error and not old numbers).

Homes can be given anew between two steps (``replace``): blocks then go from home to home one at a time, those that
leave the device first, so that no more than one block is ever there twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memwall_strategy.core.block import Block, Placement, Tier
from memwall_strategy.core.errors import BlockError, MemwallError, PoolFull
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.quantised import is_quantised, with_parts
from memwall_strategy.pool.arena import GRANULE_BYTES, LARGE_BYTES, PAGE_BYTES, Arena, aligned
from memwall_strategy.pool.device import ENGINE
from memwall_strategy.pool.host_units import book, unbook
from memwall_strategy.pool.state_fields import StateField, UnitState
from memwall_strategy.pool.store import Store
from memwall_strategy.pool.table import AddressTable

Pairs = Sequence[tuple[StateField, torch.Tensor]]
"""State tensors, each with the memory that its bytes come from or go to."""


class StateHomes:
    """The homes of one optimizer's state.

    Args:
        optimizer: whose ``state`` it is.
        units: in the order in which they step.
        homes: block -> tier, for every block of the units.
        table, stores: of this rank; every tier of the homes must be open.

    Attributes:
        paged: of each unit, what rests off the device, in the order in which it lies in a slot.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[UnitState],
        homes: Mapping[Block, Tier],
        *,
        table: AddressTable,
        stores: Mapping[Tier, Store],
    ) -> None:
        self.optimizer, self.table, self.stores = optimizer, table, stores
        self._nothing = torch.empty(0)
        self._booked: set[Block] = set()
        self._entries_seen: dict[torch.nn.Parameter, int] = {}
        self._take(units, homes)
        for paged in self.paged:
            self._book_homes(paged)

    def _take(self, units: Sequence[UnitState], homes: Mapping[Block, Tier]) -> None:
        self.units, self._tier_of = list(units), dict(homes)
        self.paged = [
            {f.block: f for f in _as_groups_lie(f for f in unit.fields.values() if homes[f.block] is not Tier.DEVICE)}
            for unit in self.units
        ]
        self._fields = {(id(f.parameter), f.key): f for unit in self.units for f in unit.fields.values()}

    # -- homes --

    def tier_of(self, block: Block) -> Tier:
        """Where a block is to rest."""
        return self._tier_of.get(block, Tier.DEVICE)

    def field_of(self, parameter: torch.Tensor, key: str) -> StateField | None:
        """The field that a state tensor is; None for what is never paged."""
        return self._fields.get((id(parameter), key))

    def is_paged(self, block: Block) -> bool:
        """Whether a block rests off the device now."""
        home = self.tier_of(block)
        return home is not Tier.DEVICE and block in self.table and self.table.locate(block).generation > 0

    def existing(self, index: int) -> list[StateField]:
        """The paged fields of a unit whose home was written."""
        return [f for block, f in self.paged[index].items() if self.table.locate(block).generation > 0]

    def replace(
        self,
        units: Sequence[UnitState],
        homes: Mapping[Block, Tier],
        make_room: Callable[[Tier, int], None] | None = None,
    ) -> None:
        """Give the state other homes, other units too, and carry what exists there; nothing may be on its way.

        Args:
            units: as they step from now on; state of parameters that none holds any more becomes ordinary tensors.
            homes: block -> tier, for every block of the units.
            make_room: called with a tier and bytes when the tier has no room for a unit's blocks, before a second try.

        Raises:
            PoolFull, ConfigError: a tier has no room; everything rests where it did.
        """
        former, before = (self.units, self._tier_of), {b: f for paged in self.paged for b, f in paged.items()}
        self.forget_resident()
        self._take(units, homes)
        after = {block: f for paged in self.paged for block, f in paged.items()}
        fresh: list[StateField] = []
        try:
            for paged in self.paged:
                new = {block: f for block, f in paged.items() if block not in before}
                fresh += new.values()
                self._book_homes(new, make_room)
            for block in before.keys() & after.keys():
                self._rehouse(after[block], make_room)
        except MemwallError:
            for each in fresh:
                if each.block in self.table:
                    self.table.drop(each.block)
            self._take(*former)
            self._book_residents()
            raise
        for each in fresh:
            local = self.local(each)
            if local is not None and local.numel():
                self.copy_out([(each, self.contiguous(each))], None)
                self.show_home(each)
        for block, each in before.items():
            if block not in after:
                self.release(each, keep=True)
        self._book_residents()

    def _rehouse(self, each: StateField, make_room: Callable[[Tier, int], None] | None) -> None:
        """From host to disk, or back."""
        tier = self._tier_of[each.block]
        if self.table.locate(each.block).tier is tier:
            return
        exists = self.table.locate(each.block).generation > 0
        data = self.fetch(each) if exists else None
        try:
            copy = self.table.begin_move(each.block, tier)
        except PoolFull:
            if make_room is None:
                raise
            make_room(tier, group_bytes([each.nbytes]))
            copy = self.table.begin_move(each.block, tier)
        try:
            if data is not None:
                self.stores[tier].write([(copy.target, data)])
        except MemwallError:
            self.table.abort(copy)
            raise
        self.table.commit(copy)
        if exists:
            self.show_home(each)

    def _book_homes(
        self, paged: Mapping[Block, StateField], make_room: Callable[[Tier, int], None] | None = None
    ) -> None:
        for tier in (Tier.HOST, Tier.DISK):
            sizes = {b: f.nbytes for b, f in paged.items() if self._tier_of[b] is tier}
            if not sizes:
                continue
            try:
                self.table.allocate_group(sizes, tier)
            except PoolFull:
                if make_room is None:
                    raise
                make_room(tier, group_bytes(sizes.values()))
                self.table.allocate_group(sizes, tier)

    def forget_resident(self) -> None:
        """Take what torch holds off the books, until ``book_resident``."""
        for block in self._booked:
            unbook(self.table, block)
        self._booked.clear()
        self._entries_seen.clear()

    def _book_residents(self) -> None:
        for unit in self.units:
            self.book_resident(unit)

    def release(self, each: StateField, *, keep: bool) -> None:
        """Give a block's home back; its state becomes an ordinary tensor, or is gone with all of its parameter's."""
        local = self.local(each)
        if local is not None:
            if keep and self.table.locate(each.block).generation > 0:
                local.data = self.fetch(each).to(local_tensor(each.parameter).device)
            elif not keep:
                self.optimizer.state.pop(each.parameter)  # half a state is worse than none
        self.table.drop(each.block)

    def close(self, *, keep: bool) -> None:
        """Give every home back."""
        for paged in self.paged:
            for each in paged.values():
                self.release(each, keep=keep)
        self.forget_resident()
        self.paged = [{} for _ in self.units]

    # -- bytes --

    def copy_in(self, pairs: Pairs, after: torch.cuda.Event | None) -> None:
        """Copy each field's home into its memory."""
        by_tier: dict[Tier, list[tuple[Placement, torch.Tensor]]] = {}
        for each, target in pairs:
            home = self.table.readable(each.block)
            by_tier.setdefault(home.tier, []).append((home, target))
        for tier, wanted in by_tier.items():
            self.stores[tier].read(wanted, after)

    def copy_out(self, pairs: Pairs, after: torch.cuda.Event | None) -> None:
        """Copy each memory to its field's home."""
        for tier in (Tier.HOST, Tier.DISK):
            here = [(f, source) for f, source in pairs if self.table.locate(f.block).tier is tier]
            if not here:
                continue
            with ExitStack() as stack:
                homes = [stack.enter_context(self.table.writing(each.block)) for each, _ in here]
                self.stores[tier].write(list(zip(homes, (source for _, source in here), strict=True)), after)

    def fetch(self, each: StateField) -> torch.Tensor:
        """A copy of a block's bytes in ordinary memory on the CPU, wherever it rests; nothing may be on its way."""
        out = torch.empty(each.shape, dtype=each.dtype)
        placement = self.table.readable(each.block)
        if placement.arena == ENGINE:
            out.copy_(self.local(each))
        else:
            self.stores[placement.tier].read([(placement, out)])
        return out

    def whole(self, each: StateField) -> torch.Tensor:
        """A copy of a state tensor on the CPU: a DTensor where the state is one."""
        value = self.optimizer.state[each.parameter][each.key]
        local = self.fetch(each) if each.part is None else self._fetch_parts(each, local_tensor(value))
        if not isinstance(value, DTensor):
            return local
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )

    def _fetch_parts(self, each: StateField, value: torch.Tensor) -> torch.Tensor:
        """A quantised state tensor with copies of its inner ones, wherever they rest."""
        its = [f for f in self._fields_of(each.parameter) if f.key == each.key and self.is_paged(f.block)]
        return with_parts(value, {f.part: self.fetch(f) for f in its})

    def _fields_of(self, parameter: torch.nn.Parameter) -> Iterator[StateField]:
        return (f for unit in self.units for f in unit.fields.values() if f.parameter is parameter)

    # -- the state's tensors --

    def local(self, each: StateField) -> torch.Tensor | None:
        """This rank's part of a state tensor; None where the optimizer has not made it."""
        value = self.optimizer.state.get(each.parameter, {}).get(each.key)
        if not isinstance(value, torch.Tensor):
            return None
        return local_tensor(value) if each.part is None else getattr(local_tensor(value), each.part, None)

    def contiguous(self, each: StateField) -> torch.Tensor:
        """It as one stretch of memory.

        Raises:
            BlockError: the optimizer made something else than was planned.
        """
        local = self.local(each)
        if local.dtype != each.dtype or local.shape != each.shape:
            raise BlockError(
                f"block {each.block} was planned as {each.dtype} {tuple(each.shape)}, the optimizer made it "
                f"{local.dtype} {tuple(local.shape)}"
            )
        return local.contiguous()

    def show_homes(self, index: int) -> None:
        """Let a unit's state tensors show their homes."""
        for each in self.existing(index):
            self.show_home(each)

    def show_home(self, each: StateField) -> None:
        """Let a state tensor show its home."""
        if (local := self.local(each)) is not None:
            on_disk = self.table.locate(each.block).tier is Tier.DISK
            local.data = self._nothing.to(each.dtype) if on_disk else self._home_view(each)

    def shows_home(self, each: StateField, local: torch.Tensor) -> bool:
        """Whether a state tensor shows its home, and not memory that somebody else made."""
        home = self.table.locate(each.block)
        return home.tier is Tier.HOST and home.generation > 0 and local.data_ptr() == self._home_view(each).data_ptr()

    def _home_view(self, each: StateField) -> torch.Tensor:
        home = self.table.locate(each.block)
        return self.stores[home.tier].view(home, each.dtype, each.shape)

    def convert(self, unit: UnitState) -> None:
        """Give state that was made in another type the planned one (made before the master copies, or loaded)."""
        for each in unit.fields.values():
            local = self.local(each)
            if each.part is None and local is not None and local.numel() and local.dtype != each.dtype:
                entries = self.optimizer.state[each.parameter]
                entries[each.key] = entries[each.key].to(each.dtype)

    # -- what torch holds --

    def book_resident(self, unit: UnitState) -> None:
        """Note where torch holds what rests on the device, step counters and the like included."""
        found: dict[Block, torch.Tensor] = {}
        for block, each in unit.fields.items():
            if each.nbytes and self.tier_of(block) is Tier.DEVICE and (local := self.local(each)) is not None:
                found[block] = local
        for parameter, name in zip(unit.parameters, unit.names, strict=True):
            state = self.optimizer.state.get(parameter)
            if not state or self._entries_seen.get(parameter) == len(state):
                continue
            self._entries_seen[parameter] = len(state)
            for key, value in state.items():
                block = Block(unit.name, name, key)
                if is_quantised(value):
                    continue  # its fields are the inner tensors
                if isinstance(value, torch.Tensor) and value.numel() and block not in unit.fields:
                    found[block] = local_tensor(value)
        moved = {b: t for b, t in found.items() if b not in self.table or self.table.locate(b).offset != t.data_ptr()}
        for block in moved.keys() & self._booked:  # the optimizer made it anew; all first: addresses are used again
            unbook(self.table, block)
            self._booked.discard(block)
        tier = Tier.HOST if unit.on_host else Tier.DEVICE
        for block, local in moved.items():
            book(self.table, block, local.nbytes, tier, local.data_ptr())
            self._booked.add(block)


def _as_groups_lie(fields: Iterable[StateField]) -> list[StateField]:
    """What has bytes, in the order of ``AddressTable.allocate_group``: then a slot is one copy away from the home."""
    return sorted((f for f in fields if f.nbytes), key=lambda f: f.nbytes < LARGE_BYTES)


def offsets(fields: Iterable[StateField]) -> tuple[dict[Block, int], int]:
    """Where each field begins when they lie one behind the other, and where the last ends."""
    found, offset = {}, 0
    for each in fields:
        found[each.block] = offset
        offset += aligned(each.nbytes, GRANULE_BYTES)
    return found, offset


def group_bytes(sizes: Iterable[int]) -> int:
    """What an arena holds for blocks that lie together: large ones on pages, small ones behind them."""
    rule = Arena(0)
    return aligned(sum(rule.held(size) for size in sizes), PAGE_BYTES)
