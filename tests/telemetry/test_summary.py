"""Figures of a run from its rows, and claims beside them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from memwall_strategy.cli.options import ClaimOptions
from memwall_strategy.cli.report import print_summary
from memwall_strategy.planner import ClusterSpec, ModelSpec, ParameterSpec, UnitSpec, plan
from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.summary import environment, hold_claims, run_figures


def rows(steps: int = 20) -> list[dict[str, str]]:
    made = []
    for step in range(1, steps + 1):
        row = {"step": str(step), names.TRAIN_LOSS: str(6.0 - 0.1 * step), names.STEP_S: "9.0" if step < 4 else "0.5"}
        row[names.DEVICE_PEAK_BYTES] = str(1000 + (step == 7))
        made.append(row | {names.VAL_LOSS: "4.0" if step == 10 else ""})
    return made


def test_figures_are_taken_from_the_rows() -> None:
    figures = run_figures(rows())
    assert figures["train/loss_first"] == pytest.approx(5.9)
    assert figures["train/loss_last"] == pytest.approx(sum(6.0 - 0.1 * s for s in range(11, 21)) / 10)
    assert figures["train/loss_ratio"] == pytest.approx(figures["train/loss_last"] / 5.9)
    assert figures[names.STEP_S] == 0.5, "the first steps do not count"
    assert figures[names.DEVICE_PEAK_BYTES] == 1001 and figures[names.VAL_LOSS] == 4.0
    assert figures["train/steps"] == 20
    assert names.MFU not in figures, "a figure nobody measured is not there"
    assert run_figures([]) == {}


def test_claims_are_kept_broken_or_not_measured() -> None:
    figures = {"a": 2.0}
    held = hold_claims(
        [
            ClaimOptions(what="kept", figure="a", at_most=3, at_least=2),
            ClaimOptions(what="broken", figure="a", at_most=1.5),
            ClaimOptions(what="unknown", figure="b", at_least=1),
        ],
        figures,
    )
    assert [(c.kept, c.measured) for c in held] == [(True, 2.0), (False, 2.0), (None, None)]
    assert held[0].claimed == "at most 3 and at least 2"


def test_what_is_printed(tmp_path: Path) -> None:
    out = io.StringIO()
    unit = UnitSpec("block", (ParameterSpec("block.w", (4, 4)),))
    made = plan(ModelSpec((unit,)), ClusterSpec(world=1))
    claims = hold_claims([ClaimOptions(what="fast", figure="b", at_most=1, how="a clock")], {})
    print_summary(
        Console(file=out, width=120), {"train/steps": 20.0}, claims, made, {"step": {"param": 64}}, tmp_path / "run",
        ["trainer.max_steps=20"],
    )  # fmt: skip
    text = out.getvalue()
    assert "this run changed trainer.max_steps=20" in text
    assert "steps" in text and "training loss" not in text
    assert "not measured" in text and "kept" not in text.replace("not measured", "")
    assert re.search(r"param +64 B +64 B +\+0\.0%", text)
    assert re.search(r"grad +64 B +not counted", text)
    assert text.rstrip().endswith(str(tmp_path / "run"))


def test_environment_names_versions_and_ranks() -> None:
    found = environment(2, 1, "cpu")
    assert found["ranks"] == 2 and found["torch"].startswith("2.") and found["cores"] >= 1
