"""What goes into a checkpoint, by reference: the blocks of model and optimizers, and the layout that explains them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memwall_strategy.engine.checkpoint.model import collect_model, logical_name, model_key, model_path
from memwall_strategy.engine.checkpoint.optimizer import collect_optimizer

LAYOUT_FILE = "layout.pt"
"""Plain data: aliases of tied weights, extra states, the optimizers' layouts."""

EXTRA_FILE = "meta.pt"
"""The trainer's dict; Lightning looks for this name in a sharded checkpoint."""

RNG_FILE = "rng.pt"
"""A list with each rank's generators."""


@dataclass(frozen=True, slots=True)
class Contents:
    """References to everything that one rank has to save.

    Attributes:
        blocks: key -> tensor, model and optimizers together.
        paths: key -> DCP's nested path.
        layout: ``aliases``, ``objects`` and ``optimizers`` (a list of layouts; None for weights alone).
    """

    blocks: dict[str, Tensor]
    paths: dict[str, tuple[str, ...]]
    layout: dict[str, Any]

    def digest(self) -> str:
        """A hash of the keys: equal on all ranks, or they do not hold the same model."""
        return hashlib.sha256("\n".join(sorted(self.blocks)).encode()).hexdigest()


def optimizer_name(index: int) -> str:
    """First part of an optimizer's keys; Lightning's own sharded checkpoints use the same."""
    return f"optimizer_{index}"


def collect(
    model: nn.Module, optimizers: Sequence[Optimizer] | None, state_dict: Mapping[str, Any] | None = None
) -> Contents:
    """Collect references; copies nothing.

    Args:
        optimizers: None for a checkpoint of weights alone.
        state_dict: what to save of the model, when a callback changed what ``model_state`` returned; default: all.
    """
    state = collect_model(model)
    entries = {**state.tensors, **state.objects} if state_dict is None else state_dict
    named = {logical_name(name): value for name, value in entries.items()}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    blocks = {model_key(name): value.detach() for name, value in tensors.items()}
    paths: dict[str, tuple[str, ...]] = {model_key(name): model_path(name) for name in tensors}
    layouts: list[dict[str, Any]] | None = None if optimizers is None else []
    for index, optimizer in enumerate(optimizers or ()):
        saved = collect_optimizer(state, optimizer, optimizer_name(index))
        blocks.update(saved.blocks)
        paths.update(saved.paths)
        assert layouts is not None
        layouts.append(saved.layout)
    layout = {
        "aliases": {alias: name for alias, name in state.aliases.items() if name in tensors},
        "objects": {name: value for name, value in named.items() if not isinstance(value, Tensor)},
        "optimizers": layouts,
    }
    return Contents(blocks, paths, layout)
