"""Paged optimizer state under the Trainer: the same losses to the last bit, and checkpoints that go anywhere."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import Gpt, make_loader, make_trainer, module_class

BUDGET = {1: 230_000, 2: 150_000}
"""Bytes a rank by world size: the model trains, its AdamW state does not fit whole."""


def make(here: Here, where: str, *, world: int, folder: Path | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """Module, trainer and loader; the optimizer's state on the device, on the host or on disk."""
    pools = {
        "device": PoolConfig(),
        "host": PoolConfig(
            device_budget=BUDGET[world], host_budget="64MiB", optimizer_on="device", activations="keep"
        ),
        "stepped on host": PoolConfig(device_budget=BUDGET[world], host_budget="64MiB", activations="keep"),
        "disk": PoolConfig(
            device_budget=BUDGET[world], host_budget=0, disk_budget="64MiB", disk_path=str(folder or here.folder),
            activations="keep",
        ),
    }
    torch.manual_seed(1)
    module = module_class("lightning")(Gpt(6), "adamw")
    strategy = MemwallStrategy(pool=pools[where], timeout_s=60.0)
    trainer = make_trainer(world, strategy=strategy, accumulate_grad_batches=2, gradient_clip_val=0.4, **options)
    return module, trainer, make_loader("gpt", 8 * world * 4, 2, rank=here.rank, world=world)


@on_ranks(2)
def test_losses_are_those_of_the_unpaged_run(here: Here) -> None:
    """Accumulation, clipping, odd shards; what is booked is what is held; nothing of it remains."""
    losses = {}
    for where in ("device", "host", "stepped on host", "disk"):
        module, trainer, loader = make(here, where, world=2, max_epochs=2)
        found: dict[str, Any] = {}
        module.on_train_epoch_end = lambda found=found, trainer=trainer: look(trainer, found)
        trainer.fit(module, loader)
        losses[where] = module.losses
        metrics = trainer.strategy.runtime.metrics()
        assert metrics["memwall/pool/device_peak_bytes"] <= BUDGET[2] or where == "device"
        if where != "device":
            tier = Tier(where.removeprefix("stepped on "))
            assert found["tiers"] == {Tier.DEVICE, tier}, found
            assert found["pooled"] and metrics[f"memwall/pool/{tier}_bytes"] > 0
            assert (metrics["memwall/pool/page_in_s"] > 0) == (where != "stepped on host")  # nothing moves there
            assert ("memwall/pool/access_p50_s" in metrics) == (where != "stepped on host")
        else:
            assert not found["pooled"] and found["tiers"] == {Tier.DEVICE}
            assert "memwall/pool/page_in_s" not in metrics
        optimizer = trainer.optimizers[0]
        assert type(optimizer) is torch.optim.AdamW  # as it came, its state in ordinary memory
        assert all(v.to_local().numel() for s in optimizer.state.values() for k, v in s.items() if k == "exp_avg")
        assert len(trainer.strategy.runtime.pool.table) == 0
    assert losses["device"] == losses["host"] == losses["stepped on host"] == losses["disk"]


def look(trainer: Any, found: dict[str, Any]) -> None:
    pool = trainer.strategy.runtime.pool
    pool.table.check()
    found["tiers"] = {placement.tier for block, placement in pool.table if block.kind.startswith("exp_avg")}
    found["pooled"] = isinstance(trainer.strategy.raw_optimizers()[0], PooledOptimizer)
    booked = pool.table.balance(Tier.DEVICE).bytes
    assert booked <= (trainer.strategy.runtime.budget_bytes or booked)


