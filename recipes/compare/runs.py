"""Reads run folders: configuration and figures, nothing else of what is in them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.telemetry.csv_log import STEP, read_csv
from memwall_strategy.telemetry.run_folder import CONFIG_YAML, METRICS_CSV, SUMMARY_JSON


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        name: short, different for each run of a comparison.
        path: of its folder.
        config: dotted key -> value; empty where the folder holds no ``config.yaml``.
        columns: name -> (step, value) of each row that has it, NaN included, steps ascending.
        last_step: of the last row.
        status: from ``summary.json``: success, failed, stopped; or ``unfinished``.
    """

    name: str
    path: Path
    config: dict[str, Any]
    columns: dict[str, list[tuple[int, float]]]
    last_step: int
    status: str


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the folders and name the runs.

    Raises:
        ConfigError: fewer than two, one twice, or a folder that holds no run.
    """
    if len(paths) < 2:
        raise ConfigError("A comparison needs two run folders or more: python -m recipes.compare runs/a runs/b.")
    resolved = [path.expanduser().resolve() for path in paths]
    if twice := next((path for path in resolved if resolved.count(path) > 1), None):
        raise ConfigError(f"{twice} is given twice. Name each run folder once.")
    return [_read(path, name) for path, name in zip(resolved, short_names(resolved), strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """The fewest last parts of the paths that tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read(path: Path, name: str) -> Run:
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder. Name the folder of a run, such as runs/gpt_nano/DATE_TIME.")
    if not (path / METRICS_CSV).is_file():
        inside = sorted(child.name for child in path.iterdir() if (child / METRICS_CSV).is_file())[:5]
        hint = f" The runs in it: {', '.join(inside)}." if inside else " Name the folder of a run."
        raise ConfigError(f"{path} is no run folder: it holds no {METRICS_CSV}.{hint}")
    columns, last_step = _columns(path / METRICS_CSV)
    return Run(name, path, _config(path / CONFIG_YAML), columns, last_step, _status(path / SUMMARY_JSON))


def _columns(path: Path) -> tuple[dict[str, list[tuple[int, float]]], int]:
    try:
        names, rows = read_csv(path)
        steps = [int(float(row[STEP])) for row in rows]
        columns = {
            name: [(step, float(row[name])) for step, row in zip(steps, rows, strict=True) if row[name]]
            for name in names if name != STEP
        }  # fmt: skip
    except (OSError, UnicodeDecodeError, KeyError, ValueError, OverflowError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a run's figures ({error}). Name another run folder.") from error
    if not rows:
        raise ConfigError(f"{path} holds no step yet. Wait for the run's first logged step, or leave the run out.")
    return {name: sorted(values) for name, values in columns.items() if values}, max(steps)


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read as a configuration ({error}). Repair or remove it.") from error
    return dict(_flat("", config))


def _flat(prefix: str, node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [leaf for key, child in node.items() for leaf in _flat(f"{prefix}.{key}" if prefix else str(key), child)]
    return [(prefix, node)]


def _status(path: Path) -> str:
    if not path.is_file():
        return "unfinished"
    try:
        return str(json.loads(path.read_text()).get("status", "success"))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read as a summary ({error}). Repair or remove it.") from error


def finite(values: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The values that are numbers."""
    return [(step, value) for step, value in values if math.isfinite(value)]
