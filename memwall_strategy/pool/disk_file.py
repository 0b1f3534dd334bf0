"""One file of a fixed size that has no name: read and written in place, gone with the last descriptor.

It is made unnamed where the file system can (``O_TMPFILE``), else unlinked right after it is made: however the process
ends, the kernel frees its blocks; forked children close it at once. Its whole length is allocated at set-up, so that a
full disk is met there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from pathlib import Path

from memwall_strategy.config import format_size
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.arena import PAGE_BYTES

_PREFIX = "memwall-pool-"
"""Of the names that exist for an instant where ``O_TMPFILE`` is missing; whoever finds one may remove it."""


_open: weakref.WeakSet[DiskFile] = weakref.WeakSet()


class DiskFile:
    """An unnamed file of ``nbytes``, with direct I/O where the file system has it.

    Args:
        folder: where.
        nbytes: its length.
        allow_direct: False: do not try direct I/O.

    Attributes:
        direct: whether reads and writes bypass the page cache; then offsets, lengths and memory must be whole pages.
        why_buffered: the reason where they do not.

    Raises:
        ConfigError: the folder cannot be written, or has no room.
    """

    def __init__(self, folder: Path, nbytes: int, *, allow_direct: bool = True) -> None:
        self.nbytes = nbytes
        self.folder = folder
        self._fd = _open_unnamed(folder)
        _open.add(self)
        try:
            self._allocate()
            self.why_buffered = self._try_direct() if allow_direct else "not asked for"
        except BaseException:
            self.close()
            raise
        self.direct = not self.why_buffered

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on; short reads are continued.

        Raises:
            OSError: the disk failed, or the file is shorter than that.
        """
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], offset + done)
            done = self._advance(done, got, len(buffer), "read")

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write all of ``buffer`` from ``offset`` on; short writes are continued.

        Raises:
            OSError: the disk failed.
        """
        done = 0
        while done < len(buffer):
            put = os.pwritev(self._fd, [buffer[done:]], offset + done)
            done = self._advance(done, put, len(buffer), "write")

    def close(self) -> None:
        """Close it, and so free its blocks. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _advance(self, done: int, moved: int, wanted: int, what: str) -> int:
        after = done + moved
        if self.direct and after < wanted:
            after -= after % PAGE_BYTES  # the next attempt must start on a page again
        if after <= done:
            raise OSError(errno.EIO, f"{what} of {wanted - done} bytes moved {moved}")
        return after

    def _allocate(self) -> None:
        if self.nbytes == 0:
            return
        room = os.statvfs(self.folder)
        free = room.f_bavail * room.f_frsize
        why: OSError | None = None
        if free < self.nbytes:  # asked first: the call below would take every free block before it fails
            why = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            try:
                os.posix_fallocate(self._fd, 0, self.nbytes)
            except OSError as error:
                why = error
        if why is not None:
            raise ConfigError(
                f"pool.disk_budget={format_size(self.nbytes)} cannot be allocated in pool.disk_path={self.folder}: "
                f"{why.strerror}; {format_size(free)} are free there. Lower the budget, or name a folder on a "
                "larger disk."
            ) from why

    def _try_direct(self) -> str:
        """Switch direct I/O on and move one page; the reason where that does not work."""
        if self.nbytes < PAGE_BYTES:
            return f"a file of {self.nbytes} bytes holds no page"
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self.direct = True
        with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as buffer:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
                self.write(buffer, 0)
                self.read(buffer, 0)
            except OSError as error:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
                return f"the file system of {self.folder} refuses O_DIRECT ({error.strerror})"
        return ""


def _open_unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # EISDIR: a kernel that does not know the flag; EOPNOTSUPP: a file system that cannot.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise _unusable(folder, error) from error
    for left in folder.glob(f"{_PREFIX}*"):  # of a process killed between the two calls below; names never matter
        with contextlib.suppress(FileNotFoundError):
            left.unlink()
    try:
        fd, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    with contextlib.suppress(FileNotFoundError):  # another process of ours may have tidied it
        os.unlink(name)
    return fd


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"pool.disk_path={folder} cannot hold the disk tier: {error.strerror}. Name an existing folder that you may "
        "write to."
    )


def _close_inherited() -> None:
    """In a forked child (a data loader worker): it must not keep the blocks when its parent is killed."""
    for file in list(_open):
        file.close()


os.register_at_fork(after_in_child=_close_inherited)
