"""Budgets held step by step: what gives way and comes back, with the losses of the free run to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from memwall_strategy.config import MemwallConfig, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import ConfigError, PoolFull
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.pool import escalation
from memwall_strategy.pool.activations import Mode
from memwall_strategy.runtime import Runtime
from memwall_strategy.telemetry.events import Event
from tests.lightning.checks import Here, on_ranks, rank_results
from tests.lightning.models import Gpt, loss_of, make_data, make_optimizer

__all__ = ["rank_results"]  # pytest finds the fixture here

LARGEST_BLOCK_BYTES = 3200
"""Of one moment of the model below on one rank (the widest matrix, 48 x 16 in float32, with alignment)."""


class Run:
    """A small model trained under a pool's options; samples of a step as ``sizes`` says."""

    def __init__(
        self, here: Here, sizes: Sequence[int], *, overlap: OverlapConfig | None = None, frozen: int = 0, **pool: Any
    ) -> None:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        torch.manual_seed(1)
        self.sizes, net = sizes, Gpt(6)
        net.blocks[:frozen].requires_grad_(False)
        pool = {"optimizer_on": "device", **pool}  # where state steps at home, no slots are needed
        config = MemwallConfig(pool=PoolConfig(**pool), overlap=overlap or OverlapConfig())
        self.runtime = Runtime(config, mesh=data_parallel_mesh("cpu", here.world, 1))
        self.events: list[Event] = []
        self.runtime.events.subscribe(self.events.append)
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.here = here
        try:
            self.runtime.setup(net)
            self.optimizer = make_optimizer(net.parameters(), "adamw")
            self.runtime.add_optimizers([self.optimizer])
        except BaseException:
            self.runtime.close()
            raise

    def go(self, after: Callable[[Run], None] | None = None) -> Run:
        inputs, labels = (each[self.here.rank :: self.here.world] for each in make_data("gpt", 400))
        try:
            for number, size in enumerate(self.sizes):
                at = slice(8 * (number % 16), 8 * (number % 16) + size)
                batch = inputs[at], labels[at]
                loss = self.runtime.step([batch], lambda b: loss_of(self.runtime.model, b), self.optimizer)
                self.losses.append(loss.item())
                self.peaks.append(int(self.runtime.metrics()["memwall/pool/device_peak_bytes"]))
                self.runtime.pool.table.check()
                if after is not None:
                    after(self)
            self.rest = {tier: self.state_bytes(tier) for tier in Tier}
        finally:
            self.runtime.close()
        assert type(self.optimizer) is torch.optim.AdamW and len(self.runtime.pool.table) == 0
        return self

    def state_bytes(self, tier: Tier) -> int:
        table = self.runtime.pool.table
        return sum(p.bytes for b, p in table if p.tier is tier and b.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ))

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.events if event.kind == kind]


@on_ranks(1)
def test_every_budget_is_honoured_and_used_to_within_a_block(here: Here) -> None:
    """Cases 1 and 8: state that stays is monotone in the budget; the loss is that of the free run."""
    sizes = [4] * 6
    free = Run(here, sizes, deep_accounting=True).go()
    whole = max(free.peaks)
    kept = []
    for budget in (*range(220_000, whole - 4_000, 20_000), whole + 60_000):
        run = Run(here, sizes, device_budget=budget, host_budget="16MiB").go()
        assert run.losses == free.losses, budget
        kept.append(run.rest[Tier.DEVICE])
        eased = [fields["relief"] for fields in run.told("memory_relieved")]
        if "recompute" not in eased:  # state alone gave way
            assert max(run.peaks[-3:]) <= budget, (budget, run.peaks)
            if eased:
                highest = run.told("relief_measured")[-1]["after_bytes"]
                # A block more would widen both slots by as much, where it is of the widest unit.
                assert budget - highest < 3 * LARGEST_BLOCK_BYTES, (budget, highest)
    assert kept == sorted(kept) and len(set(kept)) > 4, kept
    assert kept[0] == 0 and kept[-1] == free.rest[Tier.DEVICE]


