"""A rank runs out of memory in the user's own loop, which holds the batches: every rank ends by name, nobody waits."""

from __future__ import annotations

from typing import Any

import torch

from tests.accelerate.helpers import make_accelerator, whole_loader
from tests.lightning.models import loss_of, make_net, make_optimizer
from tests.ranks import run_ranks


def worker(rank: int, world: int) -> list[Any]:
    acc = make_accelerator()
    net = make_net("mlp")
    passed: list[int] = []

    def hook(*_: Any) -> None:
        passed.append(1)
        if rank == 1 and len(passed) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (made up by a test)")

    net.register_forward_pre_hook(hook)
    model, optimizer, loader = acc.prepare(net, make_optimizer(net.parameters()), whole_loader("mlp", 40, 2))
    try:
        for batch in loader:
            with acc.accumulate(model):
                acc.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        return [type(error).__name__, list(getattr(error, "ranks", ())), str(error)]
    return ["nothing", [], ""]


def test_every_rank_ends_by_name() -> None:
    other, failed = run_ranks(worker, 2, timeout_s=60)
    assert failed[0] == "OutOfMemoryError", failed
    assert other[:2] == ["CollectiveError", [1]], other
    assert "rank 1 gave up: OutOfMemoryError: CUDA out of memory" in other[2]
