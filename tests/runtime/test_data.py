"""A loader goes on from where training was: shuffled or not, with workers or not, whatever loader it is."""

from __future__ import annotations

import gc
import random
import warnings
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from memwall_strategy.core.errors import CheckpointError, ConfigError
from memwall_strategy.runtime.data import PositionedLoader, position_loader
from memwall_strategy.runtime.even import EvenLoader


class Ids(Dataset):
    """Sample i is i."""

    def __init__(self, n):
        self.n, self.loaded = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.loaded.append(i)
        return torch.tensor(i)


class Augmented(Ids):
    """Sample i is i and what the three generators gave for it."""

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def positioned(loader, *, rank=0, world=1, seed=0, mode="train"):
    return position_loader(loader, rank=rank, world=world, seed=seed, mode=mode, gather=lambda value: [value] * world)


def ids(loader, count=None):
    taken = []
    for batch in loader:
        taken.append(batch.tolist())
        if len(taken) == count:
            break
    return taken


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("workers", "later"), [(0, 2), (2, 0)])
def test_resume_continues_the_sequence(shuffle, workers, later):
    def make(n):
        more = {"persistent_workers": True, "prefetch_factor": 3} if n else {}
        return positioned(DataLoader(Ids(23), 4, shuffle=shuffle, num_workers=n, **more), seed=1)

    whole = make(0)
    expected = []
    for epoch in range(3):
        whole.sampler.set_epoch(epoch)
        expected += ids(whole)
    loader = make(workers)
    loader.sampler.set_epoch(0)
    got = ids(loader)
    loader.sampler.set_epoch(1)
    got += ids(loader, 2)  # workers have loaded more by now
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"], state["length"]) == (1, 8, 23)
    resumed = make(later)
    resumed.load_state_dict(state)
    assert len(resumed) == 6
    resumed.sampler.set_epoch(1)
    got += ids(resumed)
    resumed.sampler.set_epoch(2)
    got += ids(resumed)
    assert got == expected
    assert sorted(i for batch in got[:6] for i in batch) == list(range(23))


def test_skipped_samples_are_not_loaded():
    loader = positioned(DataLoader(Ids(100), 5))
    ids(loader, 18)
    resumed = positioned(DataLoader(Ids(100), 5))
    resumed.load_state_dict(loader.state_dict())
    ids(resumed)
    assert resumed.dataset.loaded == list(range(90, 100))


def test_the_given_loader_and_its_options_stay_as_they_were():
    def collate(items):
        return torch.stack(items) * 2

    class Mine(DataLoader):
        def __iter__(self):
            return (batch + 1 for batch in super().__iter__())

    given = Mine(Ids(6), 3, shuffle=True, collate_fn=collate, timeout=0, num_workers=0)
    loader = positioned(given)
    assert isinstance(loader, Mine) and isinstance(loader, PositionedLoader)
    assert type(given) is Mine and type(given.sampler) is RandomSampler and given.generator is None
    assert loader.dataset is given.dataset and loader.batch_size == 3 and loader.collate_fn is collate
    assert sorted(i for batch in ids(loader) for i in batch) == [1, 3, 5, 7, 9, 11]
    assert loader.position.consumed == 6
    assert positioned(loader) is loader


def test_a_pass_uses_none_of_the_runs_random_numbers():
    loader = positioned(DataLoader(Ids(8), 2, shuffle=True))
    before = torch.get_rng_state()
    ids(loader)
    assert (torch.get_rng_state() == before).all()


def test_workers_end_with_a_pass_that_was_broken_off():
    gc.collect()
    gc.disable()  # they must not wait for it
    try:
        loader = positioned(DataLoader(Ids(40), 2, num_workers=2))
        running = iter(loader)
        next(running)
        assert len(active_children()) == 2
        del running
        assert active_children() == []
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [1, 2])
def test_augmentations_in_workers_repeat_after_a_resume(workers):
    def make(n):
        return positioned(DataLoader(Augmented(12), 2, shuffle=True, num_workers=n), seed=3)

    expected = ids(make(2))
    loader = make(2)
    first = ids(loader, 3)
    resumed = make(workers)
    resumed.load_state_dict(loader.state_dict())
    assert first + ids(resumed) == expected
    drawn = np.array([sample[1:] for batch in expected for sample in batch])
    assert len(np.unique(drawn)) == drawn.size  # no two samples share a draw


