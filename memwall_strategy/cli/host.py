"""The host of a planned run: its cores, which units step there, and what that takes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.optim import SGD, Adagrad, Adam, Optimizer

from memwall_strategy.cli.settings import Settings
from memwall_strategy.core.block import Block, Tier
from memwall_strategy.engine.capacity import machine_cores
from memwall_strategy.planner import ClusterSpec, HostArithmetic, HostSpec, ModelSpec, host_arithmetic
from memwall_strategy.planner.host import KERNEL_BYTES
from memwall_strategy.planner.memory_plan import stored_dtype
from memwall_strategy.planner.specs import PrecisionSpec, item_bytes
from memwall_strategy.pool.arena import GRANULE_BYTES, PAGE_BYTES, aligned
from memwall_strategy.pool.arithmetic import Costs, cheaper_on_host, may_step_on_host
from memwall_strategy.pool.rates import Rate
from memwall_strategy.pool.state_placement import StatePlacement

_FUSED_ON_HOST = (Adam, SGD, Adagrad)
"""What steps with a fused kernel at the host's desks; AdamW is an Adam."""


def host_spec(settings: Settings, world: int, device: torch.device) -> HostSpec:
    """The host that the options describe, or this one where the plan is for it."""
    hardware = settings.hardware
    here = device.type == "cpu" or hardware.device_memory is None
    cores, threads = hardware.host_cores, None
    if cores is None and here:
        cores = machine_cores()
        chosen = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        threads = int(chosen) if chosen.isdigit() and int(chosen) else None
    devices = settings.trainer.devices
    ranks = devices if isinstance(devices, int) else min(world, hardware.devices_per_machine or world)
    return HostSpec(cores, ranks, threads, hardware.host_link_bytes_per_s, hardware.host_memory_bytes_per_s)


def units_on_host(
    settings: Settings,
    optimizer: Optimizer,
    units: Sequence[Mapping[Block, int]],
    weight_bytes: Sequence[int],
    host: HostSpec,
    device: torch.device,
) -> tuple[int, ...]:
    """Indices of the units that step where their state rests, if that is the host: by the run's own rule.

    Args:
        units: the state of each; weight_bytes: of its weights that train.

    Raises:
        ConfigError: ``pool.optimizer_on=host`` and an optimizer that cannot.
    """
    where = settings.memwall.pool.optimizer_on
    if where == "device" or not units:
        return ()
    if device.type == "cpu":
        return tuple(range(len(units)))
    if not may_step_on_host(optimizer, where):
        return ()
    if where == "host":
        return tuple(range(len(units)))
    rate = host.elements_per_s()
    if host.link_bytes_per_s is None or rate is None:
        return ()  # the run measures; until then the plan counts what paging takes on the device
    link = Rate(0.0, host.link_bytes_per_s)
    costs = Costs(link, link, Rate(0.0, rate * KERNEL_BYTES))
    pairs = enumerate(zip(units, weight_bytes, strict=True))
    return tuple(i for i, (sizes, weights) in pairs if cheaper_on_host(sum(sizes.values()), weights, costs))


def weights_of(model: ModelSpec, cluster: ClusterSpec, rank: int, precision: str) -> list[int]:
    """Bytes of each unit's weights that train, on one rank."""
    types = PrecisionSpec.named(precision)
    return [
        sum(
            p.local_numel(cluster.shard_ranks, rank) * item_bytes(stored_dtype(p, types))
            for p in unit.parameters
            if p.trainable
        )
        for unit in model.every_unit
    ]


def desks_bytes(
    model: ModelSpec,
    cluster: ClusterSpec,
    rank: int,
    precision: str,
    there: Collection[int],
    *,
    master: bool,
    desks: int,
) -> int:
    """Host bytes of the weights and gradients of units on their way, as ``pool.desks`` takes them; 0 without any."""
    types, widest = PrecisionSpec.named(precision), 0
    for unit in (unit for index, unit in enumerate(model.every_unit) if index in there):
        total = 0
        for p in (p for p in unit.parameters if p.trainable):
            numel, stored = p.local_numel(cluster.shard_ranks, rank), stored_dtype(p, types)
            total += 2 * aligned(numel * item_bytes(stored), GRANULE_BYTES)
            if master and stored in ("bfloat16", "float16"):
                total += aligned(4 * numel, GRANULE_BYTES)
        widest = max(widest, total)
    return desks * aligned(widest, PAGE_BYTES)


def arithmetic_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    rank: int,
    optimizer: Optimizer,
    host: HostSpec,
    device: torch.device,
    units: Sequence[Mapping[Block, int]],
    placement: StatePlacement | None,
    there: Collection[int],
) -> HostArithmetic | None:
    """What the optimizer's arithmetic takes on the host; None where all of it is on a card.

    Args:
        units: the state of each unit; placement: where it rests, None: on the device.
        there: units that step where their state rests, if that is the host.
    """
    stepped = range(len(model.every_unit))
    kernel = _kernel(optimizer)
    if device.type != "cpu":
        stepped = [index for index in there if placement is not None and _is_on_host(units[index], placement)]
        kernel = "fused" if isinstance(optimizer, _FUSED_ON_HOST) else "loop"
    elements = sum(
        p.local_numel(cluster.shard_ranks, rank)
        for index in stepped
        for p in model.every_unit[index].parameters
        if p.trainable
    )
    return host_arithmetic(elements, host, kernel) if elements else None


def _is_on_host(sizes: Mapping[Block, int], placement: StatePlacement) -> bool:
    paged = [placement.homes[block] for block in sizes if placement.homes[block] is not Tier.DEVICE]
    return bool(paged) and all(tier is Tier.HOST for tier in paged)


def _kernel(optimizer: Optimizer) -> str:
    options = optimizer.defaults
    return "fused" if options.get("fused") else "foreach" if options.get("foreach") else "loop"
