"""The book of live bytes: counters per kind and step phase, and storages that are counted until they are freed.

A storage is tracked by a weak reference. torch keeps one Python object for each storage for as long as anything holds
it, C++ included (autograd's saved tensors, buffers in a collective), so the reference dies when the memory does. Its
callback only appends to a queue, which is atomic and takes no lock: the garbage collector may run it anywhere, even
while this thread is inside the book. The queue is booked before the next change and before every look.

A storage counts once, under one kind, whatever tensors share it. Its identity is the ``id`` of its Python object.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import torch

from memwall_strategy.core.block import Kind, Phase
from memwall_strategy.core.errors import MemwallError

OPTIMIZER_KINDS = frozenset({Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MASTER, Kind.OPTIMIZER})
WALKED_KINDS = frozenset({Kind.PARAM, Kind.BUFFER}) | OPTIMIZER_KINDS
"""Kinds that are found by walking model and optimizers, and that seldom change."""


class StorageRef(weakref.ref):
    """Weak reference to a storage: its id, the kind it counts under, and its bytes."""

    __slots__ = ("key", "kind", "nbytes")


class _SavedRef(weakref.ref):
    """Weak reference to the holder of a tensor that autograd saved."""

    __slots__ = ("keys",)


class Book:
    """Live bytes of one device per kind, and their peaks per phase. Thread-safe.

    Args:
        device: only storages on a device of this type count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        self._stale = False
        self._lock = threading.Lock()
        self._live: dict[str, int] = {}
        self._total = 0
        self._held: dict[int, StorageRef] = {}
        self._saved: dict[int, list[int]] = {}
        """Storages that autograd saved: how many holders each has, and its bytes."""
        self._saved_refs: set[_SavedRef] = set()
        self._ignored: dict[int, torch.UntypedStorage] = {}
        self._freed: deque[weakref.ref] = deque()
        self._phase = Phase.IDLE
        self._peaks: dict[Phase, tuple[int, dict[str, int]]] = {Phase.IDLE: (0, {})}
        self._kind_peaks: dict[Phase, dict[str, int]] = {Phase.IDLE: {}}

    # -- booking --

    def add(self, kind: str, nbytes: int) -> None:
        """Book an allocation that is no torch storage, or whose end the caller books with ``remove``."""
        with self._lock:
            self._collect()
            self._change(kind, nbytes)

    def remove(self, kind: str, nbytes: int) -> None:
        """Book the end of what ``add`` booked.

        Raises:
            MemwallError: more than is booked under this kind.
        """
        with self._lock:
            self._collect()
            if nbytes > self._live.get(kind, 0):
                raise MemwallError(
                    f"memory account: {nbytes} bytes of {kind} were removed, {self._live.get(kind, 0)} are booked. "
                    "Each remove needs one add of the same size before it."
                )
            self._change(kind, -nbytes)

    def change(self, kind: str, nbytes: int) -> None:
        """``add`` or, below zero, ``remove``, for a caller that keeps its own number."""
        with self._lock:
            if self._freed:
                self._collect()
            self._change(kind, nbytes)

    def rename(self, ref: StorageRef, kind: str) -> None:
        """Count a tracked storage that is alive under another kind."""
        with self._lock:
            self._collect()
            if self._held.get(ref.key) is ref:
                self._change(ref.kind, -ref.nbytes)
                ref.kind = kind
                self._change(kind, ref.nbytes)

    def brief(self, sizes: Mapping[str, int]) -> None:
        """Book things that lived together and are gone again: only the peaks see them."""
        with self._lock:
            self._collect()
            for kind, nbytes in sizes.items():
                self._change(kind, nbytes)
            for kind, nbytes in sizes.items():
                self._change(kind, -nbytes)

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """Never count this storage: another tier's memory, or memory that is booked by number."""
        self._ignored[id(storage)] = storage  # held, so that its id stays its own

    def heed(self, storage: torch.UntypedStorage) -> None:
        """Take ``ignore`` back, and let go of the storage."""
        self._ignored.pop(id(storage), None)

    def track(self, tensor: torch.Tensor, kind: str) -> StorageRef | None:
        """Count the tensor's storage until it is freed; under the new kind where it is counted already.

        Returns:
            A weak reference to the (last) storage, or None where there is nothing to count on this device.
        """
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            return self._track(tensor.untyped_storage(), kind)
        ref = None
        for storage in storages(tensor):
            ref = self._track(storage, kind)
        return ref

    def hold(self, buffer: torch.Tensor, kind: str) -> StorageRef | None:
        """``track`` for a plain tensor that is surely on the book's device: what happens in every unit."""
        storage = buffer.untyped_storage()
        nbytes = storage.nbytes()
        if not nbytes:
            return None
        key = id(storage)
        if key in self._ignored:
            return None
        with self._lock:
            if self._freed:
                self._collect()
            if (ref := self._held.get(key)) is not None:
                return ref  # whoever allocated it tracks it too
            ref = self._held[key] = StorageRef(storage, self._freed.append)
            ref.key, ref.kind, ref.nbytes = key, kind, nbytes
            self._change(kind, nbytes)
        return ref

    def track_new(self, tensor: torch.Tensor, kind: str, skip: set[int]) -> None:
        """Count the tensor's storage until it is freed, unless it counts already or its id is among ``skip``."""
        for storage in storages(tensor):
            key, nbytes = id(storage), storage.nbytes()
            if key in skip or key in self._ignored or not nbytes or storage.device.type != self._device_type:
                continue
            with self._lock:
                self._collect()
                if key in self._held or key in self._saved:
                    continue
                ref = self._held[key] = StorageRef(storage, self._freed.append)
                ref.key, ref.kind, ref.nbytes = key, kind, nbytes
                self._change(kind, nbytes)

    def _track(self, storage: torch.UntypedStorage, kind: str) -> StorageRef | None:
        key = id(storage)
        ref = self._held.get(key)
        if ref is not None and ref.kind == kind and ref() is storage and ref.nbytes == storage.nbytes():
            return ref
        nbytes = storage.nbytes()
        if not nbytes or storage.device.type != self._device_type or key in self._ignored:
            return None
        with self._lock:
            if self._freed:
                self._collect()
            ref = self._held.get(key)
            if ref is None:
                ref = self._held[key] = StorageRef(storage, self._freed.append)
                ref.key = key
            else:
                self._change(ref.kind, -ref.nbytes)
            ref.kind, ref.nbytes = kind, nbytes
            self._change(kind, nbytes)
        return ref

    def keep_only(self, kinds: Iterable[str], found: set[int]) -> None:
        """Stop counting storages of these kinds that are not among the found ids: they live, but hold no such thing."""
        with self._lock:
            self._collect()
            for key, ref in list(self._held.items()):
                if ref.kind in kinds and key not in found:
                    del self._held[key]
                    self._change(ref.kind, -ref.nbytes)
            self._stale = False

    def forget(self) -> None:
        """Stop counting every storage and forget the peaks; what was booked with ``add`` stays."""
        with self._lock:
            self._collect()
            for ref in self._held.values():
                self._change(ref.kind, -ref.nbytes)
            for _, nbytes in self._saved.values():
                self._change(Kind.ACTIVATION, -nbytes)
            self._held.clear()
            self._saved.clear()
            self._saved_refs.clear()
            self._stale = False
        self.reset_peaks()

    def save(self, holder: object, tensor: torch.Tensor, skip: set[int]) -> None:
        """Count a tensor that autograd saved as activation, until its last holder is gone.

        Args:
            holder: object that lives as long as autograd needs the tensor; it must keep the tensor alive.
            skip: ids of storages that are counted elsewhere.
        """
        keys = []
        with self._lock:
            self._collect()
            for storage in storages(tensor):
                key, nbytes = id(storage), storage.nbytes()
                if key in skip or key in self._held or not nbytes or storage.device.type != self._device_type:
                    continue
                if (entry := self._saved.get(key)) is None:
                    self._saved[key] = [1, nbytes]
                    self._change(Kind.ACTIVATION, nbytes)
                else:
                    entry[0] += 1
                keys.append(key)
            if keys:
                ref = _SavedRef(holder, self._freed.append)
                ref.keys = keys
                self._saved_refs.add(ref)

    # -- looking --

    def enter(self, phase: Phase) -> Phase:
        """Start a phase and return the one before; what is alive counts in the new one from the first moment."""
        with self._lock:
            self._collect()
            before, self._phase = self._phase, phase
            self._note_all()
        return before

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._phase

    def is_stale(self) -> bool:
        """Whether a weight, buffer or optimizer state was freed since ``keep_only``: another may have its place."""
        with self._lock:
            self._collect()
            return self._stale

    def live(self) -> dict[str, int]:
        """Live bytes per kind."""
        with self._lock:
            self._collect()
            return dict(self._live)

    def total(self) -> int:
        """Live bytes of all kinds."""
        with self._lock:
            self._collect()
            return self._total

    def peaks(self) -> dict[Phase, dict[str, int]]:
        """Phase -> bytes per kind at the moment of the phase's highest total."""
        with self._lock:
            return {phase: dict(kinds) for phase, (_, kinds) in self._peaks.items()}

    def kind_peaks(self) -> dict[Phase, dict[str, int]]:
        """Phase -> highest bytes of each kind, whenever within the phase."""
        with self._lock:
            return {phase: dict(kinds) for phase, kinds in self._kind_peaks.items() if kinds}

    def reset_peaks(self) -> None:
        """Forget the peaks; what is alive now is the first of the present phase."""
        with self._lock:
            self._collect()
            self._peaks.clear()
            self._kind_peaks.clear()
            self._note_all()

    # -- under the lock --

    def _collect(self) -> None:
        while self._freed:
            ref = self._freed.popleft()
            if type(ref) is StorageRef:
                if self._held.get(ref.key) is ref:  # not dropped before, and not a new storage at the same address
                    del self._held[ref.key]
                    self._change(ref.kind, -ref.nbytes)
                    self._stale = self._stale or ref.kind in WALKED_KINDS
                continue
            self._saved_refs.discard(ref)
            for key in ref.keys:
                entry = self._saved[key]
                entry[0] -= 1
                if not entry[0]:
                    del self._saved[key]
                    self._change(Kind.ACTIVATION, -entry[1])

    def _change(self, kind: str, nbytes: int) -> None:
        live = self._live
        now = live[kind] = live.get(kind, 0) + nbytes
        self._total += nbytes
        if nbytes > 0:
            highest = self._kind_peaks[self._phase]
            if now > highest.get(kind, 0):
                highest[kind] = now
            if self._total > self._peaks[self._phase][0]:
                self._peaks[self._phase] = (self._total, dict(live))

    def _note_all(self) -> None:
        phase = self._phase
        highest = self._kind_peaks.setdefault(phase, {})
        for kind, nbytes in self._live.items():
            if nbytes > highest.get(kind, -1):
                highest[kind] = nbytes
        if phase not in self._peaks or self._total > self._peaks[phase][0]:
            self._peaks[phase] = (self._total, dict(self._live))


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: one, or those of the inner tensors of a wrapper (DTensor, quantized, sparse)."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        yield tensor.untyped_storage()
        return
    local = getattr(tensor, "_local_tensor", None)  # DTensor: this rank's part, without autograd
    if local is not None:
        yield from storages(local)
    elif (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:  # protocol of wrapper subclasses
        for name in flatten()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from storages(tensor._indices())  # the public accessors demand a coalesced tensor
        yield from storages(tensor._values())
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:
        raise MemwallError(
            f"memory account: cannot count a tensor of layout {tensor.layout}. Switch the account off "
            "(pool.enabled=false) for models with such tensors."
        )


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of it, was changed in place (private: autograd's version counter)."""
    return tensor._version


_PLAIN = (torch.Tensor, torch.nn.Parameter)
