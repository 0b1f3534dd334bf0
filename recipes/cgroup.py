"""A control group of its own for a child process: a limit on memory that the kernel enforces. Needs root (Linux).

Version 1 or 2, below this process's own group. What passes the limit is killed. Page cache that a process brings in
counts towards it, and is dropped first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_REMOVE_S = 10.0
"""A group can be removed once the kernel has taken leave of its processes."""


@dataclass(frozen=True)
class MemoryGroup:
    """One control group with a limit.

    Attributes:
        folder: of the group.
    """

    folder: Path

    def command(self, *command: str) -> list[str]:
        """The command, run in this group."""
        return ["sh", "-c", f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"', "sh", *command]

    def kill(self) -> None:
        """Kill what runs in it."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    @property
    def peak_bytes(self) -> int:
        """The most that was charged to the group, page cache included."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (self.folder / name).exists():
                return int((self.folder / name).read_text())
        return 0


def why_not() -> str | None:
    """The reason why no group can be made here; None when one can."""
    if os.geteuid() != 0:
        return "control groups need root"
    try:
        with memory_limit(2**30) as group:
            done = subprocess.run(group.command("true"), capture_output=True, text=True, check=False)
    except OSError as error:
        return f"no control group can be made: {error}"
    return done.stderr.strip() or None


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group whose processes together may hold ``limit_bytes``; killed and removed at the end."""
    folder = _own_group() / f"memwall-{os.getpid()}"
    folder.mkdir()
    try:
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max", "memory.swap.max")
        found = [name for name in names if (folder / name).exists()]
        if not found:
            raise OSError(f"{folder} has no limit on memory")
        for name in found:
            (folder / name).write_text("0" if name == "memory.swap.max" else str(limit_bytes))
        yield MemoryGroup(folder)
    finally:
        MemoryGroup(folder).kill()
        _remove(folder)


def run_limited(
    command: Sequence[str], limit_bytes: int, *, env: dict[str, str], timeout_s: float
) -> tuple[int, str, int]:
    """Run a command under a limit: its exit code (-9 where the kernel killed it), its output, and its peak in bytes.

    A run that takes longer than ``timeout_s`` is killed.
    """
    with memory_limit(limit_bytes) as group:
        process = subprocess.Popen(
            group.command(*command), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            group.kill()
            output, _ = process.communicate()
        return process.returncode, output, group.peak_bytes


def _own_group() -> Path:
    """The folder of this process's own group that limits memory: version 1's where it is mounted, else version 2's."""
    lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/")
    path = next((path for _, controllers, path in lines if controllers == ""), "/")
    return _ROOT / path.lstrip("/")


def _remove(folder: Path) -> None:
    limit = time.monotonic() + _REMOVE_S
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)
