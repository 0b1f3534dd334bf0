"""The summary as it is printed at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from memwall_strategy.config import format_size
from memwall_strategy.planner import Plan
from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.summary import Claim

_FIGURES = (
    ("steps", "train/steps", "{:.0f}"),
    ("training loss, first step (nats/token)", "train/loss_first", "{:.3f}"),
    ("training loss, last 10 steps", "train/loss_last", "{:.3f}"),
    ("validation loss", names.VAL_LOSS, "{:.3f}"),
    ("validation, bits per byte", names.VAL_BITS_PER_BYTE, "{:.3f}"),
    ("step time, median (s)", names.STEP_S, "{:.3f}"),
    ("tokens/s, median", names.TOKENS_PER_S, "{:,.0f}"),
    ("MFU, median", names.MFU, "{:.1%}"),
    ("exposed communication, median share", names.EXPOSED_FRACTION, "{:.1%}"),
    ("training, with validation and saving (s)", "train/wall_s", "{:.1f}"),
    ("whole run (s)", "run/wall_s", "{:.1f}"),
)


def print_summary(
    console: Console,
    figures: Mapping[str, float],
    claims: Sequence[Claim],
    plan: Plan,
    measured: Mapping[str, Mapping[str, int]],
    folder: Path,
    changed: Sequence[str] = (),
) -> None:
    """Print figures, claimed | measured | how, predicted | measured, and where the run folder is.

    Args:
        changed: overrides that make this run another than the one that the claims are about.
    """
    console.print()
    for text, name, shape in _FIGURES:
        if name in figures:
            console.print(f"{text:<42} {shape.format(figures[name])}")
    if names.DEVICE_PEAK_BYTES in figures:
        console.print(f"{'most bytes held for the model, rank 0':<42} {format_size(figures[names.DEVICE_PEAK_BYTES])}")
    if claims:
        if changed:
            told = f"\nThe claims are about the recipe as it stands; this run changed {', '.join(changed)}."
            console.print(told, markup=False)
        console.print(_claims_table(claims))
    if measured:
        console.print(_memory_table(plan.kind_peaks, measured))
    console.print(f"\nrun folder: {folder}")


def _memory_table(predicted: Mapping[str, Mapping[str, int]], measured: Mapping[str, Mapping[str, int]]) -> Table:
    """The highest bytes of each kind in any phase; ``summary.json`` has them by phase."""
    table = Table("highest bytes on rank 0", box=SIMPLE_HEAD)
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
    for kind in dict.fromkeys(str(kind) for kinds in predicted.values() for kind in kinds):
        planned = max(kinds.get(kind, 0) for kinds in predicted.values())
        seen = max((kinds[kind] for kinds in measured.values() if kind in kinds), default=None)
        if planned or seen:
            difference = f"{(planned - seen) / seen:+.1%}" if seen else ""
            table.add_row(kind, format_size(planned), "not counted" if seen is None else format_size(seen), difference)
    return table


def _claims_table(claims: Sequence[Claim]) -> Table:
    table = Table("claim", "claimed", "measured", "", "how", box=SIMPLE_HEAD)
    for claim in claims:
        measured = "not measured" if claim.measured is None else f"{claim.measured:.3g}"
        verdict = {True: "kept", False: "NOT kept", None: ""}[claim.kept]
        table.add_row(claim.what, claim.claimed, measured, verdict, claim.how)
    return table
