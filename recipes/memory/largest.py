"""The largest model that one process trains under a limit on memory that the kernel enforces.

A GPT of width 512 grows block by block. Each try is a process of its own in a control group of ``LIMIT_BYTES``, without
swap. It fits when it ends all of its steps with finite losses; it does not when the kernel kills it at the limit, or
memwall refuses it by name. Whatever else goes wrong ends the recipe, with the run's output. All sides train in fp32
with AdamW on the same batches, recompute activations block by block, and have the same settings of glibc's allocator:

- ``stock``: FSDP2 and fused AdamW in a plain loop, without the memory that a trainer's imports take;
- ``memwall``: Lightning's Trainer, optimizer state on disk, units that step inside the backward;
- ``deepspeed``: ZeRO-3 in a plain loop, weights and optimizer state offloaded to disk (NVMe), where it is installed in
  ``--deepspeed-python``; it needs libaio's headers and a compiler.

Weights rest in memory with stock and memwall; DeepSpeed has them on disk too.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memwall_strategy.config import format_size

from ..bench_engine.__main__ import MALLOC, RUN_LIMIT_S, free_port
from ..cgroup import Limited, run_limited, why_not
from ..figures import Row

LIMIT_BYTES = 1024**3
MODEL = {"heads": 8, "hidden": 512, "context": 128, "dropout": 0.0}
TASK = {"batch": 1, "steps": 3, "threads": 1, "limit_bytes": LIMIT_BYTES}
STARTS = {"stock": 16, "memwall": 51, "deepspeed": 32}
"""Layers from which the search starts; anything near the end saves tries."""
BUILD_LIMIT_BYTES = 16 * 1024**3
BUILD_LIMIT_S = 1800
"""Outside the limit, once: DeepSpeed compiles its extensions with the first use, for ten minutes on 2 cores."""


class Failed(Exception):
    """A run broke off for another reason than memory; the text is the end of its output."""


def largest(repeats: int, folder: Path, deepspeed_python: str) -> list[Row]:
    """The most parameters of each side; ``repeats`` is not used, a limit is no matter of chance."""
    if why := why_not():
        return [("memwall / stock FSDP2 with AdamW: parameters under a limit", "at least 3", "not measured", why)]
    found = {}
    for side in ("stock", "memwall"):
        try:
            found[side] = deepest(side, folder, sys.executable)
        except Failed as error:
            raise SystemExit(f"{side} broke off, and not for want of memory:\n{error}") from None
    counts = {side: parameters(layers) for side, (layers, _) in found.items()}
    setting = ", ".join(f"{name}={value}" for name, value in MALLOC.items())
    rows = [
        (f"{side}: most parameters under {format_size(LIMIT_BYTES)}", "-", f"{counts[side] / 1e6:.1f} M",
         f"{layers} layers, {_step(result)}, {setting}")
        for side, (layers, result) in found.items()
    ]  # fmt: skip
    rows.append(
        ("memwall / stock FSDP2 with AdamW: parameters", "at least 3", f"{counts['memwall'] / counts['stock']:.2f}",
         "to the layer; state on disk, one process, no swap")
    )  # fmt: skip
    return [*rows, deepspeed_row(folder, deepspeed_python)]


def deepspeed_row(folder: Path, python: str) -> Row:
    """DeepSpeed with NVMe offload, or why not."""
    name = f"DeepSpeed with NVMe offload: most parameters under {format_size(LIMIT_BYTES)}"
    if not _imports("deepspeed", python):
        return (name, "-", "not measured", "no DeepSpeed in this Python; another one: --deepspeed-python")
    try:
        attempt("deepspeed", 1, folder, python, BUILD_LIMIT_BYTES)
        layers, result = deepest("deepspeed", folder, python)
    except Failed as error:
        print(error, flush=True)
        return (name, "-", "not measured", f"it does not train here: {str(error).splitlines()[-1][:100]}")
    return (name, "-", f"{parameters(layers) / 1e6:.1f} M", f"{layers} layers, {_step(result)}, weights on disk too")


def _imports(name: str, python: str) -> bool:
    if shutil.which(python) is None:
        return False
    asked = subprocess.run([python, "-c", f"import {name}"], env=environment(), capture_output=True, check=False)
    return asked.returncode == 0


def _step(result: dict[str, Any]) -> str:
    return f"{statistics.median(result['step_s']):.1f} s a step"


def deepest(side: str, folder: Path, python: str) -> tuple[int, dict[str, Any]]:
    """Most layers that fit, and the result of that run.

    Raises:
        Failed: a run broke off for another reason than memory.
        SystemExit: not one layer fits.
    """
    results: dict[int, dict[str, Any]] = {}

    def fits(layers: int) -> bool:
        print(f"  {side}, {layers} layers, {parameters(layers) / 1e6:.1f} M parameters:", end=" ", flush=True)
        result = results[layers] = attempt(side, layers, folder, python, LIMIT_BYTES)
        why = result.get("does_not_fit")
        print(f"fit, {result['seconds']:.0f} s" if why is None else f"do not fit: {why[:160]}", flush=True)
        return why is None

    layers = bisect(fits, STARTS[side])
    if layers == 0:
        raise SystemExit(f"{side} does not train a single layer under {format_size(LIMIT_BYTES)}")
    return layers, results[layers]


def bisect(fits: Callable[[int], bool], start: int) -> int:
    """The largest number that fits, if all below it do; 0 where 1 does not. Strides grow from ``start`` outwards."""
    stride, low, high = max(1, start // 16), 0, None
    at = start
    while high is None or high - low > 1:
        if fits(at):
            low = at
        else:
            high = at
        if high is None:
            at = low + stride
        elif low == 0 and high > 1:
            at = max(1, high - stride)
        else:
            at = (low + high) // 2
        stride *= 2
    return low


def attempt(side: str, layers: int, folder: Path, python: str, limit_bytes: int) -> dict[str, Any]:
    """One run: as ``outcome``.

    Raises:
        Failed: it broke off for another reason.
    """
    with tempfile.TemporaryDirectory(prefix=f"{side}-", dir=folder) as own:
        task = TASK | {"variant": side, "folder": own, "model": MODEL | {"layers": layers}}
        path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed looks for ninja there
        command = [python, "-m", f"{__package__}.limited", json.dumps(task)]
        timeout_s = BUILD_LIMIT_S if limit_bytes == BUILD_LIMIT_BYTES else RUN_LIMIT_S
        run = run_limited(command, limit_bytes, env=environment() | {"PATH": path}, timeout_s=timeout_s)
    return outcome(run)


def outcome(run: Limited) -> dict[str, Any]:
    """The figures of a run; ``does_not_fit`` alone where the kernel killed it at its limit, or memwall refused it.

    Raises:
        Failed: neither, nor did it get through.
    """
    if run.killed:
        return {"does_not_fit": "killed at the limit"}
    if run.timed_out:
        raise Failed(f"{run.output[-3000:]}\nit took longer than it may")
    if run.code:
        raise Failed(f"{run.output[-3000:]}\nexit code {run.code}")
    said = json.loads(run.output.strip().splitlines()[-1])
    if not all(map(math.isfinite, said.get("losses", []))):
        raise Failed(f"losses {said['losses']}")
    return said


def environment() -> dict[str, str]:
    """Of every run: allocator, threads, and one rank for those who ask."""
    return {
        **os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu", "MAX_JOBS": "2",
    }  # fmt: skip


def parameters(layers: int) -> int:
    """Of the model with so many layers."""
    import torch

    from ..gpt.model import GPT
    from ..gpt.options import GPTOptions

    with torch.device("meta"):
        return sum(each.numel() for each in GPT(GPTOptions(layers=layers, **MODEL)).parameters())
