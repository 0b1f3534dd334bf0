"""Recomputing activations in backward: one unit by itself, one unit without its matrix products, several together.

One unit goes through ``torch.utils.checkpoint`` (non-reentrant): its state of the random numbers and of autocast come
back, and its weights are there because FSDP2 gathers them before the unit's backward begins. What a recomputation must
not do twice is taken care of here: running statistics of normalization layers are updated once.

Several units together (``Segment``) keep the arguments of the first one only. Each unit's ``forward`` is hooked by
itself, and the model's own code between two units is not run again: a unit joins the segment where one of its arguments
is, byte for byte, what the unit before returned; otherwise it starts a segment of its own. The first saved tensor that
backward asks for runs the whole segment again, unit by unit; weights of units that are not gathered then are gathered
for their forward and let go after it.

Private faces: ``_top_saved_tensors_default_hooks`` (the innermost hooks, to count what a recomputation saves without
hiding it from torch's checkpoint), ``storage`` of the first selective context (what it keeps),
``_disable_current_modes``, ``torch.utils._pytree``. ``tests/pool/test_activations.py`` fails when one of them changes.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.fsdp import fsdp_state, state_groups
from memwall_strategy.engine.precision import keeps_statistics
from memwall_strategy.engine.unit_forward import UnitForward

Note = Callable[[torch.Tensor], None]
"""Counts a tensor that is held for backward."""

_ATEN = torch.ops.aten
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "matmul")
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_KEPT = frozenset(getattr(_ATEN, name).default for name in _PRODUCTS if hasattr(_ATEN, name))
_KEPT_ATTENTION = {
    op: next(i for i, arg in enumerate(op._schema.arguments) if arg.name == "dropout_p")
    for op in (getattr(_ATEN, name).default for name in _ATTENTIONS if hasattr(_ATEN, name))
}


def recompute(
    unit: UnitForward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    selective: bool,
    again: Callable[[int], None],
    note: Note | None,
) -> Any:
    """Run one call of a unit so that its backward runs it again.

    Args:
        selective: keep the results of matrix products and attention, run the rest again.
        again: called with the number of units that are run again, when they are.
        note: told of every tensor that is held for backward; None: nobody counts.
    """
    leaves, spec = _flat_arguments(unit, args, kwargs)
    changed = _Changes(unit)
    first = True

    def run(*leaves: Any) -> Any:
        nonlocal first
        args, kwargs = tree_unflatten(list(leaves), spec)
        if first:
            first = False
            return unit.inner(*args, **kwargs)
        again(1)
        with changed.aside(), _noted(note):
            return unit.inner(*args, **kwargs)

    if not selective:
        output = checkpoint(run, *leaves, use_reentrant=False)
    else:
        contexts = create_selective_checkpoint_contexts(_policy)
        output = checkpoint(run, *leaves, use_reentrant=False, context_fn=lambda: contexts)
        if note is not None:
            for kept in tree_flatten(dict(contexts[0].storage))[0]:
                if isinstance(value := getattr(kept, "val", kept), torch.Tensor):
                    note(value)
    changed.look()
    return output


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    if (index := _KEPT_ATTENTION.get(op)) is not None:
        dropout = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
        # With dropout inside, skipping it would leave the random numbers behind for whatever is run again after it.
        return CheckpointPolicy.MUST_SAVE if dropout == 0.0 else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _flat_arguments(unit: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    leaves, spec = tree_flatten((args, kwargs))
    if any(hasattr(leaf, "get_seq_length") for leaf in leaves):
        raise ConfigError(
            f"unit {unit.name!r} is given a key-value cache, which a recomputation would fill a second time. Set "
            "model.config.use_cache=False for training, or keep or offload this unit's activations."
        )
    return leaves, spec


class _Changes:
    """Buffers that one call of a unit changes: they must be changed once, however often it runs.

    Normalization layers do not read the running statistics that they update, so a recomputation may update copies.
    """

    def __init__(self, unit: UnitForward) -> None:
        self._unit = unit
        self._versions = [(buffer, buffer._version) for buffer in unit.module.buffers()]

    def look(self) -> None:
        """After the first run.

        Raises:
            ConfigError: a buffer changed that the unit may have read before.
        """
        changed = {id(buffer) for buffer, version in self._versions if buffer._version != version}
        self._versions = []
        if not changed:
            return
        for name, owner in self._unit.module.named_modules():
            for key, buffer in owner.named_buffers(recurse=False):
                if id(buffer) in changed and not keeps_statistics(owner):
                    raise ConfigError(
                        f"unit {self._unit.name!r} changes its buffer {f'{name}.{key}'.lstrip('.')!r} in forward: run "
                        "again it would see another one. Keep or offload this unit's activations."
                    )

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While the body runs, layers with running statistics hold copies of them."""
        owners = [m for m in self._unit.module.modules() if keeps_statistics(m)]
        before = [dict(owner._buffers) for owner in owners]
        with _disable_current_modes():  # selective checkpointing would take these copies for the unit's own
            for owner in owners:
                owner._buffers.update({k: b if b is None else b.clone() for k, b in owner._buffers.items()})
        try:
            yield
        finally:
            for owner, buffers in zip(owners, before, strict=True):
                owner._buffers.update(buffers)


