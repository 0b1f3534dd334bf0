"""Every sample is dealt once, in one order, from any position on, over any number of ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.runtime.order import DrawnOrder, Permutation
from memwall_strategy.runtime.sampler import Position, PositionBatchSampler, PositionSampler

segments = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9)), max_size=4)
"""(world, batch size, steps) of each part of an interrupted epoch."""


def ranks_of(n, world, batch, *, shuffle=True, seed=0, drop_last=False):
    return [
        PositionSampler(
            Permutation(n, shuffle=shuffle, seed=seed), rank=r, world=world, batch_size=batch, drop_last=drop_last
        )
        for r in range(world)
    ]


def take(samplers, steps=None):
    """The samples of each step in the order in which ranks were dealt them, repeats left out, and the next position."""
    at = samplers[0].start
    streams = [s.batches(at) for s in samplers]
    dealt = []
    while samplers[0].steps_left(at) and steps != 0:
        batches = [next(stream) for stream in streams]
        behind = [s.after(at) for s in samplers]
        assert len({position for position, _ in behind}) == 1
        own = [b for b, (_, weight) in zip(batches, behind, strict=True) if weight > 0]
        width = max(len(b) for b in own)
        dealt.append([b[i] for i in range(width) for b in own if i < len(b)])
        assert all(len(b) == 1 for b, (_, weight) in zip(batches, behind, strict=True) if weight == 0)
        at, steps = behind[0][0], None if steps is None else steps - 1
    return dealt, at


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 150),
    parts=segments,
    last=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_every_sample_once_through_changes_of_world_and_batch(n, parts, last, shuffle, epoch, seed):
    state, seen = None, []
    for world, batch, steps in [*parts, (*last, None)]:
        samplers = ranks_of(n, world, batch, shuffle=shuffle, seed=seed)
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
        dealt, at = take(samplers, steps)
        seen += [i for step in dealt for i in step]
        state = samplers[0].state_dict(at)
    expected = Permutation(n, shuffle=shuffle, seed=seed).items(epoch, 0)
    assert seen == list(expected)
    assert (at.epoch, at.consumed) == (epoch, n)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 80), world=st.integers(1, 4), batch=st.integers(1, 5), steps=st.integers(0, 4))
def test_drop_last_leaves_less_than_one_step(n, world, batch, steps):
    samplers = ranks_of(n, world, batch, drop_last=True)
    first, at = take(samplers, steps)
    for sampler in samplers:
        sampler.move_to(at)
    rest, at = take(samplers)
    assert all(len(step) == world * batch for step in first + rest)
    assert 0 <= n - at.consumed < world * batch
    assert len(PositionBatchSampler(samplers[0])) == len(first) + len(rest) == at.batches


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 90), world=st.integers(1, 4), batch=st.integers(1, 5), epoch=st.integers(0, 3))
def test_whole_steps_are_those_of_distributed_sampler(n, world, batch, epoch):
    for rank, sampler in enumerate(ranks_of(n, world, batch, seed=3)):
        stock = DistributedSampler(range(n), world, rank, shuffle=True, seed=3)
        stock.set_epoch(epoch)
        sampler.set_epoch(epoch)
        whole = n // (world * batch)
        assert list(PositionBatchSampler(sampler))[:whole] == list(BatchSampler(stock, batch, False))[:whole]


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 40), world=st.integers(1, 5), batch=st.integers(1, 4))
def test_weighted_means_of_ranks_are_the_mean_of_the_step(n, world, batch):
    samplers = ranks_of(n, world, batch)
    order = list(Permutation(n, shuffle=True, seed=0).items(0, 0))
    at = Position()
    streams = [s.batches(at) for s in samplers]
    while samplers[0].steps_left(at):
        weighted = [(np.mean(next(stream)), s.after(at)[1]) for stream, s in zip(streams, samplers, strict=True)]
        behind = samplers[0].after(at)[0]
        mean = np.mean(order[at.consumed : behind.consumed])
        assert np.mean([m * w for m, w in weighted]) == pytest.approx(mean, rel=1e-12)
        at = behind


def test_last_step_is_dealt_evenly_and_pads_only_empty_ranks():
    samplers = ranks_of(9, 4, 2, shuffle=False)
    assert [list(PositionBatchSampler(s)) for s in samplers] == [
        [[0, 4], [8]],
        [[1, 5], [8]],
        [[2, 6], [8]],
        [[3, 7], [8]],
    ]
    at = samplers[0].after(Position())[0]
    assert [s.after(at)[1] for s in samplers] == [4.0, 0.0, 0.0, 0.0]


def test_rounds_and_epochs_have_orders_of_their_own():
    sampler = ranks_of(50, 1, 10)[0]
    orders = []
    for _ in range(2):
        sampler.begin()
        orders.append(tuple(sampler))
    sampler.set_epoch(1)
    sampler.begin()
    orders.append(tuple(sampler))
    assert [sorted(order) for order in orders] == [list(range(50))] * 3
    assert len(set(orders)) == 3


def test_a_pass_goes_on_where_it_was_though_the_sampler_moved():
    sampler = ranks_of(12, 1, 3, shuffle=False)[0]
    running = iter(PositionBatchSampler(sampler))
    assert next(running) == [0, 1, 2]
    sampler.move_to(Position(consumed=9, batches=3))
    assert list(running) == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert list(PositionBatchSampler(sampler)) == [[9, 10, 11]]


class Global:
    """A sampler that draws from the global generators of Python, NumPy and torch."""

    def __init__(self, n):
        self.n, self.epochs = n, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return self.n

    def __iter__(self):
        order = torch.randperm(self.n).tolist()
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())


def test_a_users_sampler_draws_the_same_order_again_and_leaves_the_runs_generators_alone():
    sampler = Global(30)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = DrawnOrder(sampler, seed=5)
    drawn = first.items(2, 0)
    assert (torch.get_rng_state() == before[0]).all()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert sorted(drawn) == list(range(30)) and sampler.epochs == [2]
    torch.manual_seed(99)
    again = DrawnOrder(Global(30), seed=5)
    assert again.items(2, 0) == drawn and again.fingerprint(2, 0) == first.fingerprint(2, 0)
    assert again.items(3, 0) != drawn


def test_a_users_generator_is_reseeded_for_the_draw_and_put_back():
    generator = torch.Generator().manual_seed(7)
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0], 20, generator=generator)
    before = generator.get_state()
    order = DrawnOrder(sampler, seed=0)
    drawn = order.items(0, 0), order.items(1, 0)
    assert (generator.get_state() == before).all() and generator.initial_seed() == 7
    torch.rand(3, generator=generator)  # used elsewhere
    assert DrawnOrder(sampler, seed=0).items(0, 0) == drawn[0] != drawn[1]


class Unrepeatable:
    def __len__(self):
        return 10

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(10), 10))


def saved(sampler, steps):
    return sampler.state_dict(take([sampler], steps)[1])


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (Permutation(11, shuffle=True, seed=0), "had 10 samples .* and has 11 now"),
        (DrawnOrder(range(10), seed=0), "one global order .dataset., but this run's come from"),
    ],
)
def test_a_position_in_other_data_is_refused(order, words):
    state = saved(PositionSampler(Permutation(10, shuffle=True, seed=0), batch_size=3), 2)
    with pytest.raises(CheckpointError, match=words):
        PositionSampler(order, batch_size=3).load_state_dict(state)


def test_an_order_that_does_not_repeat_itself_is_refused():
    state = saved(PositionSampler(DrawnOrder(Unrepeatable(), seed=0)), 4)
    with pytest.raises(CheckpointError, match="Unrepeatable yields another one"):
        PositionSampler(DrawnOrder(Unrepeatable(), seed=0)).load_state_dict(state)


@pytest.mark.parametrize("state", [{"consumed": 3}, None, {"version": 0}])
def test_a_foreign_state_is_refused(state):
    with pytest.raises(CheckpointError, match="not written by this version"):
        ranks_of(10, 1, 1)[0].load_state_dict(state)


def test_a_ranks_own_position_does_not_move_to_another_world_or_batch():
    def own(rank, world, batch, n=10):
        order = Permutation(n, shuffle=False, seed=0)
        return PositionSampler(order, rank=rank, world=world, batch_size=batch, by_rank=True)

    state = saved(own(0, 2, 3), 2)
    other = own(1, 2, 3, n=4)  # has other data than the rank that saved
    other.load_state_dict(state)
    assert other.start == Position(consumed=4, batches=2) and other.steps_left(other.start) == 0
    for world, batch in ((3, 3), (2, 2)):
        with pytest.raises(CheckpointError, match="saved by 2 ranks with batches of 3"):
            own(0, world, batch).load_state_dict(state)


def test_the_saved_order_is_continued_and_said():
    state = saved(PositionSampler(Permutation(20, shuffle=True, seed=1), batch_size=4), 2)
    sampler = PositionSampler(Permutation(20, shuffle=False, seed=2), batch_size=4)
    told = sampler.load_state_dict(state)
    assert "seed 1, shuffle True" in told and "seed 2, shuffle False" in told
    assert list(sampler) == list(Permutation(20, shuffle=True, seed=1).items(0, 0))[8:]


def test_whole_batches_of_a_users_batch_sampler():
    batches = BatchSampler(SequentialSampler(range(10)), 4, False)
    sampler = PositionSampler(DrawnOrder(batches, seed=0, batches=True), by_rank=True)
    assert list(PositionBatchSampler(sampler)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    state = saved(sampler, 0) | {"consumed": 2, "batches": 2}
    sampler.load_state_dict(state)
    assert list(PositionBatchSampler(sampler)) == [[8, 9]] and len(PositionBatchSampler(sampler)) == 3


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), world=st.integers(1, 5), batch=st.integers(1, 4))
def test_consecutive_dealing_keeps_the_order_over_ranks(n, world, batch):
    """What the ranks of a step have, one after the other, is the step; a weight is that of the samples dealt."""
    order = Permutation(n, shuffle=True, seed=3)
    ranks = [
        PositionSampler(order, rank=rank, world=world, batch_size=batch, consecutive=True) for rank in range(world)
    ]
    at, seen = Position(), []
    for dealt in zip(*(list(PositionBatchSampler(sampler)) for sampler in ranks), strict=True):
        places = [sampler.after(at) for sampler in ranks]
        real = [own if weight else [] for own, (_, weight) in zip(dealt, places, strict=True)]
        taken = places[0][0].consumed - at.consumed
        assert [weight for _, weight in places] == [len(own) * world / taken for own in real]
        seen += [index for own in real for index in own]
        at = places[0][0]
    assert seen == list(order.items(0, 0))
