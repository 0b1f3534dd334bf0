"""One rank of a bench: trains the bench model under one or more strategies and writes what it measured.

Run by ``recipes.bench_engine``; reads its task as JSON from the command line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig, ResilienceConfig
from memwall_strategy.callbacks.lightning import Telemetry
from memwall_strategy.telemetry.progress import StepProgress
from memwall_strategy.telemetry.run_folder import RunFolder
from memwall_strategy.telemetry.run_log import run_log_class
from memwall_strategy.telemetry.wandb_log import wandb_logger

from ..gpt.module import GPTModule
from ..gpt.options import GPTOptions
from .account_clock import AccountClock
from .telemetry_clock import TelemetryClock, wandb_threads_s


class RandomTokens(Dataset):
    """Seeded random tokens: the bench measures time, not learning."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        self._tokens = torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tokens[index]


class StockModule(GPTModule):
    """The same model, sharded by the user as the stock strategy asks for."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class StepClock(L.Callback):
    """Seconds of each optimizer step, from batch start to batch end: all, on the CPU, in the account; and its loss.

    ``period_s`` holds those from one start to the next: what goes on between two steps is in them. ``process_s`` is the
    CPU time of all threads, which a busy machine changes less.
    """

    def __init__(self, account: AccountClock | None) -> None:
        self.step_s: list[float] = []
        self.period_s: list[float] = []
        self.cpu_s: list[float] = []
        self.process_s: list[float] = []
        self.account_s: list[float] = []
        self.losses: list[float] = []
        self._account = account
        self._start = self._cpu_start = self._process_start = self._account_start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # both ranks measure the same step
        self._account_start = self._account.inside_s if self._account else 0.0
        before, self._start, self._cpu_start = self._start, time.perf_counter(), time.thread_time()
        self._process_start = time.process_time()
        if before:
            self.period_s.append(self._start - before)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.step_s.append(time.perf_counter() - self._start)
        self.cpu_s.append(time.thread_time() - self._cpu_start)
        self.process_s.append(time.process_time() - self._process_start)
        self.account_s.append(self._account.inside_s - self._account_start if self._account else 0.0)
        self.losses.append(float(outputs["loss"]))


class TelemetrySteps(L.Callback):
    """Seconds that telemetry took of each step: on the training thread, of that its CPU time, and of W&B's threads."""

    def __init__(self, clock: TelemetryClock) -> None:
        self.clock = clock
        self.thread_s: list[float] = []
        self.cpu_s: list[float] = []
        self.others_s: list[float] = []
        self._before = (0.0, 0.0, 0.0)

    def on_train_batch_start(self, *_: Any) -> None:
        now = (self.clock.inside_s, self.clock.cpu_s, wandb_threads_s())
        for values, new, old in zip((self.thread_s, self.cpu_s, self.others_s), now, self._before, strict=True):
            values.append(new - old)
        self._before = now


class LaneFigures(L.Callback):
    """What the runtime says of each step's overlap, by the names' last parts."""

    def __init__(self) -> None:
        self.taken: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        prefix = "memwall/overlap/"
        metrics = trainer.strategy.runtime.metrics()
        self.taken.append({k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)})


def telemetry_of(kind: str, folder: Path) -> dict[str, Any]:
    """A run's loggers and callbacks, as ``memwall-train`` makes them; ``kind`` is csv or wandb."""
    loggers = [run_log_class("lightning")(RunFolder(folder))]
    if kind == "wandb":
        loggers.append(wandb_logger(save_dir=str(folder), project="bench"))
    return {"logger": loggers, "callbacks": [Telemetry(), StepProgress()], "log_every_n_steps": 1}


def strategy_of(variant: str, options: dict[str, Any]) -> Any:
    """The strategy of a variant of the bench; ``compute``: the whole model on each rank, no communication."""
    if variant == "compute":
        return "auto"
    if variant == "stock":
        world = int(os.environ["WORLD_SIZE"])
        return L.strategies.ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    if variant == "ddp":
        return L.strategies.DDPStrategy(process_group_backend="gloo")
    off = {
        "pool": PoolConfig(enabled=False),
        "overlap": OverlapConfig(enabled=False),
        "resilience": ResilienceConfig(enabled=False),
    }
    parts = {
        "off": off,
        "accounting": {**off, "pool": PoolConfig(enabled=True)},
        "lanes": {"resilience": off["resilience"], "overlap": OverlapConfig(shared_memory=False)},
        "shared": {"resilience": off["resilience"], "overlap": OverlapConfig(shared_memory=True)},
        "memwall": {"overlap": OverlapConfig(**options.get("overlap", {}))},
    }
    return MemwallStrategy(**parts[variant])


