"""Processes that end together, and sessions that cannot start any."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
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


def is_launched_child() -> bool:
    """Whether another rank's process started this one (Lightning's launcher gives such a process its LOCAL_RANK)."""
    return int(os.environ.get("LOCAL_RANK", "0")) > 0
