"""Optimizers that were made before their model was sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from memwall_strategy.core.errors import ConfigError


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameter -> name; taken before sharding, which replaces every parameter."""
    return {parameter: name for name, parameter in model.named_parameters()}


def point_at_shards(
    optimizers: Iterable[torch.optim.Optimizer], before: dict[nn.Parameter, str], model: nn.Module
) -> None:
    """Let optimizers step the sharded parameters of ``model`` in place of those they were made with.

    Args:
        before: ``parameter_names`` of the model before it was sharded.

    Raises:
        ConfigError: an optimizer already has state (it stepped), or holds a parameter of another model.
    """
    after = dict(model.named_parameters())
    for optimizer in optimizers:
        if len(optimizer.state) > 0:
            raise ConfigError(
                f"{type(optimizer).__name__} has stepped before the model was sharded. Set up model and optimizer "
                "before the first step, and load its state afterwards."
            )
        for group in optimizer.param_groups:
            unknown = [p for p in group["params"] if p not in before and p not in set(after.values())]
            if unknown:
                raise ConfigError(
                    f"{type(optimizer).__name__} holds {len(unknown)} parameters that are not in the model set up "
                    "with it. Make it with model.parameters()."
                )
            group["params"] = [after[before[p]] if p in before else p for p in group["params"]]
