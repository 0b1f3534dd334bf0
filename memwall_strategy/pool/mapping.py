"""Anonymous memory of an exact size: whole pages, nothing rounded up beyond them, no name that could outlive us."""

from __future__ import annotations

import mmap
import os
import weakref

import torch

_LIVE: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_INHERITED: list[object] = []
"""In a forked child: the parent's mappings, which are not mapped there and must never be unmapped there."""


class Mapping:
    """Private anonymous memory, zeroed by the kernel on first touch.

    Forked children (data loader workers) do not get it: copy-on-write would make every later write of the parent a
    page fault and a copy, and could give the child the page that direct I/O is filling. It is unmapped when the last
    tensor over it is gone, and by the kernel however we end.

    Args:
        nbytes: length; a whole number of pages, so that what is mapped is what is counted.
        touch: make every page resident now, not at its first use.
    """

    def __init__(self, nbytes: int, *, touch: bool = False) -> None:
        if nbytes % mmap.PAGESIZE:
            raise ValueError(f"{nbytes} bytes are not whole pages")
        self.nbytes = nbytes
        self._map: mmap.mmap | None = None
        if nbytes == 0:
            self.bytes = torch.empty(0, dtype=torch.uint8)
            return
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_DONTFORK)
        # The tensor keeps the mmap object alive but takes no lock on it: mmap.close() would leave it dangling, so
        # nobody calls that, and the last reference unmaps.
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        _LIVE.add(self._map)
        if touch:
            self.bytes.zero_()

    @property
    def address(self) -> int:
        """First byte's address."""
        return self.bytes.data_ptr()

    def give_back(self, offset: int, nbytes: int) -> int:
        """Let the kernel take the whole pages of a free stretch; returns their bytes. They read as zeros afterwards."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length <= 0 or self._map is None:
            return 0
        self._map.madvise(mmap.MADV_DONTNEED, start, length)
        return length


def _keep_inherited() -> None:
    _INHERITED.extend(_LIVE)


os.register_at_fork(after_in_child=_keep_inherited)
