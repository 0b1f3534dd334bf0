"""The plan of one rank's memory: bytes per kind between steps and at the peak of each step phase, and whether it fits.

What rests between steps (weights, gradients, optimizer state, buffers) is exact to the byte. Gathered weights and
communication buffers come from playing a step (``schedule``): exact for the engine's synchronous path, an upper bound
for the lanes. Activations are added only when given, and the plan says whether they are estimated or measured.

Not planned: temporaries of single operations and of the optimizer, the framework's own memory, fragmentation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Any

from memwall_strategy.config import GRADIENTS, OverlapConfig, format_size
from memwall_strategy.core.block import Kind
from memwall_strategy.core.errors import ConfigError, nearest
from memwall_strategy.planner.activations import ActivationSpec
from memwall_strategy.planner.plans import Plan
from memwall_strategy.planner.schedule import Schedule, Step, UnitBytes
from memwall_strategy.planner.specs import (
    Budgets,
    ClusterSpec,
    ModelSpec,
    OptimizerSpec,
    ParameterSpec,
    PrecisionSpec,
    UnitSpec,
    item_bytes,
)

ACCUMULATE_HOW = ("sharded", "whole")

PLAYED_MICRO_BATCHES = 3
"""Most micro-batches that are played: the first finds no gradient, the last reduces, all between are alike."""

MOST_RANKS_FACTOR = 4096
"""How far the advice looks for a number of ranks that fits: up to this many times the given one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """The keywords of ``plan``, so that the advice can vary one at a time."""

    optimizer: OptimizerSpec
    precision: PrecisionSpec
    micro_batch: int
    accumulate: int
    accumulate_how: str
    prefetch: int
    reduce_buffers: int
    lanes: bool
    windows: bool
    activations: ActivationSpec | None
    gradients_in_forward: bool
    gradients: str
    retained: frozenset[str]
    next_iteration_early: bool
    rank: int

    def __post_init__(self) -> None:
        for name, lowest in (
            ("micro_batch", 1),
            ("accumulate", 1),
            ("prefetch", 0),
            ("reduce_buffers", 1),
            ("rank", 0),
        ):
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {lowest}.")
        if self.accumulate_how not in ACCUMULATE_HOW:
            raise ConfigError(f"accumulate_how={self.accumulate_how!r} is not one of {', '.join(ACCUMULATE_HOW)}.")
        if self.gradients not in GRADIENTS:
            raise ConfigError(f"gradients={self.gradients!r} is not one of {', '.join(GRADIENTS)}.")


def schedule_of(overlap: OverlapConfig, device_type: str) -> dict[str, Any]:
    """The keywords of ``plan`` that say how a run with these options gathers and reduces on such a device."""
    lanes = overlap.enabled and overlap.lanes and device_type == "cpu"
    explicit = overlap.enabled and (lanes or overlap.prefetch > 1)  # else the engine's own prefetch, one unit
    return {
        "prefetch": overlap.prefetch if explicit else 0,
        "reduce_buffers": overlap.reduce_buffers if overlap.enabled else 1,
        "lanes": lanes,
        "windows": lanes and overlap.shared_memory is not False,
        "next_iteration_early": lanes and overlap.next_iteration_early,
    }


def plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    budgets: Budgets | None = None,
    *,
    optimizer: str | OptimizerSpec = "adamw",
    precision: str | PrecisionSpec = "32-true",
    micro_batch: int = 1,
    accumulate: int = 1,
    accumulate_how: str = "sharded",
    prefetch: int = 1,
    reduce_buffers: int = 2,
    lanes: bool = True,
    windows: bool = False,
    activations: ActivationSpec | None = None,
    gradients_in_forward: bool = True,
    gradients: str = "device",
    retained: Collection[str] = (),
    next_iteration_early: bool = False,
    rank: int = 0,
) -> Plan:
    """Predict one rank's memory for a model on a cluster.

    Args:
        budgets: limit of the device; default: what ``cluster.device_bytes`` says.
        optimizer: a name, or what ``OptimizerSpec.from_optimizer`` read.
        precision: the trainer's name of it, or dtypes.
        micro_batch: samples per rank; scales ``activations``.
        accumulate: micro-batches per optimizer step.
        accumulate_how: ``sharded`` or ``whole``, as the option ``accumulate`` of the strategy.
        prefetch: units gathered ahead (``overlap.prefetch``).
        reduce_buffers: most reductions at a time (``overlap.reduce_buffers``).
        lanes: False for the engine's own synchronous path.
        windows: ranks of one host may share memory (``overlap.shared_memory``): then it is held between steps, too.
        activations: estimated (``gpt_activations``) or measured; None: not counted.
        gradients_in_forward: whether the last step's gradients are alive in forward; so it is under Lightning.
        gradients: where they rest between micro-batches (``pool.gradients``).
        retained: names of the units whose gathered weights stay until the step's last backward (``pool.retain``).
        next_iteration_early: the next forward's first gathers start while the optimizer steps
            (``overlap.next_iteration_early``).
        rank: position among the ranks that share the weights; 0 holds at least as much as any other.

    Raises:
        ConfigError: a value out of range, an unknown unit, or activations of another number of units.
    """
    settings = _Settings(
        optimizer=OptimizerSpec.named(optimizer) if isinstance(optimizer, str) else optimizer,
        precision=PrecisionSpec.named(precision) if isinstance(precision, str) else precision,
        micro_batch=micro_batch,
        accumulate=accumulate,
        accumulate_how=accumulate_how,
        prefetch=prefetch,
        reduce_buffers=reduce_buffers,
        lanes=lanes,
        windows=windows and cluster.shard_ranks > 1,
        activations=activations,
        gradients_in_forward=gradients_in_forward,
        gradients=gradients,
        retained=frozenset(retained),
        next_iteration_early=next_iteration_early,
        rank=rank,
    )
    for name in retained:
        if name not in (known := [unit.name for unit in model.every_unit]):
            raise ConfigError(f"retained={name!r} is no unit.{nearest(name, known)} Units are: {', '.join(known)}.")
    if rank >= cluster.shard_ranks:
        raise ConfigError(f"rank={rank} is not below the {cluster.shard_ranks} ranks that share the weights.")
    if activations is not None and len(activations.unit_bytes) != len(model.units):
        raise ConfigError(
            f"activations are given for {len(activations.unit_bytes)} units, the model has {len(model.units)}. "
            "Measure or estimate them with the same units."
        )
    limit_bytes = budgets.device_bytes if budgets and budgets.device_bytes is not None else cluster.device_bytes
    made = _predict(model, cluster, settings)
    if limit_bytes is None:
        return made
    made = replace(made, limit_bytes=limit_bytes, fits=made.peak_bytes <= limit_bytes)
    return made if made.fits else replace(made, advice=_advise(model, cluster, settings, limit_bytes))


def _predict(model: ModelSpec, cluster: ClusterSpec, settings: _Settings) -> Plan:
    resident = _resident(model, cluster, settings)
    between_steps = dict(resident)
    del resident[Kind.GRAD]  # the step makes and drops gradients itself
    saved = (0,) * (len(model.units) + 1)
    if settings.activations is not None:
        scaled = settings.activations.at(settings.micro_batch)
        saved = (*scaled.unit_bytes, scaled.root_bytes)
    units = [_unit_bytes(unit, cluster, settings.precision) for unit in model.units]
    if units and not _has_trainable_stem(model):
        units[0] = replace(units[0], waits=True)
    root = _unit_bytes(model.root, cluster, settings.precision) if model.root else None
    windows_bytes = _windows([*units, *([root] if root else [])], cluster, settings)
    ledger = Step(
        units,
        root,
        resident,
        saved,
        Schedule(
            flats=cluster.shard_ranks > 1,
            prefetch=settings.prefetch,
            reduce_buffers=settings.reduce_buffers,
            lanes=settings.lanes,
            windows=windows_bytes,
            micro_batches=min(settings.accumulate, PLAYED_MICRO_BATCHES),
            keep_whole=settings.accumulate_how == "whole" and settings.accumulate > 1,
            replicated=cluster.replicate > 1,
            gradients_in_forward=settings.gradients_in_forward,
            gradients_on_host=settings.gradients == "host",
            retained=frozenset(n for n, unit in enumerate(model.every_unit) if unit.name in settings.retained),
            early=settings.prefetch + 1 if settings.next_iteration_early else 0,
        ),
    ).play()
    return Plan(
        world=cluster.world,
        shard_ranks=cluster.shard_ranks,
        rank=settings.rank,
        parameters=model.numel,
        units=len(model.units) + (model.root is not None),
        optimizer=settings.optimizer.name,
        precision=settings.precision.name,
        micro_batch=settings.micro_batch,
        accumulate=settings.accumulate,
        activations=settings.activations.source if settings.activations else "not counted",
        resident={str(kind): size for kind, size in (between_steps | _held(ledger.live.get(Kind.COMM, 0))).items()},
        peaks={str(phase): {str(k): v for k, v in kinds.items()} for phase, kinds in ledger.peaks.items()},
        kind_peaks={str(phase): {str(k): v for k, v in kinds.items()} for phase, kinds in ledger.kind_peaks.items()},
        communication="upper bound" if settings.lanes else "exact",
        limit_bytes=None,
        fits=None,
        advice=None,
    )


