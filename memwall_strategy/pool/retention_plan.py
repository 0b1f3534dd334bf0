"""Which units are expected to stay gathered in a run, and its memory plan with them.

By the run's own rule (``retention.share_room``), from what the plan leaves of the budget; all ranks retain the same, so
the rank that has least left decides. Whole gradients, which follow only while training converges, are not planned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from memwall_strategy.planner import ClusterSpec, ModelSpec, Plan
from memwall_strategy.planner.memory_plan import gathered_bytes
from memwall_strategy.pool.retention import UnitRoom, share_room


def retained_bytes(
    model: ModelSpec, cluster: ClusterSpec, precision: str, names: Collection[str] | None = None
) -> dict[str, int]:
    """Unit -> bytes of its gathered weights, of the named units or of all."""
    return {
        unit.name: gathered_bytes(unit, cluster, precision)
        for unit in model.every_unit
        if names is None or unit.name in names
    }


def units_for(model: ModelSpec, cluster: ClusterSpec, precision: str, room_bytes: int) -> tuple[str, ...]:
    """Names of the units that stay in so much room."""
    sizes = retained_bytes(model, cluster, precision)
    root = model.root.name if model.root is not None else None
    ordered = sorted(sizes, key=lambda name: name != root)  # the run's order: the root comes first
    return share_room([UnitRoom(name, sizes[name], 0, stays=name == root) for name in ordered], room_bytes).retained


def with_retained(made: Plan, before: Plan, after: Plan, retained: Mapping[str, int]) -> Plan:
    """Add to a plan what two others differ by, of which the second retains units.

    Args:
        made: the whole plan, without them.
        before, after: without and with them, all else equal.
        retained: the units with their bytes.
    """

    first, then = before.kind_peaks, after.kind_peaks

    def changed(kinds: Mapping[str, int], less: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
        names = {**kinds, **more}
        return {kind: max(0, kinds.get(kind, 0) + more.get(kind, 0) - less.get(kind, 0)) for kind in names}

    return replace(
        made,
        peaks={p: changed(kinds, before.peaks[p], after.peaks[p]) for p, kinds in made.peaks.items()},
        kind_peaks={p: changed(kinds, first[p], then[p]) for p, kinds in made.kind_peaks.items()},
        retained=dict(retained),
    )
