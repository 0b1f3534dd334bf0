"""Reduce-scatter through shared windows: each rank adds up its own part of all windows, in place.

Sums are made in the reduce dtype in the order of the group's ranks: ((w0 + w1) + w2) + ... With two ranks a sum has one
order only, so the result is gloo's to the last bit; with more, gloo's order depends on the part, so last bits may
differ.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine.shared_ring import Lease


def reduce_scatter_shared(
    lease: Lease, output: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """Reduce what the ranks wrote into their parts of the slot; returns when ``output``, this rank's part, is there."""
    lease.ring.arrive(lease, "reduce-scatter")
    lease.ring.wait(lease, "reduce-scatter", (group.size() - 1) * output.nbytes)
    add_parts(lease, output, group.rank(), group.size(), op)
    lease.ring.release(lease)


def add_parts(lease: Lease, output: torch.Tensor, rank: int, world: int, op: dist.ReduceOp.RedOpType) -> None:
    """Add up this rank's part of every rank's window into ``output``, in the order of the ranks.

    Args:
        op: SUM; AVG: the sum over ``world``; PREMUL_SUM: of each part times its factor.
    """
    numel = output.numel()
    parts = [lease.part(r, output.dtype)[rank * numel : (rank + 1) * numel] for r in range(world)]
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # private: what pickling an op keeps; nothing else tells its factor
        torch.mul(parts[0], factor, out=output)
        for part in parts[1:]:
            output.add_(part, alpha=factor)
        return
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise MemwallError(f"reduce-scatter through shared memory knows sums and means, got {op}.")
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)
    if op == dist.ReduceOp.AVG:
        output.div_(world)
