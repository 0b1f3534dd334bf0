"""The callbacks by themselves: what they take, what they refuse, what the strategy makes of them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import memwall_strategy.callbacks.lightning as ours
import memwall_strategy.callbacks.pytorch_lightning as others
from memwall_strategy.callbacks.pillars import configured
from memwall_strategy.config import ClusterConfig, MemwallConfig, OverlapConfig, PoolConfig, ResilienceConfig
from memwall_strategy.core.errors import ConfigError
from tests.ranks import ROOT

NAMES = ("PooledMemory", "DynamicClustering", "Overlap", "TopologyBalance", "Rollback", "Telemetry")


class Mine(ours.PooledMemory):
    """A user's own."""


def test_a_callback_is_its_pillars_configuration() -> None:
    given = MemwallConfig(replicate=2)
    callbacks = [ours.Rollback(swappable_groups=False), object(), Mine(device_budget="1MiB"), ours.Overlap(prefetch=2)]
    wanted = MemwallConfig(
        replicate=2, pool=PoolConfig(device_budget="1MiB"), overlap=OverlapConfig(prefetch=2),
        resilience=ResilienceConfig(swappable_groups=False),
    )  # fmt: skip
    assert configured(given, callbacks) == configured(given, callbacks[::-1]) == wanted
    assert configured(given, []) is given
    assert configured(given, [others.PooledMemory(PoolConfig(enabled=False))]).pool == PoolConfig(enabled=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ours.PooledMemory(device_bugdet=1), r"callbacks=\[PooledMemory\(\.\.\.\)\]: .*'device_bugdet'.*Did"),
        (lambda: ours.PooledMemory(device_budget="lots"), r"pool\.device_budget='lots' is not a size"),
        (lambda: ours.Overlap(prefetch=-1), r"overlap\.prefetch=-1 must be a whole number"),
        (lambda: ours.Overlap(OverlapConfig(), prefetch=1), "Overlap: give either a OverlapConfig or single options"),
        (lambda: ours.Overlap(PoolConfig()), r"write Overlap\(OverlapConfig\(\.\.\.\)\)"),
        (lambda: ours.Overlap(3), r"Overlap\(3\): write Overlap\(OverlapConfig"),
        (lambda: ours.DynamicClustering(), r"DynamicClustering.*cluster\.enabled=true: .* is not in this version"),
        (lambda: ours.TopologyBalance(), r"TopologyBalance.*topology\.enabled=true: .* is not in this version"),
        (lambda: ours.Telemetry(every_n_step=2),
         r"Telemetry has no option 'every_n_step'\. Did you mean 'every_n_steps'\?"),
        (lambda: ours.Telemetry(memory_alert=95), r"telemetry\.memory_alert=95 must be a share"),
        (lambda: ours.Telemetry(profile="yes"), r"telemetry\.profile='yes' must be true or false"),
        (lambda: ours.Telemetry(profile_steps=0), r"telemetry\.profile_steps=0"),
        (lambda: ours.Telemetry(alert_every_s=float("nan")), r"telemetry\.alert_every_s=nan"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_pillar_of_a_later_version_may_be_named_when_it_is_off() -> None:
    assert ours.DynamicClustering(enabled=False).memwall_config == ClusterConfig()


def test_two_of_a_kind_are_refused() -> None:
    for two in (
        [ours.PooledMemory(), ours.PooledMemory()],
        [Mine(), others.PooledMemory()],
        [ours.Telemetry(), others.Telemetry()],
    ):
        with pytest.raises(ConfigError, match=r"callbacks= holds two of one kind: \w+ and \w+ both stand for"):
            configured(MemwallConfig(), two)
    configured(MemwallConfig(), [one := ours.Overlap(), one])  # the same object twice is one


def test_a_callback_beside_another_configuration_is_refused_unless_equal() -> None:
    given = MemwallConfig(pool=PoolConfig(device_budget="1GiB"))
    with pytest.raises(ConfigError, match=r"pool is set twice, differently: .*1GiB.*2GiB.*Leave one out"):
        configured(given, [ours.PooledMemory(device_budget="2GiB")])
    assert configured(given, [ours.PooledMemory(device_budget="1GiB")]) == given
    assert configured(given, [ours.Overlap(prefetch=3)]).pool == given.pool


@pytest.mark.parametrize("name", NAMES)
def test_another_strategy_is_refused_and_state_keys_are_the_kinds(name: str) -> None:
    options = {"enabled": False} if name in ("DynamicClustering", "TopologyBalance") else {}
    keys = set()
    for module in (ours, others):
        callback = getattr(module, name)(**options)
        with pytest.raises(ConfigError, match=rf"callbacks=\[{name}.*this trainer has SingleDeviceStrategy"):
            callback.setup(SimpleNamespace(strategy=type("SingleDeviceStrategy", (), {})()), None, "fit")
        keys.add(callback.state_key)
        assert callback.state_dict() == {}, "nothing of it is in a checkpoint"
        assert type(pickle.loads(pickle.dumps(callback))) is type(callback)
    assert keys == {f"memwall.{name}"}


def test_which_lightning_and_nothing_early() -> None:
    """In processes of their own: what is imported decides, and nothing is before a name is asked for."""
    code = """
import sys
import memwall_strategy, memwall_strategy.callbacks as callbacks
assert not {"torch", "lightning", "pytorch_lightning"} & set(sys.modules), "early"
before = sys.argv[1]
if before:
    __import__(before)
print(callbacks.PooledMemory.__mro__[-2].__module__.partition(".callbacks")[0], callbacks.PooledMemory.__module__)
"""
    for before, base, module in (
        ("", "lightning.pytorch", "lightning"),
        ("pytorch_lightning", "pytorch_lightning", "pytorch_lightning"),
    ):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, before], cwd=ROOT, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [base, f"memwall_strategy.callbacks.{module}"]
    with pytest.raises(AttributeError, match="Nothing"):
        import memwall_strategy.callbacks as package

        _ = package.Nothing
