"""Accelerators for tests: many in one process, one after the other, over one process group."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, TensorDataset

from tests.lightning.models import make_data


def make_accelerator(memwall: Any = None, **options: Any) -> Any:
    """A new accelerator on CPU; what an earlier one left in Accelerate's process-wide state is forgotten."""
    from accelerate.state import AcceleratorState, GradientState

    from memwall_strategy.accelerate import MemwallAccelerator, MemwallPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return MemwallAccelerator(cpu=True, memwall=memwall or MemwallPlugin(), **options)


def whole_loader(kind: str, count: int, batch: int, **options: Any) -> DataLoader:
    """A loader of all samples, as a user makes it; ``acc.prepare`` deals it."""
    return DataLoader(TensorDataset(*make_data(kind, count)), batch_size=batch, **options)
