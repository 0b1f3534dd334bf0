"""The run folder: where it is made, when it is refused, what is written."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.telemetry.events import EventKind, Events
from memwall_strategy.telemetry.run_folder import RunFolder, create_run_folder


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "2026-01-02_03-04-05")
    made = [create_run_folder(str(tmp_path), "nano", None, resume=False).path for _ in range(3)]
    assert [path.relative_to(tmp_path).as_posix() for path in made] == [
        "nano/2026-01-02_03-04-05", "nano/2026-01-02_03-04-05_2", "nano/2026-01-02_03-04-05_3",
    ]  # fmt: skip
    assert all(path.is_dir() and not [*path.iterdir()] for path in made)


def test_a_named_folder_holds_one_run(tmp_path: Path) -> None:
    folder = create_run_folder("runs", "nano", str(tmp_path / "a" / "b"), resume=False)
    assert folder.path == tmp_path / "a" / "b"
    folder.metrics.write_text("step\n1\n")
    with pytest.raises(ConfigError, match=r"paths\.run_folder=.*already holds a run\. Go on with it by ckpt_path=last"):
        create_run_folder("runs", "nano", str(tmp_path / "a" / "b"), resume=False)
    with pytest.raises(ConfigError, match=r"paths\.run_folder=.*is in use by a run that has not ended"):
        create_run_folder("runs", "nano", str(tmp_path / "a" / "b"), resume=True)
    del folder
    assert create_run_folder("runs", "nano", str(tmp_path / "a" / "b"), resume=True).path == tmp_path / "a" / "b"


@pytest.mark.parametrize("run_folder", ["file", "file/below", "/proc/memwall_run"])
def test_an_unwritable_folder_names_option_and_remedy(tmp_path: Path, run_folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"paths\.run_folder=.*Name another: paths\.run_folder="):
        create_run_folder("runs", "nano", str(tmp_path / run_folder), resume=False)


def test_an_unwritable_root_names_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"paths\.root=.*cannot be written.*paths\.run_folder="):
        create_run_folder(str(tmp_path / "file"), "nano", None, resume=False)


def test_files_are_replaced_whole_and_events_appended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config("seed: 1\n")
    folder.write_config("seed: 2\n")
    folder.write_plan("{}")
    folder.write_summary({"figures": {"a": 1.5}})
    for rank in (0, 1):
        events = Events(rank)
        events.subscribe(folder.write_event)
        events.emit(EventKind.RUN_ENDED, steps=2)
        events.emit(EventKind.STEP_ABORTED, error="PeerLost", message='a "quoted"\nline')
    assert (tmp_path / "config.yaml").read_text() == "seed: 2\n"
    assert json.loads((tmp_path / "summary.json").read_text()) == {"figures": {"a": 1.5}}
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["rank"], e["kind"]) for e in events] == [(0, "run_ended"), (0, "step_aborted"), (1, "step_aborted")]
    assert events[1]["fields"] == {"error": "PeerLost", "message": 'a "quoted"\nline'}
    assert abs(events[1]["time_s"] - time.time()) < 60
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "events.jsonl", "plan.json", "summary.json"]
