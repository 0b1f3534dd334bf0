"""Checkpoints and resuming through the Trainer: the resumed run is the uninterrupted one.

Each test trains once without a break and once with one, and compares what the ranks saw: sample ids, losses, learning
rates and weights.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.ranks import run_ranks

ELASTIC = {"TORCHELASTIC_RUN_ID": "tests", "PL_GLOBAL_SEED": "7"}
SAMPLES = 46
WIDTH = 12


class Numbered(Dataset):
    """Samples that carry their index, so that what was trained on can be told."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.x[index]


def make_module(*, dropout: float = 0.0, manual_log: list[dict[str, Any]] | None = None) -> Any:
    import lightning.pytorch as L

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(WIDTH, 17), torch.nn.Linear(17, WIDTH)
            self.drop = torch.nn.Dropout(dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.b(torch.tanh(self.a(x))))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
            self.head = torch.nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.log_rows = [] if manual_log is None else manual_log

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            ids, x = batch
            loss = (self.net(x) - x.sum(1, keepdim=True)).float().square().mean()
            rate = self.optimizers().param_groups[0]["lr"]
            self.log_rows.append({"ids": ids.tolist(), "loss": loss.item(), "lr": rate, "epoch": self.current_epoch})
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.net(batch[1]).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7) * 0.99**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(3)
    return Module()


def make_trainer(folder: str, world: int, **options: Any) -> Any:
    import lightning.pytorch as L

    from memwall_strategy import MemwallStrategy

    strategy = MemwallStrategy(timeout_s=60.0, **options.pop("strategy", {}))
    defaults = {
        "max_epochs": 3, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "default_root_dir": folder,
    }  # fmt: skip
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=world, **{**defaults, **options})


def weights(module: Any) -> list[float]:
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in full]).double().tolist()


