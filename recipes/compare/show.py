"""A comparison as plain text for a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from memwall_strategy.config import format_size

from .comparison import Comparison, Row

_LONGEST_CELL = 60


def text(comparison: Comparison) -> str:
    """Configuration, figures and losses as aligned tables, then the notes."""
    runs = [run.name for run in comparison.runs]
    parts = ["\n".join(f"{run.name}: {run.path} ({run.status})" for run in comparison.runs)]
    if comparison.config:
        rows = [[key, *map(_config_cell, values)] for key, values in comparison.config.items()]
        parts.append(_table(["configuration", *runs], rows))
    else:
        parts.append("The configurations are equal.")
    for title, figures in (("figure", comparison.figures), ("loss at equal steps", comparison.at_steps)):
        if figures:
            parts.append(_table([title, *runs], [[row.what, *cells(row)] for row in figures]))
    if comparison.notes:
        parts.append("\n".join(f"note: {note}" for note in comparison.notes))
    return "\n\n".join(parts)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Plain data; what is missing, NaN or infinite is null."""
    return {
        "runs": [
            {"name": run.name, "path": str(run.path), "status": run.status, "last_step": run.last_step}
            for run in comparison.runs
        ],
        "config": {key: list(values) for key, values in comparison.config.items()},
        "figures": [_plain(row) for row in comparison.figures],
        "at_steps": [_plain(row) for row in comparison.at_steps],
        "notes": list(comparison.notes),
    }


def cells(row: Row) -> list[str]:
    """The row's values as text, from the second run on with the ratio to the first."""
    shown = [_number(row.values[0], row.unit)]
    for value, ratio in zip(row.values[1:], row.ratios[1:], strict=True):
        relation = f" ({ratio:.3f}x)" if ratio is not None and math.isfinite(ratio) else ""
        shown.append(_number(value, row.unit) + relation)
    return shown


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if unit == "B":
        return format_size(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _config_cell(value: Any) -> str:
    shown = "null" if value is None else str(value)
    return shown if len(shown) <= _LONGEST_CELL else f"{shown[: _LONGEST_CELL - 3]}..."


def _plain(row: Row) -> dict[str, Any]:
    values = [v if v is not None and math.isfinite(v) else None for v in row.values]
    return {**asdict(row), "values": values}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *others]).rstrip())
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
