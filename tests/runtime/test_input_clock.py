"""The wait for batches: what counts, what does not, by a clock that the data turns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from memwall_strategy.runtime import input_clock
from memwall_strategy.runtime.data import PositionedLoader, position_loader
from memwall_strategy.runtime.even import EvenLoader
from memwall_strategy.runtime.input_clock import InputClock, timed
from memwall_strategy.telemetry import names
from tests.ranks import run_ranks

FETCH_S = 0.5


class Clock:
    """Seconds that only the data advances."""

    def __init__(self) -> None:
        self.now_s = 10.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(input_clock, "time", made)
    return made


class Slow(Dataset[torch.Tensor]):
    """Each sample takes ``FETCH_S``."""

    def __init__(self, clock: Clock, length: int = 6) -> None:
        self.clock, self.length = clock, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now_s += FETCH_S
        return torch.full((4,), float(index))


class SlowStream(IterableDataset):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(3):
            self.clock.now_s += FETCH_S
            yield torch.full((4,), float(index))


def test_waits_within_a_wait_count_once_and_nothing_is_claimed_unasked(clock: Clock) -> None:
    watch = InputClock()
    assert watch.take() is None
    with watch:
        clock.now_s += 1.0
        with watch:
            clock.now_s += 2.0
    clock.now_s += 8.0
    assert watch.take() == 3.0 and watch.take() == 0.0
    with pytest.raises(KeyError), watch:
        clock.now_s += 1.0
        raise KeyError
    assert watch.take() == 1.0


@pytest.mark.parametrize("kind", ["positioned", "plain", "stream", "even"])
def test_each_kind_of_loader(clock: Clock, kind: str) -> None:
    watch = InputClock()
    data = SlowStream(clock) if kind == "stream" else Slow(clock)
    given = DataLoader(data, batch_size=1)
    loader = position_loader(given, rank=0, world=1, seed=0, mode="passes") if kind == "positioned" else given
    if kind == "even":
        loader = EvenLoader(loader, lambda mine: [mine], 6)
    made = timed(loader, watch)
    assert timed(made, watch) is made
    assert isinstance(made, PositionedLoader) == (kind == "positioned") and type(made).__name__ == type(loader).__name__
    waited = []
    for _ in made:
        waited.append(watch.take())
        clock.now_s += 100.0  # training
    assert waited == [FETCH_S] * len(waited) and len(waited) == (3 if kind == "stream" else 6)
    if kind != "even":  # which makes collectives where gradients are on
        with torch.no_grad():
            assert [watch.take() for _ in made] == [0.0] * len(waited), "validation is not what training waits for"
    assert [type(batch) for batch in given] == [torch.Tensor] * len(waited), "the loader that was given is as it was"


def test_what_is_no_loader_is_left_alone() -> None:
    batches = [1, 2]
    assert timed(batches, InputClock()) is batches


def fabric_worker(rank: int, world: int) -> list[float]:
    import lightning as L

    import memwall_strategy.lightning  # noqa: F401

    clock = input_clock.time = Clock()
    fabric = L.Fabric(strategy="memwall", accelerator="cpu", devices=1)
    fabric.launch()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader, val = fabric.setup_dataloaders(*(DataLoader(Slow(clock), batch_size=2) for _ in range(2)))
    seen = []
    for batch in loader:
        fabric.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(fabric.strategy.runtime.metrics()[names.INPUT_EXPOSED_S])
        with torch.no_grad():
            for held_out in val:
                model(held_out)
    assert isinstance(loader._dataloader.state_dict(), dict), "the position is there as ever"
    return seen


def lightning_worker(rank: int, world: int) -> list[float]:
    import lightning.pytorch as L

    import memwall_strategy.lightning  # noqa: F401

    clock = input_clock.time = Clock()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            clock.now_s += 7.0
            return self.layer(batch).mean()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.layer(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx % 2:
                seen.append(trainer.strategy.runtime.metrics()[names.INPUT_EXPOSED_S])

    for train in (DataLoader(Slow(clock), batch_size=1), DataLoader(SlowStream(clock), batch_size=1)):
        trainer = L.Trainer(
            strategy="memwall", accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=2,
            val_check_interval=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Watch()],
        )  # fmt: skip
        trainer.fit(Module(), train, DataLoader(Slow(clock), batch_size=1))
    return seen


def test_under_fabric_each_step_says_what_it_waited() -> None:
    assert run_ranks(fabric_worker, 1) == [[2 * FETCH_S] * 3]


def test_under_lightning_micro_batches_add_up_and_validation_does_not() -> None:
    """Whatever the data: a loader with a position, and a stream of unknown length, of which Lightning reads its first
    batch before the epoch and one ahead from then on. Fails when Lightning no longer calls the loop's fetch hooks."""
    assert run_ranks(lightning_worker, 1) == [[2 * FETCH_S] * 4]
