"""What this machine can do for the pool, found once at set-up and said by name."""

from __future__ import annotations

import os
import resource
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memwall_strategy.config import format_size
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.capacity import memory_groups, unused_memory_bytes
from memwall_strategy.pool.arena import PAGE_BYTES
from memwall_strategy.pool.disk_file import DiskFile
from memwall_strategy.pool.mapping import Mapping
from memwall_strategy.pool.numa import Node, nodes, why_unbound

MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Findings. A reason is empty where the ability is there.

    Attributes:
        numa_nodes: nodes with memory; one host arena each.
        unused_memory_bytes: what the host tier may take now, under every limit of the container.
        memory_limit_bytes: the container's limit, or None.
        memlock_limit_bytes: most bytes that this process may lock, or None for no limit; registering host memory
            with CUDA is up to the driver, not to this limit.
        why_no_numa_binding: why host memory cannot be taken from a chosen node; empty where there is but one.
        why_no_registration: why host memory cannot be registered; empty on CPU, which copies from any memory.
        disk_path: the folder that was looked at, or None.
        disk_free_bytes: room in it.
        disk_file_system: its type, ``ext4`` say.
        why_no_direct_io: why reads and writes there go through the page cache.
    """

    numa_nodes: tuple[Node, ...]
    unused_memory_bytes: int
    memory_limit_bytes: int | None
    memlock_limit_bytes: int | None
    why_no_numa_binding: str
    why_no_registration: str
    disk_path: str | None = None
    disk_free_bytes: int = 0
    disk_file_system: str = ""
    why_no_direct_io: str = "no pool.disk_path is set"

    def missing(self) -> list[str]:
        """One line for each ability that is not there, its name first."""
        lines = []
        if self.why_no_numa_binding:
            lines.append(f"NUMA binding: {self.why_no_numa_binding}")
        if self.why_no_registration:
            lines.append(f"host registration: {self.why_no_registration}")
        if self.why_no_direct_io:
            lines.append(f"direct I/O: {self.why_no_direct_io}")
        if self.disk_file_system in ("tmpfs", "ramfs"):
            lines.append(f"disk: pool.disk_path={self.disk_path} is {self.disk_file_system}, which is memory")
        return lines

    def require(self, ability: str) -> None:
        """Refuse to go on without an ability.

        Args:
            ability: ``"direct I/O"``, ``"NUMA binding"``, ``"host registration"`` or ``"disk"``.

        Raises:
            ConfigError: it is missing; the message says why.
        """
        for line in self.missing():
            if line.startswith(f"{ability}:"):
                raise ConfigError(f"This machine has no {line}. Switch off what needs it, or mend that.")

    def to_record(self) -> dict[str, Any]:
        """Plain numbers and strings, for the run's summary."""
        return asdict(self)

    def __str__(self) -> str:
        limit = "none" if self.memory_limit_bytes is None else format_size(self.memory_limit_bytes)
        lock = "none" if self.memlock_limit_bytes is None else format_size(self.memlock_limit_bytes)
        lines = [
            f"memory: {format_size(self.unused_memory_bytes)} unused, container's limit {limit}, memlock limit {lock}, "
            f"{len(self.numa_nodes)} NUMA node(s)"
        ]
        if self.disk_path is not None:
            lines.append(
                f"disk: {format_size(self.disk_free_bytes)} free in {self.disk_path} ({self.disk_file_system})"
            )
        return "\n".join([*lines, *(f"missing: {line}" for line in self.missing())])


def probe(disk_path: str | Path | None = None, device: torch.device | str = "cpu") -> Capabilities:
    """Look at this machine. Takes milliseconds; leaves nothing behind.

    Args:
        disk_path: folder for the disk tier, or None.
        device: the device that host memory would be registered for.

    Raises:
        ConfigError: the folder cannot be written.
    """
    limits = [limit for _, limit in memory_groups() if limit < 2**60]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    disk: dict[str, Any] = {}
    if disk_path is not None:
        file = DiskFile(Path(disk_path), PAGE_BYTES)
        file.close()
        disk = {
            "disk_path": str(disk_path),
            "disk_free_bytes": disk_free_bytes(Path(disk_path)),
            "disk_file_system": file_system(Path(disk_path)),
            "why_no_direct_io": file.why_buffered,
        }
    return Capabilities(
        numa_nodes=tuple(nodes()),
        unused_memory_bytes=unused_memory_bytes(),
        memory_limit_bytes=min(limits, default=None),
        memlock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        why_no_numa_binding=why_unbound(nodes()),
        why_no_registration=_why_no_registration(torch.device(device)),
        **disk,
    )


_told: set[str] = set()


def tell_once(what: str) -> None:
    """Warn of a missing ability, once a process."""
    if what not in _told:
        _told.add(what)
        warnings.warn(what, stacklevel=3)


def disk_free_bytes(folder: Path) -> int:
    """Bytes that this user may still write in a folder."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """Type of the file system that a folder lies on."""
    real = folder.resolve()
    best, kind = -1, ""
    for line in mounts.read_text().splitlines():
        _, point, its_kind, *_ = line.split(" ")
        path = Path(point.encode().decode("unicode_escape"))
        if real.is_relative_to(path) and len(path.parts) >= best:  # the last of equal ones is mounted on top
            best, kind = len(path.parts), its_kind
    return kind


def _why_no_registration(device: torch.device) -> str:
    """Register one page with CUDA and release it; the reason where that does not work."""
    if device.type != "cuda":
        return ""
    page = Mapping(PAGE_BYTES, touch=True)
    runtime = torch.cuda.cudart()
    result = int(runtime.cudaHostRegister(page.address, page.nbytes, 0))
    if result:
        return f"cudaHostRegister gives error {result}"
    runtime.cudaHostUnregister(page.address)
    return ""
