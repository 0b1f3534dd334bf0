"""Two or more runs side by side, from their run folders.

    python -m recipes.compare runs/gpt_nano/A runs/gpt_nano/B            # tables, and compare.html with the curves
    python -m recipes.compare A B C --plot out.html --metric memwall/mfu
    python -m recipes.compare A B --json > compare.json                  # the tables as data, no plot

Shown: options that differ, last losses, medians of step time and throughput, memory, losses at equal steps; each run
beside the first. The page needs no network and no other file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from memwall_strategy.core.errors import ConfigError

from .comparison import compare
from .page import page
from .runs import read_runs
from .show import text, to_json

EXIT_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders, two or more")
    parser.add_argument("--plot", type=Path, default=Path("compare.html"), metavar="FILE",
                        help="where the page goes (default compare.html)")  # fmt: skip
    parser.add_argument("--no-plot", action="store_true", help="write no page")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME",
                        help="also show and plot this column of metrics.csv; may be given again")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the tables as JSON and write no page")
    given = parser.parse_args(arguments)
    try:
        comparison = compare(read_runs(given.runs), given.metric)
        if given.json:
            print(json.dumps(to_json(comparison), indent=1, allow_nan=False, default=str))
            return 0
        print(text(comparison))
        if not given.no_plot:
            print(f"\nplot: {_write(given.plot, page(comparison, given.metric))}")
    except ConfigError as error:
        print(textwrap.fill(f"compare: {error}", 110, break_long_words=False), file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _write(path: Path, content: str) -> Path:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"--plot={path} cannot be written ({error.strerror or error}). Name another file.") from error
    return path


if __name__ == "__main__":
    sys.exit(main())