@on_ranks(2, "host", "disk")
def test_checkpoints_go_from_anywhere_to_anywhere(here: Here) -> None:
    """Saved paged, resumed paged or not, and the other way: the losses of the uninterrupted run."""
    whole, trainer, loader = make(here, "device", world=2, max_epochs=2)
    trainer.fit(whole, loader)
    for source, target in ((here.case, "device"), ("device", here.case), (here.case, here.case)):
        folder = here.folder / f"{source}-{target}"
        again, trainer2, loader = make(here, source, world=2, max_steps=6, max_epochs=2, folder=here.folder)
        again.on_train_batch_end = saver(again, trainer2, folder)
        trainer2.fit(again, loader)
        rest, trainer3, loader = make(here, target, world=2, max_epochs=2, folder=here.folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer3.fit(rest, loader, ckpt_path=str(folder / "at.ckpt"))
        assert rest.losses == whole.losses[-len(rest.losses) :] and len(rest.losses) >= 4, (source, target)


def saver(module: Any, trainer: Any, folder: Path) -> Any:
    def save(*_: Any) -> None:
        if trainer.global_step == 4 and not (folder / "at.ckpt").exists():
            trainer.save_checkpoint(folder / "at.ckpt")

    return save


@on_ranks(1)
def test_one_full_file_holds_paged_state(here: Here) -> None:
    module, trainer, loader = make(here, "disk", world=1, max_epochs=1)
    saved = here.folder / "one.ckpt"
    module.on_train_end = lambda: trainer.strategy._checkpointer.save_full(saved, {}, 1)
    trainer.fit(module, loader)
    state = torch.load(saved, weights_only=False)["optimizer_states"][0]["state"]
    optimizer = trainer.optimizers[0]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(state) == len(parameters)
    for number, parameter in enumerate(parameters):
        assert torch.equal(optimizer.state[parameter]["exp_avg"].full_tensor(), state[number]["exp_avg"])


@on_ranks(1)
def test_a_budget_that_cannot_be_met_is_named(here: Here) -> None:
    torch.manual_seed(1)
    for pool, text in (
        (PoolConfig(device_budget=150_000, optimizer_on="device"), r"device tier: 2 slots .*Raise pool\.device_budget"),
        (PoolConfig(device_budget=BUDGET[1], host_budget="16KiB"), r"no room for block .*Raise pool\.host_budget, or"),
    ):
        module = module_class("lightning")(Gpt(6), "adamw")
        trainer = make_trainer(1, strategy=MemwallStrategy(pool=pool), max_epochs=1)
        with pytest.raises(ConfigError, match=text):
            trainer.fit(module, make_loader("gpt", 8, 2, rank=0, world=1))


@on_ranks(2, "lanes", "engine")
def test_steps_inside_the_backward_are_the_ordinary_ones(here: Here) -> None:
    """The same losses to the last bit, paged or not, with fewer gradients alive; one step a batch, counted."""
    losses, peaks, grads = {}, {}, {}
    for early in (False, True):
        for where in ("device", "host"):
            torch.manual_seed(1)
            module = module_class("lightning")(Gpt(6), "adamw")
            overlap = OverlapConfig(optimizer_in_backward=early, lanes=here.case == "lanes")
            pool = PoolConfig(device_budget=BUDGET[2]) if where == "host" else PoolConfig()
            strategy = MemwallStrategy(pool=pool, overlap=overlap, timeout_s=60.0)
            trainer = make_trainer(2, strategy=strategy, max_epochs=2)
            trainer.fit(module, make_loader("gpt", 32, 2, rank=here.rank, world=2))
            losses[early, where] = module.losses
            runtime = trainer.strategy.runtime
            peaks[early, where] = runtime.metrics()["memwall/pool/device_peak_bytes"]
            grads[early] = max(kinds["grad"] for kinds in runtime.kind_peaks.values())
            assert runtime.steps == trainer.global_step == 16
            counts = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
            assert counts == {16.0}
            assert all(p.grad is None for p in module.parameters()) == early
    assert len(set(map(tuple, losses.values()))) == 1
    assert peaks[True, "device"] < peaks[False, "device"] and grads[True] < grads[False], (peaks, grads)


@on_ranks(2)
def test_early_steps_with_accumulation_are_one_step_each(here: Here) -> None:
    """Case 15: k micro-batches and one step."""
    losses = []
    for early in (False, True):
        torch.manual_seed(1)
        module = module_class("lightning")(Gpt(6), "adamw")
        strategy = MemwallStrategy(overlap=OverlapConfig(optimizer_in_backward=early), timeout_s=60.0)
        trainer = make_trainer(2, strategy=strategy, max_epochs=2, accumulate_grad_batches=4)
        trainer.fit(module, make_loader("gpt", 32, 2, rank=here.rank, world=2))
        losses.append(module.losses)
        assert {float(state["step"]) for state in trainer.optimizers[0].state.values()} == {4.0}
    assert losses[0] == losses[1]


@on_ranks(1, "clip", "hook", "callback", "manual", "scaler")
def test_what_looks_at_all_gradients_is_refused_beside_early_steps(here: Here) -> None:
    """Case 16: by name, with what to change."""

    class Hooked(module_class("lightning")):
        def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    class Looks(Callback):
        def on_before_optimizer_step(self, *_: Any) -> None: ...

    kind = Hooked if here.case == "hook" else module_class("lightning")
    module = kind(Gpt(2), "adamw")
    module.automatic_optimization = here.case != "manual"
    options = {
        "clip": {"gradient_clip_val": 0.5}, "callback": {"callbacks": [Looks()]}, "scaler": {"precision": "16-mixed"},
    }.get(here.case, {})  # fmt: skip
    strategy = MemwallStrategy(overlap=OverlapConfig(optimizer_in_backward=True))
    text = {"clip": "gradient_clip_val", "hook": "hook of Hooked", "callback": "hook of Looks",
            "manual": "manual optimization", "scaler": "16-mixed"}[here.case]  # fmt: skip
    with pytest.raises(ConfigError, match=rf"optimizer_in_backward=true and .*{text}.* cannot go together"):
        trainer = make_trainer(1, strategy=strategy, max_epochs=1, **options)
        trainer.fit(module, make_loader("gpt", 8, 2, rank=0, world=1))
