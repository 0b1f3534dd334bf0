"""NUMA nodes: which there are, and memory that comes from one of them. A memory expander is one more node."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from memwall_strategy.core.errors import ConfigError

NODES = Path("/sys/devices/system/node")

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call; glibc has no wrapper for it."""
_MPOL_PREFERRED = 1
_MEM_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node that has memory."""

    index: int
    memory_bytes: int


def nodes(root: Path = NODES) -> list[Node]:
    """The nodes with memory, by number; one node of the machine's memory where the kernel shows none."""
    found = []
    for folder in root.glob("node[0-9]*"):
        match = _MEM_TOTAL.search((folder / "meminfo").read_text())
        if match and int(match[1]):
            found.append(Node(int(folder.name.removeprefix("node")), int(match[1]) * 1024))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sorted(found, key=lambda node: node.index) or [Node(0, whole)]


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
