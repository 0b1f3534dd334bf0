"""Collectives of the lanes over gloo, as direct exchanges between the ranks of a group.

gloo's own all-gather, and a send that is posted before its receive, use a link mostly in one direction at a time: over
400 Mbit/s, 6.3 MB each way took 0.17 to 0.25 s where both directions together take 0.13 s. Here every rank posts all
its receives before its first send, so that whatever a peer sends finds its place at once and both directions stay full.

gloo's reduce-scatter moreover sends as much as its all-reduce. Two ranks just swap the halves that the other one keeps:
half the bytes, and a sum of two terms has one order only, so the result is gloo's bit for bit.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist

from memwall_strategy.engine.fsdp import all_gather_single, reduce_scatter_single

DIRECT_RANKS = 8
"""Most ranks of a group whose gathers go from everybody to everybody; beyond, gloo's ring meets fewer peers at once."""


def all_gather(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's flat ``mine`` into ``output``, in the order of the ranks; returns when it is there.

    Args:
        output: flat, ``group.size()`` times as long as ``mine``; ``mine`` may be this rank's part of it.
    """
    if not 1 < group.size() <= DIRECT_RANKS:
        all_gather_single(output, mine, group=group)
        return
    parts = output.view(group.size(), -1)
    own = parts[group.rank()]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    _exchange({peer: (parts[peer], own) for peer in range(group.size()) if peer != group.rank()}, group)


def reduce_scatter(
    output: torch.Tensor, flat: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """Reduce ``flat`` over the ranks into each rank's part of it; returns when it is there.

    Args:
        output: this rank's part.
        flat: the parts of all ranks behind each other, in their order.
    """
    if group.size() != 2 or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        reduce_scatter_single(output, flat, op=op, group=group)
        return
    me = group.rank()
    halves = flat.view(2, -1)
    _exchange({1 - me: (output, halves[1 - me])}, group)
    output.add_(halves[me])
    if op == dist.ReduceOp.AVG:
        output.div_(2)


def _exchange(parts: dict[int, tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Swap tensors with peers: group rank -> (receive into, send). Starts with the next rank, so that no two meet."""
    after = sorted(parts, key=lambda peer: (peer - group.rank()) % group.size())
    ranks = {peer: dist.get_global_rank(group, peer) for peer in parts}
    receives = [dist.irecv(parts[peer][0], src=ranks[peer], group=group) for peer in reversed(after)]
    sends = [dist.isend(parts[peer][1], dst=ranks[peer], group=group) for peer in after]
    for work in chain(receives, sends):
        work.wait()
