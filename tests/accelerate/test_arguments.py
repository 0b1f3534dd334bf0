"""Arguments that contradict memwall are refused by name, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, ParallelismConfig

from memwall_strategy.accelerate import MemwallAccelerator, MemwallPlugin
from memwall_strategy.config import MemwallConfig, PoolConfig
from memwall_strategy.core.errors import ConfigError
from tests.ranks import free_port


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deepspeed_plugin": object()}, "deepspeed_plugin=.*DeepSpeed shards by itself"),
        ({"deepspeed_plugins": {"a": object()}}, "deepspeed_plugins="),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, "fsdp_plugin=.*applies FSDP2 itself"),
        ({"megatron_lm_plugin": object()}, "megatron_lm_plugin="),
        ({"torch_tp_plugin": object()}, "torch_tp_plugin="),
        ({"parallelism_config": ParallelismConfig()}, "parallelism_config=.*replicate=N"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs()]}, "DistributedDataParallelKwargs.*Leave it out"),
        ({"dynamo_backend": "inductor"}, "dynamo_backend=inductor.*before acc.prepare"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8' is not supported"),
        ({"mixed_precision": "b16"}, "mixed_precision='b16' .*bf16"),
        ({"memwall": MemwallConfig()}, "must be a MemwallPlugin"),
        ({"memwall": MemwallPlugin(replicate=3)}, "replicate=3 does not divide"),
    ],
)
def test_a_contradiction_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MemwallAccelerator(cpu=True, **options)
    assert not dist.is_initialized()
    assert not PartialState._shared_state


def test_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="keywords only"):
        MemwallAccelerator(True)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_MEGATRON_LM", "1"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER"),
        ("ACCELERATE_MIXED_PRECISION", "fp8"),
    ],
)
def test_a_launcher_that_asks_for_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="fp8" if value == "fp8" else variable):
        MemwallAccelerator(cpu=True)


def test_wrong_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"MemwallPlugin has no option 'replicat'.*replicate"):
        MemwallPlugin(replicat=2)
    with pytest.raises(ConfigError, match=r"device_bugdet.*device_budget"):
        MemwallPlugin(pool={"device_bugdet": 1})
    with pytest.raises(ConfigError, match="either config= or single options"):
        MemwallPlugin(MemwallConfig(), replicate=2)
    plugin = MemwallPlugin(pool=PoolConfig(device_budget="64MiB"), accumulate="whole")
    assert plugin.config.pool.device_budget == "64MiB"
    assert plugin.runtime is None


def test_a_plain_accelerator_never_takes_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails loudly before it starts anything; an FSDP plugin would be ignored on CPU, and DDP used."""
    monkeypatch.setenv("RANK", "0")  # as under torchrun
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(TypeError, match="fsdp_plugin"):
        Accelerator(cpu=True, fsdp_plugin=MemwallPlugin())
    with pytest.raises(AssertionError, match="MemwallPlugin"):
        Accelerator(cpu=True, kwargs_handlers=[MemwallPlugin()])
    with pytest.raises(TypeError, match="memwall"):
        Accelerator(cpu=True, memwall=MemwallPlugin())
    assert not dist.is_initialized()
    assert not AcceleratorState._shared_state
