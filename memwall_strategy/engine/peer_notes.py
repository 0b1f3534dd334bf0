"""Notes that the ranks of a job leave each other in its store while no collective can be trusted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from memwall_strategy.core.errors import CollectiveError, PeerLost

_POLL_S = 0.02


class PeerNotes:
    """One epoch's notes, by topic and rank.

    Args:
        store: the job's; the prefix is this epoch's own.
        rank, world: this process's rank and their number.
        gone: why a rank will write no more, or an empty string.

    Attributes:
        topics: topics that this rank numbered so far.
    """

    def __init__(self, store: dist.Store, *, epoch: int, rank: int, world: int, gone: Callable[[int], str]) -> None:
        self.epoch, self.rank, self.world = epoch, rank, world
        self.topics = 0
        self._store, self._gone = store, gone

    def numbered(self, topic: str) -> str:
        """A topic that is new in this epoch, and the same on all ranks that number their topics alike."""
        self.topics += 1
        return f"{topic}/{self.topics}"

    def write(self, topic: str, note: Any) -> None:
        """Leave this rank's note; the first on a topic counts."""
        self._store.compare_set(f"{topic}/{self.rank}", "", json.dumps(note))

    def read(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
        """The notes of these ranks that are there. Never waits."""
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def all_within(self, topic: str, timeout_s: float) -> dict[int, Any]:
        """The notes on a topic, as far as they are there when all are, or when the time is over."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.read(topic, range(self.world))) < self.world and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def all(self, topic: str, timeout_s: float) -> dict[int, Any]:
        """Every rank's note; waits for them.

        Raises:
            PeerLost: a rank's process ended before it wrote.
            CollectiveError: a rank did not write in time.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        while missing := [rank for rank in range(self.world) if rank not in found]:
            gone = {rank: why for rank in missing if (why := self._gone(rank))}
            found |= self.read(topic, missing)
            lost = {rank: why for rank, why in gone.items() if rank not in found}
            if lost:
                names = "; ".join(f"rank {rank}: {why}" for rank, why in lost.items())
                raise PeerLost(f"{len(lost)} of {self.world} ranks lost ({names}) while they agreed.", tuple(lost))
            if time.monotonic() > deadline:
                late = tuple(rank for rank in range(self.world) if rank not in found)
                raise CollectiveError(f"rank {late[0]} did not take part within {timeout_s:.0f} s.", late)
            time.sleep(_POLL_S)
        return found
