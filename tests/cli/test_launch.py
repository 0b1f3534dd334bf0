"""Rank, run folder and checkpoint, settled before torch comes in."""

from __future__ import annotations

import builtins
import os
import time
from pathlib import Path

import pytest

from memwall_strategy.cli.compose import compose_run
from memwall_strategy.cli.launch import find_checkpoint, launch, rank
from memwall_strategy.cli.settings import Settings, check
from memwall_strategy.core.errors import ConfigError, PeerLost
from memwall_strategy.engine.checkpoint.folder import Partial


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "MEMWALL_TRAIN_CHOSEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def settings(tmp_path: Path, *overrides: str) -> Settings:
    return check(compose_run([f"paths.root={tmp_path}", "name=nano", *overrides]))


def commit(folder: Path, step: int) -> Path:
    """A whole sharded checkpoint, as far as its marker says."""
    partial = Partial(folder, Partial.new_id())
    partial.create_folder()
    (partial.path / "__0_0.distcp").write_bytes(b"shard")
    partial.commit(step=step, world_size=1, torch_version="2", files={"__0_0.distcp": 5})
    partial.publish()
    return folder


def test_the_first_process_chooses_and_the_others_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = commit(tmp_path / "nano" / "old" / "checkpoints" / "last.ckpt", 3)
    chosen = settings(tmp_path, "ckpt_path=last")
    first = launch(chosen)
    assert first.is_first and first.checkpoint == last and first.folder.path.parent == tmp_path / "nano"
    monkeypatch.setenv("LOCAL_RANK", "1")
    commit(tmp_path / "nano" / "new" / "checkpoints" / "last.ckpt", 9)  # must change nothing any more
    armed: list[bool] = []
    monkeypatch.setattr("memwall_strategy.cli.launch.die_with_parent", armed.append)
    with pytest.raises(PeerLost, match="the first rank, which started this one, has ended"):
        launch(chosen)  # this process started itself, and so has no such parent
    monkeypatch.setattr("os.getppid", os.getpid)
    second = launch(chosen)
    assert armed == [True, True]
    assert not second.is_first
    assert (second.folder.path, second.checkpoint) == (first.folder.path, first.checkpoint)
    assert len([*(tmp_path / "nano").iterdir()]) == 3


def test_ranks_of_another_launcher_need_a_named_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"another launcher.*paths\.run_folder="):
        launch(settings(tmp_path))
    part = launch(settings(tmp_path, f"paths.run_folder={tmp_path}/mine"))
    assert not part.is_first and part.folder.path == tmp_path / "mine"
    monkeypatch.setenv("RANK", "0")
    assert launch(settings(tmp_path, f"paths.run_folder={tmp_path}/mine")).is_first
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize(("name", "expected"), [("RANK", 3), ("LOCAL_RANK", 3), ("SLURM_PROCID", 3), ("HOME", 0)])
def test_the_rank_is_what_the_launcher_says(name: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    assert rank() == expected


def test_last_is_the_newest_whole_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"ckpt_path=last: there is no whole checkpoint in .*nano.*Leave ckpt_path out"
    ):
        find_checkpoint(settings(tmp_path, "ckpt_path=last"))
    older = commit(tmp_path / "nano" / "b" / "checkpoints" / "last.ckpt", 10)
    time.sleep(0.02)
    newer = commit(tmp_path / "nano" / "a" / "checkpoints" / "last.ckpt", 5)
    half = tmp_path / "nano" / "c" / "checkpoints" / "last.ckpt"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"half")
    assert find_checkpoint(settings(tmp_path, "ckpt_path=last")) == newer
    assert find_checkpoint(settings(tmp_path, "ckpt_path=last", f"paths.run_folder={tmp_path}/nano/b")) == older
    assert find_checkpoint(settings(tmp_path, f"ckpt_path={older}")) == older
    assert find_checkpoint(settings(tmp_path)) is None
    with pytest.raises(ConfigError, match=r"ckpt_path=.*half-written.*earlier one"):
        find_checkpoint(settings(tmp_path, f"ckpt_path={half}"))


def test_missing_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ckpt_path=/nowhere/x: There is no checkpoint at /nowhere/x"):
        find_checkpoint(settings(tmp_path, "ckpt_path=/nowhere/x"))
    (tmp_path / "photos").mkdir()
    with pytest.raises(ConfigError, match=r"ckpt_path=.*directory of something else"):
        find_checkpoint(settings(tmp_path, f"ckpt_path={tmp_path}/photos"))
    (tmp_path / "notes.txt").write_text("no checkpoint")
    with pytest.raises(ConfigError, match=r"ckpt_path=.*is not a checkpoint"):
        find_checkpoint(settings(tmp_path, f"ckpt_path={tmp_path}/notes.txt"))


def test_no_folder_is_made_for_a_run_that_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        launch(settings(tmp_path / "runs", "ckpt_path=/nowhere"))
    assert not (tmp_path / "runs").exists()


def test_a_notebook_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "get_ipython", object, raising=False)
    with pytest.raises(ConfigError, match=r"a notebook or an interactive Python.*!memwall-train"):
        launch(settings(tmp_path))
