"""What a step needs on the device beside the optimizer's state; and a plan whose units step inside the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memwall_strategy.config import OverlapConfig
from memwall_strategy.core.block import Kind
from memwall_strategy.planner.memory_plan import plan, schedule_of
from memwall_strategy.planner.plans import Plan
from memwall_strategy.planner.specs import Budgets, ClusterSpec, ModelSpec, OptimizerSpec, item_bytes


def steps_in_backward(overlap: OverlapConfig) -> bool:
    """Whether units step inside the backward."""
    return overlap.enabled and overlap.optimizer_in_backward


def bytes_beside(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    precision: str,
    accumulate: int,
    accumulate_how: str,
    overlap: OverlapConfig,
    device_type: str,
    gradients: str = "device",
) -> int:
    """Most device bytes that a step needs beside the optimizer's state and activations, on the rank that holds most.

    Args:
        model, cluster: what is trained on what.
        precision: the trainer's name of it.
        accumulate: most micro-batches of a step; in a second one, gradients of an earlier one are there too.
        accumulate_how: as the strategy's option ``accumulate``.
        overlap: how gathers and reductions run, and whether units step inside the backward.
        device_type: ``cpu`` or ``cuda``.
        gradients: where they rest between micro-batches (``pool.gradients``).
    """
    early = steps_in_backward(overlap)
    made = plan(
        model,
        cluster,
        Budgets(),
        optimizer=OptimizerSpec("none"),
        precision=precision,
        accumulate=min(accumulate, 2),
        accumulate_how=accumulate_how,
        **schedule_of(overlap, device_type),
        gradients_in_forward=not early,
        gradients=gradients,
    )
    if early and accumulate == 1:
        made = with_early_steps(made, model, cluster, overlap)
    return made.peak_bytes


def with_early_steps(made: Plan, model: ModelSpec, cluster: ClusterSpec, overlap: OverlapConfig) -> Plan:
    """The plan where each unit lets go of its gradients as it steps, inside the backward of the only micro-batch.

    One unit's gradients land while those still on the reduce lane are on their way; none are left after the step.

    Args:
        made: a plan with ``gradients_in_forward=False``.
        model, cluster: that it is for.
        overlap: of the run.
    """
    units = [*model.units, *([model.root] if model.root is not None else [])]
    widest = max((sum(p.padded_numel(cluster.shard_ranks) for p in unit.parameters) for unit in units), default=0)
    alive = min(made.resident.get(Kind.GRAD, 0), widest * (overlap.reduce_buffers + 1) * item_bytes("float32"))

    def fewer(kinds: Mapping[str, int]) -> dict[str, int]:
        return {kind: min(size, alive) if kind == Kind.GRAD else size for kind, size in kinds.items()}

    changed = replace(
        made,
        resident={kind: 0 if kind == Kind.GRAD else size for kind, size in made.resident.items()},
        peaks={phase: fewer(kinds) for phase, kinds in made.peaks.items()},
        kind_peaks={phase: fewer(kinds) for phase, kinds in made.kind_peaks.items()},
    )
    if made.limit_bytes is None:
        return changed
    fits = changed.peak_bytes <= made.limit_bytes
    return replace(changed, fits=fits, advice=None if fits else changed.advice)
