"""``python -m recipes.compare``: what it shows, and what it says of folders that cannot be compared."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as xml
from collections.abc import Callable
from pathlib import Path

import pytest

from memwall_strategy.telemetry import names
from memwall_strategy.telemetry.csv_log import CsvLog
from recipes.compare.__main__ import main
from recipes.compare.chart import line_chart, pieces, thinned, ticks
from recipes.compare.comparison import compare
from recipes.compare.page import page
from recipes.compare.runs import read_runs, short_names


def make_run(
    folder: Path, steps: int, *, loss: Callable[[int], float] = lambda step: 5.0 - 0.1 * step,
    step_s: float | None = 0.5, config: str | None = "optimizer:\n  lr: 0.001\nseed: 0\n",
    status: str | None = "success",
) -> Path:  # fmt: skip
    folder.mkdir(parents=True)
    log = CsvLog(folder / "metrics.csv")
    for step in range(1, steps + 1):
        row = {"step": step, names.TRAIN_LOSS: loss(step)}
        if step_s is not None:
            row[names.STEP_S] = 9.0 if step <= 3 else step_s
        if step % 5 == 0:
            row[names.VAL_LOSS] = loss(step) + 0.5
        log.write(row)
    log.close()
    if config is not None:
        (folder / "config.yaml").write_text(config)
    if status is not None:
        (folder / "summary.json").write_text(json.dumps({"status": status}))
    return folder


def test_two_runs_of_unequal_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "x" / "run", 20)
    b = make_run(tmp_path / "y" / "run", 30, loss=lambda step: 5.0 - 0.12 * step, step_s=0.25,
                 config="optimizer:\n  lr: 0.002\nseed: 0\n", status=None)  # fmt: skip
    assert main([str(a), str(b), "--plot", str(tmp_path / "out.html")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"optimizer\.lr +0\.001 +0\.002", out) and "seed" not in out
    assert re.search(r"memwall/step_s, median +0\.5 +0\.25 \(0\.500x\)", out), "the first steps do not count"
    assert re.search(r"train/loss at step 20 +3 +2\.6 \(0\.867x\)", out) and "at step 30" not in out.split("note:")[0]
    assert len(re.findall(r"^train/loss at step", out, re.M)) == 8
    assert "unequal lengths: x/run at step 20, y/run at step 30" in out and "y/run is unfinished" in out
    text = (tmp_path / "out.html").read_text()
    assert text.count("<svg viewBox") == 3 + 2, "loss, validation, step time; two in the legend"
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text), "no network, no other file"
    for svg in re.findall(r"<svg.*?</svg>", text):
        xml.fromstring(svg)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.html", "x", "y"]


def test_json_of_three_runs_with_nan_and_missing_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", 10)
    b = make_run(tmp_path / "b", 10, loss=lambda step: math.nan if step >= 8 else 5.0, status="failed")
    c = make_run(tmp_path / "c", 10, step_s=None, config=None)
    assert main([str(a), str(b), str(c), "--json", "--metric", names.STEP_S]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    figures = {row["what"]: row["values"] for row in shown["figures"]}
    assert figures["train/loss, last"] == [pytest.approx(4.0), 5.0, pytest.approx(4.0)], "the last number"
    assert figures["memwall/step_s, median"] == [0.5, 0.5, None]
    assert shown["at_steps"][-3]["values"][1] is None or any(row["values"][1] is None for row in shown["at_steps"])
    notes = " ".join(shown["notes"])
    assert "b: train/loss is NaN or infinite in 3 of 10 rows, first at step 8" in notes
    assert "c has no column memwall/step_s" in notes and "c holds no config.yaml" in notes and "b is failed" in notes
    text = page(compare(read_runs([a, b, c])))
    assert "nan" not in "".join(re.findall(r'points="([^"]*)"', text)).lower()


def test_names_with_markup_are_text(tmp_path: Path) -> None:
    a = make_run(tmp_path / "<b>a&", 5, config="note: <script>x</script>\n")
    text = page(compare(read_runs([a, make_run(tmp_path / "c", 5)])))
    assert "<script>" not in text and "<b>" not in text and "&lt;b&gt;a&amp;" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["good"], "needs two run folders or more"),
        ([], "needs two run folders or more"),
        (["good", "good"], "is given twice"),
        (["good", "nowhere"], "nowhere is not a folder"),
        (["good", "good/config.yaml"], "is not a folder"),
        (["good", "parent"], r"parent is no run folder: it holds no metrics.csv. The runs in it: one"),
        (["good", "empty"], "empty is no run folder.*Name the folder of a run"),
        (["good", "headers"], "holds no step yet"),
        (["good", "garbage"], "cannot be read as a run's figures"),
        (["good", "binary"], "cannot be read as a run's figures"),
        (["good", "bad_yaml"], "cannot be read as a configuration"),
        (["good", "bad_summary"], "cannot be read as a summary"),
        (["good", "stranger"], "no column of metrics.csv in common"),
        (["good", "parent/one", "--metric", "memwall/step"], r"No run has a column 'memwall/step'. Did you mean"),
        (["good", "parent/one", "--plot", "nowhere/x.html"], r"--plot=.*nowhere/x.html cannot be written"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "good", 5)
    make_run(tmp_path / "parent" / "one", 5)
    for name in ("empty", "headers", "garbage", "binary", "stranger"):
        (tmp_path / name).mkdir()
    (tmp_path / "headers" / "metrics.csv").write_text("step,a\n")
    (tmp_path / "garbage" / "metrics.csv").write_text("step,a\n1,many\n")
    (tmp_path / "binary" / "metrics.csv").write_bytes(b"\xff\xfe\x00step")
    (tmp_path / "stranger" / "metrics.csv").write_text("step,other\n1,2\n")
    (make_run(tmp_path / "bad_yaml", 5) / "config.yaml").write_text("a: [1\n")
    (make_run(tmp_path / "bad_summary", 5) / "summary.json").write_text("{")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert re.search(message, " ".join(captured.err.split())), captured.err
    assert "Traceback" not in captured.err


def test_short_names_tell_apart() -> None:
    assert short_names([Path("/r/a/1"), Path("/r/b/1")]) == ["a/1", "b/1"]
    assert short_names([Path("/r/a/1"), Path("/r/a/2")]) == ["1", "2"]


def test_charts() -> None:
    assert line_chart([[], [(1, math.nan)]], "x") == ""
    assert "<circle" in line_chart([[(1, 2.0)]], "one point, one value")
    xml.fromstring(line_chart([[(1, 0.0), (2, math.inf), (3, 1e-9)], [(5, -1.0), (9, -1.0)]], 'a "quoted" <label>'))
    assert pieces([(1, math.nan), (2, 1.0), (3, 2.0), (4, math.inf), (5, 3.0)]) == [[(2, 1.0), (3, 2.0)], [(5, 3.0)]]
    long = [(step, float(step == 7_777)) for step in range(20_000)]
    assert len(thinned(long)) <= 2000 and (7_777, 1.0) in thinned(long), "a spike stays"
    for low, high in ((0.0, 1.0), (3.0, 3.0), (0.0, 0.0), (-2e9, 5e9), (1e-9, 3e-9), (5.41, 5.42)):
        marks = ticks(low, high)
        assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 12
