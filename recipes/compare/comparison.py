"""What there is to say about runs side by side: pure functions from runs to rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memwall_strategy.core.errors import ConfigError, nearest
from memwall_strategy.telemetry import names

from .runs import Run, finite

WARM_UP_ROWS = 3
"""Rows left out of medians: lazy initialisation, and the step in which operations are counted."""

EQUAL_STEPS = 8
"""Most rows of losses at equal steps."""

IGNORED_KEYS = ("paths.run_folder", "ckpt_path")
"""Configuration that differs from run to run without meaning."""

LOSSES = (names.TRAIN_LOSS, names.VAL_LOSS)

MEDIANS = (
    names.STEP_S, names.TOKENS_PER_S, names.MFU, names.EXPOSED_S, names.EXPOSED_FRACTION,
)  # fmt: skip
HIGHEST = (names.DEVICE_PEAK_BYTES, names.DEVICE_BYTES, names.UTILIZATION)
LAST = (names.TRAIN_LOSS, names.VAL_LOSS, names.VAL_BITS_PER_BYTE)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every run.

    Attributes:
        what: the figure; unit: of the values, ``1`` for a plain number.
        values: one a run; None where the run has none.
    """

    what: str
    unit: str
    values: tuple[float | None, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each value over the first run's; None where either is missing or the first is zero."""
        first = self.values[0]
        return tuple(None if v is None or not first else v / first for v in self.values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything about some runs.

    Attributes:
        runs: compared, the first is what the others are held against.
        config: dotted key -> its value in each run; only keys that differ.
        figures: final and median figures.
        at_steps: losses at steps that all runs have.
        notes: what a reader must know: unequal lengths, missing columns, NaN.
    """

    runs: tuple[Run, ...]
    config: dict[str, tuple[Any, ...]]
    figures: tuple[Row, ...]
    at_steps: tuple[Row, ...]
    notes: tuple[str, ...]


def compare(runs: Sequence[Run], more: Sequence[str] = ()) -> Comparison:
    """Put runs side by side.

    Args:
        more: further columns whose last value and median are wanted.

    Raises:
        ConfigError: no run has a column of ``more``, or the runs have no column in common.
    """
    everything = {name for run in runs for name in run.columns}
    for name in more:
        if name not in everything:
            raise ConfigError(
                f"No run has a column {name!r}.{nearest(name, everything)} There are: {_list(everything)}."
            )
    if not set.intersection(*(set(run.columns) for run in runs)):
        raise ConfigError("These runs have no column of metrics.csv in common, so there is nothing to compare.")
    return Comparison(
        runs=tuple(runs),
        config=config_differences(runs),
        figures=tuple(_figures(runs, more)),
        at_steps=tuple(row for name in LOSSES for row in losses_at_equal_steps(runs, name)),
        notes=tuple(_notes(runs)),
    )


def config_differences(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """Keys whose values are not the same in all runs that have a configuration."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in IGNORED_KEYS)
    found = {key: tuple(run.config.get(key, "-") if run.config else "?" for run in runs) for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def losses_at_equal_steps(runs: Sequence[Run], name: str) -> list[Row]:
    """Values at the first and last step that all runs have, and at some between."""
    if not all(name in run.columns for run in runs):
        return []
    columns = [dict(run.columns[name]) for run in runs]
    common = sorted(set.intersection(*(set(column) for column in columns)))
    if len(common) > EQUAL_STEPS:
        picks = [round(i * (len(common) - 1) / (EQUAL_STEPS - 1)) for i in range(EQUAL_STEPS)]
        common = [common[i] for i in picks]
    unit = _units().get(name, "1")
    return [Row(f"{name} at step {step}", unit, tuple(column[step] for column in columns)) for step in common]


def _figures(runs: Sequence[Run], more: Sequence[str]) -> list[Row]:
    units = _units()
    rows = [Row("steps", "1", tuple(float(run.last_step) for run in runs))]
    for names_, how, take in (
        (LAST, "last", lambda values: values[-1]),
        (MEDIANS, "median", _median),
        (HIGHEST, "highest", max),
        (more, "last", lambda values: values[-1]),
        (more, "median", _median),
    ):
        for name in names_:
            found = [[value for _, value in finite(run.columns.get(name, []))] for run in runs]
            if any(found):
                unit = units.get(name, "1")
                rows.append(Row(f"{name}, {how}", unit, tuple(take(v) if v else None for v in found)))
    return rows


def _median(values: list[float]) -> float:
    return statistics.median(values[WARM_UP_ROWS:] or values)


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    if len({run.last_step for run in runs}) > 1:
        ends = ", ".join(f"{run.name} at step {run.last_step}" for run in runs)
        notes.append(f"The runs have unequal lengths: {ends}. Losses are compared at steps that all have.")
    for run in runs:
        if run.status != "success":
            notes.append(f"{run.name} is {run.status}: its last figures are those of the last row written.")
        if not run.config:
            notes.append(f"{run.name} holds no config.yaml: its configuration is not known.")
        for name, values in run.columns.items():
            wrong = [step for step, value in values if not math.isfinite(value)]
            if wrong:
                notes.append(
                    f"{run.name}: {name} is NaN or infinite in {len(wrong)} of {len(values)} rows, first at step "
                    f"{wrong[0]}; these are left out of its figures."
                )
    shown = (*LAST, *MEDIANS, *HIGHEST)
    for name in shown:
        missing = [run.name for run in runs if name not in run.columns]
        if missing and len(missing) < len(runs):
            notes.append(f"{', '.join(missing)} has no column {name}.")
    for name in LOSSES:
        if all(name in run.columns for run in runs) and not losses_at_equal_steps(runs, name):
            notes.append(f"The runs logged {name} at no step in common.")
    return notes


def _units() -> dict[str, str]:
    return {metric.name: metric.unit for metric in names.METRICS}


def _list(columns: set[str]) -> str:
    return ", ".join(sorted(columns))
