"""The metric names are unique, documented, and those that the code uses."""

from __future__ import annotations

import re
from pathlib import Path

from memwall_strategy.telemetry import names

PACKAGE = Path(names.__file__).resolve().parent.parent


def test_every_constant_is_described_once() -> None:
    constants = {v for k, v in vars(names).items() if k.isupper() and isinstance(v, str)}
    described = [metric.name for metric in names.METRICS]
    assert len(described) == len(set(described)) and set(described) == constants
    assert all(metric.unit and metric.meaning for metric in names.METRICS)


def test_every_metric_that_the_runtime_makes_is_described() -> None:
    made = set()
    for path in (PACKAGE / "runtime").glob("*.py"):
        found = re.findall(r'"(memwall/[a-z_/]+)"', path.read_text())
        made |= {re.sub(r"(?<=/lane_)([a-z_]+)/[a-z_]+$", r"\1/<lane>", name) for name in found}
        made |= {f"{stem}<lane>" for stem in re.findall(r'f"(memwall/[a-z_/]+/){name}"', path.read_text())}
    assert names.STEP_S in made and names.LANE_BUSY_S in made
    assert made <= {metric.name for metric in names.METRICS}


def test_the_readme_lists_every_metric_as_described() -> None:
    readme = (PACKAGE.parent / "README.md").read_text()
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in names.METRICS]
    assert [row for row in rows if row not in readme] == []