def _windows(units: list[UnitBytes], cluster: ClusterSpec, settings: _Settings) -> int:
    """This rank's share of the shared windows, as ``engine.lanes`` and ``engine.reducer`` size them."""
    if not settings.windows:
        return 0
    gathered = nlargest(settings.prefetch + 2, (unit.gathered for unit in units))
    reduced = nlargest(settings.reduce_buffers, (unit.reduce_input for unit in units))
    return sum(gathered) // cluster.shard_ranks + sum(reduced)


def _held(comm_bytes: int) -> dict[str, int]:
    """Shared windows, and what was gathered for the next iteration."""
    return {Kind.COMM: comm_bytes} if comm_bytes else {}


def gathered_bytes(unit: UnitSpec, cluster: ClusterSpec, precision: str) -> int:
    """What a unit's whole weights take on each rank."""
    return _unit_bytes(unit, cluster, PrecisionSpec.named(precision)).gathered


def _resident(model: ModelSpec, cluster: ClusterSpec, settings: _Settings) -> dict[str, int]:
    """Bytes per kind of one rank between two steps."""
    ranks, precision, optimizer = cluster.shard_ranks, settings.precision, settings.optimizer
    held: dict[str, int] = {Kind.PARAM: 0, Kind.GRAD: 0, Kind.BUFFER: 0}
    for buffer in model.buffers:
        held[Kind.BUFFER] += buffer.numel * item_bytes(stored_dtype(buffer, precision))
    for parameter in model.parameters:
        stored = stored_dtype(parameter, precision)
        padded_bytes = parameter.padded_numel(ranks) * item_bytes(stored)
        held[Kind.PARAM] += padded_bytes
        if not parameter.trainable:
            continue
        held[Kind.GRAD] += padded_bytes
        for key, dtype in optimizer.state_of(stored).items():  # made like the rank's piece, which has no padding
            kind = Kind(key) if key in (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MASTER) else Kind.OPTIMIZER
            local_bytes = parameter.local_numel(ranks, settings.rank) * item_bytes(dtype)
            held[kind] = held.get(kind, 0) + local_bytes
        if optimizer.scalar_bytes:
            held[Kind.OPTIMIZER] = held.get(Kind.OPTIMIZER, 0) + optimizer.scalar_bytes
    if optimizer.master and (scratch := max(_fine_gradients(model, cluster, settings), default=0)):
        held[Kind.STAGING] = scratch
    return held


def _fine_gradients(model: ModelSpec, cluster: ClusterSpec, settings: _Settings) -> Iterator[int]:
    """Bytes of each unit's float32 gradients: those of the widest unit lie beside its own for the step."""
    for unit in model.every_unit:
        yield sum(
            parameter.local_numel(cluster.shard_ranks, settings.rank) * item_bytes("float32")
            for parameter in unit.parameters
            if parameter.trainable and settings.optimizer.needs_master(stored_dtype(parameter, settings.precision))
        )


