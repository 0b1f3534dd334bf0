"""Batches ahead of need: those of a plain loop, in its order, with its random numbers, ends, errors and positions."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from memwall_strategy.config import OverlapConfig
from memwall_strategy.runtime import input_lane
from memwall_strategy.runtime.data import position_loader
from memwall_strategy.runtime.input_clock import InputClock, timed
from memwall_strategy.runtime.input_lane import InputLane, lane_for, leaves, understood, use_lane
from tests.runtime.lane_standin import Standin

N = 14
CPU = torch.device("cpu")


class Ids(Dataset):
    """Ids beside random numbers; some cannot be loaded."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i == self.broken:
            raise KeyError(f"no sample {i}")
        return {"id": torch.tensor(i), "noise": torch.rand(())}


class Backwards(Sampler):
    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(range(N - 1, -1, -1))


class Doubled(DataLoader):
    """The user's own way through the batches, with random numbers."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch | {"draw": torch.rand(())}


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[InputLane]:
    monkeypatch.setitem(input_lane.STREAMS, "cpu", Standin)
    clock = InputClock()
    made = lane_for(CPU, lambda batch: batch, overlap=OverlapConfig(), timeout_s=60, clock=clock)
    assert clock.lane is made.lane
    made.clock = clock
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "memwall-input"]


def loader_of(lane: InputLane | None, *, data: Dataset | None = None, cls: type = DataLoader, **options: Any) -> Any:
    loader = cls(data or Ids(), batch_size=3, **{"shuffle": "sampler" not in options, **options})
    positioned = position_loader(loader, rank=0, world=1, seed=7, mode="passes")
    use_lane(positioned, lane)
    return positioned


def train(loader: Any, stop: int = 99) -> list[Any]:
    """What a loop sees and draws, and where it would resume."""
    seen = []
    for number, batch in enumerate(loader):
        step = torch.rand(()).item()  # dropout, say
        values = {key: value.tolist() for key, value in sorted(batch.items())}
        seen.append((values, step, loader.state_dict(), loader.weight))
        if number + 1 == stop:
            break
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["permutation", "sampler", "own iter"])
def test_a_loop_sees_and_draws_what_it_would_without(lane: InputLane, workers: int, kind: str) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    options |= {"sampler": {"sampler": Backwards()}, "own iter": {"cls": Doubled}}.get(kind, {})
    found = []
    for each in (None, lane):
        loader = loader_of(each, **options)
        torch.manual_seed(5)
        passes = [train(loader), train(loader, stop=2), train(loader), train(loader)]
        found.append((passes, torch.rand(()).item()))
    assert found[0] == found[1]
    ahead = workers > 0 and kind == "permutation"
    handed = Standin.made.handed
    assert handed == 5 + 2 + 5 + 5
    threads = set(Standin.made.copied)
    assert threads == ({"memwall-input"} if ahead else {"MainThread"})
    assert len(Standin.made.copied) == handed + (1 if ahead else 0), "one was on its way when a pass was left"
    assert not ahead or lane.lane.take_stats().transfers >= handed


def test_the_next_batch_is_there_before_it_is_asked_for(lane: InputLane) -> None:
    batches = iter(loader_of(lane, num_workers=1))
    next(batches)
    Standin.made.wait_for_copies(2)
    assert Standin.made.handed == 1
    for _ in batches:
        pass
    assert Standin.made.handed == len(Standin.made.copied) == 5
    with pytest.raises(StopIteration):
        next(batches)
    lane.rest()
    assert Standin.made.handed == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_is_raised_where_its_batch_is_asked_for(lane: InputLane, workers: int) -> None:
    loader = loader_of(lane, data=Ids(broken=7), shuffle=False, num_workers=workers)
    ids = []
    with pytest.raises(KeyError, match="no sample 7"):
        for batch in loader:
            ids += batch["id"].tolist()
            at = loader.state_dict()["consumed"]
            lane.rest()
            assert loader.state_dict()["consumed"] == at == len(ids)
    assert ids == [0, 1, 2, 3, 4, 5]


def test_two_loaders_share_a_lane(lane: InputLane) -> None:
    """As a trainer that combines them; one of them ends first, and is begun again while the other is under way."""
    plain, ahead = ([loader_of(each, num_workers=1), loader_of(each, num_workers=1)] for each in (None, lane))
    found = []
    for first, second in (plain, ahead):
        seen, others = [], iter(second)
        for batch in first:
            seen.append(batch["id"].tolist())
            for _ in range(2):
                other = next(others, None)
                if other is None:
                    others = iter(second)
                    other = next(others)
                seen.append(other["id"].tolist())
        found.append(seen)
    assert found[0] == found[1] and len(found[0]) == 15


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_stopped_resumes_behind_what_it_trained_on(lane: InputLane, workers: int) -> None:
    whole = train(loader_of(None, num_workers=workers))
    loader = loader_of(lane, num_workers=workers)
    first = train(loader, stop=2)
    lane.rest()  # whatever comes ahead has come
    state = loader.state_dict()
    assert state["consumed"] == 6
    resumed = loader_of(lane, num_workers=workers)
    resumed.load_state_dict(state)
    second = train(resumed)
    assert [values["id"] for values, *_ in first + second] == [values["id"] for values, *_ in whole]


def test_waits_for_the_lane_are_waits_for_input(lane: InputLane) -> None:
    """Behind the clock, as Fabric's and Accelerate's loops have it."""
    clock = lane.clock
    loader = timed(loader_of(lane, num_workers=1), clock)
    with torch.enable_grad():
        assert len(list(loader)) == 5
    waited_s = clock.take()
    figures = clock.take_lane()
    assert 0 < figures["memwall/overlap/lane_exposed_s/input"] <= waited_s
    assert figures["memwall/overlap/lane_busy_s/input"] > 0
    assert set(clock.take_lane().values()) == {0.0} and InputClock().take_lane() == {}


def test_a_closed_lane_leaves_loaders_as_they_were(lane: InputLane) -> None:
    loader = loader_of(lane, num_workers=1, shuffle=False)
    batches = iter(loader)
    ids = [next(batches)["id"].tolist()]
    lane.close()
    ids += [batch["id"].tolist() for batch in batches]
    assert ids == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13]]
    loader = loader_of(lane, num_workers=1, shuffle=False)
    assert [batch["id"].tolist() for batch in loader] == ids


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any


class Own:
    """Moves itself; nobody knows what is in it."""

    def __init__(self) -> None:
        self.hidden = torch.ones(2)

    def to(self, *args: Any, **options: Any) -> Own:
        return self


class OwnDict(dict):
    """Has more than its items."""

    to = Own.to


Named = collections.namedtuple("Named", "x y")


@pytest.mark.parametrize(
    ("batch", "tensors"),
    [
        (torch.ones(1), 1),
        ({"a": torch.ones(1), "b": [torch.ones(1), (torch.ones(1), "text", None, 3)]}, 3),
        (Named(torch.ones(1), {"z": torch.ones(1)}), 2),
        (Pair(torch.ones(1), Pair([torch.ones(1)], 2)), 2),
        (UserDict(input_ids=torch.ones(1), labels=torch.ones(1)), 2),
        (collections.OrderedDict(a=torch.ones(1)), 1),
        ([], 0),
        (None, 0),
    ],
)
def test_batches_that_are_understood(lane: InputLane, batch: Any, tensors: int) -> None:
    assert understood(batch)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves(batch)) == tensors


@pytest.mark.parametrize(
    "batch",
    [
        Own(),
        {"a": torch.ones(1), "b": [Own()]},
        Pair(1, Own()),
        [OwnDict(a=torch.ones(1))],
        torch.ones(2, 2).to_sparse(),
        torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})),
        torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    ],
)
def test_others_stay_as_the_loader_made_them(lane: InputLane, batch: Any) -> None:
    assert not understood(batch) and lane.place(batch) is batch
    assert not Standin.made.copied
    assert understood(pack_sequence([torch.ones(2)])), "a named tuple that moves itself: its tensors are its items"


def test_where_there_is_nothing_to_copy_to_nothing_changes() -> None:
    clock = InputClock()
    assert lane_for(CPU, list, overlap=OverlapConfig(), timeout_s=1, clock=clock) is None and clock.lane is None
    loader = loader_of(None, num_workers=2)
    assert loader.fetches_ahead and loader.input_lane is None
    for options in ({"num_workers": 0}, {"num_workers": 2, "cls": Doubled}, {"num_workers": 2, "sampler": Backwards()}):
        assert not loader_of(None, **options).fetches_ahead
    assert loader_of(None, num_workers=1, sampler=SequentialSampler(Ids())).fetches_ahead
    assert loader_of(None, num_workers=1, sampler=RandomSampler(Ids())).fetches_ahead
    use_lane([1, 2], None)


def test_off_with_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(input_lane.STREAMS, "cpu", Standin)
    off = lane_for(CPU, list, overlap=OverlapConfig(enabled=False), timeout_s=1, clock=InputClock())
    assert off is None
