"""metrics.csv: rows, new columns, resumed and killed runs."""

from __future__ import annotations

from pathlib import Path

from memwall_strategy.telemetry.csv_log import CsvLog, read_csv


def values(path: Path) -> list[dict[str, float]]:
    return [{k: float(v) for k, v in row.items() if v} for row in read_csv(path)[1]]


def test_rows_come_back_with_the_columns_they_had(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "m.csv")
    rows = [{"step": 1, "loss": 5.5}, {"step": 2, "loss": 5.25, "val": 4.0}, {"step": 3, "val": 3.5, "loss": 1e-7}]
    for i, row in enumerate(rows):
        log.write(row)
        assert values(tmp_path / "m.csv") == rows[: i + 1], "a row is on disk as soon as it is written"
    assert read_csv(tmp_path / "m.csv")[0] == ["step", "loss", "val"]
    log.close()
    assert [p.name for p in tmp_path.iterdir()] == ["m.csv"]


def test_a_resumed_run_repeats_no_step(tmp_path: Path) -> None:
    first = CsvLog(tmp_path / "m.csv")
    for step in range(1, 6):
        first.write({"step": step, "loss": float(step)})
    first.close()
    again = CsvLog(tmp_path / "m.csv")
    again.write({"step": 4, "loss": 40.0, "new": 1.0})
    again.write({"step": 5, "loss": 50.0})
    again.close()
    assert [(row["step"], row["loss"]) for row in values(tmp_path / "m.csv")] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0),
    ]  # fmt: skip


def test_a_line_that_a_killed_run_left_unfinished_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("step,loss,val\n1,5.0,\n2,4.")
    assert [row["step"] for row in read_csv(path)[1]] == ["1"]
    log = CsvLog(path)
    log.write({"step": 2, "loss": 4.5})
    log.close()
    assert [row["loss"] for row in values(path)] == [5.0, 4.5]


def test_closing_and_writing_on(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "m.csv")
    log.write({"step": 1, "loss": 1.0})
    log.close()
    log.write({"step": 2, "loss": 2.0})
    log.close()
    assert [row["step"] for row in values(tmp_path / "m.csv")] == [1, 2]
