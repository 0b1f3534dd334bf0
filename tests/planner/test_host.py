"""CASES 11: what the optimizer's arithmetic takes on the host follows from the cores that a rank may keep busy."""

from __future__ import annotations

import pytest

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import HostSpec, host_arithmetic
from memwall_strategy.planner.host import ELEMENTS_PER_CORE_S, KERNEL_BYTES


@pytest.mark.parametrize(
    ("host", "cores"),
    [
        (HostSpec(8.0), 8),
        (HostSpec(8.0, ranks=4), 2),
        (HostSpec(7.5, ranks=2), 3),  # whole threads: three quarters of a core stay idle
        (HostSpec(2.0, ranks=8), 0.25),  # one thread each, which get a quarter of a core
        (HostSpec(8.0, ranks=2, threads=1), 1),
        (HostSpec(2.0, ranks=2, threads=64), 1),  # more threads make no cores
        (HostSpec(None), None),
    ],
)
def test_ranks_share_the_cores(host: HostSpec, cores: float | None) -> None:
    assert host.rank_cores == cores


def test_the_cost_follows_the_cores() -> None:
    alone, shared, quota = (
        host_arithmetic(10**9, host)
        for host in (HostSpec(64.0), HostSpec(64.0, ranks=8), HostSpec(2.0, ranks=8))
    )
    assert alone.seconds == pytest.approx(10**9 / 64 / ELEMENTS_PER_CORE_S["fused"])
    assert shared.seconds == pytest.approx(8 * alone.seconds)
    assert quota.seconds == pytest.approx(256 * alone.seconds), "a quota of 2 of 64 cores, and 8 ranks"
    assert "about 4.21 s on 0.25 of the machine's 2 cores (8 ranks share them)" in quota.text()
    slower = [host_arithmetic(10**9, HostSpec(2.0), kernel).seconds for kernel in ("fused", "loop", "foreach")]
    assert slower == sorted(slower) and slower[0] < slower[1]
    unknown = host_arithmetic(10**9, HostSpec())
    assert unknown.seconds is None and "set hardware.host_cores" in unknown.text()


def test_memory_bounds_many_cores() -> None:
    many = HostSpec(128.0, ranks=8, memory_bytes_per_s=400e9)
    assert many.elements_per_s() == pytest.approx(400e9 / 8 / KERNEL_BYTES)
    few = HostSpec(4.0, ranks=2, memory_bytes_per_s=400e9)
    assert few.elements_per_s() == pytest.approx(2 * ELEMENTS_PER_CORE_S["fused"])


def test_what_cannot_be() -> None:
    for wrong in ({"cores": 0.0}, {"cores": 2.0, "ranks": 0}, {"threads": -1}, {"link_bytes_per_s": float("inf")}):
        with pytest.raises(ConfigError, match=r"HostSpec\.\w+=.* must be above 0"):
            HostSpec(**wrong)
