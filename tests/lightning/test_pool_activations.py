"""Activations offloaded and recomputed under the Trainer on two ranks: the losses of the plain run, to the last bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Kind, Phase, Tier
from memwall_strategy.core.errors import PoolFull
from memwall_strategy.pool import sqrt_plan
from memwall_strategy.pool.activations import Mode
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import Gpt, make_loader, make_trainer, module_class
from tests.lightning.test_pool import BUDGET


def net_with_dropout() -> Gpt:
    torch.manual_seed(1)
    net = Gpt(6)
    for block in net.blocks:
        block.mlp.append(nn.Dropout(0.1))
    return net


def fit(
    here: Here, choose: Any = None, *, precision: str = "32-true", prefetch: int = 1, inside: bool = False, **pool: Any
) -> Any:
    """Train 8 steps of two micro-batches, with validation half way; ``choose(pillar, step)`` before each step.

    Returns:
        The module's losses, the final weights, and the metrics and peaks of the run.
    """
    module = module_class("lightning")(net_with_dropout(), "adamw")
    options = {"host_budget": "16MiB", "deep_accounting": True} | pool
    strategy = MemwallStrategy(
        pool=PoolConfig(**options),
        overlap=OverlapConfig(prefetch=prefetch, optimizer_in_backward=inside),
        timeout_s=60.0,
    )
    trainer = make_trainer(
        2, strategy=strategy, precision=precision, accumulate_grad_batches=2, max_epochs=1,
        gradient_clip_val=None if inside else 0.4,
        val_check_interval=8,
    )  # fmt: skip
    steps = []

    def before(*_: Any) -> None:
        pillar = strategy.runtime.pool
        pillar.table.check()
        if trainer.global_step not in steps:
            steps.append(trainer.global_step)
            if choose is not None:
                choose(pillar, trainer.global_step)

    module.on_train_batch_start = before
    torch.manual_seed(10 + here.rank)  # dropout differs between ranks
    loader = functools.partial(make_loader, "gpt", rank=here.rank, world=2)
    trainer.fit(module, loader(8 * 2 * 4, 2), loader(8, 2, seed=3))
    runtime = strategy.runtime
    weights = [p.full_tensor().detach().clone() for p in module.parameters()]
    assert all("forward" not in vars(block) for block in module.net.blocks) and len(runtime.pool.table) == 0
    return module.losses, weights, runtime.metrics(), runtime.kind_peaks[Phase.BACKWARD].get(Kind.ACTIVATION, 0)


def names(pillar: Any) -> tuple[str, ...]:
    return pillar.activations.units


def changing(pillar: Any, step: int) -> None:
    """Every step another mix; segments too."""
    units, modes = names(pillar), list(Mode)
    if step % 3 == 2:
        pillar.set_activations({units[0]: "offload"}, together=[units[1:3], units[3:]])
    else:
        pillar.set_activations({name: modes[(i + step) % 4].value for i, name in enumerate(units)})


@on_ranks(2)
def test_every_mode_is_bit_equal(here: Here) -> None:
    wanted = fit(here)
    assert len(wanted[0]) == 16
    together = lambda pillar, step: step or pillar.set_activations(together=sqrt_plan(names(pillar)))  # noqa: E731
    runs = {
        "offload": lambda: fit(here, activations="offload"),
        "recompute": lambda: fit(here, activations="recompute"),
        "selective": lambda: fit(here, activations="selective"),
        "together": lambda: fit(here, together),
        "changing": lambda: fit(here, changing),
        "far ahead": lambda: fit(here, changing, prefetch=3),
    }
    for name, run in runs.items():
        losses, weights, metrics, peak = run()
        assert losses == wanted[0], name
        assert all(torch.equal(a, b) for a, b in zip(weights, wanted[1], strict=True)), name
        if name in ("recompute", "together", "offload"):
            assert peak < 0.7 * wanted[3], (name, peak, wanted[3])
        if name in ("recompute", "selective", "together"):
            assert metrics["memwall/pool/recomputed_units"] == 2 * 6
        if name == "offload":
            assert metrics["memwall/pool/offloaded_bytes"] > 0


@on_ranks(2)
def test_with_low_precision_and_paged_state(here: Here) -> None:
    """Steps inside the backward; and the optimizer's state on the host too: both share the lanes and the host tier."""
    assert fit(here, changing, inside=True)[0] == fit(here, inside=True)[0]  # steps inside the backward
    wanted = fit(here, precision="bf16-mixed")
    assert fit(here, changing, precision="bf16-mixed")[0] == wanted[0]
    wanted = fit(here)
    tiers: set[Tier] = set()

    def choose(pillar: Any, step: int) -> None:
        tiers.update(placement.tier for block, placement in pillar.table if block.kind.startswith("exp_avg"))
        changing(pillar, step)

    found = fit(here, choose, device_budget=BUDGET[2] + 20_000, deep_accounting=False)
    assert Tier.HOST in tiers
    assert found[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


@on_ranks(2)
def test_a_full_host_ends_on_every_rank(here: Here) -> None:
    with pytest.raises(PoolFull, match=r"do not fit on the host.*Raise pool\.host_budget"):
        fit(here, activations="offload", host_budget="8KiB")


@on_ranks(2)
def test_units_of_a_model_that_came_sharded(here: Here) -> None:
    losses = []
    for choose in (None, changing, lambda pillar, _: pillar.set_activations(together=sqrt_plan(names(pillar)))):
        module = OwnSharding(net_with_dropout(), "adamw")
        strategy = MemwallStrategy(pool=PoolConfig(host_budget="16MiB"), timeout_s=60.0)
        trainer = make_trainer(2, strategy=strategy)

        def before(*_: Any, choose: Any = choose, strategy: Any = strategy, trainer: Any = trainer) -> None:
            assert len(names(strategy.runtime.pool)) == 6
            if choose is not None:
                choose(strategy.runtime.pool, trainer.global_step)

        module.on_train_batch_start = before
        torch.manual_seed(10 + here.rank)
        trainer.fit(module, make_loader("gpt", 2 * 2 * 4, 2, rank=here.rank, world=2))
        losses.append(module.losses)
    assert losses[0] == losses[1] == losses[2]


class OwnSharding(module_class("lightning")):
    """Shards its blocks and the net itself."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
