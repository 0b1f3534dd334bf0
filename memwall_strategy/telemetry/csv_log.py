"""A CSV file of metrics: one row a logged step, a column for each name ever seen.

Rows are written and flushed as they come. A name that is new gives the file a new header: it is written anew beside
the old one and renamed over it, which happens a few times a run.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

STEP = "step"


class CsvLog:
    """Appends rows of metrics to a file.

    Args:
        path: the file. Rows of an earlier part of the run are kept up to the first new row's step: a resumed run
            repeats no step.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] = []
        self._file = None
        self._resuming = path.exists() and path.stat().st_size > 0

    def write(self, row: Mapping[str, float]) -> None:
        """Append one row; it must hold ``step``."""
        if self._resuming:
            self._names, rows = read_csv(self._path)
            self._rewrite([old for old in rows if float(old[STEP]) < row[STEP]])
            self._resuming = False
        new = [name for name in row if name not in self._names]
        if new:
            rows = read_csv(self._path)[1] if self._names else []
            self._names += new
            self._rewrite(rows)
        assert self._file is not None
        csv.writer(self._file).writerow([_text(row.get(name)) for name in self._names])
        self._file.flush()

    def close(self) -> None:
        """Close the file; a later row opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._resuming = True

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        if self._file is not None:
            self._file.close()
        beside = self._path.with_suffix(".csv.new")
        with beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._names, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, self._path)
        self._file = self._path.open("a", newline="")


def read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The names and rows of a metrics file; a last row that a killed run left incomplete is left out."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        rows = [row for row in reader if None not in row and None not in row.values() and row.get(STEP)]
    return names, rows


def _text(value: float | None) -> str:
    return "" if value is None else repr(value) if isinstance(value, int) else f"{value:.8g}"
