"""The plan of a run, from the model as it will be sharded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from memwall_strategy.cli.options import HardwareOptions
from memwall_strategy.cli.settings import Settings
from memwall_strategy.config import check_entries, parse_size
from memwall_strategy.core.block import Kind
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.capacity import available_device_bytes
from memwall_strategy.engine.host_modules import find_host_modules, without_host
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
from memwall_strategy.planner.activations import under_mode
from memwall_strategy.planner.beside import bytes_beside, steps_in_backward, with_early_steps
from memwall_strategy.planner.buffers import Buffers, buffer_ladder
from memwall_strategy.planner.memory_plan import schedule_of
from memwall_strategy.pool.budget import (
    UNKNOWN_BYTES,
    device_budget_bytes,
    differs_by_rank,
    disk_budget_bytes,
    host_budget_bytes,
    reserve_bytes,
)
from memwall_strategy.pool.probe import unused_memory_bytes
from memwall_strategy.pool.relief_plan import with_reliefs
from memwall_strategy.pool.state_placement import Room, StatePlacement, place_state
from memwall_strategy.pool.state_plan import fixed_state_bytes, state_units, with_placement

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
    pool = memwall.pool
    host = find_host_modules(module, pool.host_modules)
    units = [name for name, _ in without_host(sharding, host).units]
    model = ModelSpec.from_module(module, units, host_modules=host)
    cluster = ClusterSpec(world=world, replicate=memwall.replicate, device_bytes=memory_bytes)
    ranks = [0]
    if pool.enabled:
        check_entries(pool, world)
        ranks = list(range(world)) if differs_by_rank(pool) else [0]
    made = [_plan_rank(settings, model, cluster, optimizer, device, rank) for rank in ranks]
    tightest = min(made, key=lambda each: (each.limit_bytes or UNKNOWN_BYTES) - each.peak_bytes)
    return replace(tightest, bounds=_bounds(settings, model, cluster))


def _plan_rank(
    settings: Settings, model: ModelSpec, cluster: ClusterSpec, optimizer: Optimizer, device: torch.device, rank: int
) -> Plan:
    """One rank's plan, with the values that the run will have."""
    memwall, accumulate = settings.memwall, settings.trainer.accumulate_grad_batches
    pool, precision = memwall.pool, settings.trainer.precision
    spec = replace(OptimizerSpec.from_optimizer(optimizer), master=pool.enabled and pool.master != "none")
    budget_bytes = None
    if pool.enabled:
        budget_bytes = device_budget_bytes(pool, device, rank, cluster.device_bytes)
    activations = _activations(settings)
    rungs = buffer_ladder(memwall.overlap, device.type)

    def planned(rung: Buffers) -> Plan:
        overlap = rung.within(memwall.overlap)
        early = steps_in_backward(overlap)
        made = plan(
            model,
            cluster,
            Budgets(device_bytes=budget_bytes),
            optimizer=spec,
            precision=precision,
            micro_batch=settings.text.batch_size if settings.text else 1,
            accumulate=accumulate,
            accumulate_how=memwall.accumulate,
            activations=under_mode(activations, pool.activations) if activations and pool.enabled else activations,
            **schedule_of(overlap, device.type),
            gradients_in_forward=not early,
            gradients=pool.gradients,
            rank=rank % cluster.shard_ranks,
        )
        if early and accumulate == 1:
            made = with_early_steps(made, model, cluster, overlap)
        return replace(made, rank=rank, buffers=None if rung == rungs[0] else rung)

    made = planned(rungs[0])
    if budget_bytes is None:
        return made
    reserve = reserve_bytes(pool, budget_bytes)
    units = state_units(model, cluster, spec, rank % cluster.shard_ranks, precision) if probe(optimizer).alone else []
    unused = unused_memory_bytes() if settings.hardware == HardwareOptions() else UNKNOWN_BYTES
    gradients_bytes = made.resident[Kind.GRAD] if pool.gradients == "host" else 0
    fixed_bytes = reserve + fixed_state_bytes(model) + made.resident.get(Kind.STAGING, 0)
    host_bytes = max(0, host_budget_bytes(pool, rank, unused) - gradients_bytes)
    disk_bytes = disk_budget_bytes(pool, rank)
    there = range(len(units)) if pool.optimizer_on != "device" and device.type == "cpu" else ()

    def place(device_bytes: int) -> StatePlacement:
        room = Room(device_bytes, host_bytes, disk_bytes)
        return place_state(units, room, slots=pool.optimizer_units, at_home=there)

    def left_by(rung: Buffers) -> int:
        beside = bytes_beside(
            model, cluster, precision=precision, accumulate=accumulate, accumulate_how=memwall.accumulate,
            overlap=rung.within(memwall.overlap), device_type=device.type, gradients=pool.gradients,
        )  # fmt: skip
        return budget_bytes - fixed_bytes - beside

    for height, rung in enumerate(rungs):  # as ``pool.buffer_relief`` does at set-up
        try:
            placement = place(left_by(rung))
            break
        except ConfigError as error:
            if height == len(rungs) - 1:
                raise ConfigError(f"rank {rank}: {error}" if differs_by_rank(pool) else str(error)) from error
    made = planned(rung)
    if pool.activations != "auto" or activations is None:
        return with_placement(made, units, placement)
    return with_reliefs(
        made, units, placement, place, activations.at(made.micro_batch), reserve,
        offload=pool.host_budget is not None, leaner=map(planned, rungs[height + 1 :]),
    )  # fmt: skip


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
