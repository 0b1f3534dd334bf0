"""Under Lightning's Trainer: a resumed run sees what the uninterrupted one would have seen, at any world size.

Most tests run the ranks one after the other in this process: what a rank is dealt depends on its number alone. One test
runs two real ranks.
"""

from __future__ import annotations

import logging
import pathlib
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.loader import batch_weight, follow, settle_resume
from memwall_strategy.runtime.data import PositionedLoader, position_loader
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The '.*' does not have many workers", "ignore:.*isinstance.treespec")

N = 20
"""Samples; with batches of 3, seven steps on one rank, the last one smaller."""

EPOCHS = {"max_epochs": 3}
STEPS = {"max_steps": 18, "max_epochs": 3}


class Ids(Dataset):
    def __init__(self, n=N):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor(float(i))


class Noisy(Ids):
    """Augmented in the worker."""

    def __getitem__(self, i):
        return torch.stack([torch.tensor(float(i)), torch.rand(())])


class Positions:
    """What memwall's strategy does with loaders, for any strategy of Lightning."""

    rank, world, gather = 0, 1, None

    def process_dataloader(self, dataloader):
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        loader = position_loader(dataloader, rank=self.rank, world=self.world, seed=0, gather=self.gather)
        follow(loader, trainer)
        return loader

    def on_train_start(self):
        settle_resume(self.lightning_module.trainer)


class OneOf(Positions, SingleDeviceStrategy):
    """Rank ``rank`` of ``world`` that never meets the others."""

    def __init__(self, rank=0, world=1):
        super().__init__(torch.device("cpu"))
        self.rank, self.world, self.gather = rank, world, lambda value: [value] * world


class Real(Positions, DDPStrategy):
    def setup(self, trainer):
        self.rank, self.world = self.global_rank, self.world_size
        super().setup(trainer)


class Model(L.LightningModule):
    """Notes (epoch, batch_idx, ids, weight) of each batch, and when it was validated."""

    def __init__(self, estimate=False):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(1, 1), torch.nn.Dropout(0.5)
        self.estimate = estimate
        self.seen, self.validated, self.rates = [], [], []

    def training_step(self, batch, batch_idx):
        ids = batch.reshape(len(batch), -1)[:, 0]
        self.seen.append((self.current_epoch, batch_idx, [int(i) for i in ids], batch_weight(self.trainer)))
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.layer(self.dropout(batch.reshape(-1, 1).float()) / N).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self):
        if self.estimate:  # sets the data up before the checkpoint is read
            assert self.trainer.estimated_stepping_batches > 0
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAt(L.Callback):
    """Saves once, in a hook, in or after the batch of that number."""

    def __init__(self, hook, batch, path):
        self.hook, self.batch, self.path = hook, batch, path

    def _save(self, hook, trainer):
        due = trainer.fit_loop.total_batch_idx + 1 == self.batch and not trainer.sanity_checking
        if hook == self.hook and due:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_start(self, trainer, *_):
        self._save("epoch_start", trainer)

    def on_before_optimizer_step(self, trainer, *_):
        self._save("in_batch", trainer)

    def on_train_batch_end(self, trainer, *_):
        self._save("batch_end", trainer)
        if self.hook == "sigterm" and trainer.fit_loop.total_batch_idx + 1 == self.batch:
            trainer._signal_connector.received_sigterm = True

    def on_validation_end(self, trainer, *_):
        self._save("validation_end", trainer)

    def on_train_epoch_end(self, trainer, *_):
        self._save("epoch_end", trainer)

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(self.path)


