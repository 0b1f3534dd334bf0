"""Weights that are unfrozen, and param groups that join, under the Trainer with paged state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import Gpt, make_loader, make_trainer, module_class

SAVED_AT = 11
"""Step of the checkpoint: after the group joined."""

BUDGETS = (130_000, 152_500)
"""Under the first, state is paged from the start; under the second everything fits (the highest step, activations
included, takes 152,132 bytes) until the group joins."""

FROZEN = ("blocks.0.", "blocks.1.", "token")


class Finetune(BaseFinetuning):
    """Everything below the third block is frozen, and joins in a group of its own with the second epoch."""

    def freeze_before_training(self, module: Any) -> None:
        for parameter in late(module):
            parameter.requires_grad_(False)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Lightning restores the groups of a resumed run, not what they unfroze."""
        for parameter in (p for group in trainer.optimizers[0].param_groups for p in group["params"]):
            parameter.requires_grad_(True)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            for parameter in late(module):
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": late(module), "lr": optimizer.param_groups[0]["lr"] / 10})


def late(module: Any) -> list[torch.nn.Parameter]:
    """Parameters that join; frozen from the start."""
    return [p for n, p in module.named_parameters() if any(part in n for part in FROZEN)]


def run(here: Here, pool: PoolConfig, folder: Path | None = None, resume: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(1)

    class Tuned(module_class("lightning")):
        def configure_optimizers(self) -> Any:
            rest = [p for p in self.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(rest, lr=1e-2)
            rate = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}

        def on_train_epoch_end(self) -> None:
            self.seen = [*getattr(self, "seen", []), look(self.trainer)]

        def on_train_batch_end(self, *_: Any) -> None:
            if folder is not None and self.trainer.global_step == SAVED_AT and not (folder / "at.ckpt").exists():
                self.trainer.save_checkpoint(folder / "at.ckpt")

    module = Tuned(Gpt(6), "adamw")
    strategy = MemwallStrategy(pool=pool, overlap=OverlapConfig(shared_memory=False), timeout_s=60.0)
    options = {"max_epochs": 3} | options
    trainer = make_trainer(here.world, strategy=strategy, callbacks=[Finetune()], **options)
    loader = make_loader("gpt", 8 * here.world * 2, 2, rank=here.rank, world=here.world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=resume)
    return module


def look(trainer: Any) -> dict[str, Any]:
    pool = trainer.strategy.runtime.pool
    pool.table.check()
    held = trainer.strategy.runtime.metrics()["memwall/pool/device_peak_bytes"]
    return {
        "tiers": {str(placement.tier) for block, placement in pool.table if block.kind.startswith("exp_avg")},
        "pooled": isinstance(trainer.strategy.raw_optimizers()[0], PooledOptimizer),
        "peak": held,
    }


@on_ranks(2)
def test_groups_that_join_are_paged_and_resumed(here: Here) -> None:
    """The losses of the unpaged run to the last bit, paged from the start or only since the group joined."""
    whole = run(here, PoolConfig())
    for budget, where in zip(BUDGETS, ("device", "host"), strict=True):
        pool = PoolConfig(device_budget=budget, host_budget="64MiB", optimizer_on=where)
        paged = run(here, pool, folder=here.folder)
        assert paged.losses == whole.losses, (budget, where)
        first, *_, last = paged.seen
        assert last["pooled"] and "host" in last["tiers"], (budget, where, paged.seen)
        assert first["pooled"] == (budget == BUDGETS[0]) and last["peak"] <= budget, paged.seen
    rest = run(here, pool, resume=here.folder / "at.ckpt")
    assert rest.losses == whole.losses[SAVED_AT:]


@on_ranks(1)
def test_without_room_for_what_joins_it_is_named(here: Here) -> None:
    with pytest.raises(ConfigError, match=r"no room for block .*pool\.host_budget|device tier: 2 slots"):
        run(here, PoolConfig(device_budget=240_000, host_budget="4KiB", optimizer_on="device"))
