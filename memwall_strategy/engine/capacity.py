"""How much memory and how many cores one rank may count on.

On CPU: the smallest of the machine's memory and of every limit that a control group puts on this process (version 2 or
1, this group and all above it), shared evenly among the ranks of the machine (``LOCAL_WORLD_SIZE``, which launchers
set, or the strategy). On CUDA: the card's total memory. What other processes hold is not subtracted. Cores are shared
alike, within the CPU quota of every control group above this process.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path, PurePosixPath

import torch

from memwall_strategy.core.errors import ConfigError

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_device_bytes(device: torch.device | str = "cpu") -> int:
    """Bytes that one rank may count on.

    Args:
        device: ``cpu`` or ``cuda``, with or without an index.

    Raises:
        ConfigError: another type of device.
    """
    device = torch.device(device)
    match device.type:
        case "cpu":
            return _machine_bytes() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        case "cuda":
            return torch.cuda.get_device_properties(device).total_memory
        case other:
            raise ConfigError(f"memwall knows the memory of cpu and cuda, not of device {other!r}. Use one of these.")


def _machine_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits()])


def machine_cores(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> float:
    """Cores that all ranks of this machine may keep busy: those they may run on, within every CPU quota."""
    return min([float(len(os.sched_getaffinity(0))), *cpu_quotas(proc, root)])


def available_cores(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> float:
    """Cores that one rank may keep busy: its share of ``machine_cores``."""
    return machine_cores(proc, root) / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def share_cores(cores: float | None = None) -> int:
    """Let torch use no more threads than this rank has cores, and return how many it uses.

    torch counts the machine's cores; ranks that all use them, or pass a quota, spend their time waiting for each other.
    Where ``OMP_NUM_THREADS`` is set, by the user or a launcher, that number stays; it is warned about when it is more
    than there are cores.

    Args:
        cores: of this rank; ``available_cores()`` where None.
    """
    share = max(1, int(available_cores() if cores is None else cores))
    threads = torch.get_num_threads()
    if threads <= share:
        return threads
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if "OMP_NUM_THREADS" in os.environ:
        what = f"OMP_NUM_THREADS={threads}, and each rank may keep {share} busy. Set it to {share}, or leave it out."
    else:
        torch.set_num_threads(share)
        what = (
            f"torch would use {threads} threads, and each rank may keep {share} busy: it uses as many. Set "
            "OMP_NUM_THREADS to choose another number."
        )
    if first:
        warnings.warn(what, stacklevel=2)
    return torch.get_num_threads()


def share_threads(ranks: int, cores: float | None = None) -> None:
    """Set ``OMP_NUM_THREADS``, where nobody did, for ``ranks`` processes of this machine that are about to start.

    Lightning's launcher would set it from the cores that the process may run on, whatever the quota.

    Args:
        cores: of the machine; ``machine_cores()`` where None.
    """
    _set_ours("OMP_NUM_THREADS", max(1, int((machine_cores() if cores is None else cores) / max(1, ranks))))


def share_machine(ranks: int) -> None:
    """Set ``LOCAL_WORLD_SIZE``, where the launcher did not (Lightning's does not): a rank counts on its share."""
    _set_ours("LOCAL_WORLD_SIZE", ranks)


_ours: dict[str, str] = {}
"""Variables that were set here, so that the next trainer of the process may set them anew."""


def _set_ours(name: str, value: int) -> None:
    if os.environ.get(name) in (None, _ours.get(name)):
        os.environ[name] = _ours[name] = str(value)


def cpu_quotas(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> list[float]:
    """Every CPU quota in force on this process, in cores; empty where there is none.

    Args:
        proc, root: as for ``cgroup_limits``.
    """
    found = []
    for folder, version_2 in _folders(proc, root, "cpu"):
        if version_2 and (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        elif not version_2 and (folder / "cpu.cfs_quota_us").is_file():
            quota, period = ((folder / f"cpu.cfs_{each}_us").read_text().strip() for each in ("quota", "period"))
        else:
            continue
        if quota not in ("max", "-1"):
            found.append(int(quota) / int(period))
    return found


def cgroup_limits(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> list[int]:
    """Every memory limit in force on this process, in bytes; empty where there is none.

    Args:
        proc: the process's list of groups: one ``hierarchy:controllers:path`` a line.
        root: where the hierarchies are mounted.
    """
    return [limit for _, limit in memory_groups(proc, root)]


def memory_groups(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> list[tuple[Path, int]]:
    """The folder of every control group that limits this process's memory, with its limit in bytes."""
    found = []
    for folder, version_2 in _folders(proc, root, "memory"):
        file = folder / ("memory.max" if version_2 else "memory.limit_in_bytes")
        if file.is_file() and (text := file.read_text().strip()) != "max":
            found.append((folder, int(text)))
    return found


def _folders(proc: Path, root: Path, controller: str) -> list[tuple[Path, bool]]:
    """Folders of the process's groups and all above them, each with whether it is of version 2."""
    if not proc.exists():
        return []
    found = []
    for line in proc.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy
            base = root if (root / "cgroup.controllers").exists() else root / "unified"
        elif controller in controllers.split(","):
            base = root / controller
            if not base.exists():
                base = root / controllers  # "cpu,cpuacct" where nobody made the short names
        else:
            continue
        # A container may see its own group at the mount's root while the path names it from outside: the root is
        # always looked at, and folders that are not there are passed over.
        for part in (PurePosixPath(path), *PurePosixPath(path).parents):
            found.append((base / str(part).lstrip("/"), controllers == ""))
    return found


def unused_memory_bytes(meminfo: Path = MEMINFO, proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> int:
    """Memory that may be taken now without anybody being killed: the machine's, and what each control group leaves."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    if match is None:
        raise ConfigError(f"{meminfo} names no MemAvailable: this needs Linux with /proc.")
    return min([int(match[1]) * 1024, *(max(0, limit - _used(group)) for group, limit in memory_groups(proc, root))])


def _used(group: Path) -> int:
    """Bytes charged to a control group, without the page cache that the kernel would drop first."""
    for name, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        if (group / name).is_file():
            stat = (group / "memory.stat").read_text() if (group / "memory.stat").is_file() else ""
            match = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
            return max(0, int((group / name).read_text()) - (int(match[1]) if match else 0))
    return 0
