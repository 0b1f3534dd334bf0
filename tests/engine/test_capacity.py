"""How much memory a rank may count on, from control groups of both versions."""

from __future__ import annotations

import os

import pytest
import torch

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine import capacity
from memwall_strategy.engine.capacity import (
    available_cores,
    available_device_bytes,
    cgroup_limits,
    cpu_quotas,
    machine_cores,
    share_cores,
    share_machine,
    share_threads,
)

MIB = 1 << 20


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_takes_every_level(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/machine/job\n")
    write(root / "cgroup.controllers", "memory")
    write(root / "machine/job/memory.max", "max\n")
    write(root / "machine/memory.max", f"{512 * MIB}\n")
    write(root / "memory.max", f"{900 * MIB}\n")
    assert sorted(cgroup_limits(proc, root)) == [512 * MIB, 900 * MIB]


def test_version_1_in_a_container(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    write(root / "memory/memory.limit_in_bytes", f"{256 * MIB}\n")  # its own group is the mount's root
    assert cgroup_limits(proc, root) == [256 * MIB]


def test_no_limits(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    assert cgroup_limits(proc, root) == []
    proc.write_text("0::/\n")
    assert cgroup_limits(proc, root) == []


def test_the_smallest_limit_is_shared_among_local_ranks(tmp_path, monkeypatch):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/\n")
    write(root / "cgroup.controllers", "memory")
    write(root / "memory.max", f"{64 * MIB}\n")
    monkeypatch.setattr(capacity, "cgroup_limits", lambda: cgroup_limits(proc, root))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_device_bytes("cpu") == 64 * MIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_device_bytes(torch.device("cpu")) == 16 * MIB


def test_cpu_quotas_of_both_versions(tmp_path, monkeypatch):
    """CASES 11: a rank counts on its share of the quota, not on every core of the machine."""
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    assert cpu_quotas(proc, root) == []
    proc.write_text("0::/machine/job\n")
    write(root / "cgroup.controllers", "cpu memory")
    write(root / "machine/job/cpu.max", "max 100000\n")
    write(root / "machine/cpu.max", "50000 100000\n")
    assert cpu_quotas(proc, root) == [0.5]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_cores(proc, root) == 0.25
    old = tmp_path / "old"
    proc.write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    write(old / "cpu,cpuacct/cpu.cfs_quota_us", "150000\n")
    write(old / "cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    write(old / "cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "-1\n")
    write(old / "cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000\n")
    assert cpu_quotas(proc, old) == [1.5]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert 0 < available_cores() <= len(os.sched_getaffinity(0))


def test_threads_are_shared_unless_the_user_chose(monkeypatch):
    """CASES 11: ranks of one machine do not fight for its cores."""
    before = torch.get_num_threads()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    try:
        torch.set_num_threads(4)
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        with pytest.warns(UserWarning, match="OMP_NUM_THREADS=4, and each rank may keep 1 busy"):
            assert share_cores(1.5) == 4
        monkeypatch.delenv("OMP_NUM_THREADS")
        with pytest.warns(UserWarning, match="4 threads, and each rank may keep 2 busy"):
            assert share_cores(2.9) == torch.get_num_threads() == 2
        assert share_cores(8) == 2
        with pytest.warns(UserWarning, match="1 busy"):
            assert share_cores(0.25) == 1
    finally:
        torch.set_num_threads(before)


def test_launched_processes_share_threads_and_memory(monkeypatch):
    """CASES 11: by the quota, before Lightning's launcher counts cores; the next trainer of the process anew."""
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "for pytest to restore")
        monkeypatch.delenv(name)
    monkeypatch.setattr(capacity, "_ours", {})
    for ranks, cores, threads in ((4, 10.0, "2"), (1, 3.5, "3"), (8, 2.0, "1"), (0, 2.0, "2")):
        share_threads(ranks, cores)
        assert os.environ["OMP_NUM_THREADS"] == threads
    for ranks in (2, 3):
        share_machine(ranks)
        assert os.environ["LOCAL_WORLD_SIZE"] == str(ranks)
    assert available_cores() == pytest.approx(machine_cores() / 3)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):  # a launcher, or the user, says otherwise
        os.environ[name] = "5"
    share_threads(2, 8.0)
    share_machine(2)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["LOCAL_WORLD_SIZE"] == "5"


def test_this_machine_has_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_device_bytes() > 64 * MIB


def test_an_unknown_device():
    with pytest.raises(ConfigError, match="not of device 'meta'"):
        available_device_bytes("meta")
