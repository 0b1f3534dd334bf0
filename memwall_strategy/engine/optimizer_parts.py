"""One torch optimizer, stepped a few parameters at a time, and what its state looks like before it exists.

An optimizer that treats each parameter by itself gives the same bits whether ``step`` sees all parameters or one group
of them after the other. ``probe`` finds out whether a given optimizer does, with its own options, on tiny tensors; and
which of its state tensors have the parameter's shape. The optimizer itself, its parameters and its state stay as they
are.

Relies on a private fact of ``torch.optim.Optimizer``: hooks live in the attributes of ``_HOOKS``.
``tests/engine/test_optimizer_parts.py`` fails when that changes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.optimizer_step import bare_step, only, plain_class
from memwall_strategy.engine.quantised import uncompiled, why_not_paged

MASTER = "master"
"""Key, in a parameter's state, of the float32 copy that the optimizer steps in its stead."""

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

_PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, KeyError, IndexError)
"""What an optimizer may raise on the probe's tensors: no closure, dense gradients, a parameter it does not know."""

_PROBE_DIMS = (6, 4, 3, 5, 2)
"""Sizes of the probe's tensors along each dim; different ones, so that a factored state is not taken for a full one."""

_PROBE_STEPS = 3
"""Enough for what starts at a first step, or looks at the one before."""

_PROBED_PER_GROUP = 4
"""Parameters of one param group in the probe; at least two, so that they can be told apart."""


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """What the layout of a parameter's state depends on."""

    group: int
    dims: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Parts:
    """What ``probe`` found.

    Attributes:
        alone: parameters can be stepped one after the other with the same result.
        reason: why not, in words; empty where they can.
        like: kind of parameter -> state key -> dtype of the state tensors that have the parameter's shape.
    """

    alone: bool
    reason: str
    like: dict[ParameterKind, dict[str, torch.dtype]]


def kind_of(parameter: torch.Tensor, group: int) -> ParameterKind:
    """The kind of a parameter in param group ``group``."""
    return ParameterKind(group, parameter.dim(), parameter.dtype)


def needs_master(dtype: torch.dtype) -> bool:
    """Whether weights of this type are too coarse for small updates: ``bfloat16`` and ``float16``."""
    return dtype.is_floating_point and dtype.itemsize == 2


def probe(optimizer: Optimizer, *, master: bool = False) -> Parts:
    """Find out whether an optimizer can be stepped in parts, and which state it will keep.

    Args:
        optimizer: whose.
        master: it will step float32 copies of weights of a coarser type; the copy is part of the state.
    """
    chosen = _chosen(optimizer)
    if reason := why_not_paged(optimizer):
        return Parts(False, reason, {})
    if not chosen:
        return Parts(True, "", {})
    name = type(optimizer).__name__
    stepped = [replace(k, dtype=torch.float32) if master and needs_master(k.dtype) else k for k in chosen]
    whole, apart = _Twin(optimizer, stepped), _Twin(optimizer, stepped)
    try:
        # Stochastic rounding must not move the run's random numbers.
        with torch.random.fork_rng(devices=[]), uncompiled(optimizer):
            for step in range(_PROBE_STEPS):
                whole.give_gradients(step)
                apart.give_gradients(step)
                bare_step(whole.optimizer)()
                for parameter in apart.parameters:
                    with only(apart.optimizer, [parameter]):
                        bare_step(apart.optimizer)()
    except _PROBE_ERRORS as error:
        text = str(error).splitlines()[0] if str(error) else ""
        return Parts(False, f"{name} does not step tensors of its own one by one: {type(error).__name__}: {text}", {})
    if difference := whole.difference(apart):
        return Parts(False, f"{name} couples its parameters: {difference} differs when they are stepped apart", {})
    like: dict[ParameterKind, dict[str, torch.dtype]] = {}
    for kind, parameter in zip(chosen, whole.parameters, strict=True):
        like[kind] = {
            key: value.dtype
            for key, value in whole.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
        }
        if parameter.dtype != kind.dtype:
            like[kind][MASTER] = parameter.dtype
    return Parts(True, "", like)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a piece of a parameter can be stepped by itself with the same result, for one that ``probe`` found alone.

    Where it can, a rank's part of a sharded parameter is stepped as a tensor of its own. Adafactor (row means), Muon
    (matrix products) and LAMB (norms) cannot.
    """
    chosen = _chosen(optimizer)
    whole, cut = _Twin(optimizer, chosen), _Twin(optimizer, chosen)
    pieces = {p: [torch.nn.Parameter(piece) for piece in _halves(p.detach().clone())] for p in cut.parameters}
    for group in cut.optimizer.param_groups:
        group["params"] = [piece for parameter in group["params"] for piece in pieces[parameter]]
    for parameter, mine in pieces.items():
        for key, value in cut.optimizer.state.pop(parameter, {}).items():
            full = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
            for piece, part in zip(mine, _halves(value) if full else [value] * len(mine), strict=True):
                cut.optimizer.state[piece][key] = _unshared(part)
    try:
        with torch.random.fork_rng(devices=[]), uncompiled(optimizer):
            for step in range(_PROBE_STEPS):
                whole.give_gradients(step)
                cut.give_gradients(step)
                for parameter, mine in pieces.items():
                    for piece, gradient in zip(mine, _halves(parameter.grad), strict=True):
                        piece.grad = gradient.clone()
                bare_step(whole.optimizer)()
                bare_step(cut.optimizer)()
    except _PROBE_ERRORS:
        return False
    return all(
        torch.equal(one, torch.cat(list(pieces[other])) if one.dim() else pieces[other][0])
        for one, other in zip(whole.parameters, cut.parameters, strict=True)
    )


def _halves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Two pieces along the first dim."""
    return [tensor] if tensor.dim() == 0 else list(tensor.tensor_split(2))


