"""One rank: trains the model with its optimizer state in different places and writes what it measured as JSON.

Run by ``recipes.memory``. ``device`` is a capped arena on CPU; every byte between device, host and disk is copied.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Tier
from memwall_strategy.pool import needed_device_bytes

from ..bench_engine.worker import RandomTokens, constant
from ..gpt.module import GPTModule
from ..gpt.options import GPTOptions
from .beside_raw import BesideRaw
from .link import SlowLink, scaled_rate


class Watch(L.Callback):
    """Seconds from the start of each step to that of the next, and the pool's figures of it.

    Args:
        around: what goes around the copies of the optimizer's state.
        warmup: steps that it does not measure.
    """

    def __init__(self, around: SlowLink | BesideRaw | None, warmup: int) -> None:
        self.period_s: list[float] = []
        self.figures: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.moved_s: list[float] = []
        self._around, self._warmup = around, warmup
        self._start = 0.0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        pool = trainer.strategy.runtime.pool
        if isinstance(self._around, SlowLink):
            self._around.install(pool.stores[Tier.HOST])
        elif self._around is not None:
            for pager in pool.pagers:
                self._around.install(pager.homes)

    def on_train_batch_start(self, *_: Any) -> None:
        torch.distributed.barrier()
        before, self._start = self._start, time.perf_counter()
        if before:
            self.period_s.append(self._start - before)
        if isinstance(self._around, BesideRaw):
            self._around.measuring = len(self.period_s) >= self._warmup

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        runtime = trainer.strategy.runtime
        self.figures.append(runtime.metrics())
        self.moved_s.append(self._around.take() if isinstance(self._around, SlowLink) else 0.0)


def around_of(variant: str, task: dict[str, Any], device: dict[str, Any] | None) -> SlowLink | BesideRaw | None:
    """What goes around the copies in a variant; ``device``: as for ``train``."""
    if variant.endswith(", slow link"):
        tokens = task["batch"] * task["model"]["context"]
        return SlowLink(scaled_rate(device["parameters"], tokens, statistics.median(device["period_s"])))
    return BesideRaw() if variant.endswith(", beside raw copies") else None


def pool_of(place: str, task: dict[str, Any], budget_bytes: int | None) -> PoolConfig:
    """The pool's options; ``budget_bytes`` forces all state off the device, activations left out."""
    match place:
        case "off":
            return PoolConfig(enabled=False)
        case "device":
            return PoolConfig()
        case "host":
            return PoolConfig(device_budget=budget_bytes, host_budget="2GiB", optimizer_on="device", activations="keep")
        case "host, stepped there":
            return PoolConfig(device_budget=budget_bytes, host_budget="2GiB", optimizer_on="host", activations="keep")
        case "disk":
            return PoolConfig(
                device_budget=budget_bytes, host_budget=0, disk_budget="2GiB", disk_path=task["folder"],
                activations="keep",
            )  # fmt: skip
    raise ValueError(place)


def train(variant: str, task: dict[str, Any], device: dict[str, Any] | None) -> dict[str, Any]:
    """Train and return the figures, the first ``task["warmup"]`` steps left out.

    Args:
        variant: where the state rests, then what else is special, separated by commas.
        task: see ``recipes.memory.__main__``.
        device: the result of an earlier run with all state on the device.
    """
    place, *special = variant.split(", ")
    if "stepped there" in special:
        place = "host, stepped there"
    options = GPTOptions(**task["model"])
    L.seed_everything(0, verbose=False)
    module = GPTModule(options, partial(torch.optim.AdamW, lr=1e-3, fused=True), constant)
    world, total = int(os.environ["WORLD_SIZE"]), task["steps"] + task["warmup"]
    tokens = RandomTokens(total * task["batch"] * world, options.context + 1, options.vocab)
    around = around_of(variant, task, device)
    watch = Watch(around, task["warmup"])
    overlap = OverlapConfig(enabled=place != "off", lanes=world > 1, optimizer_in_backward="in backward" in special)
    budget_bytes = device["needed_bytes"] if device is not None else None
    trainer = L.Trainer(
        strategy=MemwallStrategy(pool=pool_of(place, task, budget_bytes), overlap=overlap),
        accelerator="cpu", devices=world, max_steps=total, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
    )  # fmt: skip
    needed: dict[str, int] = {}
    module.on_train_end = lambda: needed.update(bytes=needed_device_bytes(trainer.strategy.runtime))
    if variant == "off":
        module.on_train_end = lambda: None
    io_before = disk_bytes()
    trainer.fit(module, DataLoader(tokens, batch_size=task["batch"]))
    first = task["warmup"]
    kept = [f for f in watch.figures[first:] if f]

    def median(name: str) -> float | None:
        values = [figures[name] for figures in kept if name in figures]
        return statistics.median(values) if values else None

    return {
        "variant": variant,
        "period_s": watch.period_s[first:],
        "losses": watch.losses,
        "needed_bytes": needed.get("bytes"),
        "peak_bytes": max((f.get("memwall/pool/device_peak_bytes", 0.0) for f in kept), default=0.0),
        "host_bytes": median("memwall/pool/host_bytes"),
        "disk_bytes": median("memwall/pool/disk_bytes"),
        "page_in_s": median("memwall/pool/page_in_s"),
        "page_out_s": median("memwall/pool/page_out_s"),
        "exposed_s": median("memwall/pool/exposed_s"),
        "moved_s": statistics.median(watch.moved_s[first:]),
        "bytes_per_s": around.bytes_per_s if isinstance(around, SlowLink) else None,
        "page_ins": [around.page_ins, around.raw] if isinstance(around, BesideRaw) else None,
        "io_bytes": disk_bytes() - io_before,
        "parameters": sum(p.numel() for p in module.parameters()),
        "steps": total,
    }


def disk_bytes() -> int:
    """Bytes that this process has read from and written to disks, by the kernel's count."""
    with open("/proc/self/io") as file:
        counters = dict(line.split(": ") for line in file.read().splitlines())
    return int(counters["read_bytes"]) + int(counters["write_bytes"])


def main() -> None:
    """Run the task's variants in order."""
    task = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(task["threads"])
    results, device = [], None
    for variant in task["variants"]:
        results.append(train(variant, task, device))
        if results[-1]["needed_bytes"] and device is None:
            device = results[-1]
    if int(os.environ["RANK"]) == 0:
        with open(task["result"], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
