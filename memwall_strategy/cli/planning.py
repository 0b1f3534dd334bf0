"""The plan of a run, from the model as it will be sharded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from memwall_strategy.cli.options import HardwareOptions
from memwall_strategy.cli.settings import Settings
from memwall_strategy.config import parse_size
from memwall_strategy.engine.capacity import available_device_bytes
from memwall_strategy.engine.optimizer_parts import probe
from memwall_strategy.engine.units import plan_sharding
from memwall_strategy.planner import (
    ActivationSpec,
    Budgets,
    ClusterSpec,
    HardwareSpec,
    ModelSpec,
    OptimizerSpec,
    Plan,
    StepBounds,
    bound_step,
    gpt_activations,
    gpt_flops,
    plan,
)
from memwall_strategy.planner.memory_plan import schedule_of
from memwall_strategy.pool.probe import unused_memory_bytes
from memwall_strategy.pool.state_placement import Room
from memwall_strategy.pool.state_plan import with_paged_state

UNKNOWN_BYTES = 2**62
"""Room on a machine of which nobody said how much it has."""

_FLOPS = {"32-true": "fp32_flops", "bf16-true": "bf16_flops", "bf16-mixed": "bf16_flops", "16-mixed": "fp16_flops"}
_COMPUTE_DTYPES = {"32-true": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "16-mixed": "float16"}


def plan_run(settings: Settings, module: nn.Module, optimizer: Optimizer, world: int, device: torch.device) -> Plan:
    """Plan one rank's memory, and the least time of a step where the hardware is described; no process exists yet.

    Args:
        module: on any device; on meta it takes no memory.
        optimizer: of the run's class and options, on any parameter.
        device: the rank's, which need not be there when ``hardware.device_memory`` says what it has.

    Raises:
        ConfigError: the budget is above what is there, or what it leaves is too little for optimizer state to pass
            through.
    """
    memwall, trainer = settings.memwall, settings.trainer
    sharding = plan_sharding(
        module, unit_classes=memwall.unit_classes, split=True, low_precision=trainer.precision != "32-true"
    )
    memory_bytes = device_memory_bytes(settings, device)
    budget_bytes = None
    if memwall.pool.enabled and memwall.pool.device_budget is not None:
        budget_bytes = parse_size(
            memwall.pool.device_budget, option="pool.device_budget", available_bytes=memory_bytes
        )
    model = ModelSpec.from_module(module, [name for name, _ in sharding.units])
    cluster = ClusterSpec(world=world, replicate=memwall.replicate, device_bytes=memory_bytes)
    master = memwall.pool.enabled and memwall.pool.master != "none"
    spec = replace(OptimizerSpec.from_optimizer(optimizer), master=master)
    predict = partial(
        plan,
        model,
        cluster,
        precision=trainer.precision,
        micro_batch=settings.text.batch_size if settings.text else 1,
        accumulate_how=memwall.accumulate,
        **schedule_of(memwall.overlap, device.type),
    )
    accumulate = trainer.accumulate_grad_batches
    made = predict(
        Budgets(device_bytes=budget_bytes), optimizer=spec, accumulate=accumulate, activations=_activations(settings)
    )
    if budget_bytes is not None:
        # As the pool itself plans it: gradients of an earlier micro-batch are there, activations are not counted.
        beside = predict(Budgets(), optimizer=OptimizerSpec("none"), accumulate=2).peak_bytes
        room = Room(budget_bytes - beside, *_room_elsewhere(settings))
        if probe(optimizer).alone:
            made = with_paged_state(
                made, model, cluster, spec, room, slots=memwall.pool.optimizer_units,
                at_home=memwall.pool.optimizer_on != "device" and device.type == "cpu",
            )  # fmt: skip
    return replace(made, bounds=_bounds(settings, model, cluster))


def _room_elsewhere(settings: Settings) -> tuple[int, int]:
    """Bytes for optimizer state on host and disk: the budgets, else what is unused here, or any where not here."""
    pool, here = settings.memwall.pool, settings.hardware == HardwareOptions()
    unused = unused_memory_bytes() if here else UNKNOWN_BYTES
    host = unused
    if pool.host_budget is not None:
        host = parse_size(pool.host_budget, option="pool.host_budget", available_bytes=unused)
    return host, parse_size(pool.disk_budget, option="pool.disk_budget", available_bytes=UNKNOWN_BYTES)


def device_memory_bytes(settings: Settings, device: torch.device) -> int:
    """Memory of one rank's device: as the hardware is described, else as found here."""
    described = settings.hardware.device_memory
    if described is None:
        return available_device_bytes(device)
    return parse_size(described, option="hardware.device_memory")


def peak_flops(settings: Settings) -> float | None:
    """Operations per second of the described device in the run's precision; None: to be measured."""
    return getattr(settings.hardware, _FLOPS[settings.trainer.precision])


def _bounds(settings: Settings, model: ModelSpec, cluster: ClusterSpec) -> StepBounds | None:
    hardware, ours, text = settings.hardware, settings.model, settings.text
    spec = HardwareSpec(
        name=hardware.name,
        peak_flops=peak_flops(settings),
        link_bytes_per_s=hardware.link_bytes_per_s,
        network_bytes_per_s=hardware.network_bytes_per_s,
        devices_per_machine=hardware.devices_per_machine,
    )
    if hardware == HardwareOptions():
        return None  # this machine, of which nothing was said
    flops = None
    if ours is not None and text is not None:
        flops = gpt_flops(
            layers=ours.layers,
            hidden=ours.hidden,
            vocabulary=ours.vocab,
            mlp_ratio=ours.mlp_ratio,
            sequence=text.seq_len,
            samples=text.batch_size * settings.trainer.accumulate_grad_batches,
        )
    return bound_step(
        spec,
        model,
        cluster,
        precision=settings.trainer.precision,
        flops=flops,
        accumulate=settings.trainer.accumulate_grad_batches,
        accumulate_how=settings.memwall.accumulate,
    )


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
