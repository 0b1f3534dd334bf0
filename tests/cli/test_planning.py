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


# -- gathered weights that stay --


def test_retained_weights_are_in_the_plan_and_out_of_the_states_room() -> None:
    free, _ = plan_of("pool.retain=none", base=SMALL[:1])
    every, _ = plan_of("pool.retain=all", base=SMALL[:1])
    whole = sum(every.retained.values())
    assert free.retained is None and len(every.retained) == 5
    assert every.kind_peaks["forward"]["gathered"] == every.kind_peaks["backward"]["gathered"] == whole
    assert every.peak_bytes > free.peak_bytes and "5 of 5 units stay gathered" in every.table()
    tight = ("pool.optimizer_on=device", "pool.activations=recompute", "pool.device_budget=60MiB")
    less, more = (plan_of(f"pool.retain={how}", *tight, base=SMALL[:1])[0] for how in ("all", "none"))
    assert less.fits and more.fits and less.placed["host"] > 0 and more.placed is None
    with pytest.raises(ConfigError, match=r"pool\.retain='all' keeps 12\.\d MiB of gathered weights; device tier"):
        plan_of("pool.retain=all", "pool.device_budget=33MiB", "pool.optimizer_on=device", base=SMALL[:1])


def test_what_the_budget_leaves_is_retained_the_last_units_first() -> None:
    found = []
    for budget in ("104MiB", "108MiB", "112MiB", "1GiB"):
        made, _ = plan_of(f"pool.device_budget={budget}", base=SMALL[:1])
        found.append([name for name in made.retained or () if name != "root"])
        assert made.fits and made.peak_bytes <= made.limit_bytes
        same, _ = plan_of(f"pool.device_budget={budget}", "pool.retain=none", base=SMALL[:1])
        assert made.resident == same.resident and made.peak_bytes >= same.peak_bytes
    assert [len(names) for names in found] == [0, 1, 2, 4]
    assert found[1] == ["model.blocks.3"] and found[2] == ["model.blocks.2", "model.blocks.3"]
    without, _ = plan_of(base=SMALL[:1])
    assert without.retained is None, "no budget, no room to speak of"


def test_when_nothing_else_is_left_retained_weights_give_way() -> None:
    made, _ = plan_of("pool.retain=all", "pool.device_budget=50MiB", "data.seq_len=512", base=SMALL[:1])
    assert list(made.reliefs) == ["optimizer state", "recompute", "gathered weights"]
    assert 0 < len(made.retained or ()) < 5 and made.fits == (made.peak_bytes <= made.limit_bytes)


# -- arithmetic on the host --


def test_the_plan_says_what_the_optimizer_takes_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 11."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    on = {cores: plan_of("trainer.devices=2", f"hardware.host_cores={cores}")[0] for cores in (0.5, 2, 8)}
    seconds = {cores: made.host.seconds for cores, made in on.items()}
    assert seconds[2] == pytest.approx(seconds[8] * 4) and seconds[0.5] == pytest.approx(seconds[2] * 4)
    assert "s on 4 of the machine's 8 cores (2 ranks share them)" in on[8].table() and '"host"' in on[8].to_json()
    elements = on[2].host.elements
    assert elements == pytest.approx(on[2].parameters / 2, rel=0.01) and on[2].host.kernel == "fused"
    slow, _ = plan_of("trainer.devices=2", "hardware.host_cores=2", "optimizer.fused=false")
    assert slow.host.kernel == "loop" and slow.host.seconds > seconds[2]
    monkeypatch.setattr("memwall_strategy.cli.host.machine_cores", lambda: 1.5)
    here, _ = plan_of("trainer.devices=2")
    assert here.host.cores == 0.75 and here.host.machine_cores == 1.5, "the quota of this machine"
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    assert plan_of("trainer.devices=1")[0].host.cores == 1


CARD = ("hardware=a100_80g", "pool.activations=recompute", "pool.host_budget=16GiB", "trainer.devices=2")


def plan_on_card(*overrides: str) -> Plan:
    settings = check(compose_run([*SMALL[:1], *CARD, *overrides]))
    module, tried = build_module(settings)
    return plan_run(settings, module, tried, world=2, device=torch.device("cuda"))


def test_units_step_on_the_host_where_that_is_cheaper() -> None:
    """CASES 11: with few cores the state travels, with many the arithmetic stays with it."""
    tight = ("pool.device_budget=33MiB", "trainer.precision=bf16-true", "pool.master=float32")
    few, many = (plan_on_card(*tight, f"hardware.host_cores={cores}") for cores in (2, 128))
    assert few.host is None and few.placed["host"] > 0 and few.resident["staging"] > many.resident["staging"]
    assert many.host.elements > 0 and many.host.kernel == "fused" and many.host.cores == 64
    forced = plan_on_card(*tight, "hardware.host_cores=2", "pool.optimizer_on=host")
    assert forced.resident == many.resident and forced.host.seconds > 2 * many.host.seconds
    unknown = plan_on_card(*tight, "hardware.host_cores=null", "pool.optimizer_on=host")
    assert unknown.host.seconds is None and "set hardware.host_cores" in unknown.table()
    assert plan_on_card("pool.device_budget=1GiB").host is None
    assert plan_on_card(*tight, "pool.optimizer_on=device").host is None
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
