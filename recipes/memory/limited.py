"""One process that trains a GPT of a given depth for a few steps; its parent puts it under a limit on memory.

Run by ``recipes.memory.largest``. The variants: ``stock``, FSDP2 and AdamW in a plain loop; ``memwall``, under
Lightning's Trainer, optimizer state on disk, units that step inside the backward; ``deepspeed``, ZeRO-3 with
parameters and optimizer state offloaded to disk. All recompute activations block by block.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from memwall_strategy.core.errors import ConfigError, PoolFull

from ..gpt.model import GPT
from ..gpt.options import GPTOptions

MARGIN_BYTES = 48 * 1024 * 1024
"""Of the limit, for what is no block: Python's and torch's work space, threads, the page cache of what is imported
while it trains. ``device_budget`` is the rest beside what is resident before."""


class StepClock:
    """Losses, and seconds from each one to the next: a step, wherever in it the loss is told."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self._last = 0.0

    def tell(self, loss: torch.Tensor) -> None:
        """Once a step."""
        now = time.perf_counter()
        if self.losses:
            self.step_s.append(now - self._last)
        self._last = now
        self.losses.append(loss.item())


def batch_of(task: dict[str, Any], step: int, options: GPTOptions) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, options.vocab, (task["batch"], options.context + 1), generator=generator)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def recompute(model: GPT) -> None:
    """Keep no activations of a block but its input."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def stock(task: dict[str, Any], options: GPTOptions, clock: StepClock) -> None:
    """Plain FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        model = GPT(options)
    recompute(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(task["steps"]):
        loss = loss_of(model, batch_of(task, step, options))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tell(loss)
    dist.destroy_process_group()


def memwall(task: dict[str, Any], options: GPTOptions, clock: StepClock) -> None:
    """memwall under Lightning."""
    import lightning.pytorch as L
    from torch.utils.data import DataLoader

    from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.model = GPT(options)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = loss_of(self.model, batch)
            clock.tell(loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    batches = [batch_of(task, step, options) for step in range(task["steps"])]
    budget = task["limit_bytes"] - resident_bytes() - MARGIN_BYTES
    trainer = L.Trainer(
        strategy=MemwallStrategy(
            pool=PoolConfig(
                device_budget=budget, host_budget=0, disk_budget="64GiB", disk_path=task["folder"],
                activations="recompute",
            ),
            overlap=OverlapConfig(lanes=False, reduce_buffers=1, optimizer_in_backward=True),
        ),
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(batches, batch_size=None))


def deepspeed(task: dict[str, Any], options: GPTOptions, clock: StepClock) -> None:
    """ZeRO-3; weights and optimizer state on disk, buffers as small as the widest weight lets them be."""
    import deepspeed as ds

    ds.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    largest = options.mlp_ratio * options.hidden**2
    offload = {"device": "nvme", "nvme_path": task["folder"], "pin_memory": False, "buffer_count": 5}
    config = {
        "train_micro_batch_size_per_gpu": task["batch"],
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload | {"buffer_size": 2 * largest},
            "offload_optimizer": offload,
            "sub_group_size": largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": largest,
            "stage3_param_persistence_threshold": options.hidden,
            "reduce_bucket_size": largest,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1},
    }
    with ds.zero.Init(config_dict_or_path=config):
        model = GPT(options)
    recompute(model)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(task["steps"]):
        loss = loss_of(engine, batch_of(task, step, options))
        engine.backward(loss)
        engine.step()
        clock.tell(loss)


def resident_bytes() -> int:
    """Of this process, without what it maps from files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


def says_it_does_not_fit(error: PoolFull | ConfigError) -> bool:
    """Whether memwall refused for want of memory; other mistakes in the options are not meant."""
    return isinstance(error, PoolFull) or "are missing" in str(error)


VARIANTS: dict[str, Callable[[dict[str, Any], GPTOptions, StepClock], None]] = {
    "stock": stock,
    "memwall": memwall,
    "deepspeed": deepspeed,
}


def main() -> None:
    """Train, and print one line of JSON."""
    task = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(task["threads"])
    options = GPTOptions(**task["model"])
    torch.manual_seed(0)
    start, clock = time.perf_counter(), StepClock()
    try:
        VARIANTS[task["variant"]](task, options, clock)
    except (PoolFull, ConfigError) as error:
        if not says_it_does_not_fit(error):
            raise
        said = {"does_not_fit": str(error)}
    else:
        said = {"losses": clock.losses, "step_s": clock.step_s, "seconds": time.perf_counter() - start}
    print("\n" + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
