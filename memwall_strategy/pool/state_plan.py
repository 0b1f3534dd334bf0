"""The memory plan of a run whose optimizer state is paged, before any process exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.planner import ClusterSpec, ModelSpec, OptimizerSpec, Plan
from memwall_strategy.planner.memory_plan import stored_dtype
from memwall_strategy.planner.specs import PrecisionSpec, item_bytes
from memwall_strategy.pool.state_placement import Room, place_state


def with_paged_state(
    made: Plan,
    model: ModelSpec,
    cluster: ClusterSpec,
    optimizer: OptimizerSpec,
    room: Room,
    *,
    slots: int,
    at_home: bool = False,
) -> Plan:
    """Take off the device what the pool will keep elsewhere, and add the slots that it passes through.

    Args:
        made: the plan with all state on the device.
        model, cluster, optimizer: as for ``plan``.
        room: what the tiers have for the state; its ``fixed_bytes`` are added here.
        slots: see ``place_state``.
        at_home: state on the host is stepped there (as on CPU, where the two are one kind of memory).

    Raises:
        ConfigError: no placement fits, see ``place_state``.
    """
    precision = PrecisionSpec.named(made.precision)
    fixed_bytes = scratch_bytes = made.resident.get(Kind.STAGING, 0)
    units: list[dict[Block, int]] = []
    for unit in (*model.units, *([model.root] if model.root is not None else [])):
        sizes: dict[Block, int] = {}
        for parameter in unit.parameters:
            if not parameter.trainable:
                continue
            fixed_bytes += optimizer.scalar_bytes
            local = parameter.local_numel(cluster.shard_ranks, made.rank)
            for key, dtype in optimizer.state_of(stored_dtype(parameter, precision)).items():
                if local:
                    sizes[Block(unit.name, parameter.name, key)] = local * item_bytes(dtype)
        units.append(sizes)
    there = range(len(units)) if at_home else ()
    placement = place_state(units, replace(room, fixed_bytes=fixed_bytes), slots=slots, at_home=there)
    if all(home is Tier.DEVICE for home in placement.homes.values()):
        return made
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
