"""What is expected to give way in a run whose activations are known before it starts: its own rules, on a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from memwall_strategy.core.block import Block, Kind
from memwall_strategy.planner import ActivationSpec, Plan
from memwall_strategy.pool.activation_relief import OFFLOADING_UNITS, ladder
from memwall_strategy.pool.state_placement import StatePlacement
from memwall_strategy.pool.state_plan import with_placement
from memwall_strategy.pool.state_relief import held_bytes, lowest


def with_reliefs(
    made: Plan,
    units: Sequence[Mapping[Block, int]],
    placement: StatePlacement,
    place: Callable[[int], StatePlacement],
    activations: ActivationSpec,
    reserve_bytes: int,
    *,
    offload: bool,
    leaner: Iterable[Plan] = (),
) -> tuple[Plan, StatePlacement]:
    """The plan after everything gave way that has to, in the run's order; and the state's placement then.

    Args:
        made: with all state on the device and all activations kept.
        units: from ``state_units``.
        placement: the state's at set-up.
        place: device bytes for state -> placement.
        activations: for the plan's micro-batch.
        reserve_bytes: of the device tier.
        offload: whether activations may rest on the host.
        leaner: the same as ``made`` with fewer and fewer second buffers.
    """
    now = with_placement(made, units, placement)
    missing = now.peak_bytes - (now.limit_bytes - reserve_bytes)
    freed: dict[str, int] = {}
    if missing > 0 and reserve_bytes:
        freed["reserve"] = min(missing, reserve_bytes)
        missing -= freed["reserve"]
    sizes = {block: size for unit in units for block, size in unit.items()}
    if missing > 0 and sizes:
        held = held_bytes(placement, sizes)
        smaller, _ = lowest(place, max(0, held - missing), held)
        if smaller is not None and (gone := held - held_bytes(smaller, sizes)) > 0:
            freed["optimizer state"] = gone
            missing -= gone
            now, placement = with_placement(made, units, smaller), smaller
    gone_activations = 0
    for name, gone in _activations(activations, missing, offload=offload):
        freed[name] = gone
        gone_activations += gone
    now = _without(now, Kind.ACTIVATION, gone_activations)
    missing = now.peak_bytes - now.limit_bytes + max(0, reserve_bytes - freed.get("reserve", 0))
    stay, gone_gathered = dict(now.retained or {}), 0
    for unit in now.retained or () if missing > 0 else ():  # the first ones first
        if missing > 0:
            gone = stay.pop(unit)
            now, missing, gone_gathered = _without(now, Kind.GATHERED, gone), missing - gone, gone_gathered + gone
            freed["gathered weights"] = gone_gathered
    with_all_bytes = now.peak_bytes
    for fewer in leaner:
        if now.peak_bytes <= now.limit_bytes:
            break
        now = _without(with_placement(fewer, units, placement), Kind.ACTIVATION, gone_activations)
        now = _without(now, Kind.GATHERED, gone_gathered)
        freed["second buffers"] = with_all_bytes - now.peak_bytes
    if not freed:
        return now, placement
    now = replace(now, retained=stay or None)
    fits = now.peak_bytes <= now.limit_bytes
    return replace(now, reliefs=freed, fits=fits, advice=None if fits else now.advice), placement


def _activations(spec: ActivationSpec, missing: int, *, offload: bool) -> list[tuple[str, int]]:
    """(what gives way, bytes) of activations, until nothing is missing or nothing is left."""
    found: list[tuple[str, int]] = []
    count, kept = len(spec.unit_bytes), sum(spec.unit_bytes)
    if missing <= 0 or not count:
        return found
    shares = [rung.share for rung in ladder([str(number) for number in range(count)])]
    share = next((each for each in shares if (1 - each) * kept >= missing), shares[-1])
    found.append(("recompute", math.ceil((1 - share) * kept)))
    missing -= found[0][1]
    each = (int(share * kept) - OFFLOADING_UNITS * kept // count) // count
    if missing > 0 and offload and each > 0:
        found.append(("offload", min(count, math.ceil(missing / each)) * each))
    return found


def _without(made: Plan, what: Kind, nbytes: int) -> Plan:
    """So many bytes of a kind less, wherever there are as many."""

    def less(kinds: Mapping[str, int]) -> dict[str, int]:
        return {kind: max(0, n - nbytes) if kind == what else n for kind, n in kinds.items()}

    return replace(
        made,
        peaks={phase: less(kinds) for phase, kinds in made.peaks.items()},
        kind_peaks={phase: less(kinds) for phase, kinds in made.kind_peaks.items()},
    )
