"""Small numbers that every rank of a mesh must hold alike, so that all decide the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def smallest(mesh: DeviceMesh, value: int) -> int:
    """The smallest of all ranks' whole numbers. Collective."""
    return int(_reduced(mesh, torch.tensor(value, dtype=torch.int64), dist.ReduceOp.MIN))


def alike(mesh: DeviceMesh, value: int) -> bool:
    """Whether all ranks hold the same whole number. Collective."""
    low, high = _reduced(mesh, torch.tensor([value, -value], dtype=torch.int64), dist.ReduceOp.MIN).tolist()
    return low == -high


def summed(mesh: DeviceMesh, values: Sequence[float]) -> list[float]:
    """The sums over all ranks, the same bits on each. Collective."""
    return _reduced(mesh, torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM).tolist()


def _reduced(mesh: DeviceMesh, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if mesh.size() == 1:
        return values
    values = values.to(mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(values, op=op, group=mesh.get_group(dim))
    return values.cpu()
