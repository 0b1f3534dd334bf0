"""The command line of a recipe that measures, and its table: figure | claimed | measured | how."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = tuple[str, str, str, str]
"""Figure, claimed, measured, how."""

HEADER = ("figure", "claimed", "measured", "how")


def figures_parser(prog: str, description: str, figures: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with what all such recipes take; the recipe may add to it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "figures", nargs="*", default=[*figures], help=f"which figures: {', '.join(figures)} (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each variant (default 5)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.set_defaults(known=tuple(figures))
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, checked."""
    arguments = parser.parse_args()
    if unknown := set(arguments.figures) - set(arguments.known):
        parser.error(f"unknown figure {', '.join(sorted(unknown))}; choose from {', '.join(arguments.known)}")
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    return arguments


def measure(arguments: argparse.Namespace, measures: Mapping[str, Any]) -> None:
    """Call each asked figure's function, which returns its rows; print them as a table, and write them if asked.

    Asked to end, it takes down what it started, as after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    rows: list[Row] = []
    for figure in arguments.figures:
        print(f"measuring {figure} ...", flush=True)
        rows += measures[figure](arguments.repeats)
    widths = [max(len(row[i]) for row in [HEADER, *rows]) for i in range(len(HEADER))]
    for row in [HEADER, *rows]:
        print(" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if arguments.json:
        arguments.json.write_text(json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows], indent=1))
