"""A rank runs out of memory under Lightning's loop: the step begins anew, nothing counts twice; or all end by name."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from memwall_strategy import MemwallStrategy
from tests.lightning.checks import ELASTIC
from tests.ranks import run_ranks
from tests.runtime.test_restart import WIDTH, Net, Plan

BATCHES, ACCUMULATE = 6, 2


class Module(L.LightningModule):
    """Logs before, and after, what fails; draws random numbers outside the model too."""

    def __init__(self, plan: Plan | None) -> None:
        super().__init__()
        self.net, self.plan, self.losses, self.seen = Net(), plan, [], []

    def on_fit_start(self) -> None:
        torch.manual_seed(100 + self.global_rank)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)  # between two micro-batches, not run again

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("before", torch.tensor(1.0), on_step=False, on_epoch=True, reduce_fx="sum")
        if self.plan is not None:
            self.plan.passes("training_step")
        loss = self.net(batch[0] + 0.1 * torch.randn(WIDTH))
        self.log_dict({"after": torch.tensor(1.0)}, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if self.plan is not None:
            self.plan.passes("on_before_backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.seen.append(batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.plan is not None:
            self.plan.passes("validation_step")
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(rank: int, world: int, plan: Plan | None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    module = Module(plan)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(torch.randn(BATCHES * world * 4, WIDTH, generator=generator)), batch_size=4)
    strategy = MemwallStrategy(**options)
    told: list[str] = []
    strategy.events.subscribe(lambda event: told.append(str(event.kind)))
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_epochs=1, accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    error = None
    try:
        trainer.fit(module, loader, loader if plan is not None and plan.place == "validation_step" else None)
    except Exception as caught:  # noqa: BLE001 - judged by the test
        error = caught
    return {
        "losses": module.losses,
        "weights": [p.to_local().double().sum().item() for p in module.parameters()],
        "buffers": [b.double().sum().item() for b in module.buffers()],
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "seen": module.seen,
        "steps": trainer.global_step,
        "error": [type(error).__name__, list(getattr(error, "ranks", ())), str(error)],
        "told": [kind for kind in told if kind in ("out_of_memory", "step_restarted")],
    }  # fmt: skip


def worker(rank: int, world: int) -> dict[str, Any]:
    """Each fit in the same process, on the groups that the one before left."""
    runs = {"undisturbed": fit(rank, world, None), "whole, undisturbed": fit(rank, world, None, accumulate="whole")}
    other = rank == world - 1
    for place, at, options in (
        ("training_step", 3, {}),  # of the second step: nothing to run again before it
        ("training_step", 4, {}),  # half way through the step, before any gather
        ("on_before_backward", 4, {}),
        ("on_before_backward", 4, {"accumulate": "whole"}),
    ):
        name = f"{place} {at}{' whole' if options else ''}"
        runs[name] = fit(rank, world, Plan(place, at) if other else None, **options)
    runs["validation"] = fit(rank, world, Plan("validation_step", 2, int(other)))
    return runs


def test_a_restart_under_the_trainer_leaves_no_trace() -> None:
    for runs in run_ranks(worker, 2, timeout_s=170, env=ELASTIC):
        validation = runs.pop("validation")
        wanted = {False: runs.pop("undisturbed"), True: runs.pop("whole, undisturbed")}
        assert wanted[False]["error"][0] == "NoneType", wanted[False]["error"]
        assert wanted[False]["logged"] == {"before": BATCHES, "after": BATCHES}, wanted[False]["logged"]
        assert wanted[False]["steps"] == BATCHES // ACCUMULATE
        for name, run in runs.items():
            assert run.pop("told") == ["out_of_memory", "step_restarted"], (name, run["error"])
            assert run == {key: value for key, value in wanted["whole" in name].items() if key != "told"}, name
        kind, ranks, text = validation["error"]
        assert (kind, ranks) == ("RankOutOfMemory", [1]), validation["error"]
        assert "on rank 1, it was in validation, which is not run again" in text


