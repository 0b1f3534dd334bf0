"""CASES 7: training with state on disk, killed in the middle of a step and rerun: nothing is left, nothing grows."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn

from memwall_strategy.config import MemwallConfig, PoolConfig
from memwall_strategy.core.block import Tier
from tests.pool.test_killed import SLACK_BYTES, shared_memory
from tests.ranks import process_group, run_ranks

RUNS = 3
WIDTH = 501
LAYERS = 6
FILE_BYTES = 2 * 4 * LAYERS * WIDTH * WIDTH
"""Two moments of every matrix, of all ranks."""


def train(rank: int, world: int, folder: str, seed: int | None) -> int:
    """Train; where there is a seed, until this process is killed at some instant after the first step."""
    from memwall_strategy.engine.sharding import data_parallel_mesh
    from memwall_strategy.pool import needed_device_bytes
    from memwall_strategy.runtime import Runtime

    def make(budget: int | None, disk: int) -> tuple[Runtime, torch.optim.Optimizer]:
        torch.manual_seed(1)
        pool = PoolConfig(
            device_budget=budget, host_budget=0 if disk else "64MiB", disk_budget=disk, activations="keep",
            disk_path=str(Path(folder, "pool")) if disk else None,
        )  # fmt: skip
        runtime = Runtime(MemwallConfig(pool=pool, timeout_s=20.0), mesh=data_parallel_mesh("cpu", world, 1))
        model = runtime.setup(Stack())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        runtime.add_optimizers([optimizer])
        return runtime, optimizer

    with process_group():
        runtime, _ = make(None, 0)
        least = needed_device_bytes(runtime)
        runtime.close()
        runtime, optimizer = make(least + (64 << 10), 64 << 20)
        assert runtime.pool.table.used_bytes(Tier.DISK) > 0.8 * FILE_BYTES / world
        for number in range(3 if seed is None else 1_000):
            if number == 1 and seed is not None:
                Path(folder, f"free {rank}").write_text(str(free_bytes(Path(folder))))
                delay_s = random.Random(seed + rank).uniform(0.0, 0.15)
                threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
            try:
                runtime.step([x], lambda x: runtime.model(x).square().mean(), optimizer)
            except Exception:
                if seed is None:
                    raise
                time.sleep(30)  # the other was killed first; this one's turn comes
        runtime.close()
    return number


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bfree * found.f_frsize


def test_killed_in_the_middle_of_training_and_rerun(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    before, shared = free_bytes(tmp_path), shared_memory()
    for seed in range(RUNS):
        run_ranks(train, 2, folder=str(tmp_path), seed=seed, expect_exit={0: -9, 1: -9})
        assert list((tmp_path / "pool").iterdir()) == []
        while_training = min(int((tmp_path / f"free {rank}").read_text()) for rank in range(2))
        assert before - while_training > FILE_BYTES - SLACK_BYTES, "the files were there, and had their room"
    assert run_ranks(train, 2, folder=str(tmp_path), seed=None) == [2, 2]
    assert list((tmp_path / "pool").iterdir()) == [] and shared_memory() <= shared
    deadline = time.monotonic() + 20  # the kernel may free the blocks of a deleted file a moment later
    while before - free_bytes(tmp_path) >= SLACK_BYTES and time.monotonic() < deadline:
        time.sleep(0.2)
    assert before - free_bytes(tmp_path) < SLACK_BYTES
