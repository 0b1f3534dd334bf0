"""Loaders under ``MemwallAccelerator``: every sample once, ranks end together, gathered in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from memwall_strategy.core.errors import ConfigError
from tests.accelerate.helpers import make_accelerator
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import assert_same_weights, full_weights, loss_of, make_data, make_net, make_optimizer


class Numbers(Dataset):
    """The numbers below ``count``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(torch.arange(self.count))


@on_ranks(2, "8", "9", "10", "11", "1")
def test_gathered_in_order_each_once(here: Here) -> None:
    """Batches of 2 on 2 ranks over a length that does and does not divide."""
    count = int(here.case)
    acc = make_accelerator()
    loader = acc.prepare(DataLoader(Numbers(count), batch_size=2))
    assert len(loader) == -(-count // 4)
    for _ in range(2):
        seen, objects, ends = [], [], []
        for batch in loader:
            seen += acc.gather_for_metrics({"a": (batch, batch.float().mean())})["a"][0].tolist()
            objects += acc.gather_for_metrics([str(n) for n in batch.tolist()])
            ends.append(acc.gradient_state.end_of_dataloader)
            assert set(acc.gather(batch).tolist()) <= set(range(count))
        assert seen == list(range(count))
        assert objects == [str(n) for n in seen]
        assert ends == [False] * (len(loader) - 1) + [True]
        assert not acc.gradient_state.in_dataloader


@on_ranks(2, "9", "10", "11")
def test_the_last_step_of_an_epoch_weighs_by_samples(here: Here) -> None:
    """Ranks of 2 and 1 samples, of 1 each, or of 1 and 0, in the last step: it is that of the one whole batch."""
    count = int(here.case)
    acc = make_accelerator()
    inputs, labels = make_data("gpt", count)
    net = make_net("gpt")
    loader = DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=2)
    model, stepper, loader = acc.prepare(net, make_optimizer(net.parameters()), loader)
    for batch in loader:
        acc.backward(loss_of(model, batch))
        stepper.step()
        stepper.zero_grad()
    plain = make_net("gpt")
    optimizer = make_optimizer(plain.parameters())
    for batch in zip(inputs.split(4), labels.split(4), strict=True):
        loss_of(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(full_weights(model), plain.state_dict())
    acc.free_memory()


@on_ranks(2, "random", "weighted", "batches", "split", "distributed", "shuffled", "drop_last")
def test_samplers(here: Here) -> None:
    """Whatever the sampler, a sample is dealt to one rank; orders differ from pass to pass and agree between ranks."""
    acc = make_accelerator(dataloader_config=DataLoaderConfiguration(split_batches=here.case == "split"))
    data, own = Numbers(11), torch.Generator().manual_seed(here.rank)
    options: dict[str, Any] = {
        "random": {"sampler": RandomSampler(data, generator=own), "batch_size": 2},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * 11, 11, replacement=False), "batch_size": 2},
        "batches": {"batch_sampler": Ragged(11)},
        "split": {"batch_size": 4},
        "distributed": {"sampler": DistributedSampler(data, 2, here.rank, shuffle=True, seed=3), "batch_size": 2},
        "shuffled": {"shuffle": True, "batch_size": 2},
        "drop_last": {"shuffle": True, "batch_size": 2, "drop_last": True},
    }[here.case]
    loader = acc.prepare(DataLoader(data, **options))
    orders = []
    for _ in range(2):
        mine = [batch.tolist() for batch in loader]
        steps = acc.gather(torch.tensor([len(mine)])).tolist()
        assert steps[0] == steps[1]
        everyone = gather_lists([n for batch in mine for n in batch])
        extra = 1 if here.case == "batches" else 0  # five batches on two ranks: one is repeated, of weight 0
        if here.case == "drop_last":
            assert len(everyone) == len(set(everyone)) == 8
        else:
            assert set(everyone) == set(range(11)) and len(everyone) == 11 + extra, mine
        orders.append(everyone)
    assert (orders[0] == orders[1]) == (here.case in ("batches", "split"))
    assert loader.total_dataset_length == 11


class Ragged(BatchSampler):
    """Batches of 1, 2, 3, 4 and 1 samples."""

    def __init__(self, count: int) -> None:
        self.sampler, self.batch_size, self.drop_last = SequentialSampler(range(count)), 1, False

    def __iter__(self) -> Any:
        return iter([[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10]])

    def __len__(self) -> int:
        return 5


def gather_lists(mine: list[int]) -> list[int]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return [n for part in everyone for n in part]


@on_ranks(2, "stream", "dispatch", "own")
def test_what_accelerate_deals_itself(here: Here) -> None:
    """Iterable data and dispatched batches go through Accelerate's loaders; a rank's own data ends on all together."""
    dispatch = True if here.case == "dispatch" else None
    acc = make_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    if here.case == "own":
        mine = DistributedSampler(Numbers(9), 2, here.rank, shuffle=False, drop_last=True)
        mine.num_samples = 5 - here.rank  # five batches on one rank and four on the other
        loader = acc.prepare(DataLoader(Numbers(9), batch_size=1, sampler=Uneven(mine, here.rank)))
        ends = []
        for batch in loader:
            ends.append((loader.weight, acc.gradient_state.end_of_dataloader, batch.tolist()))
        assert [weight for weight, _, _ in ends] == [1.0] * 4 + [2.0 if here.rank == 0 else 0.0]
        assert [end for _, end, _ in ends] == [False] * 4 + [True]
        return
    data = Stream(10) if here.case == "stream" else Numbers(10)
    loader = acc.prepare(DataLoader(data, batch_size=2))
    seen = [n for batch in loader for n in acc.gather_for_metrics(batch).tolist()]
    assert seen == list(range(10))


class Uneven(DistributedSampler):
    """Five samples on the first rank and four on the second, of each rank's own choice."""

    def __init__(self, other: DistributedSampler, rank: int) -> None:
        self.__dict__.update(other.__dict__)
        self.own = list(range(rank, 9, 2))

    def __iter__(self) -> Any:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


@on_ranks(2)
def test_data_that_cannot_be_dealt_is_named(here: Here) -> None:
    acc = make_accelerator()
    with pytest.raises(ConfigError, match="length is 8 on rank 0 and 9 on rank 1"):
        acc.prepare(DataLoader(Numbers(8 + here.rank), batch_size=2))
    own = torch.Generator().manual_seed(here.rank)
    with pytest.raises(ConfigError, match="order is"):
        acc.prepare(DataLoader(Numbers(8), sampler=WeightedRandomSampler([1.0] * 8, 8, generator=own)))
    split = make_accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    with pytest.raises(ConfigError, match=r"split_batches=True .* this one's is 3"):
        split.prepare(DataLoader(Numbers(8), batch_size=3))
