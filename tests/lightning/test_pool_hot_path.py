"""CASES 9: in steady training nothing is mapped on the host, as the kernel and torch's allocator count it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Kind, Tier
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import Gpt, make_loader, make_trainer, module_class
from tests.pool.test_memory_stores import not_forked

STEPS = 10
SETTLED = 2
"""Steps after which nothing may be mapped any more."""

POOLS: dict[str, dict[str, Any]] = {
    "host": {"device_budget": 150_000, "optimizer_on": "device", "activations": "keep"},
    "stepped on host": {"device_budget": 150_000, "optimizer_on": "host", "activations": "keep"},
    "disk": {"device_budget": 150_000, "activations": "keep", "host_budget": 0, "disk_budget": "64MiB"},
    "gradients": {"device_budget": 150_000, "gradients": "host", "activations": "keep"},
    "activations": {"activations": "offload"},
    "everything": {
        "device_budget": 150_000, "optimizer_on": "device", "activations": "offload", "gradients": "host",
        "host_budget": "8MiB",
    },
}  # fmt: skip


class Pinned(TorchDispatchMode):
    """Counts allocations of pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += bool((kwargs or {}).get("pin_memory")) or "pin_memory" in str(func)
        return func(*args, **(kwargs or {}))


def shared_maps() -> list[tuple[str, int]]:
    """Mappings of files without a name and of shared memory: (name, bytes)."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) .*?((?:/memfd:|/dev/shm/).*)", line):
            found.append((match[3], int(match[2], 16) - int(match[1], 16)))
    return sorted(found)


def held() -> dict[str, Any]:
    """What this process has mapped and open, without what malloc turns over."""
    return {
        "pool": not_forked(),
        "shared": shared_maps(),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                              if os.path.exists(f"/proc/self/fd/{fd}")),
    }  # fmt: skip


@on_ranks(2, *POOLS)
def test_nothing_is_mapped_after_the_second_step(here: Here) -> None:
    torch.manual_seed(1)
    options = {"host_budget": "64MiB", **POOLS[here.case]}
    if "disk_budget" in options:
        options["disk_path"] = str(here.folder)
    module = module_class("lightning")(Gpt(6), "adamw")
    strategy = MemwallStrategy(pool=PoolConfig(**options), overlap=OverlapConfig(), timeout_s=60.0)
    trainer = make_trainer(2, strategy=strategy, accumulate_grad_batches=2, max_steps=STEPS)
    seen: list[dict[str, Any]] = []
    used: list[set[str]] = []

    def look(*_: Any) -> None:
        if trainer.global_step > len(seen):
            seen.append(held())
            table = trainer.strategy.runtime.pool.table
            used.append({f"{b.kind} on {p.tier}" for b, p in table if p.tier is not Tier.DEVICE})

    module.on_train_batch_end = look
    with Pinned() as pinned:
        trainer.fit(module, make_loader("gpt", 8 * 2 * STEPS, 2, rank=here.rank, world=2))
    assert len(seen) == STEPS and pinned.count == 0
    for number, now in enumerate(seen[SETTLED:], start=SETTLED + 1):
        assert now == seen[SETTLED - 1], (number, {k: (v, seen[1][k]) for k, v in now.items() if v != seen[1][k]})
    metrics = trainer.strategy.runtime.metrics()
    if here.case in ("host", "stepped on host", "disk", "everything"):
        assert f"exp_avg on {'disk' if here.case == 'disk' else 'host'}" in used[-1], used[-1]
    if here.case in ("gradients", "everything"):
        assert f"{Kind.GRAD} on host" in used[-1]
    if here.case in ("activations", "everything"):
        assert metrics["memwall/pool/offloaded_bytes"] > 0
    assert seen[0]["pool"][0] > 0