@contextlib.contextmanager
def _noted(note: Note | None) -> Iterator[None]:
    """Tell ``note`` of what is saved inside; the hooks around go on as they were."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False) if note is not None else None
    if outer is None:
        yield
        return

    def pack(tensor: torch.Tensor) -> Any:
        note(tensor)
        return outer[0](tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, outer[1]):
        yield


# -- several units together --


class _Saved:
    """Stands for a tensor that autograd saved; it has a value once the segment ran again."""

    __slots__ = ("__weakref__", "segment", "value")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.value: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Trace:
    """A tensor as it was, without holding it."""

    storage: weakref.ref
    version: int
    form: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Trace:
        return cls(weakref.ref(tensor.untyped_storage()), tensor._version, _form(tensor))

    def is_of(self, tensor: torch.Tensor) -> bool:
        return (
            self.storage() is tensor.untyped_storage()
            and self.version == tensor._version
            and self.form == _form(tensor)
        )


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided


@dataclass(frozen=True, slots=True)
class _Link:
    """An argument that is the output of the unit before, by its place there."""

    place: int
    requires_grad: bool


@dataclass(slots=True)
class _Member:
    """One call of one unit in a segment."""

    unit: UnitForward
    leaves: list[Any]
    """Arguments: a ``_Link``, a detached tensor with its version, or the value itself."""
    spec: TreeSpec
    changed: _Changes
    random: list[tuple[str, torch.Tensor]]
    contexts: list[Callable[[], Any]]
    saved: list[weakref.ref]
    forms: list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class _Held:
    tensor: torch.Tensor
    version: int


class Segment:
    """Units of one forward that run again together; made by the first of them.

    Args:
        names: the units that may join, in order.
        again, note: as in ``recompute``.
    """

    def __init__(self, names: Sequence[str], *, again: Callable[[int], None], note: Note | None) -> None:
        self._names, self._again, self._note = tuple(names), again, note
        self._members: list[_Member] = []
        self._outputs: list[_Trace | None] = []
        self._running = False

    def accepts(self, unit: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call goes on where the last one ended."""
        if len(self._members) >= len(self._names) or self._names[len(self._members)] != unit.name:
            return False
        return any(self._link(leaf) is not None for leaf in tree_flatten((args, kwargs))[0])

    def run(self, unit: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call, as the next member."""
        leaves, spec = _flat_arguments(unit, args, kwargs)
        changed = _Changes(unit)
        member = _Member(
            unit, [self._keep(leaf) for leaf in leaves], spec, changed, _random_states(unit), _autocasts(unit), [], []
        )
        self._members.append(member)

        def pack(tensor: torch.Tensor) -> Any:
            if _is_weight(tensor):
                return tensor
            saved = _Saved(self)
            member.saved.append(weakref.ref(saved))
            member.forms.append((tensor.dtype, tensor.shape))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            output = unit.inner(*args, **kwargs)
        changed.look()
        self._outputs = [_Trace.of(leaf) if _is_plain(leaf) else None for leaf in tree_flatten(output)[0]]
        return output

    def _link(self, leaf: Any) -> int | None:
        if not _is_plain(leaf):
            return None
        return next((i for i, trace in enumerate(self._outputs) if trace is not None and trace.is_of(leaf)), None)

    def _keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._members and (place := self._link(leaf)) is not None:
            return _Link(place, leaf.requires_grad)
        kept = leaf.detach()
        if self._note is not None:
            self._note(kept)
        # Detached: a graph held here would hold this segment in turn, and only the garbage collector would end it.
        return _Held(kept.requires_grad_(leaf.requires_grad), kept._version)

    def recompute(self) -> None:
        """Run every member again; each saved tensor that somebody still waits for gets its value."""
        if self._running:
            raise MemwallError(f"unit {self._names[0]!r}: a recomputation asks for its own result")
        self._running = True
        self._again(len(self._members))
        output: list[Any] = []
        try:
            for member in self._members:
                output = self._run_again(member, output)
        finally:
            self._running = False

    def _run_again(self, member: _Member, before: list[Any]) -> list[Any]:
        args, kwargs = tree_unflatten([self._give(member, leaf, before) for leaf in member.leaves], member.spec)
        count = 0

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal count
            if _is_weight(tensor):
                return tensor
            if count >= len(member.saved) or member.forms[count] != (tensor.dtype, tensor.shape):
                raise self._differs(member)
            if (saved := member.saved[count]()) is not None:
                saved.value = tensor.detach()
                if self._note is not None:
                    self._note(tensor)
            count += 1
            return None

        with contextlib.ExitStack() as stack:
            stack.enter_context(gathered(member.unit.module))
            stack.enter_context(_random_as(member.random))
            for context in member.contexts:
                stack.enter_context(context())
            stack.enter_context(member.changed.aside())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _nothing))
            output = member.unit.inner(*args, **kwargs)
        if count != len(member.saved):
            raise self._differs(member)
        return tree_flatten(output)[0]

    def _give(self, member: _Member, leaf: Any, before: list[Any]) -> Any:
        if isinstance(leaf, _Link):
            return before[leaf.place].detach().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, _Held):
            if leaf.tensor._version != leaf.version:
                raise MemwallError(
                    f"an argument of unit {member.unit.name!r} was changed in place between its forward and backward, "
                    "so that it cannot be recomputed. Change a copy, or keep this unit's activations."
                )
            return leaf.tensor
        return leaf

    def _differs(self, member: _Member) -> MemwallError:
        return MemwallError(
            f"unit {member.unit.name!r} saved other tensors when it was run again than the first time: its forward "
            "depends on something that changed meanwhile. Keep or offload its activations."
        )


def _unpack(saved: Any) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        return saved
    if saved.value is None:
        saved.segment.recompute()
    return saved.value


def _nothing(_: Any) -> torch.Tensor:
    raise MemwallError("a recomputation was differentiated by itself, which double backward needs and this cannot")


def _is_weight(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and isinstance(tensor, nn.Parameter)


def _random_states(unit: UnitForward) -> list[tuple[str, torch.Tensor]]:
    states = [("cpu", torch.get_rng_state())]
    if torch.cuda.is_initialized():
        states.append(("cuda", torch.cuda.get_rng_state()))
    return states


@contextlib.contextmanager
def _random_as(states: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
    devices = [torch.cuda.current_device()] if any(kind == "cuda" for kind, _ in states) else []
    with torch.random.fork_rng(devices=devices):
        for kind, state in states:
            (torch.cuda.set_rng_state if kind == "cuda" else torch.set_rng_state)(state)
        yield


def _autocasts(unit: UnitForward) -> list[Callable[[], Any]]:
    kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return [
        functools.partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in kinds
    ]


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """The weights of a sharded unit are whole while the body runs; what was whole, or on its way, before stays so.

    Relies on ``FSDPParamGroup.is_unsharded`` and ``_all_gather_result`` (a gather that was prefetched).
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    groups = state_groups(fsdp_state(module))
    stays = all(group.is_unsharded or group._all_gather_result is not None for group in groups)
    module.unshard()
    try:
        yield
    finally:
        if not stays:
            module.reshard()