def test_workers_start_from_a_seed_of_the_place_and_the_rank():
    def seed_of(epoch, rank, consumed=None):
        loader = positioned(DataLoader(Ids(8), None), rank=rank)
        loader.sampler.set_epoch(epoch)
        if consumed is not None:
            loader.skip(epoch, consumed)
        next(iter(loader))
        return loader.generator.initial_seed()

    seeds = [seed_of(0, 0), seed_of(1, 0), seed_of(0, 1), seed_of(0, 0, consumed=3)]
    assert len(set(seeds)) == 4 and seed_of(1, 0) == seeds[1]


def test_persistent_workers_of_the_given_loader_are_not_taken_over():
    given = DataLoader(Ids(6), 2, num_workers=1, persistent_workers=True)
    ids(given)
    loader = positioned(given)
    loader.skip(0, 2)
    assert ids(loader) == [[4, 5]] and ids(given) == [[0, 1], [2, 3], [4, 5]]


def test_the_users_seed_is_kept():
    def first(generator, seed):
        return ids(positioned(DataLoader(Ids(30), 30, shuffle=True, generator=generator), seed=seed))

    fixed = torch.Generator().manual_seed(5)
    assert first(fixed, 0) == first(fixed, 1) == first(None, 5)
    assert first(None, 0) != first(None, 1)


def test_loading_single_samples_without_batches():
    expected = ids(positioned(DataLoader(Ids(9), None, shuffle=True)))
    loader = positioned(DataLoader(Ids(9), None, shuffle=True))
    first = ids(loader, 4)
    resumed = positioned(DataLoader(Ids(9), None, shuffle=True))
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == 9 and first + ids(resumed) == expected


def own_sampler(n):
    return DataLoader(Ids(n), 4, sampler=WeightedRandomSampler(torch.arange(1, n + 1), 22))


def own_batches(n):
    return DataLoader(Ids(n), batch_sampler=Buckets(n))


def replacing(n):
    return DataLoader(Ids(n), 4, sampler=RandomSampler(range(n), replacement=True, num_samples=18))


def dealing_itself(n):
    return DataLoader(Ids(n), 3, sampler=DistributedSampler(range(n), 2, 1, seed=4, drop_last=True))


class Buckets:
    """Batches of unequal size in a random order, a new one each epoch."""

    def __init__(self, n):
        self.batches = [list(range(i, min(n, i + 1 + i % 3))) for i in range(0, n, 3)]
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)) if self.epoch % 2 else self.batches)


@pytest.mark.parametrize("make", [own_sampler, own_batches, replacing, dealing_itself])
def test_a_users_own_sampler_is_respected_and_resumed(make):
    random.seed(0)
    loader = positioned(make(25))
    loader.sampler.set_epoch(1)
    first = ids(loader, 2)
    state = loader.state_dict()
    whole = positioned(make(25))
    whole.sampler.set_epoch(1)
    expected = ids(whole)
    random.seed(1)  # the draw must not depend on the run's generators
    resumed = positioned(make(25))
    resumed.load_state_dict(state)
    assert first + ids(resumed) == expected
    assert len(resumed) == len(make(25)) == len(expected)


def test_the_trainers_distributed_sampler_is_dealt_on_other_worlds():
    def make(rank, world):
        data = Ids(29)
        return positioned(
            DataLoader(data, 3, sampler=DistributedSampler(data, world, rank, seed=2)), rank=rank, world=world
        )

    old = [make(r, 2) for r in range(2)]
    seen = [i for loader in old for batch in ids(loader, 3) for i in batch]
    assert old[0].state_dict()["consumed"] == old[1].state_dict()["consumed"] == 18
    new = [make(r, 3) for r in range(3)]
    for loader in new:
        loader.load_state_dict(old[0].state_dict())
    assert {len(loader) for loader in new} == {3 + 2}
    steps = [[(batch.tolist(), loader.weight) for batch in loader] for loader in new]
    assert [[weight for _, weight in rank] for rank in steps] == [[1.0, 1.5], [1.0, 1.5], [1.0, 0.0]]
    seen += [i for rank in steps for batch, weight in rank if weight > 0 for i in batch]
    assert sorted(seen) == list(range(29))


