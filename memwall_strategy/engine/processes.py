"""Processes that end together, and sessions that cannot start any."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 1, 3, 4
"""From linux/prctl.h."""


def is_interactive() -> bool:
    """Whether this is a notebook or a Python prompt: there is no script that further ranks could run."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def die_with_parent(armed: bool) -> bool:
    """Ask the kernel to send this process SIGTERM when the one that started it dies, however it dies; or no more.

    A rank that waits for the others at start-up would otherwise wait for the whole timeout when rank 0 was killed.
    Linux only; elsewhere nothing happens.

    Returns:
        Whether the kernel took the request.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM) if armed else 0, 0, 0, 0) == 0


def set_dumpable(dumpable: bool) -> bool:
    """Let other processes of the same user look into this one's memory and descriptors (the default), or no more.

    Not dumpable: no ptrace (debuggers, py-spy), no core dump, no pidfd_getfd, and /proc/<pid> belongs to root, so that
    even the process itself can no longer write its own clear_refs or read its io, unless it is root. Root can always
    look. It ends with the next exec; children inherit it. Linux only; elsewhere nothing happens.

    Returns:
        Whether the process was dumpable before.
    """
    if not sys.platform.startswith("linux"):
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    before = libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)
    return before


def parent_is_gone(parent: int | None = None) -> bool:
    """Whether the process that started this one had died before ``die_with_parent`` could be armed.

    Args:
        parent: its process id. Not known: an orphan is one whom the machine's first process took over, unless that
            runs the same Python, as the first rank in a container may.
    """
    found = os.getppid()
    if parent is not None:
        return found != parent
    try:
        return found == 1 and os.path.realpath("/proc/1/exe") != os.path.realpath(sys.executable)
    except OSError:
        return found == 1  # its executable is not ours to see: it runs as somebody else


def is_launched_child() -> bool:
    """Whether another rank's process started this one (Lightning's launcher gives such a process its LOCAL_RANK)."""
    return int(os.environ.get("LOCAL_RANK", "0")) > 0
