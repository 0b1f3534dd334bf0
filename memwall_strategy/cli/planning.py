"""The plan of a run, from the model as it will be sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from memwall_strategy.cli.host import arithmetic_of, desks_bytes, host_spec, units_on_host, weights_of
from memwall_strategy.cli.options import HardwareOptions
from memwall_strategy.cli.settings import Settings
from memwall_strategy.config import check_entries, format_size, parse_size
from memwall_strategy.core.block import Block, Kind
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
    HostSpec,
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
from memwall_strategy.pool.retention_plan import retained_bytes, units_for, with_retained
from memwall_strategy.pool.state_placement import Room, StatePlacement, place_state
from memwall_strategy.pool.state_plan import fixed_state_bytes, state_units
from memwall_strategy.pool.state_relief import held_bytes

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
    host = host_spec(settings, world, device)
    made = [_RankPlan(settings, model, cluster, optimizer, device, host, rank) for rank in ranks]
    tightest = min((each.made for each in made), key=lambda p: (p.limit_bytes or UNKNOWN_BYTES) - p.peak_bytes)
    if retains_by_room(settings):
        names = units_for(model, cluster, settings.trainer.precision, min(each.left_bytes for each in made))
        if names:
            tightest = min((each.retaining(names) for each in made), key=lambda p: p.limit_bytes - p.peak_bytes)
    return replace(tightest, bounds=_bounds(settings, model, cluster, tightest.retained or ()))


def retains_by_room(settings: Settings) -> bool:
    """Whether the run retains as many units' gathered weights as its budget leaves room for."""
    pool = settings.memwall.pool
    return pool.enabled and pool.retain == "auto" and pool.device_budget is not None


