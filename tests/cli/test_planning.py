"""What is found with torch, but before any process starts: the plan, the budget, options of optimizer and schedule."""

from __future__ import annotations

import pytest
import torch

from memwall_strategy.cli.compose import compose_run
from memwall_strategy.cli.job import build_module
from memwall_strategy.cli.planning import plan_run
from memwall_strategy.cli.settings import check
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import Plan
from memwall_strategy.recipes.gpt.module import GPTModule

SMALL = ("experiment=gpt_nano", "model.layers=2", "model.hidden=32", "model.heads=2", "data.seq_len=16")


def plan_of(*overrides: str, base: tuple[str, ...] = SMALL) -> tuple[Plan, GPTModule]:
    settings = check(compose_run([*base, *overrides]))
    module, tried = build_module(settings)
    return plan_run(settings, module, tried, world=2, device=torch.device("cpu")), module


def test_the_plan_is_of_the_model_as_it_will_be_sharded() -> None:
    made, module = plan_of()
    assert made.parameters == sum(p.numel() for p in module.parameters())
    assert (made.world, made.units, made.micro_batch, made.activations) == (2, 3, 4, "estimated")
    # Two ranks halve what is even; the 257 rows of the table are padded to 258.
    assert made.resident["param"] == 4 * (made.parameters + 32) // 2
    assert made.resident["exp_avg"] >= 4 * made.parameters // 2 - 64


def test_an_optimizer_without_state_plans_none() -> None:
    made, _ = plan_of("optimizer=sgd")
    assert not made.resident.get("exp_avg") and made.resident["grad"] > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pool.device_budget=100KiB", r"device tier: 2 slots for the optimizer state .* Raise pool\.device_budget"),
        ("pool.device_budget=900TiB", r"pool\.device_budget=.* is above"),
        ("strategy.unit_classes=[Blok]", r"Blok.*Did you mean 'Block'"),
        ("+optimizer.foo=1", r"optimizer: torch\.optim\.AdamW refuses its options: .*'foo'"),
        ("optimizer.lr=-1", r"optimizer: torch\.optim\.AdamW refuses its options: Invalid learning rate"),
        ("+scheduler.x=1", r"scheduler: .*cosine refuses its options: .*'x'"),
        ("model._target_=torch.no_such_thing", r"model: torch\.no_such_thing cannot be built"),
    ],
)
def test_refused_before_any_process(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(override)


def test_paged_state_leaves_the_device() -> None:
    """What the plan says of tiers and slots is what the pool does with the same budget (tests/lightning/test_pool)."""
    whole, _ = plan_of(base=SMALL[:1])
    there, _ = plan_of("pool.device_budget=40MiB", base=SMALL[:1])
    assert there.placed["host"] > 0 and there.resident["staging"] == 0  # stepped where it rests: no slots
    made, _ = plan_of("pool.device_budget=40MiB", "pool.optimizer_on=device", base=SMALL[:1])
    assert whole.placed is None and made.placed["host"] > 0 and made.placed["disk"] == 0
    moved = sum(whole.resident[kind] - made.resident[kind] for kind in ("exp_avg", "exp_avg_sq"))
    assert moved == made.placed["host"]
    assert made.resident["staging"] > 0 and "optimizer state paged" in made.table()


def test_second_buffers_that_have_no_room_are_planned_away() -> None:
    """As ``pool.buffer_relief`` does (tests/runtime/test_second_buffers): the fewest where nothing else fits."""
    roomy, _ = plan_of("pool.device_budget=4MiB")
    assert roomy.buffers is None and roomy.reliefs is None
    some, _ = plan_of("pool.device_budget=390KiB")
    fewest, _ = plan_of("pool.device_budget=370KiB")
    assert (some.buffers.prefetch, some.buffers.reduce_buffers, some.buffers.early) == (1, 1, True)
    assert (fewest.buffers.prefetch, fewest.buffers.reduce_buffers, fewest.buffers.early) == (0, 1, False)
    for made in (some, fewest):
        assert made.fits and list(made.reliefs) == ["optimizer state", "recompute"]
        assert "fewer second buffers: prefetch" in made.table() and '"reduce_buffers": 1' in made.to_json()
