"""Every error that memwall raises on purpose.

Each message says what is wrong, which value of which option caused it, and one thing to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MemwallError(RuntimeError):
    """Base of all errors raised on purpose by memwall."""


class ConfigError(MemwallError, ValueError):
    """A setting cannot be used. Raised before any process waits for another."""


class CheckpointError(MemwallError):
    """A checkpoint is missing, foreign, half-written or does not fit the model."""


class TransferError(MemwallError):
    """A transfer on a lane failed; the message names lane, transfer and unit, the cause is chained."""


class BlockError(MemwallError):
    """A pooled block cannot be used as asked: unknown, stale, half written, or placed twice; the message names it."""


class PoolFull(MemwallError):
    """A tier has no room for a block.

    Attributes:
        tier: name of the tier.
        owner: global rank whose memory it is.
        missing_bytes: how much more room would do; 0 where only one contiguous range is missing.
    """

    def __init__(self, message: str, *, tier: str, owner: int, missing_bytes: int) -> None:
        super().__init__(message)
        self.tier, self.owner, self.missing_bytes = tier, owner, missing_bytes


class PeerLost(MemwallError):
    """A process of the group died or stopped answering.

    The error is sticky: from the first time it is met, every later collective on the group raises it again, on
    every rank and every thread, until the group is configured anew.

    Attributes:
        ranks: global ranks that were lost, ascending; empty where the store that would tell died too.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class CollectiveError(MemwallError):
    """A collective failed or timed out although every rank of the job is alive, or a rank reported that it gave up.

    Sticky like ``PeerLost``: the connections were closed, so every later collective raises it again, until the groups
    are configured anew.

    Attributes:
        ranks: global ranks that had not arrived at the collective, or that gave up, ascending; empty where unknown.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankOutOfMemory(MemwallError):
    """A rank ran out of memory, and the step could not be restarted, or not with less memory. The same on every rank.

    Attributes:
        ranks: global ranks that ran out of memory, ascending.
        phase: of the step, on the first of them: ``forward``, ``backward``, ``step``...
        asked_bytes: of the allocation that failed there; 0 where unknown.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...], phase: str, asked_bytes: int) -> None:
        super().__init__(message)
        self.ranks, self.phase, self.asked_bytes = ranks, phase, asked_bytes


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest allowed name, or an empty string when none is close."""
    match = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""
