"""A comparison as one HTML file that needs nothing else: tables and inline SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

from memwall_strategy.telemetry import names

from .chart import line_chart, style
from .comparison import Comparison
from .show import cells

PLOTTED = (names.TRAIN_LOSS, names.VAL_LOSS, names.STEP_S, names.TOKENS_PER_S, names.DEVICE_PEAK_BYTES,
           names.EXPOSED_FRACTION)  # fmt: skip

_CSS = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --faint: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #30363d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 1540px; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 2rem; display: block; overflow-x: auto; }
th, td { text-align: left; padding: 0.2rem 0.9rem 0.2rem 0; border-bottom: 1px solid var(--faint); }
td + td { font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
svg .grid { stroke: var(--faint); } svg polyline { fill: none; stroke-width: 1.8; }
.legend svg { width: 44px; height: 10px; margin-right: 0.5rem; } .legend li { list-style: none; }
"""


def page(comparison: Comparison, more: Sequence[str] = ()) -> str:
    """The whole page.

    Args:
        more: further columns to plot.
    """
    runs = [run.name for run in comparison.runs]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(' | '.join(runs))}</title><style>{_CSS}</style></head><body>",
        "<h1>Runs side by side</h1>",
        _legend(comparison),
    ]
    if comparison.notes:
        parts += ["<ul>", *(f"<li>{html.escape(note)}</li>" for note in comparison.notes), "</ul>"]
    charts = []
    for name in dict.fromkeys((*PLOTTED, *more)):
        chart = line_chart([run.columns.get(name, []) for run in comparison.runs], name)
        if chart:
            unit = next((metric.unit for metric in names.METRICS if metric.name == name), "1")
            caption = html.escape(name if unit == "1" else f"{name} ({unit})")
            charts.append(f"<figure><figcaption>{caption}</figcaption>{chart}</figure>")
    parts += ['<div class="charts">', *charts, "</div>"]
    for title, figures in (("Figures", comparison.figures), ("Losses at equal steps", comparison.at_steps)):
        if figures:
            parts.append(_table(title, runs, [[row.what, *cells(row)] for row in figures]))
    if comparison.config:
        rows = [[key, *("null" if v is None else str(v) for v in values)] for key, values in comparison.config.items()]
        parts.append(_table("Configuration that differs", runs, rows))
    else:
        parts.append("<h2>Configuration</h2><p>No difference.</p>")
    return "\n".join([*parts, "</body></html>\n"])


def _legend(comparison: Comparison) -> str:
    items = []
    for index, run in enumerate(comparison.runs):
        color, dashes = style(index)
        line = f'<line x1="0" x2="44" y1="5" y2="5" stroke="{color}" stroke-width="3" stroke-dasharray="{dashes}"/>'
        shown = html.escape(f"{run.name} ({run.status}): {run.path}")
        items.append(f'<li><svg viewBox="0 0 44 10" aria-hidden="true">{line}</svg>{shown}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(title: str, runs: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in ["", *runs])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h2>{html.escape(title)}</h2><table><tr>{head}</tr>{body}</table>"
