"""The least time of a step, against sums made by hand."""

from __future__ import annotations

import pytest
import torch

from memwall_strategy.engine.flops import FlopCount
from memwall_strategy.planner import (
    ClusterSpec,
    HardwareSpec,
    ModelSpec,
    ParameterSpec,
    UnitSpec,
    bound_step,
    gpt_flops,
)
from memwall_strategy.recipes.gpt.model import GPT
from memwall_strategy.recipes.gpt.options import GPTOptions

UNIT, ROOT = 1000, 300  # elements
MODEL = ModelSpec(
    units=tuple(UnitSpec(f"u{i}", (ParameterSpec(f"u{i}.w", (10, 100)),)) for i in range(3)),
    root=UnitSpec("root", (ParameterSpec("w", (3, 50)), ParameterSpec("frozen", (3, 50), trainable=False))),
)
HARDWARE = HardwareSpec("box", peak_flops=1e6, link_bytes_per_s=1e3, network_bytes_per_s=10.0, devices_per_machine=4)


def bounds(world: int, replicate: int = 1, precision: str = "32-true", accumulate: int = 1, how: str = "sharded"):
    cluster = ClusterSpec(world=world, replicate=replicate)
    return bound_step(
        HARDWARE, MODEL, cluster, precision=precision, flops=2e6, accumulate=accumulate, accumulate_how=how
    )


def test_gathers_and_reductions_in_each_precision() -> None:
    every, trained = 3 * 2 * UNIT + ROOT, 3 * UNIT + ROOT // 2
    assert bounds(4).received_bytes == 3 * (4 * every + 4 * trained) // 4
    assert bounds(4, precision="bf16-mixed").received_bytes == 3 * (2 * every + 4 * trained) // 4
    assert bounds(4, accumulate=3).received_bytes == 3 * bounds(4).received_bytes
    assert bounds(4, accumulate=3, how="whole").received_bytes == 3 * (3 * 4 * every + 4 * trained) // 4
    made = bounds(4)
    assert (made.compute_s, made.bytes_per_s) == (2.0, 1e3) and made.communication_s == made.received_bytes / 1e3


def test_what_leaves_the_machine_is_slow() -> None:
    assert bounds(8).bytes_per_s == 10.0
    replicated = bounds(8, replicate=2)  # shards of 4 inside a machine, sums across two
    across = 2 * 4 * (3 * UNIT + ROOT // 2) // (2 * 4)
    assert replicated.received_bytes == bounds(4).received_bytes + across
    assert replicated.communication_s == pytest.approx(bounds(4).received_bytes / 1e3 + across / 10)


def test_nothing_unknown_is_said() -> None:
    alone = bounds(1)
    assert (alone.received_bytes, alone.communication_s, alone.bytes_per_s) == (0, None, None)
    silent = bound_step(
        HardwareSpec("dark"), MODEL, ClusterSpec(world=2), precision="32-true", flops=1e6, accumulate=1,
        accumulate_how="sharded",
    )  # fmt: skip
    assert silent.compute_s is None and silent.communication_s is None
    assert silent.text() == "hardware dark: no rates are known"
    assert "at least compute 2 s" in alone.text() and "communication" not in alone.text()


def test_a_gpts_operations_are_those_that_torch_counts() -> None:
    options = GPTOptions(layers=2, heads=2, hidden=32, context=16)
    model = GPT(options)
    tokens = torch.randint(0, 257, (3, 16))
    with FlopCount() as count:
        model(tokens).sum().backward()
    made = gpt_flops(layers=2, hidden=32, vocabulary=257, mlp_ratio=4, sequence=16, samples=3)
    # The backward of fused attention computes the scores again, which is not counted as needed.
    assert made <= count.flops <= 1.1 * made
