"""The state of an optimizer by parameter name, collected without a copy and without a step.

An optimizer's state has two halves. The *blocks* are its tensors, as references, under keys such as
``optimizer_0.state.layers.0.weight.exp_avg``. The *layout* is everything else as plain data: for each parameter and
state key whether there is a block, a number or a list of such (LBFGS keeps lists), how a block lies across ranks, and
the param groups with their hyperparameters (``lr``, ``initial_lr``, ``betas``, ...). What an optimizer has not made yet
is in neither half, so a checkpoint from before the first step holds no state and loading it leaves none.

A block that is a sum still to be made over ranks (a partial DTensor) is summed, by a collective, on collection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.model import ModelState, collect_model
from memwall_strategy.engine.checkpoint.paged import settle, tie
from memwall_strategy.engine.optimizer_step import plain_class
from memwall_strategy.engine.quantised import is_quantised

NOT_OPTIONS = ("params", "param_names")
"""Keys of a param group that are no hyperparameters."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One optimizer's logical state.

    Attributes:
        layout: plain data, loadable with ``weights_only=True`` as far as the optimizer's own values are.
        blocks: key -> reference.
        paths: key -> DCP's nested path of it.
    """

    layout: dict[str, Any]
    blocks: dict[str, Tensor]
    paths: dict[str, tuple[str, ...]]


def optimizer_state(model: torch.nn.Module, optimizer: Optimizer, name: str) -> dict[str, Any]:
    """Return a flat dict of everything an optimizer holds: tensors as references, nothing copied, no step executed.

    Keys are ``<name>.state.<parameter>.<state key>`` and ``<name>.param_groups.<i>.<hyperparameter>``.
    """
    state = collect_optimizer(collect_model(model), optimizer, name)
    flat: dict[str, Any] = dict(state.blocks)
    for parameter, entries in state.layout["state"].items():
        for key, spec in entries.items():
            if "value" in spec:
                flat[f"{name}.state.{parameter}.{key}"] = spec["value"]
    for index, group in enumerate(state.layout["groups"]):
        for key, value in group["options"].items():
            flat[f"{name}.param_groups.{index}.{key}"] = value
        flat[f"{name}.param_groups.{index}.params"] = group["params"]
    return flat


def collect_optimizer(model: ModelState, optimizer: Optimizer, name: str) -> OptimizerState:
    """Return layout and blocks of an optimizer.

    Raises:
        CheckpointError: it holds a parameter that the model does not.
    """
    settle(optimizer)
    state = OptimizerState({}, {}, {})
    groups, by_parameter, shared = [], {}, {}
    for index, group in enumerate(optimizer.param_groups):
        names = [name_of(model, parameter, name, index, i) for i, parameter in enumerate(group["params"])]
        groups.append({"params": names, "options": _options(group)})
        for parameter_name, parameter in zip(names, group["params"], strict=True):
            if optimizer.state.get(parameter):
                by_parameter[parameter_name] = {
                    key: _encode(value, (name, "state", parameter_name, key), parameter, state)
                    for key, value in optimizer.state[parameter].items()
                }
                for key, spec in by_parameter[parameter_name].items():
                    if "block" in spec:
                        tie(state.blocks[spec["block"]], optimizer, parameter, key)
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            shared[key] = _encode(value, (name, "shared", str(key)), None, state)
    state.layout.update(kind=plain_class(optimizer).__name__, groups=groups, state=by_parameter, shared=shared)
    return state


def encode_saved(entries: Mapping[str, Mapping[str, Any]], name: str) -> OptimizerState:
    """Blocks and layout of state that was read from a file: parameter -> state key -> value."""
    state = OptimizerState({}, {}, {})
    state.layout["state"] = {
        parameter: {key: _encode(value, (name, "state", parameter, key), None, state) for key, value in values.items()}
        for parameter, values in entries.items()
    }
    return state


def name_of(model: ModelState, parameter: Tensor, optimizer: str, group: int, index: int) -> str:
    try:
        return model.names[id(parameter)]
    except KeyError:
        raise CheckpointError(
            f"{optimizer}: parameter {index} of group {group}, shape {tuple(parameter.shape)}, is not one of the "
            "model's. Register it in the module, and create optimizers after the model is sharded."
        ) from None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in group.items() if key not in NOT_OPTIONS}


def _plain(value: Any) -> Any:
    """A NumPy number (from a scheduler) as Python's, so that the file loads with ``weights_only=True``."""
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value


# -- values to specs and back --


def _encode(value: Any, path: tuple[str, ...], parameter: Tensor | None, state: OptimizerState) -> dict[str, Any]:
    if isinstance(value, Tensor):
        key = ".".join(path)
        if is_quantised(value):
            raise CheckpointError(
                f"{key} is quantised in blocks of this rank's part, which fit no other world size. Save weights alone "
                "(ModelCheckpoint(save_weights_only=True)), or use torch.optim.AdamW."
            )
        state.paths[key] = path
        if isinstance(value, DTensor):
            value = _without_partial(value)
        state.blocks[key] = value.detach()
        spec: dict[str, Any] = {"block": key}
        if isinstance(value, DTensor):
            spec["placements"] = [p.dim if p.is_shard() else None for p in value.placements]
        if parameter is not None and value.device != parameter.device:
            spec["device"] = "cpu"
        return spec
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, list, tuple, dict)) for item in value):
        items = [_encode(item, (*path, str(i)), parameter, state) for i, item in enumerate(value)]
        return {"items": items, "tuple": isinstance(value, tuple)}
    if isinstance(value, dict) and any(isinstance(item, (Tensor, list, tuple, dict)) for item in value.values()):
        return {"entries": {k: _encode(item, (*path, str(k)), parameter, state) for k, item in value.items()}}
    return {"value": _plain(value)}


def _without_partial(value: DTensor) -> DTensor:
    if any(placement.is_partial() for placement in value.placements):
        return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    return value


def decode(spec: Mapping[str, Any], block: Callable[[Mapping[str, Any]], Tensor]) -> Any:
    if "block" in spec:
        return block(spec)
    if "items" in spec:
        items = [decode(item, block) for item in spec["items"]]
        return tuple(items) if spec["tuple"] else items
    if "entries" in spec:
        return {key: decode(item, block) for key, item in spec["entries"].items()}
    return spec["value"]