def fit(
    rank: int,
    world: int,
    folder: str,
    save_after: int = 0,
    ckpt_path: str | None = None,
    workers: int = 0,
    dropout: float = 0.0,
    batch: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Train; optionally save after a number of batches; return everything the rank saw."""
    import warnings

    import lightning.pytorch as L

    warnings.filterwarnings("ignore")
    L.seed_everything(7 + rank, verbose=False, workers=False)
    os.environ["PL_GLOBAL_SEED"] = "7"
    module = make_module(dropout=dropout)
    torch.manual_seed(100 + rank)

    class Saver(L.Callback):
        seen = 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.seen += 1
            if self.seen == save_after:
                trainer.save_checkpoint(Path(folder) / "mid.ckpt")

    trainer = make_trainer(folder, world, callbacks=[Saver()], enable_checkpointing=False, **options)
    loader = DataLoader(Numbered(), batch_size=batch, shuffle=True, num_workers=workers)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return {
        "rows": module.log_rows,
        "weights": weights(module),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "scale": trainer.scaler.get_scale() if trainer.scaler is not None else None,
    }


@pytest.mark.parametrize(
    ("workers", "save_after", "options"),
    [
        (0, 7, {}),
        (2, 17, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        (0, 12, {"strategy": {"async_checkpoint": True}}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, workers: int, save_after: int, options: dict) -> None:
    """Bit for bit: dropout, shuffled data, schedule, in the middle of the first and of the second epoch."""
    if "accumulate_grad_batches" in options:
        save_after -= save_after % options["accumulate_grad_batches"]
    common = {"folder": str(tmp_path), "dropout": 0.2, "workers": workers, "env": ELASTIC, **options}
    whole = run_ranks(fit, 2, save_after=save_after, **common)
    resumed = run_ranks(fit, 2, ckpt_path=str(tmp_path / "mid.ckpt"), **common)
    for before, after in zip(whole, resumed, strict=True):
        assert after["rows"] == before["rows"][save_after:]
        assert after["weights"] == before["weights"]
        assert (after["step"], after["epoch"]) == (before["step"], before["epoch"])


@pytest.mark.parametrize("world", [1, 3, 4])
def test_another_world_size_takes_up_the_rest_of_the_epoch(tmp_path: Path, world: int) -> None:
    """Saved by two ranks: what is left of the epoch is dealt once, and the next loss is that of the same weights."""
    whole = run_ranks(fit, 2, folder=str(tmp_path), save_after=5, env=ELASTIC, max_epochs=1)
    resumed = run_ranks(
        fit, world, folder=str(tmp_path), ckpt_path=str(tmp_path / "mid.ckpt"), env=ELASTIC, max_epochs=1
    )
    first = [i for rank in whole for row in rank["rows"][:5] for i in row["ids"]]
    rest = [i for rank in resumed for row in rank["rows"] for i in row["ids"]]
    assert len(first) == 20
    repeated = len(first) + len(rest) - SAMPLES  # only a rank that would have nothing gets a sample again
    assert 0 <= repeated < world
    assert set(first) | set(rest) == set(range(SAMPLES))
    assert len(set(first) & set(rest)) <= repeated
    # The same samples through the same weights, in whatever shares: the mean over the step's samples agrees.
    taken = sum(len(row["ids"]) for row in (rank["rows"][0] for rank in resumed))
    by_id = _loss_by_id(whole, resumed)
    assert taken == 2 * world
    assert by_id["resumed"] == pytest.approx(by_id["expected"], rel=1e-6)


def _loss_by_id(whole: list[dict], resumed: list[dict]) -> dict[str, float]:
    """Mean loss of the resumed run's first step, and the same from the saved weights in a plain module."""
    rows = [rank["rows"][0] for rank in resumed]
    ids = [i for row in rows for i in row["ids"]]
    found = sum(row["loss"] * len(row["ids"]) for row in rows) / len(ids)
    return {"resumed": found, "expected": _plain_loss(ids, whole)}


def _plain_loss(ids: list[int], whole: list[dict]) -> float:
    """Train a plain module on exactly what the first five steps of both ranks saw, then take the loss of ``ids``."""
    module = make_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7) * 0.99**step)
    data = Numbered()

    def loss_of(indices: list[int]) -> torch.Tensor:
        x = data.x[indices]
        return (module.net(x) - x.sum(1, keepdim=True)).square().mean()

    for step in range(5):
        loss_of([i for rank in whole for i in rank["rows"][step]["ids"]]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss_of(ids).item()


def test_the_gradient_scaler_goes_on(tmp_path: Path) -> None:
    common = {"folder": str(tmp_path), "env": ELASTIC, "precision": "16-mixed", "max_epochs": 1}
    whole = run_ranks(fit, 2, save_after=6, **common)
    resumed = run_ranks(fit, 2, ckpt_path=str(tmp_path / "mid.ckpt"), **common)
    assert whole[0]["scale"] is not None
    assert resumed[0]["scale"] == whole[0]["scale"]
    assert resumed[0]["rows"] == whole[0]["rows"][6:]


def test_one_full_file_resumes_too(tmp_path: Path) -> None:
    common = {"folder": str(tmp_path), "env": ELASTIC, "max_epochs": 1, "strategy": {"checkpoint": "full"}}
    whole = run_ranks(fit, 2, save_after=6, **common)
    assert (tmp_path / "mid.ckpt").is_file()
    resumed = run_ranks(fit, 2, ckpt_path=str(tmp_path / "mid.ckpt"), **common)
    assert resumed[0]["rows"] == whole[0]["rows"][6:]
    assert resumed[1]["weights"] == whole[1]["weights"]
    plain = torch.load(tmp_path / "mid.ckpt", weights_only=False)  # our own file of a moment ago
    make_module().load_state_dict(plain["state_dict"])


def keep_best(rank: int, world: int, folder: str) -> dict[str, Any]:
    import warnings

    import lightning.pytorch as L

    from memwall_strategy.runtime.checkpoint import verify

    warnings.filterwarnings("ignore")
    module = make_module()
    keeper = L.callbacks.ModelCheckpoint(
        dirpath=folder, monitor="val", save_top_k=2, save_last=True, filename="{epoch}"
    )
    trainer = make_trainer(folder, world, callbacks=[keeper], max_epochs=4)
    trainer.fit(module, DataLoader(Numbered(), batch_size=2, shuffle=True), DataLoader(Numbered(8), batch_size=2))
    kept = sorted(path.name for path in Path(folder).iterdir())
    last_step = verify(Path(folder) / "last.ckpt").marker.step
    again = make_trainer(
        folder, world, callbacks=[L.callbacks.ModelCheckpoint(dirpath=folder, save_last=True)], max_epochs=5
    )
    fresh = make_module()
    again.fit(fresh, DataLoader(Numbered(), batch_size=2, shuffle=True), ckpt_path="last")
    validated = again.validate(
        fresh, DataLoader(Numbered(8), batch_size=2), ckpt_path=keeper.best_model_path, verbose=False
    )
    return {
        "kept": kept,
        "left": sorted(os.listdir(folder)),
        "best": keeper.best_model_score.item(),
        "validated": validated[0]["val"],
        "last_step": last_step,
        "batches": len(fresh.log_rows),
        "steps_per_epoch": -(-SAMPLES // (2 * world)),
    }


def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    (result, _) = run_ranks(keep_best, 2, folder=str(tmp_path), env=ELASTIC)
    assert len([name for name in result["kept"] if name.startswith("epoch=")]) == 2
    assert "last.ckpt" in result["kept"]
    assert result["last_step"] % result["steps_per_epoch"] == 0  # saved at an epoch's end
    assert result["batches"] == 5 * result["steps_per_epoch"] - result["last_step"]
    assert result["validated"] == pytest.approx(result["best"], rel=1e-6)
    assert not [name for name in result["left"] if "partial" in name]


def told_to_stop(rank: int, world: int, folder: str, who: int) -> dict[str, Any]:
    import warnings

    import lightning.pytorch as L
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    warnings.filterwarnings("ignore")
    module = make_module()

    class Teller(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4 and rank == who:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(
        folder, world, callbacks=[Teller(), L.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=0)],
        accumulate_grad_batches=2, max_epochs=20,
    )  # fmt: skip
    stopped = False
    try:
        trainer.fit(module, DataLoader(Numbered(), batch_size=2, shuffle=True))
    except SIGTERMException:
        stopped = True
    return {"stopped": stopped, "step": trainer.global_step, "batches": len(module.log_rows)}


@pytest.mark.parametrize("who", [0, 1])
def test_a_sigterm_to_any_rank_stops_all_and_saves(tmp_path: Path, who: int) -> None:
    results = run_ranks(told_to_stop, 2, folder=str(tmp_path), who=who, env=ELASTIC)
    assert all(result["stopped"] for result in results)
    assert results[0]["batches"] == results[1]["batches"] == 2 * results[0]["step"]
    from memwall_strategy.runtime.checkpoint import find_last, verify

    last = find_last(tmp_path)
    assert last is not None
    assert last.name == "last.ckpt"
    assert verify(last).marker.step == results[0]["step"]


def refused(rank: int, world: int, folder: str, path: str) -> str:
    import warnings

    from memwall_strategy import CheckpointError

    warnings.filterwarnings("ignore")
    trainer = make_trainer(folder, world, enable_checkpointing=False)
    start = time.monotonic()
    try:
        trainer.fit(make_module(), DataLoader(Numbered(), batch_size=2), ckpt_path=path)
    except CheckpointError as error:
        assert time.monotonic() - start < 30
        return str(error)
    return "loaded"


def test_foreign_and_half_written_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(fit, 2, folder=str(tmp_path), save_after=3, env=ELASTIC, max_epochs=1)
    half = tmp_path / "mid.ckpt"
    (marker,) = [p for p in half.iterdir() if p.suffix == ".json"]
    marker.unlink()
    foreign = tmp_path / "foreign.ckpt"
    foreign.write_bytes(b"not a checkpoint")
    for path, word in ((half, "half-written"), (foreign, "foreign.ckpt")):
        messages = run_ranks(refused, 2, folder=str(tmp_path), path=str(path), env=ELASTIC)
        assert messages[0] == messages[1]
        assert word in messages[0]


def snapshot_then_change(rank: int, world: int, folder: str) -> bool:
    import warnings

    import lightning.pytorch as L

    from memwall_strategy import MemwallStrategy  # noqa: F401

    warnings.filterwarnings("ignore")

    class Changer(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                self.saved = weights(module)
                trainer.save_checkpoint(Path(folder) / "async.ckpt")
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.data.mul_(0.0)  # at once, while the write may still run

    changer = Changer()
    trainer = make_trainer(
        folder, world, callbacks=[changer], enable_checkpointing=False, max_steps=4, strategy={"async_checkpoint": True}
    )
    trainer.fit(make_module(), DataLoader(Numbered(), batch_size=2))
    fresh = make_module()
    other = make_trainer(folder, world, enable_checkpointing=False)
    other.validate(
        fresh, DataLoader(Numbered(4), batch_size=2), ckpt_path=str(Path(folder) / "async.ckpt"), verbose=False
    )
    return weights(fresh) == changer.saved


def test_an_asynchronous_save_does_not_see_later_changes(tmp_path: Path) -> None:
    assert run_ranks(snapshot_then_change, 2, folder=str(tmp_path), env=ELASTIC) == [True, True]
