"""float32 copies of bfloat16 weights under the Trainer: the loop written by hand, paged, saved and resumed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from memwall_strategy import MemwallStrategy, PoolConfig
from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import ClusterSpec, ModelSpec, OptimizerSpec, plan
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import Gpt, loss_of, make_loader, make_optimizer, make_trainer, module_class

BUDGET = {1: 180_000, 2: 110_000}
"""Bytes a rank by world size: the model trains, its state does not fit whole."""


def pools(world: int) -> dict[str, PoolConfig]:
    """Where the state rests."""
    paged = {"master": "float32", "device_budget": BUDGET[world], "host_budget": "64MiB"}
    return {
        "device": PoolConfig(master="float32"),
        "host": PoolConfig(**paged, optimizer_on="device"),
        "stepped on host": PoolConfig(**paged),
    }


def train(here: Here, pool: PoolConfig, *, save: Path | None = None, resume: Path | None = None) -> Any:
    torch.manual_seed(1)

    class Watched(module_class("lightning")):
        def on_train_batch_end(self, *_: Any) -> None:
            if save is not None and self.trainer.global_step == 2:
                self.trainer.save_checkpoint(save)

        def on_train_epoch_end(self) -> None:
            found = self.trainer.strategy.runtime
            found.pool.table.check()
            self.tiers = {p.tier for b, p in found.pool.table if b.kind == Kind.MASTER}
            self.peak = found.metrics()["memwall/pool/device_peak_bytes"]
            self.kinds = {kind: n for kinds in found.kind_peaks.values() for kind, n in kinds.items()}

    module = Watched(Gpt(6), "adamw")
    trainer = make_trainer(
        here.world, strategy=MemwallStrategy(pool=pool, timeout_s=60.0), precision="bf16-true", max_epochs=1,
        gradient_clip_val=0.4,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, make_loader("gpt", 40 // here.world * here.world, 4, rank=here.rank, world=here.world),
                    ckpt_path=resume)  # fmt: skip
    return module


@on_ranks(1)
def test_it_is_the_loop_written_by_hand(here: Here) -> None:
    torch.manual_seed(1)
    net = Gpt(6).bfloat16()
    fine = [torch.nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer, losses = make_optimizer(fine, "adamw"), []
    for batch in make_loader("gpt", 40, 4):
        loss = loss_of(net, batch)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.4)
        for p, copy in zip(net.parameters(), fine, strict=True):
            copy.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, copy in zip(net.parameters(), fine, strict=True):
                p.copy_(copy)
    for where, pool in pools(1).items():
        found = train(here, pool)
        assert found.losses == losses and (Tier.HOST in found.tiers) == (where != "device"), where
    assert train(here, PoolConfig()).losses != losses


@on_ranks(2)
def test_copies_are_sharded_paged_saved_and_counted(here: Here) -> None:
    whole = train(here, pools(here.world)["device"])
    assert whole.tiers == {Tier.DEVICE}
    spec = OptimizerSpec("adamw", {"exp_avg": None, "exp_avg_sq": None}, 4, master=True)
    model = ModelSpec.from_module(Gpt(6), [f"blocks.{i}" for i in range(6)])
    made = plan(model, ClusterSpec(world=here.world), optimizer=spec, precision="bf16-true", rank=here.rank)
    for kind in (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ):
        assert made.resident[kind] == whole.kinds[kind] > 0
    for where in ("host", "stepped on host"):
        saved = here.folder / f"{where}.ckpt"
        paged = train(here, pools(here.world)[where], save=saved)
        assert paged.losses == whole.losses and Tier.HOST in paged.tiers, where
        assert paged.peak <= BUDGET[2]
        for target in ("device", where):
            rest = train(here, pools(here.world)[target], resume=saved)
            assert rest.losses == whole.losses[2:], (where, target)


@on_ranks(1)
def test_what_has_no_copies_is_named(here: Here) -> None:
    module = module_class("lightning")(Gpt(2), "adamw")
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    trainer = make_trainer(1, strategy=MemwallStrategy(pool=pools(here.world)["device"]), precision="bf16-true")
    with pytest.raises(ConfigError, match=r"pool\.master='float32'.*LBFGS"):
        trainer.fit(module, make_loader("gpt", 8, 2))
