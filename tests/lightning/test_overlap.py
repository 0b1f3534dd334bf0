"""Everything that overlaps is on, callbacks edit weights between steps, and the Trainer's losses stay exact."""

from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.callbacks import Callback

from memwall_strategy import MemwallStrategy, OverlapConfig, PoolConfig
from memwall_strategy.core.lane import Lane
from memwall_strategy.engine.fsdp import local_tensor
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import Gpt, make_loader, make_trainer, module_class

STEPS, ACCUMULATE, PER_RANK = 5, 4, 2
BUDGET_BYTES = 150_000
"""A rank: the model trains, its AdamW state does not fit whole."""

OFF = OverlapConfig(enabled=False)
OVERLAPS = {
    "default": {"overlap": OverlapConfig()},
    "ahead": {"overlap": OverlapConfig(prefetch=3, reduce_buffers=1)},
    "paged": {"overlap": OverlapConfig(), "pool": PoolConfig(device_budget=BUDGET_BYTES, host_budget="64MiB")},
    "shared": {"overlap": OverlapConfig(shared_memory=True)},
    "shared, paged": {
        "overlap": OverlapConfig(shared_memory=True),
        "pool": PoolConfig(device_budget=BUDGET_BYTES, host_budget="64MiB"),
    },
    "inside": {"overlap": OverlapConfig(optimizer_in_backward=True, prefetch=2)},
}


class Edits(Callback):
    """After every second step, weights change through ``.data``: all of them, then one number on one rank."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self.began: list[bool] = []
        """Whether the next iteration's gathers were under way when the optimizer returned."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._held = list(module.parameters())  # what an averaging callback holds
        lanes = trainer.strategy.runtime._fsdp_lanes
        trainer.optimizers[0].register_step_post_hook(
            lambda *_: self.began.append(lanes is not None and lanes.next_iteration_began)
        )

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if trainer.global_step == 2:
            for parameter in self._held:
                parameter.data.mul_(0.75)
        if trainer.global_step == 4 and self._here.rank == 1:
            local_tensor(self._held[0]).data.view(-1)[:1].add_(1.0)


def _train(
    here: Here, clip: bool, accumulate: int, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    torch.manual_seed(1)
    module = module_class("lightning")(Gpt(6), "adamw")
    trainer = make_trainer(
        2, strategy=MemwallStrategy(timeout_s=60.0, **options), callbacks=[edits := Edits(here)],
        accumulate_grad_batches=accumulate, gradient_clip_val=0.4 if clip else None,
    )  # fmt: skip
    count = STEPS * accumulate * 2 * PER_RANK
    trainer.fit(module, make_loader("gpt", count, PER_RANK, rank=here.rank, world=2))
    assert trainer.global_step == STEPS
    weights = {name: local_tensor(p).detach().clone() for name, p in module.named_parameters()}
    return module.losses, weights, edits.began


@on_ranks(2, *OVERLAPS)
def test_edits_and_late_transfers_change_no_loss(here: Here) -> None:
    """Against the engine's own schedule, to the last bit: accumulation 4 and clipping, or steps inside the backward."""
    inside = here.case == "inside"
    clip, accumulate = not inside, 1 if inside else ACCUMULATE
    expected = _train(here, clip, accumulate, overlap=OFF)
    noise, submit = random.Random(here.rank), Lane.submit

    def late(self: Lane, fn: Any, **named: Any) -> Any:
        delay_s = noise.random() * 0.002
        return submit(self, lambda: (time.sleep(delay_s), fn()), **named)

    with mock.patch.object(Lane, "submit", late):
        found = _train(here, clip, accumulate, **OVERLAPS[here.case])
    assert found[0] == expected[0]
    # A paged optimizer steps unit by unit: it tells when the first units have their new weights.
    assert found[2] == ["paged" in here.case] * STEPS and not any(expected[2])
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        assert torch.equal(found[1][name], weight), name
