"""A line chart as SVG text: values of some runs over the step, no library and no network."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 16, 12, 40
_TICKS = 5
_MOST_POINTS = 1500
"""Points of one line; more are thinned by keeping lowest and highest of each stretch."""

COLORS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#b08800", "#0b7285", "#c2255c", "#495057")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
"""So that lines are told apart without colours too."""


def style(index: int) -> tuple[str, str]:
    """Colour and dashes of the run of that number."""
    return COLORS[index % len(COLORS)], DASHES[(index // len(COLORS) + index) % len(DASHES)]


def line_chart(lines: Sequence[Sequence[tuple[int, float]]], label: str) -> str:
    """One line a run; a value that is no number breaks its line. Empty where no run has a number.

    Args:
        lines: (step, value) of each run; may be empty.
        label: of the vertical axis.
    """
    known = [(x, y) for line in lines for x, y in line if math.isfinite(y)]
    if not known:
        return ""
    x_low, x_high = min(x for x, _ in known), max(x for x, _ in known)
    y_ticks = ticks(min(y for _, y in known), max(y for _, y in known))
    y_low, y_high = y_ticks[0], y_ticks[-1]
    span_x, inner_w, inner_h = max(1, x_high - x_low), WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - x_low) / span_x * inner_w
        return f"{across:.1f},{_TOP + (y_high - y) / (y_high - y_low) * inner_h:.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)} over the step">']
    for tick in y_ticks:
        y = _TOP + (y_high - tick) / (y_high - y_low) * inner_h
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for x in sorted({round(x_low + i * (x_high - x_low) / _TICKS) for i in range(_TICKS + 1)}):
        across = _LEFT + (x - x_low) / span_x * inner_w
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{x}</text>')
    parts.append(f'<text x="{_LEFT + inner_w / 2:.1f}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    for index, line in enumerate(lines):
        color, dashes = style(index)
        for piece in pieces(line):
            points = " ".join(place(x, y) for x, y in thinned(piece))
            if len(piece) == 1:
                x, y = place(*piece[0]).split(",")
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>')
            else:
                parts.append(f'<polyline points="{points}" stroke="{color}" stroke-dasharray="{dashes}"/>')
    return "".join([*parts, "</svg>"])


def pieces(line: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The line without what is no number, broken there."""
    made: list[list[tuple[int, float]]] = [[]]
    for x, y in line:
        if math.isfinite(y):
            made[-1].append((x, y))
        elif made[-1]:
            made.append([])
    return [piece for piece in made if piece]


def thinned(line: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most ``_MOST_POINTS`` of the points; spikes stay."""
    if len(line) <= _MOST_POINTS:
        return list(line)
    stretch = math.ceil(len(line) / (_MOST_POINTS // 2))
    kept: list[tuple[int, float]] = []
    for start in range(0, len(line), stretch):
        part = line[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from below ``low`` to above ``high``."""
    if high == low:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.floor(low / step)
    return [step * i for i in range(first, math.ceil(high / step) + 1)]


def _short(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.4g}"
