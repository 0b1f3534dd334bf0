"""The capability probe: what is found, what is missing, under which limits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.arena import PAGE_BYTES
from memwall_strategy.pool.disk_file import DiskFile
from memwall_strategy.pool.probe import file_system, probe, unused_memory_bytes

MIB = 1024 * 1024


def test_this_machine(folder):
    found = probe(folder)
    assert found.numa_nodes and found.unused_memory_bytes > 0
    assert found.disk_free_bytes > 0 and found.disk_file_system
    file = DiskFile(folder, PAGE_BYTES)
    assert bool(found.why_no_direct_io) == (not file.direct)
    file.close()
    assert found.why_no_registration == ""
    json.dumps(found.to_record())
    text = str(found)
    assert str(folder) in text and "NUMA" in text and all(f"missing: {line}" in text for line in found.missing())


def test_without_a_disk_path_and_with_a_wrong_one(tmp_path):
    found = probe()
    assert any(line.startswith("direct I/O") for line in found.missing()) and "disk:" not in str(found)
    with pytest.raises(ConfigError, match=r"no direct I/O: no pool\.disk_path is set"):
        found.require("direct I/O")
    with pytest.raises(ConfigError, match=r"pool\.disk_path"):
        probe(tmp_path / "nowhere")


def test_what_is_missing_is_refused_by_name(folder):
    found = replace(probe(folder), why_no_direct_io="", disk_file_system="tmpfs", why_no_registration="no driver")
    found.require("direct I/O")
    with pytest.raises(ConfigError, match="host registration: no driver"):
        found.require("host registration")
    with pytest.raises(ConfigError, match="tmpfs, which is memory"):
        found.require("disk")


def test_unused_memory_is_what_the_tightest_limit_leaves(tmp_path):
    meminfo, proc, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    102400 kB\n")
    proc.write_text("0::/job\n")
    (root / "job").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("memory\n")
    assert unused_memory_bytes(meminfo, proc, root) == 100 * MIB
    (root / "job" / "memory.max").write_text(f"{50 * MIB}\n")
    (root / "job" / "memory.current").write_text(f"{30 * MIB}\n")
    assert unused_memory_bytes(meminfo, proc, root) == 20 * MIB
    (root / "job" / "memory.stat").write_text(f"anon 5\ninactive_file {10 * MIB}\n")
    assert unused_memory_bytes(meminfo, proc, root) == 30 * MIB
    (root / "job" / "memory.current").write_text(f"{90 * MIB}\n")
    assert unused_memory_bytes(meminfo, proc, root) == 0
    (root / "job" / "memory.max").write_text("max\n")
    assert unused_memory_bytes(meminfo, proc, root) == 100 * MIB
    meminfo.write_text("")
    with pytest.raises(ConfigError, match="MemAvailable"):
        unused_memory_bytes(meminfo, proc, root)


def test_unused_memory_under_version_1_groups(tmp_path):
    meminfo, proc, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    meminfo.write_text("MemAvailable:    102400 kB\n")
    proc.write_text("4:cpu:/\n5:memory:/job\n")
    (root / "memory" / "job").mkdir(parents=True)
    (root / "memory" / "job" / "memory.limit_in_bytes").write_text(str(40 * MIB))
    (root / "memory" / "job" / "memory.usage_in_bytes").write_text(str(16 * MIB))
    (root / "memory" / "job" / "memory.stat").write_text(f"total_inactive_file {MIB}\n")
    assert unused_memory_bytes(meminfo, proc, root) == 25 * MIB


def test_the_file_system_of_a_folder(tmp_path):
    mounts = tmp_path / "mounts"
    spaced = str(tmp_path / "with space").replace(" ", "\\040")
    (tmp_path / "with space").mkdir()
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} xfs rw 0 0\nc {spaced} tmpfs rw 0 0\nd {spaced} btrfs rw 0 0\n")
    assert file_system(tmp_path / "with space", mounts) == "btrfs"
    assert file_system(tmp_path, mounts) == "xfs" and file_system(tmp_path.parent, mounts) == "ext4"
    assert file_system(tmp_path) == file_system(tmp_path / "with space") != ""
