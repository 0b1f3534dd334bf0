"""Sharded weights stepped on host copies: what CUDA does, made to happen on CPU, where the bits must be the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Tier
from memwall_strategy.pool import replacing
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import Gpt, make_loader, make_trainer, module_class

BUDGET = 150_000
COARSE = 100_000


@on_ranks(2)
def test_sharded_weights_on_host_copies(here: Here) -> None:
    plain_of = replacing.States.of.__func__
    for master in (False, True):
        precision = "bf16-true" if master else "32-true"
        base = {"master": "float32"} if master else {}
        runs = {}
        for copies in (False, True):
            pool = PoolConfig(**base)
            if copies:
                pool = PoolConfig(**base, device_budget=COARSE if master else BUDGET, host_budget="64MiB")
                replacing.States.of = classmethod(lambda cls, *a, **k: replace(plain_of(cls, *a, **k), copies=True))
            try:
                runs[copies] = train(here, pool, precision)
            finally:
                replacing.States.of = classmethod(plain_of)
        assert runs[True].losses == runs[False].losses, master
        assert runs[True].tiers == {Tier.DEVICE, Tier.HOST} and runs[True].desks
        optimizer = runs[True].trainer.optimizers[0]
        for entries in optimizer.state.values():
            assert all(isinstance(v, DTensor) for v in entries.values() if isinstance(v, torch.Tensor) and v.dim())


def train(here: Here, pool: PoolConfig, precision: str) -> Any:
    torch.manual_seed(1)

    class Watched(module_class("lightning")):
        def on_train_epoch_end(self) -> None:
            table = self.trainer.strategy.runtime.pool.table
            table.check()
            self.tiers = {placement.tier for block, placement in table if block.kind == "exp_avg"}
            self.desks = [block for block, _ in table if ".desk" in block.parameter]

    module = Watched(Gpt(6), "adamw")
    strategy = MemwallStrategy(pool=pool, overlap=OverlapConfig(shared_memory=False), timeout_s=60.0)
    trainer = make_trainer(here.world, strategy=strategy, precision=precision, gradient_clip_val=0.4)
    trainer.fit(module, make_loader("gpt", 32, 2, rank=here.rank, world=here.world))
    return module
