"""Room for an optimizer's saved state: found in the optimizer or allocated, read into directly, then installed.

``match`` compares names and changes nothing. ``make_room`` then takes each tensor that the optimizer already has where
shape, type and placement fit, and allocates the others like their parameter, so that the state never exists twice.
``commit`` installs what was read. Where the state is paged, this goes part by part: room for one part, read, installed
and sent away, then the next. torch's own ``set_optimizer_state_dict`` executes an optimizer step to make room;
nothing here does.

Each state keeps the type in which it was saved; ``Optimizer.load_state_dict`` would cast it to its parameter's.

If reading fails between ``make_room`` and ``commit`` the optimizer's state is not usable: load another checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from memwall_strategy.engine.checkpoint.model import ModelState, find_name
from memwall_strategy.engine.checkpoint.optimizer import decode, name_of
from memwall_strategy.engine.checkpoint.paged import PagedState, settle
from memwall_strategy.engine.fsdp import local_tensor

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of every block of a checkpoint, by key."""


@dataclass(slots=True)
class OptimizerRoom:
    """One optimizer and where its saved state goes.

    Attributes:
        blocks: checkpoint key -> tensor to read into, after ``make_room``.
        missing: names of the optimizer's parameters that no saved group holds.
        unexpected: names of saved parameters that this optimizer does not hold.
        regrouped: names that are in one group now and were in groups with unlike hyperparameters.
        joined: saved groups that this optimizer has not got, of parameters that no group of it holds: they joined after
            it was made (fine-tuning that unfreezes), and ``join`` lets them join again.
    """

    optimizer: Optimizer
    blocks: dict[str, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    regrouped: list[str] = field(default_factory=list)
    joined: list[dict[str, Any]] = field(default_factory=list)
    _matched: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _shared: dict[str, Any] = field(default_factory=dict)
    _options: list[dict[str, Any]] = field(default_factory=list)
    _state: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def match(
        cls,
        optimizer: Optimizer,
        name: str,
        model: ModelState,
        layout: Mapping[str, Any],
        aliases_there: Mapping[str, str],
        parameters: Mapping[str, Tensor],
    ) -> OptimizerRoom:
        """Match an optimizer's parameters and groups with its saved layout; ``parameters``: the model's, by name."""
        room = cls(optimizer, _shared=layout["shared"])
        groups = layout["groups"]
        group_of = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}
        found: set[str] = set()
        for index, group in enumerate(optimizer.param_groups):
            origins: dict[int, str] = {}
            for i, parameter in enumerate(group["params"]):
                parameter_name = name_of(model, parameter, name, index, i)
                saved_name = find_name(parameter_name, group_of, model.aliases, aliases_there)
                if saved_name is None:
                    room.missing.append(parameter_name)
                    continue
                found.add(saved_name)
                origins.setdefault(group_of[saved_name], parameter_name)
                room._matched.append((parameter, group, layout["state"].get(saved_name, {})))
            room._options.append(room._saved_options(groups, origins))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for index in range(len(optimizer.param_groups), len(groups)):
            found |= room._match_joined(parameters, layout, groups[index], held)
        room.unexpected = sorted(group_of.keys() - found)
        return room

    def _match_joined(
        self, named: Mapping[str, Tensor], layout: Mapping[str, Any], saved: Mapping[str, Any], held: set[int]
    ) -> set[str]:
        """Match a saved group that joined later; the names of its parameters, or none where it does not fit."""
        parameters = [named.get(name) for name in saved["params"]]
        if not parameters or any(p is None or id(p) in held for p in parameters):
            return set()
        group = dict(saved["options"]) | {"params": parameters}
        self.joined.append(group)
        self._options.append(saved["options"])
        pairs = zip(saved["params"], parameters, strict=True)
        self._matched += [(p, group, layout["state"].get(name, {})) for name, p in pairs]
        return set(saved["params"])

    def join(self) -> None:
        """Let ``joined`` join the optimizer."""
        for group in self.joined:
            self.optimizer.add_param_group(group)

    @property
    def is_paged(self) -> bool:
        """Whether the state rests elsewhere, so that it is to be read part by part."""
        return isinstance(self.optimizer, PagedState)

    def parts(self) -> list[set[int]]:
        """Ids of the parameters whose state may be in memory together; what no part names comes last."""
        settle(self.optimizer)
        parts = [{id(parameter) for parameter in part} for part in self.optimizer.state_parts()]
        return [*parts, {id(parameter) for parameter, _, _ in self._matched} - set().union(*parts)]

    def make_room(self, shapes: Shapes, part: set[int] | None = None) -> None:
        """Find or allocate a tensor for every block, or for those of a part; fills ``blocks``."""
        self.blocks = {}
        for parameter, group, specs in self._matched:
            if part is not None and id(parameter) not in part:
                continue
            present = self.optimizer.state.get(parameter, {})
            self._state[parameter] = {
                key: self._place(key, spec, parameter, group, present, shapes) for key, spec in specs.items()
            }
        for key, spec in self._shared.items() if part is None or not self._state else ():
            self._state[key] = decode(spec, lambda s: self._take(s, _plain_room(*shapes[s["block"]])))

    def install(self) -> None:
        """Install the state that was read so far. Parameters without saved state end up without state."""
        for key, entries in self._state.items():
            if isinstance(key, Tensor) and not entries:
                self.optimizer.state.pop(key, None)
            else:
                self.optimizer.state[key] = entries
        self._state, self.blocks = {}, {}
        if isinstance(self.optimizer, PagedState):
            self.optimizer.adopt_state()

    def commit(self) -> None:
        """Install state and hyperparameters."""
        self.install()
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)  # a captured graph may hold this very tensor
                else:
                    group[key] = value

    def _place(
        self,
        key: str,
        spec: Mapping[str, Any],
        parameter: Tensor,
        group: Mapping[str, Any],
        present: dict[str, Any],
        shapes: Shapes,
    ) -> Any:
        if "block" not in spec:
            return decode(spec, lambda s: self._take(s, _allocate(s, parameter, *shapes[s["block"]], parameter.device)))
        shape, dtype = shapes[spec["block"]]
        device = _device(key, spec, parameter, group)
        tensor = present.pop(key, None)
        if not _fits(tensor, spec, parameter, shape, dtype, device):
            del tensor  # before its successor is allocated: there may not be room for both
            tensor = _allocate(spec, parameter, shape, dtype, device)
        return self._take(spec, tensor)

    def _take(self, spec: Mapping[str, Any], tensor: Tensor) -> Tensor:
        self.blocks[spec["block"]] = tensor
        return tensor

    def _saved_options(self, groups: list[dict[str, Any]], origins: Mapping[int, str]) -> dict[str, Any]:
        if not origins:
            return {}
        first, *others = sorted(origins)
        for other in others:
            if not _same(groups[other]["options"], groups[first]["options"]):
                self.regrouped += [origins[first], origins[other]]
        return groups[first]["options"]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right)
    return bool(left == right)


