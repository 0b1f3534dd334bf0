"""Checkpoints on the disk: whole or not, found, replaced, tidied after a kill at any operation."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy
import pytest
import torch

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.folder import MARKER, Partial, find_last, resolve, tidy, verify
from memwall_strategy.engine.checkpoint.rng import capture_rng, restore_rng
from memwall_strategy.engine.checkpoint.save import ShardedSave
from memwall_strategy.runtime.checkpoint import Checkpointer
from tests.ranks import run_ranks


def make(path: Path, step: int = 0) -> Path:
    Checkpointer(torch.nn.Linear(2, 2)).save(path, {}, step)
    return path


def made_at(path: Path, created_s: float) -> Path:
    marker = json.loads((path / MARKER).read_text())
    (path / MARKER).write_text(json.dumps(marker | {"created_s": created_s}))
    return path


class TestVerify:
    def test_says_what_a_whole_one_is(self, tmp_path):
        marker = verify(make(tmp_path / "c", step=7)).marker
        assert (marker.step, marker.world_size, marker.torch) == (7, 1, torch.__version__)
        assert set(marker.files) == {".metadata", "__0_0.distcp", "layout.pt", "meta.pt", "rng.pt"}

    @pytest.mark.parametrize(
        ("damage", "text"),
        [
            (lambda c: (c / MARKER).unlink(), "half-written"),
            (lambda c: (c / "__0_0.distcp").unlink(), r"lacks its file __0_0\.distcp"),
            (lambda c: os.truncate(c / "__0_0.distcp", 100), r"__0_0\.distcp has 100 bytes"),
            (lambda c: (c / MARKER).write_text("{"), "cannot be read"),
            (lambda c: (c / MARKER).write_text('{"format": "other"}'), "not a memwall checkpoint"),
            (lambda c: (c / MARKER).write_text('{"format": "memwall-checkpoint", "version": 99}'), "version 99"),
        ],
    )
    def test_names_the_damage_and_loading_refuses(self, damage, text, tmp_path):
        damage(make(tmp_path / "c"))
        with pytest.raises(CheckpointError, match=text):
            verify(tmp_path / "c")
        with pytest.raises(CheckpointError, match=text):
            Checkpointer(torch.nn.Linear(2, 2)).load(tmp_path / "c")
        assert find_last(tmp_path) is None

    def test_refuses_what_is_foreign(self, tmp_path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "notes.txt").write_text("x")
        (tmp_path / "text.ckpt").write_text("x")
        torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.pt")
        torch.save({"state_dict": {}}, tmp_path / "cut.ckpt")
        os.truncate(tmp_path / "cut.ckpt", 200)
        for name, text in [
            ("nothing", "no checkpoint at"),
            ("folder", "directory of something else"),
            ("text.ckpt", "not a file of torch.save"),
            ("cut.ckpt", "truncated"),
            ("weights.pt", "without the key 'state_dict'"),
        ]:
            with pytest.raises(CheckpointError, match=text):
                verify(tmp_path / name)
        assert find_last(tmp_path) is None

    def test_a_url_is_refused(self):
        with pytest.raises(CheckpointError, match="is a URL"):
            Checkpointer(torch.nn.Linear(2, 2)).save("s3://bucket/c")


class TestFindLast:
    def test_newest_whole_one_of_any_kind(self, tmp_path):
        assert find_last(tmp_path) is None and find_last(tmp_path / "none") is None
        made_at(make(tmp_path / "a"), 1000.0)
        made_at(make(tmp_path / "b"), 3000.0)
        made_at(make(tmp_path / "c"), 2000.0)
        assert find_last(tmp_path) == tmp_path / "b"
        (tmp_path / "b" / "rng.pt").unlink()
        assert find_last(tmp_path) == tmp_path / "c"
        Checkpointer(torch.nn.Linear(2, 2)).save_full(tmp_path / "d.ckpt")
        assert find_last(tmp_path) == tmp_path / "d.ckpt"

    def test_links_and_leftover_files_do_no_harm(self, tmp_path):
        make(tmp_path / "a")
        (tmp_path / "gone").symlink_to(tmp_path / "nothing")
        torch.save({"state_dict": {}}, tmp_path / "full.ckpt.partial-0123abcd")
        assert find_last(tmp_path) == tmp_path / "a"


class TestReplacing:
    def test_kinds_replace_each_other_and_leave_nothing(self, tmp_path):
        checkpointer, path = Checkpointer(torch.nn.Linear(2, 2)), tmp_path / "deep" / "c"
        target = tmp_path / "target"
        make(target)
        for write in (checkpointer.save, checkpointer.save_full, checkpointer.save_full, checkpointer.save):
            write(path)
            verify(path)
            assert [entry.name for entry in path.parent.iterdir()] == ["c"]
        for write in (checkpointer.save, checkpointer.save_full):
            os.rename(path, tmp_path / "aside")
            path.symlink_to(target)
            write(path)
            verify(path)
            verify(target)
            assert not path.is_symlink() and len(list(path.parent.iterdir())) == 1
            checkpointer.remove(tmp_path / "aside")

    def test_failure_leaves_the_old_one(self, tmp_path, monkeypatch):
        make(tmp_path / "c", step=1)
        monkeypatch.setattr(ShardedSave, "_commit", lambda self, results: os.mkdir(tmp_path / "no" / "such"))
        with pytest.raises(CheckpointError, match="FileNotFoundError"):
            make(tmp_path / "c", step=2)
        assert verify(tmp_path / "c").marker.step == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


class TestTidy:
    def leftover(self, tmp_path, stage, step, created_s):
        path = made_at(make(tmp_path / "workshop" / "x", step), created_s)
        path = path.rename(tmp_path / f"c.{stage}-{step:08x}")
        (tmp_path / "workshop").rmdir()
        return path

    def test_a_half_written_one_goes_and_the_whole_one_stays(self, tmp_path):
        make(tmp_path / "c", step=1)
        half = self.leftover(tmp_path, "partial", 2, time.time() + 9)
        (half / MARKER).unlink()
        with pytest.raises(CheckpointError, match="half-written"):
            verify(half)
        assert resolve(half) == tmp_path / "c" == find_last(tmp_path)
        assert tidy(tmp_path) == [half]
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]

    @pytest.mark.parametrize("killed", ["before the renames", "between the renames", "after the renames"])
    def test_an_interrupted_replacement_is_finished(self, killed, tmp_path):
        new = self.leftover(tmp_path, "partial", 2, time.time() + 9)
        old = self.leftover(tmp_path, "old", 1, 1000.0)
        if killed == "before the renames":
            old.rename(tmp_path / "c")
        if killed == "after the renames":
            new.rename(tmp_path / "c")
        assert verify(resolve(tmp_path / "c")).marker.step == 2 == verify(find_last(tmp_path)).marker.step
        assert tidy(tmp_path)
        assert verify(tmp_path / "c").marker.step == 2
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]

    def test_an_old_one_whose_successor_is_broken_comes_back(self, tmp_path):
        new, old = self.leftover(tmp_path, "partial", 2, time.time()), self.leftover(tmp_path, "old", 1, 1000.0)
        (new / "meta.pt").unlink()
        assert resolve(tmp_path / "c") == old
        tidy(tmp_path)
        assert verify(tmp_path / "c").marker.step == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]

    def test_what_a_living_process_writes_is_left_alone(self, tmp_path):
        partial = Partial(tmp_path / "c", Partial.new_id())
        partial.create_folder()
        assert tidy(tmp_path) == [] and partial.path.is_dir()
        other = Partial(tmp_path / "c", partial.id)
        other.abandon()
        assert partial.path.is_dir()
        partial.abandon()
        assert list(tmp_path.iterdir()) == []

    def test_saving_tidies(self, tmp_path):
        half = self.leftover(tmp_path, "partial", 2, time.time())
        (half / MARKER).unlink()
        make(tmp_path / "other")
        assert [entry.name for entry in tmp_path.iterdir()] == ["other"]


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), numpy.random.rand(), numpy.random.standard_normal()]


class TestRng:
    def test_every_generator_goes_on(self):
        torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
        draw()  # leaves NumPy with half a pair of normal numbers
        state, expected = capture_rng(), draw()
        draw()
        restore_rng([state], 0)
        assert draw() == expected

    def test_ranks_beyond_the_saved_ones_are_seeded_alike_each_time_and_unlike_each_other(self):
        torch.manual_seed(1)
        states = [capture_rng()]
        seen = []
        for rank in (1, 1, 2):
            restore_rng(states, rank)
            seen.append(draw())
        assert seen[0] == seen[1] and all(a != b for a, b in zip(seen[0], seen[2], strict=True))

    def test_nothing_saved_changes_nothing(self):
        torch.manual_seed(1)
        expected = torch.rand(())
        torch.manual_seed(1)
        restore_rng([], 0)
        assert torch.equal(torch.rand(()), expected)


OPERATIONS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "open")


def kill_at_every_operation(rank: int, world: int, folder: str) -> dict[str, int]:
    """Fork a child for every file operation of an overwriting save, kill it there, look at what is left."""
    model = torch.nn.Linear(3, 2)

    def fill(value: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)

    def child(base: Path, fatal: int, full: bool) -> None:
        fill(2.0)
        count = 0
        for name in OPERATIONS:
            original = getattr(os, name)

            def counted(*args, _original=original, **kwargs):
                nonlocal count
                if count == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return _original(*args, **kwargs)

            setattr(os, name, counted)
        checkpointer = Checkpointer(model)
        (checkpointer.save_full if full else checkpointer.save)(base / "c", {"step": 2}, 2)

    fill(1.0)
    olds = {full: Path(folder) / f"old-{full}" for full in (False, True)}
    Checkpointer(model).save(olds[False] / "c", {"step": 1}, 1)
    Checkpointer(model).save_full(olds[True] / "c", {"step": 1}, 1)
    seen = {"old": 0, "new": 0}
    for old_full, new_full in ((False, False), (True, False), (False, True)):
        for fatal in range(1000):
            base = Path(folder) / f"{old_full}-{new_full}-{fatal}"
            shutil.copytree(olds[old_full], base)
            pid = os.fork()
            if pid == 0:
                child(base, fatal, new_full)
                os._exit(0)
            status = os.waitpid(pid, 0)[1]
            found = find_last(base)
            assert found is not None, (base, fatal, list(base.rglob("*")))
            assert resolve(base / "c") == found
            fill(0.0)
            step = Checkpointer(model).load(base / "c")["step"]
            assert all((parameter == step).all() for parameter in model.parameters()), (base, step)
            content = {file.name: file.read_bytes() for file in found.iterdir()} if found.is_dir() else None
            tidy(base)
            assert [entry.name for entry in base.iterdir()] == ["c"], list(base.iterdir())
            assert find_last(base) == base / "c"
            assert content is None or content == {file.name: file.read_bytes() for file in (base / "c").iterdir()}
            seen["new" if step == 2 else "old"] += 1
            if status == 0:
                assert step == 2
                break
            assert os.WIFSIGNALED(status), status
    return seen


def test_killed_at_any_operation_one_whole_checkpoint_is_left(tmp_path):
    (seen,) = run_ranks(kill_at_every_operation, 1, folder=str(tmp_path))
    print(seen)
    assert seen["old"] > 20 and seen["new"] > 10, seen


def test_locks_work_here(tmp_path):
    """What tidy relies on: a lock on a folder is seen by another descriptor and goes with its own."""
    first = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(first)
    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(second)