def _unit_bytes(unit: UnitSpec, cluster: ClusterSpec, precision: PrecisionSpec) -> UnitBytes:
    """What the unit's gather and reduction take on one rank."""
    ranks = cluster.shard_ranks
    gathered = early = late = whole = reduce_input = gradient = 0
    converts = casts = False
    temporaries: list[tuple[int, int]] = []  # (gathered bytes, bytes of the conversion) per parameter
    for parameter in unit.parameters:
        stored = stored_dtype(parameter, precision)
        compute = reduce = stored
        if not parameter.keeps_dtype:
            compute = _converted(stored, precision.compute)
            reduce = _converted(compute, precision.reduce)
        padded = parameter.padded_numel(ranks)
        gathered += padded * ranks * item_bytes(compute)
        temporaries.append((padded * ranks * item_bytes(compute), padded * item_bytes(compute) * (compute != stored)))
        if not parameter.trainable:
            continue
        if parameter.used_after:
            early += parameter.numel * item_bytes(compute)
        else:
            late += parameter.numel * item_bytes(compute)
        whole += parameter.numel * item_bytes(reduce)
        reduce_input += padded * ranks * item_bytes(reduce)
        gradient += padded * item_bytes(stored)
        converts, casts = converts or reduce != compute, casts or reduce != stored
    return UnitBytes(
        gathered=gathered,
        cast=sum(size for _, size in temporaries) if ranks > 1 else _single_rank_cast(temporaries),
        early_gradient=early,
        late_gradient=late,
        whole_gradient=whole,
        whole_is_converted=converts,
        reduce_input=reduce_input,
        reduce_output=reduce_input // ranks,
        gradient=gradient,
        reduction_casts=casts,
    )


def _single_rank_cast(temporaries: list[tuple[int, int]]) -> int:
    """How far conversions lift the peak above the gathered weights on one rank.

    The engine converts one parameter after the other into a temporary, then copies it, and drops a temporary only
    when the next is made.
    """
    total = sum(gathered for gathered, _ in temporaries)
    highest = copied = previous = 0
    for gathered, cast in temporaries:
        highest = max(highest, copied + previous + cast, copied + gathered + cast)
        copied, previous = copied + gathered, cast
    return max(0, highest - total)


def _has_trainable_stem(model: ModelSpec) -> bool:
    """Whether the first unit's inputs need a gradient, so that its backward can end before the whole backward does."""
    return model.root is not None and any(p.trainable and p.used_before for p in model.root.parameters)


def stored_dtype(parameter: ParameterSpec, precision: PrecisionSpec) -> str:
    """Dtype at rest: a precision that converts weights converts float32 alone, and no running statistics."""
    converts = parameter.dtype == "float32" and not parameter.keeps_dtype
    return precision.storage if converts and precision.storage else parameter.dtype


def _converted(dtype: str, wanted: str | None) -> str:
    """FSDP2's policy converts floating-point weights only."""
    return wanted if wanted is not None and "float" in dtype else dtype


# -- advice --


def _advise(model: ModelSpec, cluster: ClusterSpec, settings: _Settings, limit_bytes: int) -> str:
    """The first change that makes the model fit, the cheap ones first."""
    for text, changed_cluster, changed in _changes(cluster, settings):
        peak_bytes = _predict(model, changed_cluster, changed).peak_bytes
        if peak_bytes <= limit_bytes:
            return f"{text}: the peak becomes {format_size(peak_bytes)}."
    made = _predict(model, cluster, settings)
    kind, size_bytes = max(made.peaks[made.peak_phase].items(), key=lambda item: item[1])
    return (
        f"no number of ranks, micro-batch or buffers alone makes it fit; the largest part of the peak is {kind} "
        f"({format_size(size_bytes)}). Use smaller units (unit_classes), a smaller model, or a larger budget."
    )


def _changes(cluster: ClusterSpec, settings: _Settings) -> Iterator[tuple[str, ClusterSpec, _Settings]]:
    if settings.prefetch > 0 or settings.reduce_buffers > 1:
        lean = replace(settings, prefetch=0, reduce_buffers=1, next_iteration_early=False)
        yield "set overlap.prefetch=0 and overlap.reduce_buffers=1", cluster, lean
    if settings.activations is not None:
        micro_batch = settings.micro_batch // 2
        while micro_batch:
            yield f"lower the micro-batch to {micro_batch}", cluster, replace(settings, micro_batch=micro_batch)
            micro_batch //= 2
    if cluster.replicate > 1:
        yield f"set replicate=1 (weights over all {cluster.world} ranks)", replace(cluster, replicate=1), settings
    factor = 2
    while factor <= MOST_RANKS_FACTOR:
        yield f"use {cluster.world * factor} ranks", replace(cluster, world=cluster.world * factor), settings
        factor *= 2
