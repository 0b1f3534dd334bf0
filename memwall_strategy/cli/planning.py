"""The plan of a run, from the model as it will be sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from memwall_strategy.cli.settings import Settings
from memwall_strategy.config import format_size
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.capacity import available_device_bytes
from memwall_strategy.engine.units import plan_sharding
from memwall_strategy.planner import (
    ActivationSpec,
    Budgets,
    ClusterSpec,
    ModelSpec,
    OptimizerSpec,
    Plan,
    gpt_activations,
    plan,
)
from memwall_strategy.runtime.runtime import device_budget_bytes

_COMPUTE_DTYPES = {"32-true": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "16-mixed": "float16"}


def plan_run(settings: Settings, module: nn.Module, optimizer: Optimizer, world: int, device: torch.device) -> Plan:
    """Plan one rank's memory; no process exists yet.

    Args:
        optimizer: of the run's class and options, on any parameter.

    Raises:
        ConfigError: the budget is above what is there, or below what rests between two steps.
    """
    memwall, trainer = settings.memwall, settings.trainer
    sharding = plan_sharding(
        module, unit_classes=memwall.unit_classes, split=True, low_precision=trainer.precision != "32-true"
    )
    budget_bytes = device_budget_bytes(memwall, device) if memwall.pool.enabled else None
    overlap = memwall.overlap
    lanes = overlap.enabled and overlap.lanes and device.type == "cpu"
    explicit = overlap.enabled and (lanes or overlap.prefetch > 1)  # else the engine's own prefetch, one unit
    made = plan(
        ModelSpec.from_module(module, [name for name, _ in sharding.units]),
        ClusterSpec(world=world, replicate=memwall.replicate),
        Budgets(device_bytes=budget_bytes if budget_bytes is not None else available_device_bytes(device)),
        optimizer=OptimizerSpec.from_optimizer(optimizer),
        precision=trainer.precision,
        micro_batch=settings.text.batch_size if settings.text else 1,
        accumulate=trainer.accumulate_grad_batches,
        accumulate_how=memwall.accumulate,
        prefetch=overlap.prefetch if explicit else 0,
        reduce_buffers=overlap.reduce_buffers if overlap.enabled else 1,
        lanes=lanes,
        activations=_activations(settings),
    )
    if budget_bytes is not None and made.resident_bytes > budget_bytes:
        raise ConfigError(
            f"pool.device_budget={format_size(budget_bytes)} cannot hold this model: weights, gradients and optimizer "
            f"state alone are {format_size(made.resident_bytes)} on each of {world} ranks. Raise the budget, or use "
            "more ranks (trainer.devices)."
        )
    return made


def _activations(settings: Settings) -> ActivationSpec | None:
    """An estimate where the model is our GPT on our text; else none is counted."""
    model, text = settings.model, settings.text
    if model is None or text is None:
        return None
    return gpt_activations(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        sequence=text.seq_len,
        vocabulary=model.vocab,
        micro_batch=text.batch_size,
        dtype=_COMPUTE_DTYPES[settings.trainer.precision],
        mlp_ratio=model.mlp_ratio,
    )
