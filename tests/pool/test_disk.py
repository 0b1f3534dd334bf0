"""The disk tier: unnamed files, odd sizes, shared pages, short and failing I/O, full disks."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import BlockError, ConfigError, PoolFull, TransferError
from memwall_strategy.pool import probe as probe_module
from memwall_strategy.pool.arena import LARGE_BYTES, PAGE_BYTES, Region, aligned
from memwall_strategy.pool.disk import DiskStore, Span, chunks
from memwall_strategy.pool.disk_file import DiskFile
from memwall_strategy.pool.extent import extent_of
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.table import AddressTable

KIB, MIB = 1024, 1024 * 1024
CHUNK = 16 * KIB


def block(name: object) -> Block:
    return Block("u", str(name), Kind.EXP_AVG)


class Disk:
    """A disk tier of 4 MiB with small chunks, and what was written to it."""

    def __init__(self, folder: Path, **options) -> None:
        self.table = AddressTable()
        self.host = HostStore(self.table, MIB)
        self.store = DiskStore(self.table, 4 * MIB, folder, host=self.host, chunk_bytes=CHUNK, **options)
        self.wrote: dict[Block, torch.Tensor] = {}

    def add(self, sizes: dict[Block, int], *, group: bool = False) -> None:
        if group:
            self.table.allocate_group(sizes, Tier.DISK)
        else:
            for it, nbytes in sizes.items():
                self.table.allocate(it, nbytes, Tier.DISK)

    def write(self, blocks) -> None:
        new = {b: torch.randint(0, 256, (self.table.locate(b).bytes,), dtype=torch.uint8) for b in blocks}
        self.store.write([(self.table.locate(b), tensor) for b, tensor in new.items()])
        self.wrote |= new

    def check(self) -> None:
        got = {b: torch.full_like(tensor, 0xAA) for b, tensor in self.wrote.items()}
        self.store.read([(self.table.locate(b), tensor) for b, tensor in got.items()])
        wrong = [b for b in got if not torch.equal(got[b], self.wrote[b])]
        assert not wrong, f"{len(wrong)} blocks differ, {wrong[0]} first"
        for b in list(got)[:5]:  # one by one too: other chunks
            alone = torch.empty_like(got[b])
            self.store.read([(self.table.locate(b), alone)])
            assert torch.equal(alone, self.wrote[b])

    def close(self) -> None:
        for it in list(self.wrote):
            self.table.drop(it)
        self.store.close()
        self.host.close()


@pytest.fixture(params=["direct", "buffered"])
def disk(request, folder):
    made = Disk(folder, allow_direct=request.param == "direct")
    if request.param == "direct" and not made.store.file.direct:
        made.close()
        pytest.skip(made.store.file.why_buffered)
    yield made
    made.close()
    assert made.table.tiers() == [] and made.table.used_bytes() == 0


ODD = [0, 1, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77, LARGE_BYTES - 1,
       LARGE_BYTES, LARGE_BYTES + 1, LARGE_BYTES + PAGE_BYTES + 3]  # fmt: skip


@pytest.mark.parametrize("group", [False, True])
def test_odd_sizes_come_back_bit_for_bit(disk, group):
    disk.add({block(n): n for n in ODD}, group=group)
    disk.write(block(n) for n in ODD)
    disk.check()
    disk.write(block(n) for n in ODD[::2])
    disk.check()
    disk.table.check()


def test_thousands_of_small_tensors_cost_their_bytes(disk):
    """3,000 tensors of 1 to 200 bytes: padding below 64 bytes each, one run, and each may change alone."""
    sizes = {block(i): 1 + i * 7 % 200 for i in range(3000)}
    disk.add(sizes, group=True)
    balance = disk.table.balance(Tier.DISK)
    assert balance.bytes == sum(sizes.values()) and balance.padding_bytes < 64 * 3000
    disk.write(sizes)
    disk.check()
    for it in random.Random(0).sample(list(sizes), 60):
        disk.write([it])
    disk.check()


def test_writers_that_share_pages_do_not_lose_each_others_bytes(disk):
    disk.add({block(i): 40 + i for i in range(240)})
    disk.write(block(i) for i in range(240))
    values = dict(disk.wrote)
    failures = []

    def work(first: int) -> None:
        generator = torch.Generator().manual_seed(first)
        try:
            for turn in range(12):
                mine = {b: torch.randint(0, 256, (t.numel(),), dtype=torch.uint8, generator=generator)
                        for b, t in list(values.items())[first::6]}  # fmt: skip
                disk.store.write([(disk.table.locate(b), t) for b, t in mine.items()])
                got = {b: torch.empty_like(t) for b, t in mine.items()}
                disk.store.read([(disk.table.locate(b), t) for b, t in got.items()])
                assert all(torch.equal(got[b], mine[b]) for b in mine), turn
            disk.wrote |= mine
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    disk.check()


@pytest.mark.parametrize("kind", ["short", "one page", "one byte"])
def test_short_reads_and_writes_are_continued(disk, monkeypatch, kind):
    read, write = os.preadv, os.pwritev
    rng = random.Random(1)

    def cut(buffers, offset):
        (buffer,) = buffers
        if disk.store.file.direct:
            assert offset % PAGE_BYTES == len(buffer) % PAGE_BYTES == 0, "each attempt is whole pages again"
        most = {"short": rng.randrange(1, len(buffer) + 1), "one page": PAGE_BYTES, "one byte": len(buffer) - 1}[kind]
        # With direct I/O the kernel moves whole sectors; what it leaves may end inside a page.
        keep = max(min(most, len(buffer)), PAGE_BYTES + 512 if disk.store.file.direct else 1)
        return [buffer[: keep - keep % 512 if disk.store.file.direct else keep]]

    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, cut(buffers, offset), offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, cut(buffers, offset), offset))
    disk.add({block(n): n for n in ODD})
    disk.write(block(n) for n in ODD)
    disk.check()


@pytest.mark.parametrize(("call", "verb"), [("preadv", "read"), ("pwritev", "write")])
@pytest.mark.parametrize("failure", [errno.EIO, errno.ENOSPC, 0])
def test_a_failing_disk_is_named_and_other_blocks_stay(disk, monkeypatch, call, verb, failure):
    disk.add({block(i): 3 * CHUNK for i in range(3)})
    disk.write(block(i) for i in range(3))
    real = getattr(os, call)
    bad = disk.table.locate(block(1))

    def fail(fd, buffers, offset):
        if bad.offset <= offset < bad.offset + bad.bytes:
            if failure:
                raise OSError(failure, os.strerror(failure))
            return 0
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(TransferError, match=f"disk tier: {verb} of .* failed") as caught:
            getattr(disk.store, verb)([(bad, torch.zeros(3 * CHUNK, dtype=torch.uint8))])
    assert isinstance(caught.value.__cause__, OSError)
    disk.wrote.pop(block(1))
    disk.check()
    disk.table.drop(block(1))


def test_shift_moves_bytes_over_themselves(disk):
    disk.add({block("gap"): 64, block("long"): 5 * CHUNK + 64, block("after"): 100})
    disk.write([block("gap"), block("long"), block("after")])
    disk.table.drop(block("gap"))
    del disk.wrote[block("gap")]
    for it, p, to in disk.table.plan_defragment(Tier.DISK, "file"):
        disk.store.shift("file", Region(p.offset, p.held_bytes), to)
        disk.table.shift(it, p, to)
    assert disk.table.fragmentation(Tier.DISK, "file") == 0.0
    disk.check()


def test_staging_is_booked_on_host_and_refused_by_name_without_room(folder):
    table = AddressTable()
    host = HostStore(table, 64 * KIB)
    with pytest.raises(PoolFull, match="disk staging"):
        DiskStore(table, MIB, folder, host=host, chunk_bytes=CHUNK, workers=4)
    assert table.used_bytes() == 0
    store = DiskStore(table, MIB, folder, host=host, chunk_bytes=CHUNK, workers=3)
    assert table.used_bytes(Tier.HOST, kind=Kind.STAGING) == 4 * CHUNK == 64 * KIB
    with pytest.raises(BlockError, match="no address"):
        store.view(table.allocate(block("x"), 4, Tier.DISK), torch.float32, (1,))
    with pytest.raises(BlockError, match="still holds"):
        store.close()
    table.drop(block("x"))
    store.close()
    store.close()
    assert table.used_bytes() == 0
    host.close()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6 * PAGE_BYTES)), max_size=12),
    st.sampled_from([1, PAGE_BYTES]),
    st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES]),
    st.randoms(),
)
def test_chunks_cover_every_byte_once_on_whole_units(blocks, unit, chunk, shuffle):
    spans, offset = [], 0
    for gap, nbytes in blocks:
        offset += gap * 64
        end = offset + aligned(nbytes, 64)
        spans.append(Span(offset, end, extent_of(torch.empty(nbytes, dtype=torch.uint8))))
        offset = end
    owned = {(s.offset, s.end) for s in spans if s.memory.nbytes}
    shuffle.shuffle(spans)
    cut = list(chunks(spans, unit_bytes=unit, chunk_bytes=chunk))
    for part in cut:
        assert part.start % unit == part.end % unit == 0 and 0 < part.end - part.start <= chunk
        assert part.start <= part.own[0] < part.own[1] <= part.end
        assert all(s.offset < part.end and s.end > part.start for s in part.spans)
        inside = sorted((max(s.offset, part.start), min(s.end, part.end)) for s in part.spans)
        assert (inside[0][0], inside[-1][1]) == part.own
        assert all(a[1] == b[0] for a, b in pairwise(inside)), "no stranger in the middle"
    own = sorted(part.own for part in cut)
    assert all(a[1] <= b[0] for a, b in pairwise(own))
    assert sum(high - low for low, high in own) == sum(high - low for low, high in owned)


# -- the file --


def test_the_file_has_no_name_at_any_time(folder):
    file = DiskFile(folder, 8 * PAGE_BYTES)
    assert list(folder.iterdir()) == []
    assert os.fstat(file._fd).st_nlink == 0 and os.fstat(file._fd).st_size == 8 * PAGE_BYTES
    assert os.fstat(file._fd).st_blocks * 512 >= 8 * PAGE_BYTES, "allocated, not only announced"
    assert not os.get_inheritable(file._fd)
    file.close()
    file.close()


def test_a_forked_child_does_not_hold_the_file(folder):
    """A worker that outlives a killed parent for a while must not keep the disk full."""
    file = DiskFile(folder, 8 * PAGE_BYTES)
    inode, read, write = os.fstat(file._fd).st_ino, *os.pipe()
    child = os.fork()
    if child == 0:
        held = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
        os.write(write, str([fd for fd in held if os.fstat(fd).st_ino == inode]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"[]" and os.fstat(file._fd).st_ino == inode
    os.close(read)
    os.close(write)
    file.close()


@pytest.mark.parametrize("capacity", [0, 1, PAGE_BYTES + 1])
def test_tiny_disk_tiers(folder, capacity):
    table = AddressTable()
    host = HostStore(table, MIB)
    store = DiskStore(table, capacity, folder, host=host, chunk_bytes=CHUNK)
    assert table.capacity_bytes(Tier.DISK) == capacity // PAGE_BYTES * PAGE_BYTES
    with pytest.raises(PoolFull, match=r"pool\.disk_budget"):
        table.allocate(block("x"), PAGE_BYTES + 1, Tier.DISK)
    store.close()
    host.close()


def without_tmpfile(monkeypatch) -> None:
    """As on a file system that knows no O_TMPFILE."""
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


def test_without_o_tmpfile_it_is_unlinked_at_once_and_leftovers_go(folder, monkeypatch):
    """Case 7: what a process left that was killed between making and unlinking is gone after the next run."""
    (folder / "memwall-pool-left").write_text("")
    (folder / "of-somebody-else").write_text("")
    without_tmpfile(monkeypatch)
    file = DiskFile(folder, PAGE_BYTES)
    assert [path.name for path in folder.iterdir()] == ["of-somebody-else"]
    file.write(memoryview(bytearray(b"x" * PAGE_BYTES)), 0) if not file.direct else None
    file.close()
    (folder / "of-somebody-else").unlink()


def test_two_processes_that_tidy_at_once_do_not_trip_over_each_other(folder, monkeypatch):
    without_tmpfile(monkeypatch)
    unlink = os.unlink

    def gone_already(path, **kwargs):
        unlink(path, **kwargs)
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", gone_already)
    DiskFile(folder, PAGE_BYTES).close()


def test_a_file_system_without_direct_io_is_said_once_by_name(folder, monkeypatch):
    real = fcntl.fcntl

    def refuse(fd, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(probe_module, "_told", set())
    with pytest.warns(UserWarning, match="page cache: the file system of .* refuses O_DIRECT"):
        made = Disk(folder)
    assert not made.store.file.direct
    made.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = Disk(folder)
    made.add({block(n): n for n in ODD})
    made.write(block(n) for n in ODD)
    made.check()
    made.close()


def test_a_folder_that_is_not_one(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"pool\.disk_path=.* cannot hold the disk tier"):
            DiskFile(wrong, PAGE_BYTES)


def test_more_than_the_disk_has_is_refused_at_set_up(folder):
    room = os.statvfs(folder)
    with pytest.raises(ConfigError, match=r"pool\.disk_budget=.* cannot be allocated .* are free there"):
        DiskFile(folder, room.f_blocks * room.f_frsize * 2)


def test_a_limit_on_file_sizes_is_met_at_set_up(folder):
    code = (
        "import sys, resource, pathlib\n"
        "from memwall_strategy.pool.disk_file import DiskFile\n"
        "from memwall_strategy.core.errors import ConfigError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "DiskFile(pathlib.Path(sys.argv[1]), 1 << 20).close()\n"
        "try: DiskFile(pathlib.Path(sys.argv[1]), (1 << 20) + 4096)\n"
        "except ConfigError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert "File too large" in ran.stdout, ran.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE) != (1 << 20, 1 << 20)


def test_a_full_disk_in_truth(folder):
    """A file system of 2 MiB, in a mount namespace of its own: set-up refuses, and what fitted before stays whole."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs unprivileged mount namespaces (`unshare -rm`)")
    code = (
        "import sys, pathlib\n"
        "from memwall_strategy.pool.disk_file import DiskFile\n"
        "from memwall_strategy.core.errors import ConfigError\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "first = DiskFile(folder, 1 << 20)\n"
        "first.write(memoryview(bytearray(b'x' * (1 << 20))), 0) if not first.direct else None\n"
        "try: DiskFile(folder, 3 << 19)\n"
        "except ConfigError as error: print(error)\n"
        "second = DiskFile(folder, 3 << 18)\n"
        "first.close(); second.close()\n"
        "third = DiskFile(folder, (2 << 20) - 65536)\n"
        "print('room again', list(folder.iterdir()))\n"
    )
    mount = f'mount -t tmpfs -o size=2m tmpfs {folder} && exec {sys.executable} -c "$CODE" {folder}'
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount],
        env={**os.environ, "CODE": code},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "No space left on device" in ran.stdout and "room again []" in ran.stdout, ran.stderr
