"""Direct exchanges give what the collectives give, for any number of ranks, dtype and delay."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from memwall_strategy.engine import exchange
from memwall_strategy.engine.exchange import all_gather, reduce_scatter
from tests.engine.lane_cases import join, mesh_of
from tests.lightning.checks import on_ranks

SIZES = (1, 3, 1000, 300_000)


def _tensor(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(97 * rank + size)).to(dtype)


@on_ranks(4, "1", "2", "3", "4", "ring", group="exchange")
def test_gathers(here):
    join(here)
    if here.case == "ring":
        exchange.DIRECT_RANKS, before = 1, exchange.DIRECT_RANKS
    world = 4 if here.case == "ring" else int(here.case)
    try:
        if (mesh := mesh_of(here, str(world))) is not None:
            group = mesh.get_group()
            noise = random.Random(here.rank)
            for size in SIZES:
                for dtype in (torch.float32, torch.bfloat16, torch.uint8):
                    expected = torch.cat([_tensor(rank, size, dtype) for rank in range(world)])
                    for inside in (True, False):
                        output = torch.full_like(expected, 7)
                        mine = (
                            output[here.rank * size : (here.rank + 1) * size]
                            if inside
                            else torch.empty_like(expected[:size])
                        )
                        mine.copy_(_tensor(here.rank, size, dtype))
                        time.sleep(noise.random() * 0.002)
                        all_gather(output, mine, group)
                        assert torch.equal(output, expected)
    finally:
        if here.case == "ring":
            exchange.DIRECT_RANKS = before


@on_ranks(4, "1", "2", "3", "4", group="exchange")
def test_reductions(here):
    """Two ranks: bit by bit what gloo gives. More: gloo itself."""
    world = int(here.case)
    if (mesh := mesh_of(here, str(world))) is None:
        return
    group = mesh.get_group()
    for size in SIZES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            flat = _tensor(here.rank, size * world, torch.float32)
            kept = flat.clone()
            output = torch.full((size,), float("nan"))
            reduce_scatter(output, flat, op, group)
            assert torch.equal(flat, kept)
            total = flat.clone()
            dist.all_reduce(total, op=dist.ReduceOp.MAX if op == dist.ReduceOp.MAX else dist.ReduceOp.SUM, group=group)
            expected = total.view(world, -1)[here.rank]
            if op == dist.ReduceOp.AVG:
                expected = expected / world
            torch.testing.assert_close(output, expected, rtol=0 if world < 3 else 1e-5, atol=0 if world < 3 else 1e-6)