def _device(key: str, spec: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where a state tensor lives. A step count follows torch's rule: on the CPU, but for graphs and fused kernels."""
    beside = bool(group.get("capturable") or group.get("fused")) if key == "step" else "device" not in spec
    return parameter.device if beside else torch.device("cpu")


def _kind(spec: Mapping[str, Any], parameter: Tensor, shape: torch.Size) -> str:
    """``like`` its parameter; ``spread``: of another shape, but it meets a sharded gradient; or ``plain``."""
    if isinstance(parameter, DTensor):
        if not shape and "placements" not in spec:
            return "plain"  # a step count
        return "like" if shape == parameter.shape else "spread"
    return "like" if shape == parameter.shape else "plain"


def _placements(spec: Mapping[str, Any], parameter: DTensor) -> list[Any]:
    saved = spec.get("placements", ())
    if len(saved) != parameter.device_mesh.ndim:
        return [Replicate()] * parameter.device_mesh.ndim
    return [Replicate() if dim is None else Shard(dim) for dim in saved]


def _allocate(
    spec: Mapping[str, Any], parameter: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    kind = _kind(spec, parameter, shape)
    if kind == "plain":
        return torch.empty(shape, dtype=dtype, device=device)
    if isinstance(parameter, DTensor) and kind == "spread":
        placements = _placements(spec, parameter)
        return empty_dtensor(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)
    if isinstance(parameter, DTensor):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty_like(parameter.detach(), dtype=dtype, device=device)


def _fits(
    old: Any, spec: Mapping[str, Any], parameter: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> bool:
    if not isinstance(old, Tensor) or old.shape != shape or old.dtype != dtype:
        return False
    if local_tensor(old).numel() != local_tensor(parameter).numel() and old.shape == parameter.shape:
        return False  # it rests elsewhere
    kind = _kind(spec, parameter, shape)
    if not isinstance(parameter, DTensor) or kind == "plain":
        return not isinstance(old, DTensor) and old.device == device
    placements = parameter.placements if kind == "like" else tuple(_placements(spec, parameter))
    return isinstance(old, DTensor) and old.placements == tuple(placements)


def _plain_room(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
