"""The logical state of a model: names that do not depend on wrappers, values that are references, each tensor once.

What belongs to the state is what ``model.state_dict()`` says (persistent buffers, hooks and overrides included), asked
with ``keep_vars=True`` so that nothing is copied. FSDP2 reshards its parameters on that call, so the values are the
sharded ones even when a unit was left gathered.

Names lose what wrapping adds: ``_orig_mod`` (a ``torch.compile``d submodule) and ``_checkpoint_wrapped_module``
(activation checkpointing). A tensor with several names (tied weights) is kept under its first; the others are aliases.

It does not support FSDP1 or DDP wrappers, whose state dicts carry other prefixes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memwall_strategy.core.errors import CheckpointError

# torch.compile and torch's CheckpointWrapper keep the wrapped module under these attribute names, and so in every
# parameter's name. Pinned by tests/engine/test_checkpoint_state.py::TestModel::test_names_do_not_depend_on_wrappers.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

_MODEL = "state_dict"
"""First part of a model tensor's key in a checkpoint; Lightning's own sharded checkpoints use the same."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model's logical state.

    Attributes:
        tensors: name -> reference (DTensor or plain), without autograd.
        objects: name -> entry that is no tensor (a module's extra state).
        aliases: further name -> the name in ``tensors`` that holds the same tensor.
        derived: names in ``tensors`` that are not parameters or buffers but made for the state dict (a metric's or a
            quantised module's); reading into them would change nothing.
        names: id of a parameter -> its name.
        raw: name -> name as ``model.load_state_dict`` knows it.
    """

    tensors: dict[str, Tensor]
    objects: dict[str, Any]
    aliases: dict[str, str]
    derived: frozenset[str]
    names: dict[int, str]
    raw: dict[str, str]


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return name -> reference of everything that belongs to the model's state. Copies nothing.

    Raises:
        CheckpointError: a tensor has no storage yet (meta device), or two tensors share a name.
    """
    state = collect_model(model)
    return {**state.tensors, **state.objects}


def collect_model(model: nn.Module) -> ModelState:
    """Return the model's logical state with what is needed to load it; see ``model_state``."""
    raw_state = model.state_dict(keep_vars=True)
    live = {id(tensor) for tensor in _registered(model)}
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    derived: set[str] = set()
    first_name: dict[int, str] = {}
    raw: dict[str, str] = {}
    for raw_name, value in raw_state.items():
        name = logical_name(raw_name)
        if name in raw:
            raise CheckpointError(f"Two entries of the model's state are called {name!r}. Rename one of the modules.")
        raw[name] = raw_name
        if not isinstance(value, Tensor):
            objects[name] = value
        elif id(value) in first_name:
            aliases[name] = first_name[id(value)]
        else:
            if value.is_meta:
                raise CheckpointError(f"{name} is on the meta device and has no values. Materialise the model first.")
            if id(value) in live:
                first_name[id(value)] = name
            else:
                derived.add(name)
            tensors[name] = value.detach()
    names = dict(first_name)
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), logical_name(raw_name))  # left out of the state dict, yet optimized
    return ModelState(tensors, objects, aliases, frozenset(derived), names, raw)


def logical_name(raw_name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(part for part in raw_name.split(".") if part not in _WRAPPERS)


def model_key(name: str) -> str:
    """The key of a model tensor in a checkpoint."""
    return f"{_MODEL}.{name}"


def model_path(name: str) -> tuple[str, str]:
    """The same key as DCP's nested path, so that other readers rebuild ``{"state_dict": {name: tensor}}``."""
    return _MODEL, name


def names_in(keys: Iterable[str]) -> set[str]:
    """The names of the model tensors among a checkpoint's keys."""
    prefix = f"{_MODEL}."
    return {key[len(prefix) :] for key in keys if key.startswith(prefix)}


def find_name(
    name: str, there: Collection[str], aliases: Mapping[str, str], aliases_there: Mapping[str, str]
) -> str | None:
    """Return the name under which a checkpoint holds what the model calls ``name``, or None.

    Tied weights may have been saved under another of their names, or tied by then and untied now.

    Args:
        there: names in the checkpoint.
        aliases: the model's further name -> name.
        aliases_there: the checkpoint's further name -> name.
    """
    names = [name, *(alias for alias, first in aliases.items() if first == name)]
    for candidate in names:
        if candidate in there:
            return candidate
    return next((aliases_there[candidate] for candidate in names if candidate in aliases_there), None)


def load_entries(model: nn.Module, state: ModelState, entries: Mapping[str, Any]) -> None:
    """Hand entries that cannot be read in place (extra state, derived tensors) to ``model.load_state_dict``."""
    if entries:
        with torch.no_grad():
            model.load_state_dict({state.raw[name]: value for name, value in entries.items()}, strict=False)


def _registered(model: nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
