"""The input lane under the Trainer: the same run to the last bit, and hands off where the user's code moves batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from memwall_strategy.runtime import input_lane
from tests.lightning.checks import Here, on_ranks, rank_results
from tests.lightning.test_resume import Numbered, make_module, make_trainer, weights
from tests.runtime.lane_standin import Standin

__all__ = ["rank_results"]  # pytest finds the fixture here


def run(
    here: Here, name: str, *, lane: bool, workers: int = 0, module: Any = None, data: Any = None, save: int = 0,
    **options: Any,
) -> Any:  # fmt: skip
    """Fit; the module, what it noted, and what the lane did."""
    import lightning.pytorch as L

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
            if trainer.global_step == save:
                trainer.save_checkpoint(here.folder / "saved")

    Standin.made = None
    ckpt_path = options.pop("ckpt_path", None)
    module = module or make_module(dropout=0.1)
    trainer = make_trainer(str(here.folder / name), here.world, callbacks=[Save()] if save else [], **options)
    if lane:
        input_lane.STREAMS["cpu"] = Standin
    try:
        torch.manual_seed(11)
        if data is None:
            loaders = {"train_dataloaders": loader_of(workers), "val_dataloaders": loader_of(0)}
        else:
            loaders = {"datamodule": data}
        trainer.fit(module, ckpt_path=ckpt_path, **loaders)
    finally:
        input_lane.STREAMS.pop("cpu", None)
    module.metrics = trainer.strategy.runtime.metrics()
    assert trainer.strategy._input_lane is None, "ended with the fit"
    return module


def loader_of(workers: int) -> DataLoader:
    return DataLoader(Numbered(), batch_size=4, shuffle=True, num_workers=workers)


@on_ranks(2, "0", "2")
def test_the_run_is_the_one_without(here: Here) -> None:
    """Three epochs, the last step of each uneven; then epochs cut short, with accumulation and validation inside."""
    workers = int(here.case)
    for options in ({}, {"limit_train_batches": 4, "accumulate_grad_batches": 3, "val_check_interval": 2}):
        plain = run(here, "plain", lane=False, workers=workers, **options)
        assert Standin.made is None and "memwall/overlap/lane_busy_s/input" not in plain.metrics
        ahead = run(here, "ahead", lane=True, workers=workers, **options)
        assert ahead.log_rows == plain.log_rows and weights(ahead) == weights(plain)
        steps = len(ahead.log_rows)
        threads = set(Standin.made.copied)
        assert Standin.made.handed == steps and threads == ({"memwall-input"} if workers else {"MainThread"})
        assert len(Standin.made.copied) - steps == (3 if workers and options else 0), "one each epoch that was cut"
        assert ahead.metrics["memwall/input/exposed_s"] > 0 and "memwall/overlap/lane_busy_s/input" in ahead.metrics
        assert "memwall/overlap/lane_exposed_s/input" in ahead.metrics


@on_ranks(2, "0", "2")
def test_a_checkpoint_counts_what_was_trained_on(here: Here) -> None:
    """Saved in the middle of an epoch, with a batch on its way: the resumed run sees the next one."""
    workers = int(here.case)
    whole = run(here, "whole", lane=True, workers=workers, save=9)
    resumed = run(here, "resumed", lane=True, workers=workers, ckpt_path=here.folder / "saved")
    assert resumed.log_rows == whole.log_rows[9:] and weights(resumed) == weights(whole)


@on_ranks(2, "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "data", "iterator")
def test_user_code_that_sees_batches_on_the_host_is_left_alone(here: Here) -> None:
    import lightning.pytorch as L

    seen: list[int] = []

    def look(self: Any, batch: Any, *args: Any) -> Any:
        assert not torch.isnan(batch[1]).any()
        seen.append(len(batch[0]))
        return batch

    class Data(L.LightningDataModule):
        on_before_batch_transfer = look

        def train_dataloader(self) -> DataLoader:
            return loader_of(1)

    plain, data = make_module(), None
    module = make_module()
    if here.case == "data":
        data = Data()
    elif here.case == "iterator":
        inner = module.training_step

        def training_step(self: Any, dataloader_iter: Any) -> Any:
            batch, batch_idx, _ = next(dataloader_iter)
            seen.append(batch_idx)
            return inner(batch, batch_idx)

        module.training_step = training_step.__get__(module)
    else:
        setattr(module, here.case, look.__get__(module))
    plain = run(here, "plain", lane=False, workers=1, module=plain, max_epochs=1)
    found = run(here, "left alone", lane=True, workers=1, module=module, data=data, max_epochs=1)
    assert Standin.made is None and seen
    assert found.log_rows == plain.log_rows
