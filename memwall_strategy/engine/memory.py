"""The memory account: live bytes of one rank per kind and step phase, exact on CPU, cheap enough to leave on.

Nothing is walked at each event. Weights, buffers and optimizer state are found by a walk when the account is attached,
after the optimizer's first step, when a checkpoint is loaded, and when one of them was freed (something else may have
taken its place); gathered weights, flat buffers and gradients are counted where FSDP2 makes them
(``engine.gathered``); what the lanes allocate they book themselves. Everything that is a torch storage is counted by
its bytes until it is freed (``engine.storages``), so tied weights, views and padding come out right.

In deep mode activations are counted too, inside ``saved_activations()``.

Not counted: temporaries of single operations and of the optimizer's arithmetic, buffers inside gloo or NCCL, storages
on other devices than the account's, weights replaced through ``.data`` while the old ones are still held (until the
next walk; ``current`` walks). On CUDA the same bytes are counted as asked for, without the allocator's rounding;
``allocator_peak_bytes`` gives the allocator's own figure beside them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Kind, Phase
from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine.activations import counting_saved_tensors
from memwall_strategy.engine.capacity import available_device_bytes
from memwall_strategy.engine.gathered import ModelCounter
from memwall_strategy.engine.storages import OPTIMIZER_KINDS, Book, storages

__all__ = ["KINDS", "MemoryAccount", "available_device_bytes"]

KINDS = (
    Kind.PARAM, Kind.GRAD, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MASTER, Kind.OPTIMIZER, Kind.BUFFER, Kind.GATHERED,
    Kind.COMM, Kind.ACTIVATION,
)  # fmt: skip
"""Kinds that the account reports, zero or not, in the order of tables."""

_REMEDY = {
    Kind.GATHERED: "Gather less at once: lower overlap.prefetch, or make units smaller with unit_classes=(...).",
    Kind.COMM: "Hold fewer buffers: lower overlap.prefetch and overlap.reduce_buffers.",
    Kind.ACTIVATION: "Lower the micro-batch (and raise accumulate_grad_batches), or recompute activations.",
    Kind.GRAD: "Shard over more ranks, or set accumulate='sharded' where it is 'whole'.",
}
_REMEDY_RESIDENT = "Shard over more ranks (raise devices, lower replicate), or raise pool.device_budget."


class MemoryAccount:
    """Live bytes of one rank. Thread-safe.

    Args:
        device: whose memory is counted.
        deep: also count the activations that autograd saves inside ``saved_activations()``; may be set between steps.
            Whoever asks for ``note_activation`` does so while it is True.
        host_modules: modules of the model that run on the host.

    Attributes:
        host: the book of what these hold: weights, gradients, optimizer state, what is gathered and reduced. None of
            it is among the device's figures, not even where the device is the CPU.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, deep: bool = False, host_modules: Sequence[nn.Module] = ()
    ) -> None:
        self.device, self.deep = torch.device(device), deep
        self._book = Book(self.device)
        self.host = Book(torch.device("cpu"))
        self._host_modules = tuple(host_modules)
        self._model: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._counter: ModelCounter | None = None
        self._handles: list[Any] = []
        self._gradient_hooks: dict[int, tuple[weakref.ref, Any]] = {}
        self._plain: list[nn.Parameter] = []
        self._on_meta = False
        self._state_sizes: tuple[int, int] | None = None
        self._gradients_seen = False

    # -- life cycle --

    def attach(self, model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        """Start to count a model, sharded or not, and its optimizers. A model attached before is let go."""
        self.detach()
        self._model, self._optimizers = model, list(optimizers)
        self._counter = ModelCounter(model, self._book, self._book_of_module)
        refresh = _RefreshHook(self)
        self._handles.append(model.register_load_state_dict_post_hook(refresh))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_optimizer))
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer))
            self._handles.append(optimizer.register_load_state_dict_post_hook(refresh))
        self.refresh()

    def detach(self) -> None:
        """Let the model go: hooks and wrappers are removed, peaks forgotten. What others booked with ``add`` stays."""
        for handle in self._handles:
            handle.remove()
        for _, handle in self._gradient_hooks.values():
            handle.remove()
        if self._counter is not None:
            self._counter.remove()
        self._handles, self._gradient_hooks, self._plain = [], {}, []
        self._model, self._optimizers, self._counter, self._state_sizes = None, [], None, None
        self._book.forget()
        self.host.forget()

    def _on_host(self) -> set[int]:
        """Ids of the parameters of modules that run on the host."""
        return {id(p) for group in self._counter.groups if group.book is self.host for p in group.managed()}

    def _book_of_module(self, module: nn.Module) -> Book:
        on_host = any(module is each for host in self._host_modules for each in host.modules())
        return self.host if on_host else self._book

    # -- what others book --

    def add(self, kind: str, nbytes: int) -> None:
        """Book bytes that are no torch storage, or whose end is known. Prefer ``track`` for tensors."""
        self._book.add(kind, nbytes)

    def remove(self, kind: str, nbytes: int) -> None:
        """Book the end of what ``add`` booked."""
        self._book.remove(kind, nbytes)

    def ignore(self, storage: torch.UntypedStorage, *, on_host: bool = False) -> None:
        """Never count a storage: it is another tier's memory, or booked with ``add``.

        Args:
            on_host: nor count it among what modules on the host hold.
        """
        self._book.ignore(storage)
        if on_host:
            self.host.ignore(storage)

    def heed(self, storage: torch.UntypedStorage) -> None:
        """Take ``ignore`` back, and let go of the storage."""
        self._book.heed(storage)
        self.host.heed(storage)

    def track(self, tensor: torch.Tensor, kind: str, module: nn.Module | None = None) -> None:
        """Count a tensor's storage until it is freed; a second call with another kind renames it.

        Args:
            module: whose it is; the host counts those of modules that run there.
        """
        (self._book if module is None else self._book_of_module(module)).track(tensor, kind)

    # -- phases --

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Start a phase, at once. As a context manager it also goes back to the phase before.

        account.phase(Phase.BACKWARD)            # until the next call
        with account.phase(Phase.FORWARD): ...   # until the end of the block
        """
        before = self._enter(phase)
        return _Restore(lambda: self._enter(before))

    def _enter(self, phase: Phase) -> Phase:
        if self._book.phase == Phase.BACKWARD and phase != Phase.BACKWARD:
            self._see_gradients()  # lanes put them in place at the end of the backward
        if self._is_stale():
            self.refresh()
        self.host.enter(phase)
        return self._book.enter(phase)

    def saved_activations(self) -> AbstractContextManager[None]:
        """Count what autograd saves inside; put it around forward and loss. Does nothing unless ``deep``."""
        if not self.deep or self._counter is None:
            return contextlib.nullcontext()
        return counting_saved_tensors(self._book, self._counter.gathered_ids)

    @property
    def note_activation(self) -> Callable[[torch.Tensor], None] | None:
        """Counts a tensor that is on the device for a backward, until it is freed; None unless ``deep``.

        For whoever hides what autograd saves from ``saved_activations`` behind hooks of its own.
        """
        return self._note_activation if self.deep else None

    def _note_activation(self, tensor: torch.Tensor) -> None:
        if self.deep and self._counter is not None and not (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
            self._book.track_new(tensor, Kind.ACTIVATION, self._counter.gathered_ids)

    # -- figures --

    @property
    def device_bytes(self) -> int:
        """Live bytes of all kinds, without a walk."""
        return self._book.total()

    @property
    def peak_bytes(self) -> int:
        """Highest total of any phase since ``reset_peak``."""
        return max((sum(kinds.values()) for kinds in self._book.peaks().values()), default=0)

    @property
    def allocator_peak_bytes(self) -> int | None:
        """CUDA: the allocator's peak since the user last reset it. CPU has no such figure: None."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def current(self) -> dict[Kind, int]:
        """Live bytes per kind, after a walk over everything."""
        self.refresh()
        return _in_order(self._book.live())

    def peak(self) -> dict[Phase, dict[Kind, int]]:
        """Phase -> bytes per kind at the moment when the phase's total was highest, since ``reset_peak``."""
        return {phase: _in_order(kinds) for phase, kinds in self._book.peaks().items()}

    def kind_peaks(self) -> dict[Phase, dict[Kind, int]]:
        """Phase -> highest bytes of each kind at any moment of the phase. Their sum may never have been alive."""
        return {phase: _in_order(kinds) for phase, kinds in self._book.kind_peaks().items()}

    def reset_peak(self) -> None:
        """Forget the peaks; the present state is the first entry."""
        self._book.reset_peaks()
        self.host.reset_peaks()

    def check_budget(self, limit_bytes: int) -> None:
        """Hold the peak since ``reset_peak`` against a limit.

        Raises:
            MemwallError: it is above; the message names what was held by kind, what is missing, and a remedy.
        """
        if self.peak_bytes > limit_bytes:
            raise MemwallError(self.describe_excess(limit_bytes))

    def describe_excess(self, limit_bytes: int, *, rank: int | None = None) -> str:
        """What the peak since ``reset_peak`` held by kind, how far that is above a limit, and a remedy.

        Args:
            limit_bytes: that it passed.
            rank: named in the text; None: it says "this rank".
        """
        peak_bytes = self.peak_bytes
        phase, kinds = max(self.peak().items(), key=lambda item: sum(item[1].values()))
        held = {kind: size for kind, size in kinds.items() if size}
        listed = ", ".join(f"{kind} {format_size(size)}" for kind, size in held.items())
        return (
            f"device budget exceeded in {phase}: {'this rank' if rank is None else f'rank {rank}'} held "
            f"{format_size(peak_bytes)} ({listed}), the budget is {format_size(limit_bytes)}, "
            f"{format_size(peak_bytes - limit_bytes)} ({peak_bytes - limit_bytes} bytes) are missing. "
            f"{_REMEDY.get(max(held, key=held.__getitem__), _REMEDY_RESIDENT)}"
        )

    # -- walks --

    def refresh(self) -> None:
        """Walk over weights, buffers, gradients and optimizer state, and count what is there now."""
        if self._model is None or self._counter is None:
            return
        found: set[int] = set()
        managed = {id(p) for group in self._counter.groups for p in group.managed()}
        for group in self._counter.groups:
            group.look()
            for data in group.sharded_data():
                self._count(data, Kind.PARAM, found, group.book)
        plain = [p for p in self._model.parameters() if id(p) not in managed]
        for parameter in plain:
            self._count(parameter, Kind.PARAM, found)
        hosted = {id(b) for module in self._host_modules for b in module.buffers()}
        for buffer in self._model.buffers():
            self._count(buffer, Kind.BUFFER, found, self.host if id(buffer) in hosted else self._book)
        self._plain = plain
        self._on_meta = any(t.is_meta for t in (*self._model.parameters(), *self._model.buffers()))
        self._hook_gradients()
        self._see_gradients()
        self._walk_optimizers(found)
        for book in (self._book, self.host):
            book.keep_only(frozenset({Kind.PARAM, Kind.BUFFER}) | OPTIMIZER_KINDS, found)

    def _count(self, tensor: torch.Tensor, kind: str, found: set[int], book: Book | None = None) -> None:
        keys = [id(storage) for storage in storages(tensor)]
        if any(key not in found for key in keys):  # the first kind wins: an alias is not a second block
            (book or self._book).track(tensor, kind)
            found.update(keys)

    def _walk_optimizers(self, found: set[int]) -> None:
        hosted = self._on_host()
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                book = self.host if id(parameter) in hosted else self._book
                for kind, tensor in _state_tensors(state):
                    self._count(tensor, kind, found, book)
        self._state_sizes = self._measure_states()

    def _measure_states(self) -> tuple[int, int]:
        """Parameters with a state, and entries of all states: grows when the optimizer makes state."""
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return len(states), sum(map(len, states))

    def _see_gradients(self) -> None:
        if self._counter is None:
            return
        for group in self._counter.groups:
            group.look_at_gradients()
        for parameter in self._plain:
            if parameter.grad is not None:
                self._book.track(parameter.grad, Kind.GRAD)
        self._gradients_seen = True

    # -- hooks --

    def _hook_gradients(self) -> None:
        """Weights outside FSDP2 have no other event in backward than their gradient's own."""
        alive = {id(p): p for p in self._plain if p.requires_grad}
        for key, (ref, handle) in list(self._gradient_hooks.items()):
            if ref() is None or key not in alive:
                handle.remove()
                del self._gradient_hooks[key]
        for key, parameter in alive.items():
            if key not in self._gradient_hooks:
                handle = parameter.register_post_accumulate_grad_hook(self._after_gradient)
                self._gradient_hooks[key] = (weakref.ref(parameter), handle)

    def _after_gradient(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self._book.track(parameter.grad, Kind.GRAD)

    def _before_optimizer(self, *_: Any) -> None:
        if not self._gradients_seen:
            self._see_gradients()

    def _after_optimizer(self, *_: Any) -> None:
        self._gradients_seen = False
        if self._is_stale() or self._state_sizes != self._measure_states():
            self.refresh()

    def _is_stale(self) -> bool:
        return self._on_meta or self._book.is_stale() or self.host.is_stale()


class _RefreshHook:
    """Walks again after ``load_state_dict``. Copied or pickled with a model, it comes out as a hook without effect."""

    def __init__(self, account: MemoryAccount) -> None:
        self._account = weakref.ref(account)

    def __call__(self, *_: object) -> None:
        if (account := self._account()) is not None:
            account.refresh()

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _without_effect, ()


def _without_effect() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object) -> None:
    return None


class _Restore(AbstractContextManager[None]):
    """Goes back to the phase before when the block ends; does nothing when there is no block."""

    def __init__(self, back: Callable[[], object]) -> None:
        self._back = back

    def __exit__(self, *_: object) -> None:
        self._back()


def _state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(kind, tensor) of one parameter's optimizer state, nested containers included."""
    for key, value in state.items():
        kind = Kind(key) if key in (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MASTER) else Kind.OPTIMIZER
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, torch.Tensor):
                yield kind, item
            elif isinstance(item, Mapping):
                pending += item.values()
            elif isinstance(item, (list, tuple)):
                pending += item


def _in_order(kinds: Mapping[str, int]) -> dict[Kind, int]:
    """Every reported kind, zero or not, then whatever else was booked."""
    return {kind: kinds.get(kind, 0) for kind in KINDS} | {k: v for k, v in kinds.items() if k not in KINDS}
