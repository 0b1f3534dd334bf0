"""Case 7: kill -9 at random instants, again and again; nothing is left and nothing grows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROUNDS = 16
SLACK_BYTES = 4 * 1024 * 1024
"""Other processes write to the same disk meanwhile; one leftover pool would hold 8 MiB."""


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "memwall" in path.name or "torch" in path.name}


def run(folder: Path, code: str = "") -> str:
    command = ["-c", code, str(folder)] if code else ["-m", "tests.pool.killed_child", str(folder), str(ROUNDS)]
    ran = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_killed_at_random_instants(folder):
    before = shared_memory()
    in_set_up, at_work = map(int, run(folder).split())
    assert in_set_up + at_work == ROUNDS and at_work > ROUNDS // 4, "both set-up and work were met"
    assert list(folder.iterdir()) == [] and shared_memory() <= before


def test_killed_between_making_and_unlinking_the_next_run_tidies(folder):
    """Without O_TMPFILE there is such an instant; it leaves an empty name for one run at most."""
    code = (
        "import errno, os, pathlib, signal, sys\n"
        "from memwall_strategy.pool.disk_file import DiskFile\n"
        "real = os.open\n"
        "def refuse(path, flags, *args, **kwargs):\n"
        "    if flags & os.O_TMPFILE == os.O_TMPFILE: raise OSError(errno.EOPNOTSUPP, '')\n"
        "    return real(path, flags, *args, **kwargs)\n"
        "os.open = refuse\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "for turn in range(3):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.unlink = lambda name: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        pathlib.Path.unlink = lambda path: os.remove(path)\n"
        "        DiskFile(folder, 1 << 20)\n"
        "    os.waitpid(child, 0)\n"
        "    left = list(folder.iterdir())\n"
        "    assert len(left) == 1 and left[0].stat().st_size == 0, left\n"
        "DiskFile(folder, 1 << 20).close()\n"
        "print(len(list(folder.iterdir())))\n"
    )
    assert run(folder, code).strip() == "0"


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_the_disk_blocks_are_free_again(folder, how):
    """What is deleted but still held would not show in the folder: the file system's own count must."""
    end = "os.kill(os.getpid(), 9)" if how == "killed" else "file.close()"
    code = (
        "import os, pathlib, sys\n"
        "from memwall_strategy.pool.disk_file import DiskFile\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "free = lambda: os.statvfs(folder).f_bfree * os.statvfs(folder).f_frsize\n"
        "before = free()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    file = DiskFile(folder, 64 << 20)\n"
        "    low = before - free()\n"
        f"    {end}\n"
        "    os._exit(0 if low > 32 << 20 else 3)\n"
        "print(os.waitpid(child, 0)[1], before - free())\n"
    )
    deadline = time.monotonic() + 20
    while True:  # the kernel may free the blocks of a deleted file a moment later, and others use this disk
        status, lost = map(int, run(folder, code).split())
        assert status == (9 if how == "killed" else 0)
        if lost < SLACK_BYTES or time.monotonic() > deadline:
            break
    assert lost < SLACK_BYTES
