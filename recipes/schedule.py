"""Learning-rate schedules as factors of the peak rate, by step."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class Cosine:
    """Rise from 0 over ``warmup_steps``, then half a cosine down to ``final_factor`` at ``total_steps``."""

    def __init__(self, warmup_steps: int, total_steps: float, final_factor: float) -> None:
        self.warmup_steps, self.total_steps, self.final_factor = warmup_steps, total_steps, final_factor

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * done))


class Constant:
    """Rise from 0 over ``warmup_steps``, then stay."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))


def cosine(optimizer: Optimizer, *, warmup_steps: int, total_steps: float, final_factor: float) -> LambdaLR:
    """``Cosine`` on an optimizer."""
    return LambdaLR(optimizer, Cosine(warmup_steps, total_steps, final_factor))


def constant(optimizer: Optimizer, *, warmup_steps: int, total_steps: float) -> LambdaLR:
    """``Constant`` on an optimizer; ``total_steps`` is taken as every schedule's is, and not needed."""
    return LambdaLR(optimizer, Constant(warmup_steps))
