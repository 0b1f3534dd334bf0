"""Steps that are short under the Trainer on two ranks: what gives way changes no loss by a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Kind, Phase, Tier
from memwall_strategy.core.errors import PoolFull
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import Gpt, make_loader, make_trainer, module_class


def fit(
    here: Here, *, early: bool = False, accumulate: int = 2, ckpt: Path | None = None, save: Path | None = None,
    **pool: Any,
) -> Any:  # fmt: skip
    """Train 8 steps; returns the module, the runtime and what was told."""
    torch.manual_seed(1)
    module = module_class("lightning")(Gpt(6), "adamw")
    pool = {"optimizer_on": "device", **pool}  # where state steps at home, no slots are needed
    strategy = MemwallStrategy(
        pool=PoolConfig(**pool), overlap=OverlapConfig(optimizer_in_backward=early), timeout_s=60.0
    )
    told: list[Any] = []
    strategy.events.subscribe(told.append)
    trainer = make_trainer(2, strategy=strategy, accumulate_grad_batches=accumulate)

    module.peaks = []

    def after(*_: Any) -> None:
        module.peaks.append(strategy.runtime.metrics().get("memwall/pool/device_peak_bytes", 0))
        table = strategy.runtime.pool.table
        table.check()
        module.tiers = {p.tier for block, p in table if block.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)}
        if save is not None and trainer.global_step == 5 and not save.exists():
            trainer.save_checkpoint(save)

    module.on_train_batch_end = after
    loader = make_loader("gpt", 4 * 2 * accumulate * 8, 4, rank=here.rank, world=2)
    trainer.fit(module, loader, ckpt_path=str(ckpt) if ckpt else None)
    return module, strategy.runtime, told


def reliefs(told: list[Any]) -> list[str]:
    return [event.fields["relief"] for event in told if event.kind == "memory_relieved"]


@on_ranks(2, "host", "disk", "early")
def test_losses_while_things_give_way(here: Here) -> None:
    early = here.case == "early"
    options = {"early": early, "accumulate": 1 if early else 2}
    plain, runtime, _ = fit(here, deep_accounting=True, **options)
    most = int(max(plain.peaks))
    where = {"host_budget": "16MiB"}
    if here.case == "disk":
        where = {"host_budget": 0, "disk_budget": "16MiB", "disk_path": str(here.folder)}
    state = sum(runtime.kind_peaks[Phase.STEP].get(kind, 0) for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ))
    in_flight = 10_000  # how many units' buffers are alive at once depends on how fast the lanes are
    for missing, expected in ((state // 3, ["optimizer state"]), (state, ["optimizer state", "recompute"])):
        module, runtime, told = fit(here, device_budget=most - missing, **where, **options)
        assert module.losses == plain.losses, (here.case, missing)
        gave_way = list(dict.fromkeys(reliefs(told)))
        assert gave_way[: len(expected)] == expected, (missing, most, [(e.kind, e.fields) for e in told])
        assert Tier.DISK in module.tiers if here.case == "disk" else Tier.HOST in module.tiers
        last = [event.fields for event in told if event.kind == "relief_measured"][-1]
        assert last["after_bytes"] <= most - missing + in_flight


@on_ranks(2)
def test_saved_while_short_and_resumed_with_room_and_the_other_way(here: Here) -> None:
    plain, _, _ = fit(here, deep_accounting=True)
    budget = int(max(plain.peaks)) - 25_000
    short = {"device_budget": budget, "host_budget": "16MiB"}
    for number, (before, after) in enumerate(((short, {}), ({}, short))):
        at = here.folder / f"{number}.ckpt"
        whole, _, _ = fit(here, save=at, **before)
        rest, _, told = fit(here, ckpt=at, **after)
        assert whole.losses == plain.losses
        assert len(rest.losses) == 6 and rest.losses == plain.losses[-6:], (number, rest.losses, plain.losses)
        assert bool(reliefs(told)) == bool(after)


@on_ranks(2)
def test_too_small_a_budget_ends_on_both_ranks_with_one_error(here: Here) -> None:
    text = r"device budget exceeded in .*rank 1 held .* missing.*Or raise pool\.device_budget"
    with pytest.raises(PoolFull, match=text):
        fit(here, device_budget=["64MiB", 150_000], host_budget="16MiB", activations="keep", deep_accounting=True)
