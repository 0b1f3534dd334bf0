"""One rank of ``recipes.memory.phases``: trains with one mapping after the other, and writes what each step moved."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from memwall_strategy import MemwallConfig, PoolConfig
from memwall_strategy.runtime import Runtime

from ..gpt.model import GPT
from ..gpt.options import GPTOptions

MAPPINGS: dict[str, dict[str, Any]] = {
    "engine": {"retain": "none", "phases": False},
    "frozen": {"retain": "auto", "phases": False},
    "follow": {"retain": "auto", "phases": True},
}


def sent_bytes() -> int:
    """What this host's interface has sent, by the kernel's count."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    with open("/proc/net/dev") as file:
        row = next(line for line in file if line.strip().startswith(f"{name}:"))
    return int(row.split(":")[1].split()[8])


def share(step: int, task: dict[str, Any]) -> float:
    """Of the peak learning rate: it rises, stays, and falls to a tenth."""
    rises, stays = task["rises"], task["stays"]
    return (step + 1) / rises if step < rises else 1.0 if step < rises + stays else 0.1


def phase_of(step: int, task: dict[str, Any]) -> str:
    """What a run that follows the phase is in at a step: judged at the ends of windows."""
    window = task["window"]
    ended = step // window * window
    if ended >= task["rises"] + task["stays"] + window:
        return "converging"
    return "steady" if ended >= task["rises"] + window else "warmup"


def train(variant: str, task: dict[str, Any]) -> dict[str, Any]:
    """Train one mapping through all phases."""
    options = GPTOptions(**task["model"])
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(options)
    parameters = sum(p.numel() for p in model.parameters())
    pool = PoolConfig(device_budget=task["budget"], phase_window=task["window"], **MAPPINGS[variant])
    runtime = Runtime(MemwallConfig(pool=pool), mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    runtime.setup(model)
    runtime.micro_batches = task["micro_batches"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    runtime.add_optimizers([optimizer])
    schedule = LambdaLR(optimizer, lambda step: share(step, task))

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    moved: dict[str, int] = {}
    for lane in runtime.lanes.values():
        lane.take_stats = _noting(lane, moved)
    each = []
    for step in range(task["steps"]):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        shape = (task["micro_batches"], task["batch"], options.context + 1)
        batches = list(torch.randint(0, options.vocab, shape, generator=generator))
        dist.barrier()
        wire, start = sent_bytes(), time.perf_counter()
        moved.clear()
        loss = runtime.step(batches, loss_of, optimizer)
        dist.barrier()
        step_s = time.perf_counter() - start
        schedule.step()
        each.append(
            {"phase": phase_of(step, task), "step_s": step_s, "loss": float(loss), "wire": sent_bytes() - wire,
             "gather": moved["gather"], "reduce": moved["reduce"],
             "peak": runtime.metrics()["memwall/pool/device_peak_bytes"],
             "followed": str(runtime.pool.phases.phase)}
        )  # fmt: skip
    runtime.close()
    if variant == "follow":  # the phase that was judged in a step is that of the next one
        assert [step["followed"] for step in each[:-1]] == [step["phase"] for step in each[1:]], each
    return {"variant": variant, "each": each, "parameters": parameters}


def _noting(lane: Any, moved: dict[str, int]) -> Any:
    take = lane.take_stats

    def noting() -> Any:
        stats = take()
        moved[lane.name] = moved.get(lane.name, 0) + stats.bytes
        return stats

    return noting


def main() -> None:
    """Run the task's variants in order."""
    task = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(task["threads"])
    dist.init_process_group("gloo")
    results = [train(variant, task) for variant in task["variants"]]
    if dist.get_rank() == 0:
        with open(task["result"], "w") as file:
            json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
