"""recipes.cgroup: a limit that the kernel enforces, refused by name, gone with whoever asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import cgroup
from recipes.cgroup import MemoryGroup, memory_limit, own_group, run_limited, why_not

LIMIT_BYTES = 128 * 2**20
EATS = f"held = bytearray({2 * LIMIT_BYTES}); print(len(held))"

limits = pytest.mark.skipif(why_not() is not None, reason=f"no control groups here: {why_not()}")


# -- without the kernel's help --


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup.os, "geteuid", lambda: 1000)
    assert why_not() == "control groups need root"


def test_what_the_kernel_refuses_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plain folder is no control group: it has no files of limits."""
    monkeypatch.setattr(cgroup.os, "geteuid", lambda: 0)
    monkeypatch.setattr(cgroup, "own_group", lambda: tmp_path)
    assert "no control group can be made" in why_not() and "memory.max" in why_not()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(cgroup, "own_group", lambda: tmp_path / "nowhere")
    assert "no control group can be made" in why_not()


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ("4:memory:/job\n3:cpuset:/\n0::/\n", "memory/job"),
        ("4:hugetlb,memory:/job/step\n0::/other\n", "memory/job/step"),
        ("4:memory:/seen/from/outside\n0::/\n", "memory"),
        ("0::/user.slice\n", "user.slice"),
        ("0::/\n", ""),
    ],
)
def test_own_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, folder: str) -> None:
    for made in ("memory/job/step", "user.slice"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "own").write_text(lines)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    assert own_group() == tmp_path / folder


@pytest.mark.parametrize(
    ("files", "swaps", "after"),
    [
        ({"memory.limit_in_bytes": "", "memory.memsw.limit_in_bytes": ""}, 1, {"memory.memsw.limit_in_bytes": "4096"}),
        ({"memory.max": "", "memory.swap.max": "max"}, 1, {"memory.max": "4096", "memory.swap.max": "0"}),
        ({"memory.limit_in_bytes": ""}, 0, {"memory.limit_in_bytes": "4096"}),
        ({"memory.limit_in_bytes": ""}, 1, None),
    ],
)
def test_swap_is_no_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict, swaps: int, after: dict | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "swaps").write_text("Filename Type Size\n" + "/swapfile file 1\n" * swaps)
    monkeypatch.setattr(cgroup, "SWAPS", tmp_path / "swaps")
    if after is None:
        with pytest.raises(OSError, match="swapoff"):
            MemoryGroup(tmp_path).set_limit(4096)
        return
    MemoryGroup(tmp_path).set_limit(4096)
    assert {name: (tmp_path / name).read_text() for name in after} == after


def test_kills_and_peak_are_read_in_both_versions(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir(), two.mkdir()
    (one / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (one / "memory.max_usage_in_bytes").write_text("8192\n")
    (two / "memory.events").write_text("low 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert (MemoryGroup(one).kills, MemoryGroup(one).peak_bytes) == (2, 8192)
    assert (MemoryGroup(two).kills, MemoryGroup(two).peak_bytes) == (1, None)
    (two / "memory.events").write_text("low 0\n")
    with pytest.raises(OSError, match="does not count"):
        MemoryGroup(two).kills  # noqa: B018


# -- with it --


def left(pid: int) -> bool:
    """Whether a process's group is there; others on this machine may have theirs."""
    return (own_group() / f"memwall-{pid}").exists()


@limits
def test_what_passes_the_limit_is_killed_and_other_ends_are_told_apart() -> None:
    eaten = run_limited([sys.executable, "-c", EATS], LIMIT_BYTES, timeout_s=60)
    assert eaten.killed and eaten.code == -signal.SIGKILL and not eaten.timed_out
    good = run_limited([sys.executable, "-c", "print('through')"], LIMIT_BYTES, timeout_s=60)
    assert (good.code, good.output, good.killed) == (0, "through\n", False)
    wrong = run_limited([sys.executable, "-c", "raise SystemExit('another error')"], LIMIT_BYTES, timeout_s=60)
    assert wrong.code == 1 and "another error" in wrong.output and not wrong.killed
    slow = run_limited(["sleep", "60"], LIMIT_BYTES, timeout_s=0.2)
    assert slow.timed_out and not slow.killed
    assert not left(os.getpid())


@limits
def test_an_exception_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="on the way"), memory_limit(LIMIT_BYTES) as group:
        process = subprocess.Popen(group.command("sleep", "60"))
        _until(lambda: str(process.pid) in (group.folder / "cgroup.procs").read_text().split())
        raise ValueError("on the way")
    assert process.wait(30) == -signal.SIGKILL and not left(os.getpid())


@limits
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_however_it_ends(how: signal.Signals, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    script = f"from recipes.cgroup import run_limited; run_limited(['sh', '-c', 'echo $$ > {told}; sleep 60; true'], "
    asks = subprocess.Popen([sys.executable, "-c", f"{script}{LIMIT_BYTES}, timeout_s=60)"], stderr=subprocess.DEVNULL)
    inside = _until(lambda: told.exists() and told.read_text().strip())
    assert left(asks.pid)
    asks.send_signal(how)
    asks.wait(30)
    _until(lambda: not left(asks.pid) and not os.path.exists(f"/proc/{inside}"))


def _until(holds, limit_s: float = 30.0) -> object:
    end = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)
    return found
