"""A small GPT on the text of Python's own sources, in a loop that Accelerate's users know.

    torchrun --nproc-per-node 2 -m recipes.accelerate_gpt --steps 50 --output runs/accelerate_gpt
    torchrun --nproc-per-node 1 -m recipes.accelerate_gpt --steps 90 --output runs/accelerate_gpt --resume

The step weighs ranks and micro-batches by their labels (``tokens=``). The run saves half way and at the end; it goes on
from there with the samples not yet seen, on any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from memwall_strategy import PoolConfig
from memwall_strategy.accelerate import MemwallAccelerator, MemwallPlugin

from ..gpt.model import GPT
from ..gpt.options import GPTOptions

ACCUMULATE, BATCH, CONTEXT, BYTES = 2, 4, 64, 256


class Bytes(Dataset):
    """Windows of a text, one byte a token."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * CONTEXT
        return self.tokens[start : start + CONTEXT], self.tokens[start + 1 : start + CONTEXT + 1]


def train(steps: int, output: pathlib.Path, *, resume: bool, cpu: bool, precision: str) -> list[float]:
    """Train until ``steps`` optimizer steps are done; the mean loss over ranks of each step of this run."""
    acc = MemwallAccelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=ACCUMULATE,
        memwall=MemwallPlugin(pool=PoolConfig(device_budget="256MiB")),
    )
    torch.manual_seed(1)
    model = GPT(GPTOptions(vocab=BYTES, context=CONTEXT, layers=2, hidden=64, heads=4, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * acc.num_processes)
    data = Bytes(pathlib.Path(json.__file__).with_name("decoder.py").read_bytes())
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=1)
    model, optimizer, scheduler, loader = acc.prepare(model, optimizer, scheduler, loader)
    if resume:
        acc.load_state(output)
    runtime = acc.memwall.runtime
    losses: list[float] = []
    while runtime.steps < steps:
        for tokens, labels in loader:
            with acc.accumulate(model):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
                acc.backward(loss, tokens=labels.numel())
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if acc.sync_gradients:
                losses.append(acc.reduce(loss.detach(), "mean").item())
                acc.log({"loss": losses[-1]}, step=runtime.steps)
                if runtime.steps in (steps // 2, steps):
                    acc.save_state(output)
                if runtime.steps == steps:
                    break
    report(acc, losses)
    acc.end_training()
    return losses


def report(acc: MemwallAccelerator, losses: list[float]) -> None:
    """Print what came out, on the first rank."""
    figures: dict[str, Any] = acc.metrics()
    acc.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps on {acc.num_processes} ranks")
    acc.print(f"peak held by this rank: {figures['memwall/pool/device_peak_bytes'] / 2**20:.2f} MiB")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps in all")
    parser.add_argument("--output", type=pathlib.Path, default="runs/accelerate_gpt", help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU that is there")
    parser.add_argument("--precision", default="no", choices=("no", "bf16", "fp16"), help="mixed precision")
    given = parser.parse_args()
    train(given.steps, given.output, resume=given.resume, cpu=given.cpu, precision=given.precision)


if __name__ == "__main__":
    main()
