"""Anonymous shared memory between processes of one host: sealed, without a name, gone with the last process.

A segment is a ``memfd``: it has no path, so nothing is left behind by a process that is killed, and it is reached only
through its descriptor. Its size is sealed, so that nobody who holds the descriptor can shrink it under the others
(which would end them with SIGBUS); all of its pages are taken when it is made, so that a shortage shows then, by name.

Who can reach it: whoever is handed the descriptor, root, and other processes of the same user, through the descriptor
folder or a debugger, unless the process is made non-dumpable (``engine.processes.set_dumpable``). The boundary is the
user id.

What orders memory: x86-64 keeps the stores of a core in order, its loads in order, and shows stores to all cores in one
order, so a flag that is stored after data is seen after it. Non-temporal stores are the exception; libc ends its own
with a fence, and the lock-prefixed instruction of any mutex (each lane's queue has one) is a fence too. Other
architectures promise none of this to plain loads and stores, and Python has no fences: there, shared memory is refused.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import sys

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine.capacity import unused_memory_bytes

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
ORDERED_MACHINES = ("x86_64", "AMD64")
"""Architectures whose plain loads and stores are ordered as the rings need it."""


def why_not() -> str:
    """Why shared memory cannot be used in this process; empty where it can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        return "it needs Linux's memfd_create"
    if platform.machine() not in ORDERED_MACHINES:
        return f"plain stores of {platform.machine()} are not ordered, which it relies on"
    return ""


def create_sealed(name: str, nbytes: int) -> int:
    """A descriptor of a new segment, zeros, its pages taken and its size sealed. The caller closes it.

    Raises:
        OSError: there is not that much memory for it, or the kernel refuses memfd_create.
    """
    unused_bytes = unused_memory_bytes()
    if nbytes > unused_bytes:  # the kernel would take all there is, and then kill somebody
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {unused_bytes} bytes are unused")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _wanted())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_sealed(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a segment that another process may have made, after a look at its seals and size.

    Raises:
        MemwallError: it could shrink or grow, or has another size.
    """
    size = os.fstat(descriptor).st_size
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memfd at all
        seals = 0
    if seals & _wanted() != _wanted() or size != nbytes:
        raise MemwallError(
            f"shared memory: the segment that came has {size} bytes and seals {seals:#x}, expected {nbytes} and "
            f"{_wanted():#x}. It is not memwall's; set overlap.shared_memory=false to do without."
        )
    return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _wanted() -> int:
    seals = 0
    for name in _SEALS:
        seals |= getattr(fcntl, name)
    return seals
