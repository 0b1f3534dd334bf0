"""The end of a run in figures: read from ``metrics.csv``, held against the recipe's claims and the plan."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import memwall_strategy
from memwall_strategy.telemetry import names

_LAST_STEPS = 10
"""Steps whose mean is the loss at the end."""

_MEDIANS = (
    names.STEP_S, names.TOKENS_PER_S, names.MFU, names.EXPOSED_S, names.EXPOSED_FRACTION, names.INPUT_EXPOSED_S,
)  # fmt: skip

_WARM_UP_ROWS = 3
"""Rows left out of medians: lazy initialisation, and the step in which operations are counted."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A promise beside what was measured.

    Attributes:
        what: in words; claimed: with its bound; measured: the figure, None where the run did not produce it.
        kept: whether the bound holds; None where nothing was measured.
        how: how it was measured.
    """

    what: str
    claimed: str
    measured: float | None
    kept: bool | None
    how: str


def run_figures(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """What one wants to know of a run, from the rows of its ``metrics.csv``."""
    figures: dict[str, float] = {}
    losses = _column(rows, names.TRAIN_LOSS)
    if losses:
        figures["train/loss_first"] = losses[0]
        figures["train/loss_last"] = statistics.fmean(losses[-_LAST_STEPS:])
        figures["train/loss_ratio"] = figures["train/loss_last"] / losses[0]
    for name in (names.VAL_LOSS, names.VAL_BITS_PER_BYTE):
        if values := _column(rows, name):
            figures[name] = values[-1]
    for name in _MEDIANS:
        if values := _column(rows, name):
            figures[name] = statistics.median(values[_WARM_UP_ROWS:] or values)
    waited = _column(rows, names.INPUT_EXPOSED_S)[_WARM_UP_ROWS:]
    steps = _column(rows, names.STEP_S)[_WARM_UP_ROWS:]
    if waited and len(waited) == len(steps):
        figures["input/exposed_share"] = sum(waited) / sum(steps)
    for name in (names.DEVICE_BYTES, names.DEVICE_PEAK_BYTES, names.UTILIZATION):
        if values := _column(rows, name):
            figures[name] = max(values)
    if rows:
        figures["train/steps"] = float(rows[-1]["step"])
    return figures


def hold_claims(claims: Sequence[Any], figures: Mapping[str, float]) -> list[Claim]:
    """Put each claim (``what``, ``figure``, ``at_most``, ``at_least``, ``how``) beside the figure that it is about."""
    held: list[Claim] = []
    for claim in claims:
        measured = figures.get(claim.figure)
        bounds = [f"at most {claim.at_most:g}"] if claim.at_most is not None else []
        bounds += [f"at least {claim.at_least:g}"] if claim.at_least is not None else []
        kept = None
        if measured is not None:
            kept = (claim.at_most is None or measured <= claim.at_most) and (
                claim.at_least is None or measured >= claim.at_least
            )
        held.append(Claim(claim.what, " and ".join(bounds), measured, kept, claim.how))
    return held


def environment(world: int, threads: int, device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "lightning")},
        "memwall": memwall_strategy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": device,
        "ranks": world,
        "threads_per_rank": threads,
    }


def _column(rows: Sequence[Mapping[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]
