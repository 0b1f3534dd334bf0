"""A control group of its own for a child process: a limit on memory that the kernel enforces. Needs root (Linux).

Version 1 or 2, below this process's own group. What would pass the limit is killed. Page cache that a process brings in
counts towards it, and is dropped first. Swap is no way out: it counts towards the limit (version 1) or is forbidden
(version 2), and where the kernel can do neither, no group is made while the machine has swap.

Whatever becomes of this process, a small keeper beside it, which waits for the end of a pipe, kills what runs in the
group and removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
SWAPS = Path("/proc/swaps")

_LIMITS = ("memory.limit_in_bytes", "memory.max")
_SWAP_LIMITS = {"memory.memsw.limit_in_bytes": None, "memory.swap.max": 0}
"""Of memory and swap together: the same limit; of swap alone: none of it."""
_KILLS = ("memory.oom_control", "memory.events")
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")

_KEEPER = """
trap '' INT TERM HUP
read _
i=0
while [ -d "$0" ] && [ $i -lt 200 ] && ! rmdir "$0" 2>/dev/null; do
    while read pid; do kill -9 "$pid" 2>/dev/null; done < "$0/cgroup.procs"
    i=$((i + 1))
    sleep 0.05
done
[ ! -d "$0" ]
"""
"""A group can be removed once the kernel has taken leave of its processes: it is asked again, for ten seconds."""
_KEEPER_S = 30.0


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
    def kills(self) -> int:
        """How many of its processes the kernel killed because of the limit."""
        found = re.search(r"^oom_kill (\d+)$", self._file(_KILLS).read_text(), re.MULTILINE)
        if found is None:
            raise OSError(f"this kernel does not count what it kills in {self.folder}")
        return int(found[1])

    @property
    def peak_bytes(self) -> int | None:
        """The most that was charged to the group, page cache included; None where the kernel keeps no count."""
        try:
            return int(self._file(_PEAKS).read_text())
        except OSError:
            return None

    def set_limit(self, nbytes: int) -> None:
        """Let its processes together hold ``nbytes``, in memory and swap."""
        self._file(_LIMITS).write_text(str(nbytes))
        for name, own in _SWAP_LIMITS.items():
            if (self.folder / name).exists():
                (self.folder / name).write_text(str(nbytes if own is None else own))
                return
        if len(SWAPS.read_text().splitlines()) > 1:
            raise OSError("this kernel puts no limit on swap, and there is some: switch it off (swapoff -a)")

    def _file(self, names: Sequence[str]) -> Path:
        for name in names:
            if (self.folder / name).exists():
                return self.folder / name
        raise OSError(f"{self.folder} has none of {', '.join(names)}")


@dataclass(frozen=True)
class Limited:
    """What became of a command under a limit.

    Attributes:
        code: its exit code.
        output: all that it wrote.
        killed: by the kernel, because it passed the limit.
        timed_out: it was ended because it took too long.
        peak_bytes: the most that was charged to its group; None where the kernel keeps no count.
    """

    code: int
    output: str
    killed: bool
    timed_out: bool
    peak_bytes: int | None


def why_not() -> str | None:
    """The reason why no group can be made here; None when one can."""
    if os.geteuid() != 0:
        return "control groups need root"
    try:
        with memory_limit(2**30) as group:
            done = subprocess.run(group.command("true"), capture_output=True, text=True, check=False)
            group.kills  # noqa: B018 - raises where they are not counted
    except OSError as error:
        return f"no control group can be made: {error}"
    return done.stderr.strip() or None


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group whose processes together may hold ``limit_bytes``; they are killed, and it is removed, at the end.

    Raises:
        OSError: the kernel does not allow it.
    """
    group = MemoryGroup(own_group() / f"memwall-{os.getpid()}")
    group.folder.mkdir()
    keeper = subprocess.Popen(["sh", "-c", _KEEPER, str(group.folder)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        group.set_limit(limit_bytes)
        yield group
    finally:
        keeper.stdin.close()
        if keeper.wait(_KEEPER_S):
            raise OSError(f"{group.folder} cannot be removed: something in it cannot be killed")


def run_limited(
    command: Sequence[str], limit_bytes: int, *, env: Mapping[str, str] | None = None, timeout_s: float
) -> Limited:
    """Run a command under a limit, and kill it after ``timeout_s``.

    Raises:
        OSError: no group can be made.
    """
    with memory_limit(limit_bytes) as group:
        process = subprocess.Popen(
            group.command(*command), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        timed_out = False
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            group.kill()
            output, _ = process.communicate()
        return Limited(process.returncode, output, group.kills > 0, timed_out, group.peak_bytes)


def own_group() -> Path:
    """The folder of this process's own group that limits memory: version 1's where it is mounted, else version 2's."""
    lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _inside(ROOT / "memory", path)
    path = next((path for _, controllers, path in lines if controllers == ""), "/")
    return _inside(ROOT, path)


def _inside(mount: Path, path: str) -> Path:
    """A container may see its own group as the mount's root, while the path names it from outside."""
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount
