"""NUMA nodes: which there are, and memory that comes from one of them. A memory expander is one more node."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.mapping import Mapping

NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call; glibc has no wrapper for it."""
_MPOL_PREFERRED = 1
_MEM_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node that has memory."""

    index: int
    memory_bytes: int


def nodes(root: Path = NODES, status: Path = STATUS) -> list[Node]:
    """The nodes with memory that this process may use; one node of all memory where the kernel shows none."""
    may_use = _allowed(status)
    found = []
    for folder in root.glob("node[0-9]*"):
        index = int(folder.name.removeprefix("node"))
        match = _MEM_TOTAL.search((folder / "meminfo").read_text())
        if match and int(match[1]) and (may_use is None or index in may_use):
            found.append(Node(index, int(match[1]) * 1024))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sorted(found, key=lambda node: node.index) or [Node(0, whole)]


def _allowed(status: Path) -> set[int] | None:
    """Nodes of the control group's ``cpuset.mems``; None where the kernel does not say."""
    match = (
        re.search(r"^Mems_allowed_list:\s*([\d,-]+)$", status.read_text(), re.MULTILINE) if status.exists() else None
    )
    if match is None:
        return None
    found: set[int] = set()
    for part in match[1].split(","):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def why_unbound(found: Sequence[Node]) -> str:
    """Why memory cannot be taken from a chosen node; empty where it can, or where there is but one."""
    if len(found) < 2:
        return ""
    page = Mapping(mmap.PAGESIZE)
    try:
        bind(page.address, page.nbytes, found[0].index)
    except ConfigError as error:
        return str(error)
    return ""


def bind(address: int, nbytes: int, node: int) -> None:
    """Let pages of this stretch that were not touched yet come from ``node`` as long as it has any.

    Raises:
        ConfigError: the kernel refuses (some containers forbid it).
    """
    number = _MBIND.get(platform.machine())
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if number is None or libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * 64 + 1),
        ctypes.c_uint(0),
    ):
        reason = os.strerror(ctypes.get_errno()) if number else f"unknown system call on {platform.machine()}"
        raise ConfigError(
            f"memory cannot be bound to NUMA node {node}: {reason}. Allow mbind in the container (CAP_SYS_NICE), or "
            "start each rank on one node with numactl."
        )
