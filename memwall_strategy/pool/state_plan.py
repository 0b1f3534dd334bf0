"""The memory plan of a run whose optimizer state is paged, before any process exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.planner import ClusterSpec, ModelSpec, OptimizerSpec, Plan
from memwall_strategy.planner.memory_plan import stored_dtype
from memwall_strategy.planner.specs import PrecisionSpec, item_bytes
from memwall_strategy.pool.beside import SMALL_STATE_BYTES
from memwall_strategy.pool.state_placement import StatePlacement


def state_units(
    model: ModelSpec, cluster: ClusterSpec, optimizer: OptimizerSpec, rank: int, precision: str
) -> list[dict[Block, int]]:
    """The blocks of optimizer state of each unit, with their bytes on one rank, in the order in which units step."""
    stored = PrecisionSpec.named(precision)
    units: list[dict[Block, int]] = []
    for unit in (*model.units, *([model.root] if model.root is not None else [])):
        sizes: dict[Block, int] = {}
        for parameter in unit.parameters:
            local = parameter.local_numel(cluster.shard_ranks, rank) if parameter.trainable else 0
            for key, dtype in optimizer.state_of(stored_dtype(parameter, stored)).items():
                if local:
                    sizes[Block(unit.name, parameter.name, key)] = local * item_bytes(dtype)
        units.append(sizes)
    return units


def fixed_state_bytes(model: ModelSpec) -> int:
    """Room that the pool keeps for state that is never paged."""
    return SMALL_STATE_BYTES * sum(1 for parameter in model.parameters if parameter.trainable)


def with_placement(made: Plan, units: Sequence[Mapping[Block, int]], placement: StatePlacement) -> Plan:
    """Take off the device what rests elsewhere, and add the slots that it passes through.

    Args:
        made: the plan with all state on the device.
        units: from ``state_units``.
        placement: of their blocks.
    """
    if all(home is Tier.DEVICE for home in placement.homes.values()):
        return made
    scratch_bytes = made.resident.get(Kind.STAGING, 0)
    gone: dict[str, int] = {}
    placed = {str(Tier.HOST): 0, str(Tier.DISK): 0}
    for block, size in ((block, size) for unit in units for block, size in unit.items()):
        if (home := placement.homes[block]) is not Tier.DEVICE:
            kind = block.kind if block.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MASTER) else Kind.OPTIMIZER
            gone[kind] = gone.get(kind, 0) + size
            placed[home] += size

    def without(kinds: Mapping[str, int]) -> dict[str, int]:
        left = {kind: size - gone.get(kind, 0) for kind, size in kinds.items()}
        return left | {str(Kind.STAGING): placement.staging_bytes + scratch_bytes}

    paged = replace(
        made,
        resident=without(made.resident),
        peaks={phase: without(kinds) for phase, kinds in made.peaks.items()},
        kind_peaks={phase: without(kinds) for phase, kinds in made.kind_peaks.items()},
        placed=placed,
    )
    if paged.limit_bytes is None:
        return paged
    fits = paged.peak_bytes <= paged.limit_bytes
    return replace(paged, fits=fits, advice=None if fits else paged.advice)
