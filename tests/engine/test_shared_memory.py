"""Sealed anonymous segments: what they hold against, and what is refused."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import platform
import subprocess
import sys

import pytest

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine import shared_memory
from memwall_strategy.engine.capacity import unused_memory_bytes
from memwall_strategy.engine.processes import set_dumpable
from memwall_strategy.engine.shared_memory import create_sealed, map_sealed

pytestmark = pytest.mark.skipif(bool(shared_memory.why_not()), reason=shared_memory.why_not() or "-")

SIZE = 3 * 4096


def test_two_mappings_are_one_memory_without_a_name():
    files = set(os.listdir("/dev/shm"))
    descriptor = create_sealed("memwall-test", SIZE)
    try:
        one, two = map_sealed(descriptor, SIZE), map_sealed(descriptor, SIZE)
        assert set(os.listdir("/dev/shm")) == files
        assert os.fstat(descriptor).st_blocks * 512 >= SIZE, "its pages are taken at once"
    finally:
        os.close(descriptor)
    one[5000] = 7
    assert two[5000] == 7 and two[5001] == 0


@pytest.mark.parametrize("size", [0, SIZE - 4096, SIZE + 4096])
def test_nobody_can_change_the_size_or_the_seals(size):
    descriptor = create_sealed("memwall-test", SIZE)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)


def test_a_segment_that_could_shrink_or_has_another_size_is_refused(tmp_path):
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, SIZE)
    sealed = create_sealed("memwall-test", SIZE)
    for descriptor, nbytes in ((unsealed, SIZE), (file, SIZE), (sealed, 2 * SIZE)):
        with pytest.raises(MemwallError, match="not memwall's"):
            map_sealed(descriptor, nbytes)
    for descriptor in (unsealed, file, sealed):
        os.close(descriptor)


def test_more_memory_than_there_is_fails_by_name_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="unused"):
        create_sealed("memwall-test", unused_memory_bytes() * 2)  # never tried: the kernel would kill for it
    assert len(os.listdir("/proc/self/fd")) == before


def test_machines_whose_stores_are_not_ordered_are_named(monkeypatch):
    assert shared_memory.why_not() == ""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64" in shared_memory.why_not()
    monkeypatch.delattr(os, "memfd_create")
    assert "memfd_create" in shared_memory.why_not()


def test_a_non_dumpable_process_says_so_to_the_kernel():
    code = (
        "from memwall_strategy.engine.processes import set_dumpable\n"
        "import ctypes\n"
        "assert set_dumpable(False) is True and set_dumpable(False) is False\n"
        "assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0\n"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 1, "this process was left as it is"
    assert set_dumpable(True) is True