@on_ranks(1)
def test_what_gave_way_comes_back_in_the_opposite_order(here: Here) -> None:
    """Long batches, then short ones, then long ones again."""
    sizes = [8] * 5 + [1] * 40 + [8] * 8
    at = escalation.EVERY_STEPS  # where a run without shortage measures
    free = Run(here, sizes).go()
    states: list[tuple[int, bool, int]] = []

    def look(run: Run) -> None:
        pool = run.runtime.pool
        modes = list(pool.activations.wanted_modes.values())
        states.append((modes.count(Mode.KEEP), run.state_bytes(Tier.HOST) > 0, pool.reserve.free_bytes))
        booked = {b.kind: p.bytes for b, p in pool.table if b.kind in (Kind.RESERVE, Kind.LENT)}
        assert booked.get(Kind.RESERVE, 0) + booked.get(Kind.LENT, 0) == 10_000

    run = Run(here, sizes, device_budget=340_000, reserve=10_000, host_budget="16MiB").go(look)
    assert run.losses == free.losses
    relieved = [fields["relief"] for fields in run.told("memory_relieved")]
    restored = [fields["relief"] for fields in run.told("memory_restored")]
    order = [escalation.PLACES.index(name) for name in dict.fromkeys(relieved)]
    assert order == sorted(order) == [0, 1, 2], relieved
    first = next(n for n, event in enumerate(run.events) if event.kind == "memory_restored")
    before = [e.fields["relief"] for e in run.events[:first] if e.kind == "memory_relieved"]
    assert restored[: len(before)] == list(reversed(before)), (relieved, restored)
    assert states[4][0] < 6 and states[4][1:] == (True, 0)
    assert states[at - 1] == (6, False, 10_000), "as at the start"
    assert states[at + 1][0] < 6 and states[at + 1][1:] == (True, 0)
    for fields in run.told("relief_measured"):
        assert fields["after_bytes"] < fields["before_bytes"] or "optimizer state" in fields["reliefs"]


@on_ranks(1)
def test_a_return_that_was_too_soon_waits_longer_the_next_time(here: Here) -> None:
    sizes = ([8] * 2 + [1] * 8) * 5
    run = Run(here, sizes, device_budget=350_000, host_budget="16MiB").go()
    assert run.losses == Run(here, sizes).go().losses
    returns = len(run.told("memory_restored"))
    assert 0 < returns < 5, returns


@on_ranks(2)
def test_ranks_with_different_budgets(here: Here) -> None:
    """Each lands within its own; what gathers (recomputation) is the same on both; the losses are those of the free."""
    sizes = [6] * 7
    free = Run(here, sizes, deep_accounting=True).go()
    whole = max(free.peaks)
    budgets = [whole + 50_000, whole - 30_000]
    modes = []
    run = Run(here, sizes, device_budget=budgets, host_budget=["1MiB", "16MiB"])
    run.go(lambda run: modes.append(dict(run.runtime.pool.activations.modes)))
    assert run.runtime.budget_bytes == budgets[here.rank]
    assert run.losses == free.losses
    paged = run.rest[Tier.HOST]
    assert (paged == 0) if here.rank == 0 else (paged > 0)
    assert run.peaks[-1] <= budgets[here.rank]
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, [{k: str(v) for k, v in each.items()} for each in modes])
    assert gathered[0] == gathered[1]

    tight = Run(here, sizes, device_budget=[whole + 50_000, 165_000], host_budget="16MiB")
    tight.go()
    assert tight.losses == free.losses
    assert ("recompute" in [f["relief"] for f in tight.told("memory_relieved")]) and tight.peaks[-1] <= 165_000


@on_ranks(2)
def test_nothing_left_is_one_error_on_every_rank_at_the_same_step(here: Here) -> None:
    run = Run(here, [8] * 12, device_budget=["64MiB", 150_000], host_budget="16MiB")
    text = r"device budget exceeded in \w+: rank 1 held .* bytes\) are missing\..*Gave way"
    with pytest.raises(PoolFull, match=text) as e:
        run.go()
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, (run.runtime.steps, str(e.value), e.value.owner, e.value.missing_bytes))
    assert found[0] == found[1] and found[0][2] == 1 and found[0][3] > 0
    assert "Or raise pool.device_budget" in str(e.value) and len(str(e.value).splitlines()) == 1


