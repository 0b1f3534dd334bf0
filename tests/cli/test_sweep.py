"""``-m``: which jobs there are, what is said of a bad one, and that each runs whatever became of the others.

The jobs' command is a small script here; ``tests/cli/test_train.py`` runs real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memwall_strategy.cli import sweep as module
from memwall_strategy.cli.sweep import _expand, sweep
from memwall_strategy.core.errors import ConfigError
from tests.ranks import ROOT

PYTHON = sys.executable
COMMAND = """#!{python}
import json, pathlib, sys, time
said = " ".join(sys.argv)
if "lr=0.5" in said:
    sys.exit(7)
if "lr=0.25" in said:
    time.sleep(60)
folder = pathlib.Path(sys.argv[-1].removeprefix("paths.run_folder=").strip("'"))
folder.mkdir()
folder.joinpath("summary.json").write_text(json.dumps({{"figures": {{"train/loss_last": 1.25}}, "argv": sys.argv}}))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "python"
    script.write_text(COMMAND.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(script))
    return script


def test_the_jobs_are_the_product_of_the_choices() -> None:
    jobs = [*_expand(["experiment=gpt_nano", "optimizer.lr=1,2", "model.layers=choice(3,4)", "seed=5"])]
    assert [differs for _, differs in jobs] == [
        [f"optimizer.lr={lr}", f"model.layers={layers}"] for lr in (1, 2) for layers in (3, 4)
    ]
    assert jobs[3][0] == ["experiment=gpt_nano", "optimizer.lr=2", "model.layers=4", "seed=5"]
    again = [*_expand(["optimizer.lr=1", "seed=2", "optimizer.lr=3,4"])]  # as for one run, the last of a key counts
    assert [differs for _, differs in again] == [["optimizer.lr=3"], ["optimizer.lr=4"]]
    assert [job for job, _ in _expand(["seed=range(1,4)"])] == [["seed=1"], ["seed=2"], ["seed=3"]]


def test_each_job_runs_whatever_became_of_the_others(
    tmp_path: Path, command: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = f"paths.root='{tmp_path}/my runs'"
    assert sweep(["optimizer.lr=0.5,1,bad,2", root, "name=nano"], None, "train") == 1
    said = capfd.readouterr()
    assert "job 2 (optimizer.lr=bad) is refused: optimizer.lr=bad does not fit" in said.err
    (folder,) = (tmp_path / "my runs" / "nano").iterdir()
    jobs = json.loads((folder / "sweep.json").read_text())
    assert [job["result"] for job in jobs] == ["failed (7)", "ok", "refused", "ok"]
    assert sorted(p.name for p in folder.iterdir()) == ["1", "3", "sweep.json"]
    assert "2 of 4 jobs ended well" in said.out and "1.250" in said.out
    argv = json.loads((folder / "3" / "summary.json").read_text())["argv"]
    assert "optimizer.lr=2" in argv and "name=nano" in argv


def test_two_sweeps_in_one_second_have_folders_of_their_own(tmp_path: Path, command: Path) -> None:
    for _ in range(2):
        assert sweep(["optimizer.lr=1", f"paths.root={tmp_path}", f"hydra.sweep.dir={tmp_path}/s"], None, "train") == 0
    assert (tmp_path / "s" / "0").is_dir() and (tmp_path / "s_2" / "0").is_dir()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr=abc,xyz"], r"No job of this sweep can run\. Job 0: optimizer\.lr=abc does not fit"),
        (["optimizer.lr=range(1"], r"argument 'optimizer\.lr=range\(1' cannot be read"),
        (["optimizer.lr=1,,2"], r"cannot be read"),
        (["hydra/launcher=joblib", "seed=1,2"], r"hydra/launcher=joblib cannot be used.*Leave it out"),
    ],
)
def test_a_sweep_that_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(overrides, None, "train")


def test_a_launchers_ranks_cannot_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without a launcher"):
        sweep(["seed=1,2"], None, "train")


def test_a_stopped_sweep_leaves_no_job(tmp_path: Path, command: Path) -> None:
    code = (
        "import sys; from memwall_strategy.cli import sweep; sweep.sys.executable = sys.argv[1];"
        "sys.exit(sweep.sweep(['optimizer.lr=0.25,1', 'paths.root=' + sys.argv[2]], None, 'train'))"
    )
    process = subprocess.Popen(
        [PYTHON, "-c", code, str(command), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    assert "job 0" in process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "0 of 2 jobs ended well" in out and "stopped" in out and "waiting" in out