class Randomness(L.Callback):
    """The run's random numbers, as memwall's checkpoints keep them."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["torch_rng"] = torch.get_rng_state()

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.state = checkpoint["torch_rng"]

    def on_train_start(self, *_):
        if hasattr(self, "state"):
            torch.set_rng_state(self.state)


def fit(
    *, rank=0, world=1, batch=3, data=None, workers=0, callbacks=(), ckpt=None, strategy=None, estimate=False, **limits
):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(1, verbose=False)
    model, data = Model(estimate), data or Ids()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world if strategy else 1,
        strategy=strategy or OneOf(rank, world),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **limits,
    )
    if isinstance(data, IterableDataset):
        loader = DataLoader(data, batch)
    elif strategy is not None:
        loader = DataLoader(data, batch, shuffle=True, num_workers=workers)  # the trainer deals it
    else:
        sampler = DistributedSampler(data, world, rank)
        loader = DataLoader(data, batch, sampler=sampler, num_workers=workers)
    try:
        trainer.fit(model, loader, DataLoader(Ids(4), 2), ckpt_path=ckpt)
    except SystemExit:  # Lightning's answer to SIGTERM
        assert trainer.received_sigterm
    return model, trainer


@pytest.fixture(scope="module")
def uninterrupted():
    """Runs without an interruption, made once for each set of options."""
    runs = {}

    def run(**limits):
        key = str(limits)
        if key not in runs:
            runs[key] = fit(**limits)[0]
        return runs[key]

    return run


@pytest.mark.parametrize("limits", [EPOCHS, STEPS, {**EPOCHS, "accumulate_grad_batches": 2, "val_check_interval": 3}])
@pytest.mark.parametrize(
    ("hook", "batch"),
    [("batch_end", 3), ("batch_end", 7), ("batch_end", 10), ("in_batch", 10), ("validation_end", 7), ("sigterm", 9),
     ("sigterm", 14), ("epoch_end", 7), ("epoch_start", 7)],
)  # fmt: skip
def test_resume_continues_exactly(tmp_path, uninterrupted, limits, hook, batch):
    path = tmp_path / "saved.ckpt"
    if hook == "in_batch" and "accumulate_grad_batches" in limits:
        batch = 9  # the second of its window: 10 would be in the middle of one
    if hook == "validation_end" and "val_check_interval" in limits:
        batch = 6
    full = uninterrupted(**limits)
    fit(callbacks=[SaveAt(hook, batch, path)], **limits)
    done = batch - 1 if hook == "in_batch" else batch
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not resumable.*")
        resumed, trainer = fit(ckpt=path, estimate=batch % 2 == 0, **limits)
    assert resumed.seen == full.seen[done:]
    assert resumed.validated == full.validated[len(full.validated) - len(resumed.validated) :]
    assert resumed.rates == full.rates[done:]
    assert isinstance(trainer.train_dataloader, PositionedLoader)


def test_a_resumed_run_can_be_resumed(tmp_path, uninterrupted):
    full = uninterrupted(**STEPS)
    fit(callbacks=[SaveAt("batch_end", 7, tmp_path / "1.ckpt")], **STEPS)
    fit(ckpt=tmp_path / "1.ckpt", callbacks=[SaveAt("epoch_end", 14, tmp_path / "2.ckpt")], **STEPS)
    again, _ = fit(ckpt=tmp_path / "2.ckpt", **STEPS)
    assert again.seen == full.seen[14:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_is_bit_equal_with_dropout_and_augmentation(tmp_path, workers):
    def run(**more):
        return fit(data=Noisy() if workers else Ids(), workers=workers, max_epochs=2, **more)[0]

    full = run(callbacks=[Randomness()])
    run(callbacks=[Randomness(), ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1)])
    (path,) = tmp_path.glob("*.ckpt")
    resumed = run(callbacks=[Randomness()], ckpt=path)
    assert resumed.seen == full.seen[10:]
    for mine, other in zip(resumed.parameters(), full.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("limits", [EPOCHS, {**STEPS, "max_steps": 40}, {**EPOCHS, "accumulate_grad_batches": 2}])
@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 3), (1, 2)])
@pytest.mark.parametrize(("hook", "batch"), [("batch_end", 0), ("batch_end", -1), ("epoch_end", -1), ("in_batch", 0)])
def test_every_sample_once_at_another_world_size(tmp_path, limits, old, new, hook, batch):
    path = tmp_path / "saved.ckpt"
    steps = -(-N // (2 * old))
    at = steps + 2 + batch if batch >= 0 else 2 * steps  # two batches into epoch 1, or its last one
    before = [
        fit(rank=r, world=old, batch=2, callbacks=[SaveAt(hook, at, path)] if r == 0 else [], **limits)[0].seen
        for r in range(old)
    ]
    done = at - 1 if hook == "in_batch" else at
    resumed = [fit(rank=r, world=new, batch=2, ckpt=path, estimate=r == 1, **limits)[0] for r in range(new)]
    after = [model.seen for model in resumed]
    assert len({len(seen) for seen in after}) == 1
    for epoch in range(3 if "max_steps" not in limits else 2):
        used = [
            i
            for seen in [*(s[:done] for s in before), *after]
            for at_epoch, _, ids, weight in seen
            if at_epoch == epoch and weight > 0
            for i in ids
        ]
        assert sorted(used) == list(range(N)), f"epoch {epoch}"
    last = [batch_idx for epoch, batch_idx, _, _ in after[0] if epoch == 2]
    assert last == list(range(len(last))) and ("max_steps" in limits or len(last) == -(-N // (2 * new)))
    if "max_steps" not in limits:
        assert len(resumed[0].validated) >= 1 + (batch == 0)  # at each epoch's end


def test_a_checkpoint_without_position_is_resumed_by_its_count_of_batches(tmp_path, uninterrupted):
    full = uninterrupted(**EPOCHS)
    fit(callbacks=[SaveAt("batch_end", 10, tmp_path / "saved.ckpt")], **EPOCHS)
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(checkpoint, tmp_path / "stock.ckpt")
    with pytest.warns(UserWarning, match="3 batches into an epoch and holds no data position"):
        resumed, _ = fit(ckpt=tmp_path / "stock.ckpt", **EPOCHS)
    assert resumed.seen == full.seen[10:]


def test_data_that_changed_is_refused_before_any_batch(tmp_path):
    fit(callbacks=[SaveAt("batch_end", 3, tmp_path / "saved.ckpt")], max_epochs=1)
    with pytest.raises(CheckpointError, match="had 20 samples when the checkpoint was saved and has 21 now"):
        fit(ckpt=tmp_path / "saved.ckpt", data=Ids(21), max_epochs=1)


class Shard(IterableDataset):
    """Five batches of two on rank 0, four on rank 1."""

    def __init__(self, rank):
        self.items = [float(100 * rank + i) for i in range(10 - 2 * rank)]

    def __iter__(self):
        return iter(self.items)


def two_ranks(rank, world, folder):
    def run(**more):
        return fit(world=world, strategy=Real(), max_epochs=2, batch=2, **more)[0].seen

    uneven = run(data=Shard(rank))
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    full = run(workers=1, callbacks=[save])
    resumed = run(workers=0, ckpt=str(pathlib.Path(folder) / "step=7.ckpt"))
    return {"uneven": uneven, "full": full, "resumed": resumed}


def test_two_real_ranks(tmp_path):
    first, second = run_ranks(two_ranks, 2, env={"TORCHELASTIC_RUN_ID": "test"}, folder=str(tmp_path))
    # 5 batches on one rank, 4 on the other: both end, each sample is used once
    for epoch in range(2):
        used = [
            i for r in (first, second) for e, _, ids, weight in r["uneven"] if e == epoch and weight > 0 for i in ids
        ]
        assert sorted(used) == [*range(10), *range(100, 108)]
    assert [weight for *_, weight in second["uneven"]] == [1, 1, 1, 1, 0] * 2
    # one permutation over both ranks, then the same again from the middle of an epoch, then on one and three ranks
    for epoch in range(2):
        assert sorted(i for r in (first, second) for e, _, ids, _ in r["full"] if e == epoch for i in ids) == [
            *range(N)
        ]
    assert [first["resumed"], second["resumed"]] == [first["full"][7:], second["full"][7:]]
    seen = [i for r in (first, second) for _, _, ids, _ in r["full"][5:7] for i in ids]
    for world in (1, 3):
        rest = [fit(rank=r, world=world, batch=2, ckpt=tmp_path / "step=7.ckpt", max_epochs=2)[0] for r in range(world)]
        used = [i for model in rest for _, _, ids, weight in model.seen if weight > 0 for i in ids]
        assert sorted(seen + used) == list(range(N))
