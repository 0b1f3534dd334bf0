"""Offloaded activations: what autograd saves in a unit rests on the host from the unit's forward to its backward.

A saved-tensor hook notes each storage that autograd saves while a unit's ``forward`` runs. At its end all of them leave
in one transfer on lane ``page-out``, and the device's memory is free when the bytes are there; at most
``UNITS_IN_FLIGHT`` calls of units may be leaving at a time. The first saved tensor that backward asks for brings its
whole call back on lane ``page-in``, and the call before it in forward order, which backward needs next. What has not
left yet is used as it is.

A storage moves once, whoever saves it and however often: views are cut out of the copy, and a tensor that two units
save is one block. Not moved: weights, gathered ones included, and the unit's buffers (by storage); arguments that need
no gradient, such as masks and position tables, which live outside anyway; small tensors; other devices' tensors;
tensor subclasses.

A block lives as long as a saved tensor refers to it. When the graph dies, by backward or without one, its blocks are
noted (the garbage collector may do this on any thread) and dropped at the next call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import MemwallError, PoolFull
from memwall_strategy.core.lane import Transfer
from memwall_strategy.engine.storages import storages, version_of
from memwall_strategy.engine.unit_forward import UnitForward
from memwall_strategy.pool.pool import Pool

UNITS_IN_FLIGHT = 2
"""Calls of units whose activations may still be on the device because they are leaving."""

SMALL_BYTES = 1024
"""A storage below this stays: a transfer costs more than it frees (the same threshold as torchtune's offloading)."""


class _Moved:
    """One storage that autograd saved: on the device at first, then on the host, then on the device again."""

    __slots__ = (
        "__weakref__", "alias", "block", "call", "changed", "coming", "dead", "device", "leaving", "nbytes", "packs",
        "resident", "storage", "unpacks", "version",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, call: _Call, dead: deque[tuple[Block, Transfer | None]]) -> None:
        storage = tensor.untyped_storage()
        self.alias: torch.Tensor | None = tensor.detach()  # detached: its own graph would be a cycle
        self.storage = weakref.ref(storage)
        self.version, self.nbytes, self.device = version_of(tensor), storage.nbytes(), tensor.device
        self.call, self.dead = call, dead
        self.block: Block | None = None
        self.leaving: Transfer | None = None
        self.coming: Transfer | None = None
        self.resident: torch.Tensor | None = None
        self.changed = False
        self.packs = self.unpacks = 0

    def left(self) -> None:
        """On the lane: the bytes are on the host."""
        self.changed = version_of(self.alias) != self.version
        self.alias = None

    def __del__(self) -> None:
        if self.block is not None:
            self.dead.append((self.block, self.leaving))


class _Call:
    """One call of one unit, and the call before it."""

    __slots__ = ("__weakref__", "before", "begun", "moved", "unit")

    def __init__(self, unit: str, before: weakref.ref | None) -> None:
        self.unit, self.before = unit, before
        self.moved: list[weakref.ref] = []
        self.begun = False


@dataclass(frozen=True, slots=True)
class _Packed:
    """What autograd holds instead of a tensor."""

    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


class ActivationPager:
    """Sends activations of units to the host and brings them back.

    Args:
        pool: with a host tier.
        note: told of every tensor that is on the device for a backward; None: nobody counts.
        full: called where the host tier has no room, with the unit and the error. It raises, or the tensors stay on the
            device.
        small_bytes: storages below this stay.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        note: Callable[[torch.Tensor], None] | None = None,
        full: Callable[[str, PoolFull], None],
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self._pool, self._note, self._full, self._small_bytes = pool, note, full, small_bytes
        self._dead: deque[tuple[Block, Transfer | None]] = deque()
        self._by_storage: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._alive: weakref.WeakSet[_Moved] = weakref.WeakSet()
        self._leaving: deque[Transfer] = deque()
        self._last: weakref.ref | None = None
        self._number = 0
        self._sent_bytes = 0
        self._closed = False

    def run(self, unit: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a unit.

        Raises:
            MemwallError: what ``full`` raises, or an earlier transfer failed.
        """
        self.drop_dead()
        call = _Call(unit.name, self._last)
        new: list[_Moved] = []
        stays = _storages_that_stay(unit.module, args, kwargs)

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.is_leaf and isinstance(tensor, nn.Parameter):
                return tensor
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
                return tensor.detach()
            storage = tensor.untyped_storage()
            if id(storage) in stays or tensor.is_conj() or tensor.is_neg():
                return tensor.detach()
            if self._note is not None:
                self._note(tensor)
            if storage.nbytes() < self._small_bytes:
                return tensor.detach()
            moved = self._moved(tensor, storage, call, new)
            moved.packs += 1
            return _Packed(moved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            output = unit.inner(*args, **kwargs)
        if new:
            self._last = weakref.ref(call)
            call.moved = [weakref.ref(moved) for moved in new]
            self._send(call, new)
        return output

    def take_sent_bytes(self) -> int:
        """Bytes that left since the last call."""
        taken, self._sent_bytes = self._sent_bytes, 0
        return taken

    def drop_dead(self, *, wait: bool = False) -> None:
        """Give back the host memory of what nobody waits for any more.

        Args:
            wait: also of what is still leaving.
        """
        for _ in range(len(self._dead)):
            block, leaving = self._dead.popleft()
            if not wait and leaving is not None and not leaving.done():
                self._dead.append((block, leaving))
            elif block in self._pool.table:
                self._pool.drop(block)

    def forget(self) -> None:
        """After the lanes were reset: no transfer is waited for any more.

        Nor held: a failed one holds its error, whose traceback holds the forward's tensors, whose graph holds what is
        here, in a circle through autograd that the garbage collector does not see.
        """
        self._leaving.clear()
        for moved in list(self._alive):
            moved.leaving = moved.coming = moved.resident = None  # what was coming may not be whole
        for _ in range(len(self._dead)):
            self._dead.append((self._dead.popleft()[0], None))
        self.drop_dead()

    def close(self) -> None:
        """Before the pool closes, which drops every block; a backward that still comes is told so."""
        self._closed = True
        for moved in list(self._alive):
            moved.block = None
        self._dead.clear()
        self._leaving.clear()

    # -- forward --

    def _moved(self, tensor: torch.Tensor, storage: torch.UntypedStorage, call: _Call, new: list[_Moved]) -> _Moved:
        found = self._by_storage.get(storage)
        moved = found() if found is not None else None
        if moved is None or moved.version != version_of(tensor):
            moved = _Moved(tensor, call, self._dead)
            self._by_storage[storage] = weakref.ref(moved)
            self._alive.add(moved)
            new.append(moved)
        return moved

    def _send(self, call: _Call, new: list[_Moved]) -> None:
        tensors: dict[Block, torch.Tensor] = {}
        going: list[_Moved] = []
        try:
            for moved in new:
                self._number += 1
                block = Block(call.unit, f"saved {self._number}", Kind.ACTIVATION)
                self._allocate(block, moved.nbytes)
                tensors[block] = _all_of(moved.alias.untyped_storage(), moved.nbytes)
                going.append(moved)
        except PoolFull as error:
            for block in tensors:
                self._pool.drop(block)
            self._full(call.unit, error)
            return

        def left() -> None:
            for moved in going:
                moved.left()
            going.clear()

        try:
            transfer = self._pool.write(tensors, then=left)
        except MemwallError:
            for block in tensors:
                self._pool.drop(block)
            raise
        for moved, block in zip(new, tensors, strict=True):
            moved.block, moved.leaving = block, transfer
        self._sent_bytes += sum(moved.nbytes for moved in new)
        new.clear()
        tensors.clear()
        self._leaving.append(transfer)
        while len(self._leaving) > UNITS_IN_FLIGHT:
            self._leaving.popleft().wait()

    def _allocate(self, block: Block, nbytes: int) -> None:
        try:
            self._pool.allocate(block, nbytes, Tier.HOST)
        except PoolFull:
            self.drop_dead(wait=True)
            self._pool.allocate(block, nbytes, Tier.HOST)

    # -- backward --

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Packed):
            return packed
        moved = packed.moved
        self._begin(moved.call)
        alias = moved.alias
        if alias is None and moved.resident is None:
            self._bring([moved])
        if moved.changed or (alias is not None and version_of(alias) != moved.version):
            raise MemwallError(
                f"a tensor that the backward of unit {moved.call.unit!r} needs was changed in place after it was "
                "saved. Change a copy of it instead."
            )
        if alias is not None:
            return packed.of(alias.untyped_storage())
        moved.coming.wait()
        whole = packed.of(moved.resident.untyped_storage())
        moved.unpacks += 1
        if moved.unpacks >= moved.packs:  # a second backward over the same graph brings it again
            moved.resident = moved.coming = None
            moved.unpacks = 0
        return whole

    def _begin(self, call: _Call) -> None:
        """The first time that backward asks for something of a call: it comes whole, and the one before after it."""
        if call.begun:
            return
        call.begun = True
        self.drop_dead()
        before = call.before() if call.before is not None else None
        for each in (call, before):
            if each is not None:
                self._bring([moved for ref in each.moved if (moved := ref()) is not None])

    def _bring(self, wanted: list[_Moved]) -> None:
        away = [m for m in wanted if m.alias is None and m.resident is None]
        if not away:
            return
        if self._closed:
            raise MemwallError(
                f"activations of unit {away[0].call.unit!r} are gone: the pool was closed before their backward. "
                "Finish every backward within training."
            )
        for moved in away:
            moved.resident = torch.empty(moved.nbytes, dtype=torch.uint8, device=moved.device)
            if self._note is not None:
                self._note(moved.resident)
        transfer = self._pool.read({moved.block: moved.resident for moved in away})
        for moved in away:
            moved.coming = transfer


def _all_of(storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))


def _storages_that_stay(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Ids of storages that live anyway: weights as they are now (gathered), buffers, arguments without a gradient."""
    ids = {id(storage) for tensor in (*module.parameters(), *module.buffers()) for storage in storages(tensor)}
    pending: list[Any] = [*args, *kwargs.values()]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            if not value.requires_grad:
                ids.update(id(storage) for storage in storages(value))
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
    return ids
