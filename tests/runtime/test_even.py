"""Loaders of unequal length end together, each batch trained on once. Ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.runtime.even import EvenLoader

WAIT_S = 10.0


def on_ranks(world, work):
    """Run ``work(rank, gather)`` on ``world`` threads that can gather from each other."""
    barrier, slots = threading.Barrier(world), [None] * world

    def gather_of(rank):
        def gather(value):
            slots[rank] = value
            barrier.wait(WAIT_S)
            values = list(slots)
            barrier.wait(WAIT_S)
            return values

        return gather

    with ThreadPoolExecutor(world) as pool:
        return [f.result(WAIT_S) for f in [pool.submit(work, r, gather_of(r)) for r in range(world)]]


class Stream:
    """Batches without a length, as an iterable dataset gives them."""

    def __init__(self, items):
        self.items, self.worker_init_fn = items, None

    def __iter__(self):
        return iter(self.items)


def test_five_batches_and_four_end_together_each_used_once():
    data = [list(range(5)), list(range(10, 14))]

    def work(rank, gather):
        loader = EvenLoader(Stream(data[rank]), gather, None)
        return [(batch, loader.weight) for batch in loader]

    first, second = on_ranks(2, work)
    assert [len(first), len(second)] == [5, 5]
    assert [batch for batch, weight in first + second if weight > 0] == data[0] + data[1]
    assert [w for _, w in first] == [1, 1, 1, 1, 2] and [w for _, w in second] == [1, 1, 1, 1, 0]
    assert second[4][0] == 13  # the last one again, of weight 0


def test_passes_are_independent_and_the_longest_gives_the_length():
    def work(rank, gather):
        loader = EvenLoader([1] * (rank + 1), gather, 3)
        return [len(list(loader)) for _ in range(2)] + [len(loader)]

    assert on_ranks(3, work) == [[3, 3, 3]] * 3


def test_a_rank_without_any_batch_is_an_error_where_it_is():
    def work(rank, gather):
        loader = iter(EvenLoader([7] * rank, gather, None))
        if rank == 0:
            with pytest.raises(ConfigError, match="no batch at all"):
                next(loader)
            return None
        return next(loader)

    assert on_ranks(2, work) == [None, 7]


def test_it_is_the_loader_in_all_else():
    inner = Stream([1])
    loader = EvenLoader(inner, lambda v: [v], None)
    loader.worker_init_fn = print  # trainers set this
    assert inner.worker_init_fn is print and loader.items == [1]
    assert not hasattr(loader, "state_dict")
    with pytest.raises(TypeError):
        len(loader)
    inner.state_dict, inner.load_state_dict = (lambda: {"at": 1}), print
    assert EvenLoader(inner, lambda v: [v], 1).state_dict() == {"at": 1}


def test_weight_looks_back_past_what_was_fetched_ahead():
    loader = EvenLoader([1, 2], lambda has_one: [has_one, True] if has_one else [False, False], None)
    batches = iter(loader)
    assert loader.weight == 1.0
    next(batches)
    loader._weights.append(0.0)  # a second one was fetched, the first is in training
    loader.ahead = lambda: 2
    assert loader.weight == 1.0
