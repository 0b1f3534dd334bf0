"""Configuration errors: found when the trainer is made, before any process starts; one paragraph, option and remedy."""

from __future__ import annotations

import subprocess
from importlib import import_module
from typing import Any

import pytest

from memwall_strategy.config import MemwallConfig, PoolConfig
from memwall_strategy.core.errors import ConfigError
from tests.lightning.models import make_trainer


@pytest.fixture(autouse=True)
def no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be launched on the way to these errors."""

    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess.Popen, "__init__", start)


def strategy(**options: Any) -> Any:
    from memwall_strategy.lightning import MemwallStrategy

    return MemwallStrategy(**options)


def one_paragraph(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text
    return text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicat": 2}, ["'replicat'", "replicate"]),
        ({"pool": {"device_budgte": "1GiB"}}, ["'device_budgte'", "device_budget"]),
        ({"accumulate": "shard"}, ["accumulate='shard'", "sharded"]),
        ({"replicate": 0}, ["replicate=0", "at least 1"]),
        ({"overlap": 3}, ["overlap=3", "OverlapConfig"]),
        ({"config": MemwallConfig(), "replicate": 2}, ["config=", "replicate"]),
        ({"pool": {"device_budget": "much"}}, ["pool.device_budget='much'", "512MiB"]),
    ],
)
def test_wrong_options(options: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy(**options)
    text = one_paragraph(caught)
    assert all(name in text for name in named), text


@pytest.mark.parametrize(
    ("options", "devices", "named"),
    [
        ({"replicate": 3}, 4, ["replicate=3", "4", "1, 2, 4"]),
        ({"replicate": 4}, 2, ["replicate=4", "1, 2"]),
        ({"tensor_parallel_size": 3}, 4, ["tensor_parallel_size=3", "4 ranks", "divisor"]),
        ({"tensor_parallel_size": 0}, 2, ["tensor_parallel_size=0"]),
        ({"tensor_parallel_size": 2, "replicate": 2}, 4, ["replicate", "tensor_parallel_size", "1"]),
        ({"pool": PoolConfig(device_budget="900TiB")}, 2, ["pool.device_budget", "that are there", "0.9"]),
    ],
)
def test_options_that_the_world_rules_out(options: dict[str, Any], devices: int, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer(devices, strategy=strategy(**options))
    text = one_paragraph(caught)
    assert all(name in text for name in named), text


@pytest.mark.parametrize("options", [{"replicate": 3}, {"pool": PoolConfig(device_budget="900TiB")}])
def test_fabric_refuses_the_same(options: dict[str, Any]) -> None:
    from lightning.fabric import Fabric

    from memwall_strategy.lightning import MemwallFabricStrategy

    with pytest.raises(ConfigError) as caught:
        Fabric(accelerator="cpu", devices=4, strategy=MemwallFabricStrategy(**options))
    assert next(iter(options)).split("=")[0] in one_paragraph(caught)


@pytest.mark.parametrize("namespace", ["lightning.fabric", "lightning_fabric"])
@pytest.mark.parametrize("precision", ["64-true", "transformer-engine", "16-true"])
def test_fabric_refuses_precision_by_name(namespace: str, precision: str) -> None:
    import_module("memwall_strategy.lightning")
    with pytest.raises(ConfigError, match=f"precision={precision!r} is not supported"):
        import_module(namespace).Fabric(accelerator="cpu", devices=2, strategy="memwall", precision=precision)


def test_fabric_refuses_a_foreign_precision_plugin() -> None:
    import_module("memwall_strategy.lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    with pytest.raises(ConfigError, match=r"plugins=MixedPrecision"):
        Fabric(accelerator="cpu", devices=2, strategy="memwall", plugins=MixedPrecision("bf16-mixed", "cpu"))


def test_wrong_namespace_is_refused() -> None:
    """A strategy of one Lightning under the other's Trainer is an error, not a crash later."""
    with pytest.raises((ConfigError, ValueError), match="strategy"):
        make_trainer(2, namespace="pytorch_lightning", strategy=strategy())


def test_options_in_the_trainer_reach_the_config() -> None:
    trainer = make_trainer(2, strategy=strategy(replicate=2, unit_classes=("Block",), pool={"device_budget": "64MiB"}))
    config = trainer.strategy.config
    assert (config.replicate, config.unit_classes, config.pool.device_budget) == (2, ("Block",), "64MiB")
