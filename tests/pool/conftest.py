"""A small pool of three tiers over one folder, closed and checked after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memwall_strategy.pool.device import DeviceStore
from memwall_strategy.pool.disk import DiskStore
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.table import AddressTable

MIB = 1024 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, which must be empty again afterwards."""
    (path := tmp_path / "disk").mkdir()
    yield path
    assert list(path.iterdir()) == []


@pytest.fixture
def pool(folder: Path) -> Iterator[Pool]:
    """2 MiB of device, 4 MiB of host (of which 320 KiB are staging) and 4 MiB of disk."""
    table = AddressTable()
    host = HostStore(table, 4 * MIB)
    disk = DiskStore(table, 4 * MIB, folder, host=host, chunk_bytes=64 * 1024)
    made = Pool(table, [DeviceStore(table, 2 * MIB), host, disk], timeout_s=60)
    yield made
    made.close()
    assert table.tiers() == [] and table.used_bytes() == 0