class _RankPlan:
    """One rank's plan, with the values that the run will have.

    Attributes:
        made: the plan.
        left_bytes: of the budget, what neither the plan of a step nor the state takes; 0 without a budget.
    """

    def __init__(
        self, settings: Settings, model: ModelSpec, cluster: ClusterSpec, optimizer: Optimizer,
        device: torch.device, host: HostSpec, rank: int,
    ) -> None:  # fmt: skip
        self.settings, self.model, self.cluster, self.optimizer = settings, model, cluster, optimizer
        self.device, self.host, self.rank = device, host, rank
        self.pool, self.overlap = settings.memwall.pool, settings.memwall.overlap
        self.precision = settings.trainer.precision
        self.budget_bytes = None
        if self.pool.enabled:
            self.budget_bytes = device_budget_bytes(self.pool, device, rank, cluster.device_bytes)
        master = self.pool.enabled and self.pool.master != "none"
        self.spec = replace(OptimizerSpec.from_optimizer(optimizer), master=master)
        self.activations = _activations(settings)
        self.left_bytes = 0
        self._rungs = buffer_ladder(self.overlap, device.type)
        self._height = 0
        every = self.pool.enabled and self.pool.retain == "all"
        self._asked = retained_bytes(model, cluster, self.precision) if every else {}
        made = self._with_all(self._rungs[0])
        self.made = self._with_host(made, [], None, ()) if self.budget_bytes is None else self._budgeted(made)

    def retaining(self, names: Sequence[str]) -> Plan:
        """The plan when these units stay gathered."""
        retained = retained_bytes(self.model, self.cluster, self.precision, names)
        rung = self._rungs[self._height]
        return with_retained(self.made, self._plan((), rung), self._plan(names, rung), retained)

    def _with_all(self, rung: Buffers) -> Plan:
        """With everything that the options ask for, but these second buffers."""
        return replace(self._plan(tuple(self._asked), rung), retained=self._asked or None)

    def _plan(self, retained: Sequence[str], rung: Buffers) -> Plan:
        pool, accumulate, activations = self.pool, self.settings.trainer.accumulate_grad_batches, self.activations
        overlap = rung.within(self.overlap)
        early = steps_in_backward(overlap)
        made = plan(
            self.model,
            self.cluster,
            Budgets(device_bytes=self.budget_bytes),
            optimizer=self.spec,
            precision=self.precision,
            micro_batch=self.settings.text.batch_size if self.settings.text else 1,
            accumulate=accumulate,
            accumulate_how=self.settings.memwall.accumulate,
            activations=under_mode(activations, pool.activations) if activations and pool.enabled else activations,
            **schedule_of(overlap, self.device.type),
            gradients_in_forward=not early,
            gradients=pool.gradients,
            retained=retained,
            rank=self.rank % self.cluster.shard_ranks,
        )
        if early and accumulate == 1:
            made = with_early_steps(made, self.model, self.cluster, overlap)
        return replace(made, rank=self.rank, buffers=None if rung == self._rungs[0] else rung)

    def _beside(self, rung: Buffers) -> int:
        return bytes_beside(
            self.model, self.cluster, precision=self.precision,
            accumulate=self.settings.trainer.accumulate_grad_batches,
            accumulate_how=self.settings.memwall.accumulate, overlap=rung.within(self.overlap),
            device_type=self.device.type, gradients=self.pool.gradients,
        )  # fmt: skip

    def _budgeted(self, made: Plan) -> Plan:
        """With state paged and reliefs, as far as the budget asks for them."""
        pool, model, cluster, device = self.pool, self.model, self.cluster, self.device
        shard_rank, master = self.rank % cluster.shard_ranks, pool.master != "none"
        reserve = reserve_bytes(pool, self.budget_bytes)
        alone = probe(self.optimizer).alone
        units = state_units(model, cluster, self.spec, shard_rank, self.precision) if alone else []
        weights = weights_of(model, cluster, shard_rank, self.precision)
        there = units_on_host(self.settings, self.optimizer, units, weights, self.host, device)
        desks = 0
        if device.type != "cpu":
            desks = desks_bytes(
                model, cluster, shard_rank, self.precision, there, master=master, desks=pool.optimizer_units
            )
        unused = unused_memory_bytes() if self.settings.hardware == HardwareOptions() else UNKNOWN_BYTES
        on_host = desks + (made.resident[Kind.GRAD] if pool.gradients == "host" else 0)
        host_bytes = max(0, host_budget_bytes(pool, self.rank, unused) - on_host)
        disk_bytes = disk_budget_bytes(pool, self.rank)
        fixed = reserve + fixed_state_bytes(model) + made.resident.get(Kind.STAGING, 0)

        def place(device_bytes: int) -> StatePlacement:
            room = Room(device_bytes, host_bytes, disk_bytes)
            return place_state(units, room, slots=pool.optimizer_units, at_home=there, split=device.type == "cpu")

        for height, rung in enumerate(self._rungs):  # as ``pool.buffer_relief`` does at set-up
            state_bytes = self.budget_bytes - fixed - self._beside(rung)
            try:
                placement = place(state_bytes - sum(self._asked.values()))
                break
            except ConfigError as error:
                if height < len(self._rungs) - 1:
                    continue
                text = str(error)
                if self._asked:
                    kept = format_size(sum(self._asked.values()))
                    text = f"pool.retain='all' keeps {kept} of gathered weights; {text}"
                raise ConfigError(f"rank {self.rank}: {text}" if differs_by_rank(pool) else text) from error
        self._height = height
        made, placement = with_reliefs(
            self._with_all(rung), units, placement, place, self._may_give_way(made), reserve,
            offload=pool.host_budget is not None, leaner=map(self._with_all, self._rungs[height + 1 :]),
        )  # fmt: skip
        held = held_bytes(placement, {block: size for unit in units for block, size in unit.items()})
        self.left_bytes = max(0, min(state_bytes - held, self.budget_bytes - reserve - made.peak_bytes))
        return self._with_host(made, units, placement, there)

    def _may_give_way(self, made: Plan) -> ActivationSpec:
        """The activations that the run may recompute or offload when it is short."""
        if self.pool.activations != "auto" or self.activations is None:
            return ActivationSpec((), 0, made.micro_batch, "none")
        return self.activations.at(made.micro_batch)

    def _with_host(
        self, made: Plan, units: Sequence[Mapping[Block, int]], placement: StatePlacement | None, there: Sequence[int]
    ) -> Plan:
        shard_rank = self.rank % self.cluster.shard_ranks
        host = arithmetic_of(
            self.model, self.cluster, shard_rank, self.optimizer, self.host, self.device, units, placement, there
        )
        return replace(made, host=host)


def device_memory_bytes(settings: Settings, device: torch.device) -> int:
    """Memory of one rank's device: as the hardware is described, else as found here."""
    described = settings.hardware.device_memory
    if described is None:
        return available_device_bytes(device)
    return parse_size(described, option="hardware.device_memory")


def peak_flops(settings: Settings) -> float | None:
    """Operations per second of the described device in the run's precision; None: to be measured."""
    return getattr(settings.hardware, _FLOPS[settings.trainer.precision])


def _bounds(
    settings: Settings, model: ModelSpec, cluster: ClusterSpec, retained: Collection[str]
) -> StepBounds | None:
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
        retained=retained,
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