def _chosen(optimizer: Optimizer) -> list[ParameterKind]:
    """A few parameters of each group, every kind among them, the first kinds twice."""
    chosen: list[ParameterKind] = []
    for index, group in enumerate(optimizer.param_groups):
        kinds = list(dict.fromkeys(kind_of(p, index) for p in group["params"]))
        chosen += kinds + kinds[: max(0, _PROBED_PER_GROUP - len(kinds))] if kinds else []
    return chosen


class _Twin:
    """An optimizer of the same class and options over tiny parameters."""

    def __init__(self, optimizer: Optimizer, kinds: Iterable[ParameterKind]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._kinds = list(kinds)
        self.parameters = [
            torch.nn.Parameter(torch.randn(_PROBE_DIMS[: kind.dims], generator=generator).to(kind.dtype))
            for kind in self._kinds
        ]
        twin = self.optimizer = object.__new__(plain_class(optimizer))
        twin.__dict__.update(
            {key: copy.copy(v) if isinstance(v, (dict, list)) else v for key, v in optimizer.__dict__.items()}
        )
        twin.__dict__.pop("step", None)  # a scheduler's counter, bound to the original
        for name in _HOOKS:
            setattr(twin, name, OrderedDict())
        twin.state = defaultdict(dict)
        twin.param_groups = []
        for index, group in enumerate(optimizer.param_groups):
            options = {key: _unshared(value) for key, value in group.items() if key not in ("params", "param_names")}
            mine = [p for kind, p in zip(self._kinds, self.parameters, strict=True) if kind.group == index]
            twin.param_groups.append(options | {"params": mine})
        self._start_as(optimizer)

    def _start_as(self, optimizer: Optimizer) -> None:
        """State that the constructor makes (Adagrad) must be there before the first step: made by the constructor."""
        held = [
            (index, parameter)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if optimizer.state.get(parameter)
        ]
        for kind, mine in zip(self._kinds, self.parameters, strict=True):
            like = next((p for index, p in held if kind_of(p, index) == kind), None)
            if like is None:
                continue
            for key, value in optimizer.state[like].items():
                if isinstance(value, torch.Tensor):
                    here = value.numel() > 0 or like.numel() == 0  # else it rests elsewhere: what does has this shape
                    full = (value.shape == like.shape or not here) and value.dim() > 0
                    shape = mine.shape if full else local_tensor(value).shape
                    value = torch.zeros(shape, dtype=value.dtype)
                self.optimizer.state[mine][key] = value

    def give_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step + 1)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)

    def difference(self, other: _Twin) -> str | None:
        """What differs in bits, or None."""
        for kind, mine, its in zip(self._kinds, self.parameters, other.parameters, strict=True):
            if not torch.equal(mine, its):
                return f"a weight of group {kind.group}"
            if not _same(self.optimizer.state.get(mine, {}), other.optimizer.state.get(its, {})):
                return f"the state of a weight of group {kind.group}"
        shared = [{k: v for k, v in twin.optimizer.state.items() if isinstance(k, str)} for twin in (self, other)]
        if not _same(*shared):
            return "state that belongs to no weight"
        for index, groups in enumerate(zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True)):
            for key in groups[0]:
                if key != "params" and not _same(groups[0][key], groups[1][key]):
                    return f"{key!r} of group {index}"
        return None


def _unshared(value: Any) -> Any:
    return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else copy.copy(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
