"""``memwall-plan``: the plan of any experiment, without a card, a process or the model's memory."""

from __future__ import annotations

import json
import os

import pytest

from memwall_strategy.cli.compose import compose_run
from memwall_strategy.cli.job import build_module
from memwall_strategy.cli.plan import main, make_plan
from memwall_strategy.cli.settings import check
from memwall_strategy.core.errors import ConfigError

GIB = 2**30


@pytest.mark.parametrize(("experiment", "parameters"), [("gpt2_124m", 124_439_808), ("gpt_1b3", 1_315_723_264)])
def test_the_large_models_take_no_memory_to_plan(experiment: str, parameters: int) -> None:
    settings = check(compose_run([f"experiment={experiment}"]))
    module, _ = build_module(settings)
    assert all(p.is_meta for p in module.parameters())
    made = make_plan([f"experiment={experiment}", "hardware=h100_80g", "trainer.devices=8"])
    assert (made.parameters, made.world, made.limit_bytes) == (parameters, 8, 79 * GIB)
    assert made.fits and made.bounds.hardware == "h100_80g"


def test_what_the_hardware_changes_shows(capsys: pytest.CaptureFixture[str]) -> None:
    def bounds(*overrides: str) -> dict:
        with pytest.raises(SystemExit) as end:
            main(["experiment=gpt_1b3", "--json", *overrides])
        out = json.loads(capsys.readouterr().out)
        return {**out["bounds"], "limit": out["limit_bytes"], "code": end.value.code}

    a100, h200 = bounds(), bounds("hardware=h200")
    slow = bounds("hardware.link_bytes_per_s=1e9", "hardware.bf16_flops=1e12")
    spread = bounds("trainer.devices=8", "trainer.num_nodes=2")
    small = bounds("hardware.device_memory=8GiB")
    half = bounds("pool.device_budget=0.5")
    assert (a100["limit"], h200["limit"], half["limit"]) == (79 * GIB, 139 * GIB, 79 * GIB // 2)
    assert a100["code"] == 0 and small["code"] == 1, "what does not fit ends with 1"
    assert a100["compute_s"] == pytest.approx(a100["flops"] / 312e12)
    assert h200["compute_s"] == pytest.approx(a100["compute_s"] * 312 / 989)
    assert slow["communication_s"] == pytest.approx(slow["received_bytes"] / 1e9)
    assert slow["compute_s"] == pytest.approx(slow["flops"] / 1e12)
    assert spread["bytes_per_s"] == 25e9, "more ranks than a machine has cross the network"


def test_the_machines_memory_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    one, four = (make_plan(["experiment=gpt_nano", f"trainer.devices={n}"]) for n in (1, 4))
    assert four.limit_bytes == one.limit_bytes // 4
    assert "LOCAL_WORLD_SIZE" not in os.environ and one.bounds is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hardware.device=tpu", r"hardware\.device='tpu' is not one of cpu, cuda"),
        ("hardware.device_memory=0.5", r"hardware\.device_memory=0\.5 is a fraction"),
        ("hardware.device_memory=0", r"hardware\.device_memory=0 leaves no room"),
        ("hardware.bf16_flops=0", r"hardware\.bf16_flops=0\.0 must be above 0"),
        ("hardware.devices_per_machine=0", r"hardware\.devices_per_machine=0"),
        ("cluster.enabled=true", r"cluster\.enabled=true: dynamic clustering is not in this version"),
        ("topology.enabled=true", r"topology\.enabled=true: measurement of links"),
    ],
)
def test_hardware_that_cannot_be(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(["experiment=gpt_nano", override])