@on_ranks(2)
def test_a_list_that_cannot_be_is_refused_on_every_rank(here: Here) -> None:
    for budgets, text in (
        ([1, 2, 3], r"pool\.device_budget=\[1, 2, 3\] has 3 entries for 2 ranks"),
        (["64MiB", "900TiB"], r"rank 1: pool\.device_budget\[1\]=.* above the .* that are there"),
        (["64MiB", "100KiB"], r"rank 1: device tier: 2 slots .* are missing"),
    ):
        with pytest.raises(ConfigError, match=text):
            Run(here, [4], device_budget=budgets, host_budget="16MiB")
    with pytest.raises(ConfigError, match=r"rank 0: host tier: no room for block .*Raise pool\.host_budget"):
        Run(here, [4], device_budget=[144_000, "64MiB"], host_budget=["4KiB", "16MiB"])
    Run(here, [4], device_budget="64MiB").go()


@on_ranks(2)
def test_escalation_that_somebody_asks_for(here: Here) -> None:
    """As after an allocation that failed on one rank: the same number of bytes on both, until nothing is left."""
    sizes = [4] * 8
    free = Run(here, sizes).go()
    freed: list[int] = []

    def ask(run: Run) -> None:
        if run.runtime.steps in (2, 3):
            freed.append(run.runtime.pool.escalate(60_000 if here.rank else 0))
        if run.runtime.steps == 4:
            while run.runtime.pool.escalate(10**9):
                assert run.runtime.pool.escalation.eased
            assert run.runtime.pool.escalate(0) == 0

    run = Run(here, sizes, device_budget="64MiB", host_budget="16MiB").go(ask)
    assert run.losses == free.losses
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, freed)
    assert both[0] == both[1] and 0 < both[0][0] <= 60_000
    assert run.rest[Tier.DEVICE] == 0 and run.rest[Tier.HOST] > 0


@on_ranks(1)
def test_units_that_the_user_chose_stay_as_they_are(here: Here) -> None:
    seen = []

    def choose(run: Run) -> None:
        pool = run.runtime.pool
        if run.runtime.steps == 1:
            pool.set_activations({"blocks.0": "keep", "blocks.1": "offload"})
        seen.append(dict(pool.activations.wanted_modes))

    sizes = [8] * 6
    run = Run(here, sizes, device_budget=215_000, host_budget="16MiB")
    with pytest.raises(PoolFull):
        run.go(choose)
    assert len(seen) > 2 and all((s["blocks.0"], s["blocks.1"]) == ("keep", "offload") for s in seen[1:])
    assert seen[-1]["blocks.2"] != "keep"


@on_ranks(1, "no budget", "offloading", "disk")
def test_everything_gives_way_at_once(here: Here) -> None:
    """Without a budget, with activations on the host before any state is, and down to the disk."""
    sizes = [4] * 6
    free = Run(here, sizes).go()
    pool: dict[str, Any] = {"host_budget": "16MiB"}
    if here.case == "disk":
        pool = {"host_budget": "30KiB", "disk_budget": "8MiB", "disk_path": str(here.folder)}

    def ask(run: Run) -> None:
        if run.runtime.steps == 1 and here.case == "offloading":
            run.runtime.pool.set_activations({"blocks.0": "offload"})
        if run.runtime.steps == 3:
            assert run.runtime.pool.escalate(10**9) > 0

    run = Run(here, sizes, **pool).go(ask)
    assert run.losses == free.losses
    assert run.rest[Tier.DEVICE] == 0 and (run.rest[Tier.DISK] > 0) == (here.case == "disk")
    assert [fields["relief"] for fields in run.told("memory_relieved")][:2] == ["optimizer state", "recompute"]


@on_ranks(1)
def test_several_optimizers_share_the_room(here: Here) -> None:
    losses = []
    for pool in ({}, {"device_budget": 265_000, "host_budget": "16MiB"}):
        run = Run(here, [4] * 5, **pool)
        parameters = list(run.runtime.model.parameters())
        both = [make_optimizer(parameters[0::2], "adamw"), make_optimizer(parameters[1::2], "sgd")]
        run.runtime.add_optimizers(both)
        run.optimizer.step = lambda both=both: [each.step() for each in both]
        run.go()
        losses.append(run.losses)
        if pool:
            assert "optimizer state" in [fields["relief"] for fields in run.told("memory_relieved")]
            assert [type(each) for each in both] == [torch.optim.AdamW, torch.optim.SGD]
    assert losses[0] == losses[1]


def test_the_order_is_the_designs() -> None:
    assert escalation.PLACES == (
        "reserve", "optimizer state", "recompute", "offload", "gathered weights", "second buffers", "micro-batch",
    )  # fmt: skip