def test_ranks_that_deal_for_themselves_are_evened_out():
    def gather(value):
        return [value, {**value, "batches": 9}] if isinstance(value, dict) else [value] * 2

    def make(rank, loader):
        return position_loader(loader, rank=rank, world=2, seed=0, gather=gather)

    for loader in (DataLoader(Ids(8), 2), DataLoader(Ids(8), batch_sampler=Buckets(8)), DataLoader(Stream(), 2)):
        assert isinstance(make(1, loader), EvenLoader)
    shard = make(1, DataLoader(Ids(8), 2))
    assert len(shard) == 9 and ids(shard, 2) == [[0, 1], [2, 3]]
    again = make(1, DataLoader(Ids(8), 2))
    again.load_state_dict(shard.state_dict())
    assert ids(again) == [[4, 5], [6, 7]]
    assert isinstance(make(0, DataLoader(Ids(8), 2, sampler=DistributedSampler(range(8), 2, 0))), PositionedLoader)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_what_has_no_position_is_left_alone_and_said_once():
    loader = DataLoader(Stream(), 2)
    with pytest.warns(UserWarning, match="position in DataLoader cannot be saved"):
        assert positioned(loader) is loader
    stateful = DataLoader(Stream(), 2)
    stateful.state_dict, stateful.load_state_dict = dict, print
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert positioned(stateful) is stateful
        assert positioned(loader, mode="eval") is loader


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="in_order=True"):
        positioned(DataLoader(Ids(4), 2, num_workers=2, in_order=False))
    loader = DataLoader(Ids(4), 2, sampler=DistributedSampler(range(4), 2, 0))
    with pytest.raises(ConfigError, match="length is 4 on rank 0 and 5 on rank 1"):
        position_loader(loader, rank=0, world=2, seed=0, gather=lambda v: [v, {**v, "length": 5}])
    with pytest.raises(ConfigError, match="use_distributed_sampler=False"):
        position_loader(loader, rank=0, world=2, seed=0, gather=lambda v: [v, {"dealing": "each rank's own"}])
    with pytest.raises(ConfigError, match="taken from a trainer"):
        taken = positioned(DataLoader(Ids(4), 2))
        type(taken.batch_sampler)(SequentialSampler(range(4)), batch_size=2, drop_last=False)
    with pytest.raises(ValueError, match="mode='training'"):
        positioned(loader, mode="training")


def test_data_that_grew_is_refused():
    loader = positioned(DataLoader(Ids(10), 2))
    ids(loader, 2)
    with pytest.raises(CheckpointError, match="had 10 samples when the checkpoint was saved and has 12 now"):
        positioned(DataLoader(Ids(12), 2)).load_state_dict(loader.state_dict())


def test_another_seed_is_said_and_the_saved_order_continued():
    loader = positioned(DataLoader(Ids(10), 2, shuffle=True), seed=1)
    first = ids(loader, 2)
    resumed = positioned(DataLoader(Ids(10), 2, shuffle=True), seed=2)
    with pytest.warns(UserWarning, match="seed 1, shuffle True.*is continued"):
        resumed.load_state_dict(loader.state_dict())
    assert sorted(i for b in first + ids(resumed) for i in b) == list(range(10))


@pytest.mark.parametrize("skipped", [1, 0])
def test_a_loader_that_yields_another_number_of_batches_is_said(skipped):
    class Uneven(DataLoader):
        def __iter__(self):
            batches = list(super().__iter__())
            return iter(batches[1:] if skipped else [*batches, batches[0]])

    with pytest.warns(UserWarning, match="Uneven yielded (1 fewer|more) batches"):
        ids(positioned(Uneven(Ids(6), 2)))


def test_what_is_fetched_but_not_trained_on_is_not_consumed():
    loader = positioned(DataLoader(Ids(20), 2))
    ids(loader, 3)
    assert loader.state_dict()["consumed"] == 6
    loader.ahead = lambda: 1
    assert loader.state_dict()["consumed"] == 4
    loader.sampler.set_epoch(1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 0)


def test_an_iterator_made_before_the_epoch_is_known_serves_that_epoch():
    expected = positioned(DataLoader(Ids(12), 3, shuffle=True))
    expected.sampler.set_epoch(4)
    loader = positioned(DataLoader(Ids(12), 3, shuffle=True, num_workers=1))
    early = iter(loader)
    loader.sampler.set_epoch(4)
    assert [b.tolist() for b in early] == ids(expected)


def test_passes_are_epochs_in_plain_loops_and_under_fabric():
    from lightning.fabric import Fabric

    def make():
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.strategy.process_dataloader = lambda loader: positioned(loader, mode="passes")
        return fabric.setup_dataloaders(DataLoader(Ids(10), 3, shuffle=True))

    whole = make()
    expected = [ids(whole) for _ in range(3)]
    assert len({str(e) for e in expected}) == 3
    loader = make()
    got = [ids(loader), ids(loader, 2)]
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    got[1] += ids(resumed)
    got.append(ids(resumed))
    assert got == expected
    ended = make()
    ids(ended)
    at_end = ended.state_dict()
    ended = make()
    ended.load_state_dict(at_end)
    assert ids(ended) == expected[1]  # nothing was left of epoch 0: no empty pass
