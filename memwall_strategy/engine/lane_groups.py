"""Process groups of the lanes: the same ranks as the mesh's groups, but sequences of collectives of their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(slots=True)
class _Twins:
    """Twins of the groups of certain ranks."""

    count: int = 0
    """How many were made."""
    free: deque[dist.ProcessGroup] = field(default_factory=deque)
    """Those that nobody uses at the moment, the longest-free first."""


_Made = dict[tuple[int, ...], _Twins]


class LaneGroups:
    """Twins of process groups: the same ranks, but a sequence of collectives of their own.

    Twins are leased: ``close`` gives them back for the next model of this process. They end with the default group.
    """

    _made: ClassVar[WeakKeyDictionary[dist.ProcessGroup, _Made]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._twins: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def twin(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The twin of ``group``; made on first use, by its members alone, in the same order on each of them."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._twins:
            made = self._made.setdefault(dist.group.WORLD, {}).setdefault(ranks, _Twins())
            if not made.free:
                made.free.append(_new_group(group, f"{group.group_name}/memwall_lane_{made.count}"))
                made.count += 1
            self._twins[ranks] = made.free.popleft()
        return self._twins[ranks]

    def close(self) -> None:
        """Give the twins back. No collective may be in flight on them."""
        if dist.is_initialized():
            made = self._made.get(dist.group.WORLD, {})
            for ranks, group in self._twins.items():
                if ranks in made:  # otherwise the default group was made anew since, and the twins ended with the old
                    made[ranks].free.append(group)
        self._twins.clear()


def _new_group(like: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """A group of the same ranks, made by them alone, that meets under ``name``.

    torch derives the name from the ranks and from the number of groups that the process has: a member that belongs to
    more groups than another would wait for it under another name, for ever. So the private function that makes the
    name, ``distributed_c10d._process_group_name``, is replaced while the group is made.
    """
    ranks = dist.get_process_group_ranks(like)
    derive = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *unused, **named: name
    try:
        return dist.new_group(
            ranks, backend=dist.get_backend(like), use_local_synchronization=True, group_desc="memwall_lane"
        )
    finally:
        distributed_c10d._process_group_name = derive
