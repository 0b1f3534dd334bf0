"""One rank's failure, as others see it: a named error in seconds, no hang; SIGTERM and should_stop stop all alike."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from memwall_strategy.core.errors import MemwallError, PeerLost
from tests.lightning.checks import ELASTIC
from tests.lightning.models import make_loader, make_net, make_trainer, module_class
from tests.ranks import run_ranks

_BOUND_S = 30.0
"""Most seconds until the others end; they need a few, on a busy machine more."""


def fit_until(rank: int, world: int, what: str, at: int = 3, batches: int = 40, **options: Any) -> dict[str, Any]:
    """Fit; on rank 1, batch ``at`` does ``what``. Returns how the fit ended and how long that took."""
    happened_s: list[float] = []

    class Module(module_class("lightning")):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == at:
                happened_s.append(time.monotonic())
                if rank == 1 and what == "should_stop":
                    self.trainer.should_stop = True
                elif rank == 1:
                    act(what)
            loss = super().training_step(batch, batch_idx)
            return Late.apply(loss) if what == "backward" and rank == 1 and batch_idx == at else loss

    module = Module(make_net("gpt"))
    trainer = make_trainer(world, **options)
    error: BaseException | None = None
    try:
        trainer.fit(module, make_loader("gpt", batches * 2 * world, 2, rank=rank, world=world))
    except BaseException as caught:  # noqa: BLE001 - returned and judged by the test
        error = caught
    return {
        "type": type(error).__name__,
        "peer_lost": isinstance(error, PeerLost),
        "named": isinstance(error, MemwallError),
        "text": str(error),
        "s": time.monotonic() - happened_s[0] if happened_s else None,
        "batches": len(module.losses),
        "steps": trainer.global_step,
    }


class Late(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")


def act(what: str) -> None:
    if what == "raise":
        raise ValueError("broken on purpose")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("what", ["raise", "backward"])
def test_an_error_on_one_rank_ends_the_others_by_name(what: str) -> None:
    """The rank that failed shows its own error, the other one says that a peer left."""
    other, failed = run_ranks(fit_until, 2, timeout_s=100, env=ELASTIC, what=what)
    assert failed["type"] == "ValueError" and failed["text"] == "broken on purpose", failed
    assert other["named"], other
    assert "1" in other["text"], other
    assert other["s"] < _BOUND_S and failed["s"] < _BOUND_S


def test_a_killed_rank_ends_the_others_by_name() -> None:
    other, killed = run_ranks(fit_until, 2, timeout_s=100, env=ELASTIC, expect_exit={1: -signal.SIGKILL}, what="kill")
    assert killed is None
    assert other["peer_lost"], other
    assert other["s"] < _BOUND_S


@pytest.mark.parametrize("accumulate", [1, 4])
def test_sigterm_stops_all_ranks_at_one_batch(accumulate: int, tmp_path: Path) -> None:
    """A SIGTERM to rank 1 stops both ranks before the same batch, at the edge of an optimizer step."""
    results = run_ranks(
        fit_until,
        2,
        timeout_s=100,
        env=ELASTIC,
        what="terminate",
        default_root_dir=str(tmp_path),
        at=5,
        accumulate_grad_batches=accumulate,
    )
    assert [r["type"] for r in results] == ["SIGTERMException"] * 2, results
    batches = {r["batches"] for r in results}
    assert batches == {6 if accumulate == 1 else 8}, results
    assert {r["steps"] for r in results} == {6 if accumulate == 1 else 2}


def test_should_stop_on_one_rank_stops_all_after_the_same_batch() -> None:
    """A callback that decides from what its own rank sees must not leave the others in a collective."""
    results = run_ranks(fit_until, 2, timeout_s=100, env=ELASTIC, what="should_stop")
    assert [(r["type"], r["batches"], r["steps"]) for r in results] == [("NoneType", 4, 4)] * 2, results
