"""Paged state in a plain loop: micro-batches and clipping, no new memory in the hot path, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memwall_strategy.config import MemwallConfig, PoolConfig
from memwall_strategy.core.block import Tier
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.pool import host, mapping, needed_device_bytes
from memwall_strategy.runtime import Runtime
from memwall_strategy.runtime.checkpoint import Checkpointer
from tests.ranks import process_group, run_ranks

WHERE = ("device", "host", "disk")
STEPS = 3


class Net(nn.Module):
    """Layers of an odd width."""

    def __init__(self, layers: int = 6, width: int = 37) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batch_of(number: int, width: int = 37) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(number))


def start(
    where: str, folder: str, world: int, *, accumulate: str = "sharded", gradients: str = "device", **sizes: int
) -> tuple[Runtime, Any]:
    """A runtime whose optimizer state rests there, all of it, and its optimizer."""
    budget = None if where == "device" else least_budget(world, accumulate, **sizes)
    pool = PoolConfig(
        device_budget=budget, host_budget=0 if where == "disk" else "64MiB", optimizer_on="device", activations="keep",
        disk_budget="256MiB" if where == "disk" else 0, disk_path=folder if where == "disk" else None,
        gradients=gradients,
    )  # fmt: skip
    return build(pool, world, accumulate, **sizes)


def build(pool: PoolConfig, world: int, accumulate: str, **sizes: int) -> tuple[Runtime, Any]:
    torch.manual_seed(1)
    config = MemwallConfig(pool=pool, accumulate=accumulate)
    runtime = Runtime(config, mesh=data_parallel_mesh("cpu", world, 1))
    runtime.setup(Net(**sizes))
    optimizer = torch.optim.AdamW(runtime.model.parameters(), lr=0.02)
    runtime.add_optimizers([optimizer])
    return runtime, optimizer


def least_budget(world: int, accumulate: str, **sizes: int) -> int:
    runtime, _ = build(PoolConfig(), world, accumulate, **sizes)
    budget = needed_device_bytes(runtime)
    runtime.close()
    return budget


def rests(runtime: Runtime) -> dict[str, int]:
    """Bytes of moments by tier."""
    table = runtime.pool.table
    return {str(t): sum(p.bytes for b, p in table if p.tier is t and b.kind.startswith("exp_avg")) for t in Tier}


# -- what two ranks do, and who resumes it --


def two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    with process_group():
        result = {
            f"{accumulate} {where}": clipped_micro_batches(where, folder, rank, accumulate)
            for accumulate in ("sharded", "whole")
            for where in WHERE
        }
        result["mapped"] = {where: mapped_after_two_steps(where, folder) for where in WHERE}
        result["saved"] = {where: save(where, folder) for where in WHERE}
        return result


def clipped_micro_batches(where: str, folder: str, rank: int, accumulate: str) -> list[float]:
    """Four samples of each batch a rank, one a micro-batch; clipped by norm, then by value."""
    runtime, optimizer = start(where, folder, 2, accumulate=accumulate)
    losses = []
    for number in range(STEPS):
        mine = batch_of(number)[rank::2].split(1)
        loss = runtime.step(
            mine, lambda x: loss_of(runtime.model, x), optimizer, clip_norm=0.2, clip_value=0.004
        )
        losses.append(loss.item())
    state = rests(runtime)
    assert (state[where] > 0) and sum(state.values()) == state[where], state
    whole = [p.full_tensor().sum().item() for p in runtime.model.parameters()]
    runtime.close()
    return [*losses, *whole]


def mapped_after_two_steps(where: str, folder: str) -> list[int]:
    """How many stretches of memory the pool mapped in the first two steps with set-up, and in those behind them."""
    made: list[int] = []
    plain = mapping.Mapping

    class Counted(plain):
        def __init__(self, nbytes: int, **options: Any) -> None:
            made.append(nbytes)
            super().__init__(nbytes, **options)

    host.Mapping = Counted
    try:
        runtime, optimizer = start(where, folder, 2)
        counts = []
        for number in range(6):
            runtime.step([batch_of(number)], lambda x: loss_of(runtime.model, x), optimizer)
            counts.append(len(made))
        runtime.close()
    finally:
        host.Mapping = plain
    return [counts[1], counts[-1] - counts[1]]


def save(where: str, folder: str) -> float:
    """Train, save, and say the next loss; every rank sees the same samples, so that no world size matters."""
    runtime, optimizer = start(where, folder, 2)
    for number in range(STEPS):
        runtime.step([batch_of(number)], lambda x: loss_of(runtime.model, x), optimizer)
    with Checkpointer(runtime.model, [optimizer]) as checkpointer:
        checkpointer.save(Path(folder) / f"from {where}", {}, STEPS)
    loss = next_losses(runtime, optimizer)
    runtime.close()
    return loss


def next_losses(runtime: Runtime, optimizer: Any) -> list[float]:
    return [
        runtime.step([batch_of(number)], lambda x: loss_of(runtime.model, x), optimizer).item()
        for number in range(STEPS, STEPS + 2)
    ]


def resume(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    """Load what two ranks saved, from each place into each."""
    found = {}
    with process_group():
        for source in WHERE:
            for target in WHERE:
                runtime, optimizer = start(target, folder, world)
                with Checkpointer(runtime.model, [optimizer]) as checkpointer:
                    checkpointer.load(Path(folder) / f"from {source}")
                found[f"{source} to {target}"] = next_losses(runtime, optimizer)
                assert rests(runtime)[target] > 0
                runtime.close()
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(two_ranks, 2, folder=str(folder))


def test_micro_batches_and_both_clippings_are_one_batch(two: tuple[Path, list[dict[str, Any]]]) -> None:
    """CASES 5 and 6: whatever the placement, as a plain loop over whole batches."""
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    expected: list[list[float]] = [[], []]
    for number in range(STEPS):
        x = batch_of(number)
        for rank in range(2):
            expected[rank].append(loss_of(net, x[rank::2]).item())
        optimizer.zero_grad()
        loss_of(net, x).backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.2) > 0.2
        assert max(p.grad.abs().max() for p in net.parameters()) > 0.004
        nn.utils.clip_grad_value_(net.parameters(), 0.004)
        optimizer.step()
    weights = [p.sum().item() for p in net.parameters()]
    for rank, result in enumerate(two[1]):
        for accumulate in ("sharded", "whole"):
            first = result[f"{accumulate} device"]
            assert first == result[f"{accumulate} host"] == result[f"{accumulate} disk"]
            assert first == pytest.approx([*expected[rank], *weights], rel=1e-5, abs=1e-5)


def test_nothing_is_mapped_after_the_second_step(two: tuple[Path, list[dict[str, Any]]]) -> None:
    """CASES 9, by the pool's own count; from outside: tests/lightning/test_pool_hot_path.py."""
    for result in two[1]:
        for where, (before, after) in result["mapped"].items():
            assert (before > 0) == (where != "device") and after == 0, (where, before, after)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_two_ranks_resume_as_any_number(two: tuple[Path, list[dict[str, Any]]], world: int) -> None:
    """CASES 22, paged or not, on both sides."""
    folder, results = two
    saved = results[0]["saved"]
    assert saved["device"] == saved["host"] == saved["disk"]
    for found in run_ranks(resume, world, folder=str(folder)):
        for path, (first, second) in found.items():
            assert first == saved["device"][0], path
            assert second == pytest.approx(saved["device"][1], rel=1e-6), path