def train(
    variant: str,
    task: dict[str, Any],
    account: AccountClock | None = None,
    telemetry: TelemetryClock | None = None,
) -> dict[str, Any]:
    """Train ``task["steps"]`` steps and return what the clock saw; the first ``task["warmup"]`` are dropped."""
    options = GPTOptions(**task["model"])
    L.seed_everything(0, verbose=False)
    kind = StockModule if variant == "stock" else GPTModule
    module = kind(options, partial(torch.optim.AdamW, lr=1e-3, fused=True), constant)
    total = task["steps"] + task["warmup"]
    tokens = RandomTokens(total * task["batch"] * int(os.environ["WORLD_SIZE"]), options.context + 1, options.vocab)
    clock, lanes = StepClock(account), LaneFigures()
    steps = None if telemetry is None else TelemetrySteps(telemetry)
    kind, folder = task.get("telemetry"), tempfile.TemporaryDirectory() if telemetry else nullcontext()
    with folder as name:
        extra = telemetry_of(kind, Path(name)) if steps else {"callbacks": [], "logger": False}
        extra["callbacks"] += [clock, *([steps] if steps else []), *([lanes] if variant == "memwall" else [])]
        trainer = _fit(variant, task, module, tokens, total, extra)
        if kind == "wandb":
            extra["logger"][1].experiment.finish()
    figures = trainer.strategy.runtime.metrics() if isinstance(trainer.strategy, MemwallStrategy) else {}
    drop = task["warmup"]
    return {
        "variant": variant,
        "step_s": clock.step_s[drop:],
        "period_s": clock.period_s[drop:],
        "cpu_s": clock.cpu_s[drop:],
        "process_s": clock.process_s[drop:],
        "account_s": clock.account_s[drop:],
        "losses": clock.losses,
        "peak_bytes": peak_memory_bytes(),
        "metrics": figures,
        "lanes": lanes.taken[drop:],
        # what comes after a step's end is seen at the start of the next
        **({} if steps is None else {
            "telemetry_s": steps.thread_s[drop + 1 :],
            "telemetry_cpu_s": steps.cpu_s[drop + 1 :],
            "telemetry_others_s": steps.others_s[drop + 1 :],
        }),
    }  # fmt: skip


def _fit(
    variant: str, task: dict[str, Any], module: L.LightningModule, tokens: Dataset, total: int, extra: dict[str, Any]
) -> L.Trainer:
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // devices
    if variant == "compute":
        devices = nodes = 1
    trainer = L.Trainer(
        strategy=strategy_of(variant, task), accelerator="cpu", devices=devices, num_nodes=nodes,
        max_steps=total, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **extra,
    )  # fmt: skip
    reset_peak_memory()
    trainer.fit(module, DataLoader(tokens, batch_size=task["batch"]))
    return trainer


def constant(optimizer: torch.optim.Optimizer, total_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A constant learning rate."""
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=total_steps)


def reset_peak_memory() -> None:
    """Start a new peak of this process's resident memory."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM


def peak_memory_bytes() -> int:
    """Highest resident memory since the reset."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Run the task's variants in order and write one JSON list."""
    task = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(task["threads"])
    if "compute" in task["variants"] and len(set(task["variants"])) > 1:  # it makes no group; the others bring theirs
        torch.distributed.init_process_group("gloo")
    account = None
    if task.get("time_account"):
        account = AccountClock()
        account.install()
    telemetry = None
    if task.get("telemetry"):
        telemetry = TelemetryClock()
        telemetry.install()
    results = [train(variant, task, account, telemetry) for variant in task["variants"]]
    if int(os.environ["RANK"]) == 0:
        with open(task["result"], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
