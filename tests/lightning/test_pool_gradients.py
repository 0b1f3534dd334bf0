"""Gradients on the host between micro-batches, under the Trainer, Fabric and Accelerate: losses to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from memwall_strategy import MemwallStrategy, PoolConfig
from memwall_strategy.accelerate import MemwallPlugin
from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.lightning import MemwallFabricStrategy
from tests.accelerate.helpers import make_accelerator, whole_loader
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    full_weights,
    loss_of,
    make_loader,
    make_module,
    make_net,
    make_optimizer,
    make_trainer,
)
from tests.lightning.test_fabric import make_fabric

POOLS = {"device": PoolConfig(), "host": PoolConfig(gradients="host", host_budget="16MiB")}


def fit(here: Here, where: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, weights, and the fewest bytes of gradients that the device held at a batch's start."""
    module = make_module("mlp", optimizer="adamw")
    strategy = MemwallStrategy(pool=POOLS[where], timeout_s=60.0)
    trainer = make_trainer(here.world, strategy=strategy, max_epochs=2, **options)
    held = []

    def look(batch: Any, index: int) -> None:
        runtime = trainer.strategy.runtime
        if index % 3 == 2 and runtime.pool._pool is not None:
            runtime.pool._pool.drain()
        held.append(runtime.memory.current()[Kind.GRAD] if index % 3 == 2 else 1)
        if where == "host":
            assert runtime.pool.table.used_bytes(Tier.HOST, kind=Kind.GRAD) > 0

    module.on_train_batch_start = look
    # 7 batches a rank: the last step of an epoch has fewer micro-batches than the others
    trainer.fit(module, make_loader("mlp", 14 * here.world, 2, rank=here.rank, world=here.world))
    return module.losses, full_weights(module), min(held)


@on_ranks(2, "norm", "value", "fp16")
def test_losses_of_gradients_on_the_device(here: Here) -> None:
    options = {"norm": {"gradient_clip_val": 0.3}, "fp16": {"gradient_clip_val": 0.3, "precision": "16-mixed"}}.get(
        here.case, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    )
    found = {where: fit(here, where, accumulate_grad_batches=3, **options) for where in POOLS}
    assert found["host"][0] == found["device"][0]
    assert all(torch.equal(value, found["device"][1][name]) for name, value in found["host"][1].items())
    assert found["host"][2] == 0 < found["device"][2]


@on_ranks(2)
def test_accumulation_that_changes(here: Here) -> None:
    found = [fit(here, where, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])[0] for where in POOLS]
    assert found[0] == found[1]


@on_ranks(1)
def test_manual_optimization_is_refused(here: Here) -> None:
    module = make_module("mlp")
    module.automatic_optimization = False
    trainer = make_trainer(1, strategy=MemwallStrategy(pool=POOLS["host"]), max_steps=1)
    with pytest.raises(ConfigError, match="manual optimization"):
        trainer.fit(module, make_loader("mlp", 2, 2))


@on_ranks(2)
def test_fabric(here: Here) -> None:
    found = []
    for pool in POOLS.values():
        fabric = make_fabric(strategy=MemwallFabricStrategy(pool=pool))
        net = make_net("mlp")
        model, optimizer = fabric.setup(net, make_optimizer(net.parameters(), "adamw"))
        losses = []
        for i, batch in enumerate(make_loader("mlp", 24, 2, rank=here.rank, world=here.world)):
            with fabric.no_backward_sync(model, enabled=i % 3 != 2):
                loss = loss_of(model, batch)
                fabric.backward(loss)
            losses.append(loss.item())
            if i % 3 == 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1]


@on_ranks(2, "accumulate", "each_batch", "tokens", "fp16")
def test_accelerate(here: Here) -> None:
    """Micro-batches synced or not; clipping where gradients rest; losses weighed by tokens; a scaler."""
    from accelerate.utils import GradientAccumulationPlugin

    found = []
    for pool in POOLS.values():
        options: dict[str, Any] = {"gradient_accumulation_steps": 3}
        if here.case == "each_batch":
            plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
            options = {"gradient_accumulation_plugin": plugin}
        if here.case == "fp16":
            options["mixed_precision"] = "fp16"
        acc = make_accelerator(MemwallPlugin(pool=pool), **options)
        net = make_net("mlp")
        loader, model, stepper = acc.prepare(
            whole_loader("mlp", 14 * 2, 2), net, make_optimizer(net.parameters(), "adamw")
        )
        losses, norms, rested = [], [], 0
        for i, batch in enumerate(loader):
            with acc.accumulate(model):
                loss = loss_of(model, batch)
                acc.backward(loss, **({"tokens": 1 + i % 2} if here.case == "tokens" else {}))
                rested += all(p.grad is None for p in model.parameters())
                if acc.sync_gradients or i == 1:
                    norms.append(acc.clip_grad_norm_(model.parameters(), 0.1).item())
                stepper.step()
                stepper.zero_grad()
            losses.append(loss.item())
        assert (rested > 0) == (pool.gradients == "host")
        found.append((losses, norms, [p.to_local().tolist() for p in model.parameters()]))
        acc.free_memory()
    assert found[0] == found[1]
