"""A DataLoader that knows its place in the data, and goes on from there after a resume.

``position_loader`` puts ``runtime.sampler.PositionSampler`` under a trainer's loader and leaves all else as it was:
the class, workers, collate function, pinning, prefetch. ``state_dict`` counts what the training loop has consumed, not
what workers have loaded ahead. ``load_state_dict`` moves the next pass to that place, also with another number of
ranks or workers: skipped samples are never loaded.

The iterator of a pass does nothing before its first batch is asked for. Trainers make iterators early, before they say
which epoch it is (and, resuming, never make another), and workers that had started on the wrong epoch would be of no
use. The loader has a generator of its own, seeded from the position: a plain DataLoader draws a seed for its workers
from the run's generator at each pass, which would let a resumed run's random numbers differ from the uninterrupted
run's.

What random numbers the data itself uses: in a worker, torch's, Python's and NumPy's generators are seeded for each
batch from (seed, position, rank), so augmentations repeat after a resume with any number of workers above 0. Without
workers they use the run's own generators, which the checkpoint restores. A generator that a dataset keeps for itself,
and datasets without batches (``batch_size=None``), are not covered.

| the loader | dealt by | can resume with another world size |
|---|---|---|
| map-style, the trainer's (or a like) DistributedSampler, or one rank | memwall | yes |
| map-style, a user's sampler that the trainer deals over ranks | memwall, in the order that the sampler draws | yes |
| map-style, a batch sampler, or a sampler that deals by itself | its own; batches counted | no: refused by name |
| iterable, or a sampler without a length | its own | only if it has ``state_dict`` itself |

Where ranks deal for themselves, ``runtime.even`` lets them end together.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.loader import clone_loader, wrapped_sampler
from memwall_strategy.runtime.even import TRAIL, EvenLoader, Gather
from memwall_strategy.runtime.order import DrawnOrder, Order, Permutation, mix_seeds
from memwall_strategy.runtime.sampler import Position, PositionBatchSampler, PositionSampler

if TYPE_CHECKING:
    from memwall_strategy.runtime.input_lane import InputLane

MODES = ("train", "passes", "eval")


class PositionedLoader(DataLoader):
    """Made by ``position_loader``; never constructed.

    ``position_loader`` mixes it into the class of the loader that it is given.
    """

    positions: PositionSampler
    """Where passes start; also the loader's ``sampler``, which trainers call ``set_epoch`` on."""

    ahead: Callable[[], int]
    """How many of the batches handed out have not been trained on yet. A trainer sets it; else none are."""

    restored: bool
    """Whether a saved position was loaded."""

    input_lane: InputLane | None
    """What batches go through to the device. A trainer sets it; else none."""

    fetches_ahead: bool
    """Whether a batch may be fetched before it is asked for: nothing of the user's runs in this process for it."""

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    @property
    def position(self) -> Position:
        """What training has consumed."""
        if not self.positions.begun:
            return self.positions.start
        return self._trail[-min(1 + self.ahead(), len(self._trail))][0]

    @property
    def weight(self) -> float:
        """Weight of the batch in training: its mean loss times this, averaged over ranks, is the step's."""
        if not self.positions.begun:
            return 1.0
        return self._trail[-min(max(1, self.ahead()), len(self._trail))][1]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it takes to recognise the data it is in; plain numbers and words."""
        return self.positions.state_dict(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass start at a saved position.

        Raises:
            CheckpointError: the position is in other data, or cannot be moved to this number of ranks.
        """
        told = self.positions.load_state_dict(state)
        self.restored = True
        if told is not None:
            warnings.warn(told, stacklevel=2)

    def skip(self, epoch: int, batches: int) -> None:
        """Let the next pass start where this run would be after so many batches of an epoch."""
        at = Position(epoch=epoch)
        while at.batches < batches and self.positions.steps_left(at):
            at, _weight = self.positions.after(at)
        self.positions.move_to(at)

    def _open(self, owner: object) -> tuple[Position, Iterator[Any]]:
        if self.input_lane is not None:
            self.input_lane.rest()  # persistent workers serve one pass at a time
        moved = not self.positions.begun
        start = self.positions.begin()
        if moved:
            self._trail.clear()
            self._trail.append((start, 1.0))
        self._owner = owner
        seed = self.positions.order.seed
        self.generator.manual_seed(mix_seeds("workers", seed, start.epoch, start.round, start.batches, self._rank))
        batches = super().__iter__()
        if self.input_lane is not None:
            batches = self.input_lane.through(batches, ahead=self.fetches_ahead)
        return start, batches

    def _handed_out(self, owner: object, at: Position, weight: float) -> None:
        if owner is self._owner:  # only the pass begun last is training's
            self._trail.append((at, weight))


class _Pass(Iterator[Any]):
    """One pass through a ``PositionedLoader``, begun when its first batch is asked for."""

    def __init__(self, loader: PositionedLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._at = Position()
        # The loader knows the pass by this and holds no reference to it. Workers end when the last reference to their
        # iterator goes; in a cycle they would wait for the garbage collector, and then for each other.
        self._key = object()

    def __next__(self) -> Any:
        loader = self._loader
        if self._batches is None:
            self._at, self._batches = loader._open(self._key)
        left = loader.positions.steps_left(self._at)
        try:
            batch = next(self._batches)
        except StopIteration:
            if left:
                self._miscounted(f"{left} fewer")
            raise
        if not left:
            self._miscounted("more")
            return batch
        self._at, weight = loader.positions.after(self._at)
        loader._handed_out(self._key, self._at, weight)
        return batch

    def _miscounted(self, how_many: str) -> None:
        name = type(self._loader).__name__.removeprefix(_PREFIX)
        warnings.warn(
            f"{name} yielded {how_many} batches than its sampler made, so the data position in checkpoints of this "
            "epoch is wrong. Let its __iter__ yield each batch of DataLoader's once.",
            stacklevel=3,
        )


_PREFIX = "Positioned"


def position_loader(
    dataloader: Any,
    *,
    rank: int,
    world: int,
    seed: int,
    mode: str = "train",
    gather: Gather | None = None,
    deal: bool = False,
    split: bool = False,
) -> Any:
    """Give a loader a position in its data.

    Called by all data-parallel ranks at the same time, with what a trainer made of the user's loader (it may hold the
    trainer's DistributedSampler already). Never changes the loader that it is given.

    Args:
        dataloader: a DataLoader or any iterable of batches.
        rank, world: of the data-parallel group.
        seed: of orders that no sampler gives a seed for; the same on every rank.
        mode: ``train``: epochs are set by the trainer's ``set_epoch``. ``passes``: each pass is the next epoch
            (Fabric, plain loops). ``eval``: the loader is returned as it is.
        gather: see ``runtime.even.Gather``. None: ``all_gather_object`` over the default process group.
        deal: nobody has dealt the data over the ranks (Accelerate): do so whatever the sampler or batch sampler, in
            the first rank's order, each rank's samples of a step consecutive. A user's DistributedSampler deals itself.
        split: the loader's batches are those of all ranks together, to be split among them.

    Returns:
        A ``PositionedLoader``; an ``EvenLoader`` where ranks deal for themselves; or the loader itself.

    Raises:
        ConfigError: the ranks do not agree on the data, or the loader's options make a position impossible.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
    if mode == "eval" or isinstance(dataloader, (PositionedLoader, EvenLoader)):
        return dataloader
    gather = gather or _gather_over_default_group
    positions = _positions_of(
        dataloader, rank, world, seed, count_passes=mode == "passes", deal=deal, split=split
    )
    known = gather(_describe(dataloader, positions)) if world > 1 else []
    if deal and known and positions is not None and not positions.by_rank:
        positions.order.seed = known[0].get("seed", positions.order.seed)  # a sampler's own generator may differ
        known = [{**description, "seed": known[0].get("seed")} for description in known]
    _check_agreement(known)
    if positions is None:
        _warn_if_lost(dataloader, rank)
    else:
        dataloader = _positioned(dataloader, positions, rank)
    if world > 1 and (positions is None or positions.by_rank):
        lengths = [description["batches"] for description in known]
        return EvenLoader(dataloader, gather, None if None in lengths else max(lengths))
    return dataloader


def _positions_of(
    loader: Any, rank: int, world: int, seed: int, *, count_passes: bool, deal: bool, split: bool
) -> PositionSampler | None:
    """The sampler that gives ``loader`` a position; None where nothing can."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if hasattr(loader, "state_dict"):  # it keeps its own position, as torchdata's StatefulDataLoader does
        return None
    batch_sampler = loader.batch_sampler
    whole_batches = batch_sampler is not None and type(batch_sampler) is not BatchSampler
    sampler = loader.sampler if batch_sampler is None else batch_sampler if whole_batches else batch_sampler.sampler
    if not _has_length(sampler):
        return None
    if not getattr(loader, "in_order", True):
        raise ConfigError(
            "DataLoader(in_order=False) yields batches in no fixed order, so a resumed run could not tell which "
            "samples are left. Use in_order=True for training."
        )
    if whole_batches:
        order: Order = DrawnOrder(sampler, seed=seed, batches=True)
        dealt = False
    else:
        order, dealt = _order_of(sampler, rank, world, seed)
    deals_itself = any(isinstance(part, DistributedSampler) for part in (sampler, getattr(sampler, "sampler", None)))
    deal = deal and not deals_itself
    dealt = dealt or deal
    plain = batch_sampler is None or whole_batches
    batch_size = 1 if plain else batch_sampler.batch_size
    return PositionSampler(
        order,
        rank=rank,
        world=world,
        batch_size=_part_of_batch(batch_size, world, plain) if split else batch_size,
        drop_last=False if plain else batch_sampler.drop_last,
        by_rank=not (dealt or (world == 1 and not whole_batches)),
        count_passes=count_passes,
        seed_workers=loader.num_workers > 0 and batch_sampler is not None,
        consecutive=deal,
    )


def _part_of_batch(batch_size: int, world: int, plain: bool) -> int:
    if plain or batch_size % world:
        raise ConfigError(
            f"split_batches=True needs a loader made with a batch_size that {world} ranks divide; this one's is "
            f"{'not known' if plain else batch_size}. Change batch_size, or use split_batches=False."
        )
    return batch_size // world


def _order_of(sampler: Any, rank: int, world: int, seed: int) -> tuple[Order, bool]:
    """The order behind a sampler of single samples, and whether that is one order for all ranks."""
    inner = wrapped_sampler(sampler)
    ours = isinstance(sampler, DistributedSampler) and not sampler.drop_last
    ours = ours and (sampler.rank, sampler.num_replicas) == (rank, world)
    if ours and inner is not None:
        return DrawnOrder(inner, seed=sampler.seed, shuffle=sampler.shuffle), True
    if ours and type(sampler) is DistributedSampler:
        return Permutation(len(sampler.dataset), shuffle=sampler.shuffle, seed=sampler.seed), True
    if type(sampler) is SequentialSampler:
        return Permutation(len(sampler), shuffle=False, seed=seed), False
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        own = sampler.generator
        return Permutation(len(sampler), shuffle=True, seed=seed if own is None else own.initial_seed()), False
    return DrawnOrder(sampler, seed=seed), False


def _positioned(loader: DataLoader, positions: PositionSampler, rank: int) -> PositionedLoader:
    cls = type(loader)
    mixed = type(_PREFIX + cls.__name__, (PositionedLoader,) if cls is DataLoader else (PositionedLoader, cls), {})
    batched = loader.batch_sampler is not None
    positioned = clone_loader(
        loader,
        mixed,
        sampler=positions,
        batch_sampler=PositionBatchSampler(positions) if batched else None,
        generator=torch.Generator(),
    )
    positioned.positions, positioned._rank = positions, rank
    positioned.ahead, positioned.restored, positioned._owner = _none_ahead, False, None
    positioned._trail = deque([(positions.start, 1.0)], maxlen=TRAIL)
    positioned.input_lane = None
    # A permutation has its own generator; what a user's sampler draws, or its own __iter__, would be drawn too early.
    in_workers = loader.num_workers > 0 and cls.__iter__ is DataLoader.__iter__
    positioned.fetches_ahead = in_workers and type(positions.order) is Permutation
    if positions.count_passes:
        # Fabric's wrapper takes over a loader's attributes but not its class; these make the wrapper stateful too
        itself = weakref.ref(positioned)
        positioned.state_dict = lambda: PositionedLoader.state_dict(itself())
        positioned.load_state_dict = lambda state: PositionedLoader.load_state_dict(itself(), state)
    return positioned


def _describe(loader: Any, positions: PositionSampler | None) -> dict[str, Any]:
    """What the other ranks must know of this rank's data."""
    if positions is None or positions.by_rank:
        batches = len(PositionBatchSampler(positions)) if positions else len(loader) if _has_length(loader) else None
        return {"dealing": "each rank's own", "batches": batches}
    order = positions.order
    return {
        "dealing": "one global order",
        "sampler": order.name,
        "length": positions.size(positions.start),
        "batch_size": positions.batch_size,
        "drop_last": positions.drop_last,
        "seed": order.seed,
        "shuffle": order.shuffle,
        # A user's sampler that draws with a generator of its own may draw another order on each rank.
        "order": order.fingerprint(0, 0) if positions.consecutive and isinstance(order, DrawnOrder) else None,
    }


def _check_agreement(known: list[dict[str, Any]]) -> None:
    for rank, description in enumerate(known):
        for key in ("dealing", "sampler", "length", "batch_size", "drop_last", "seed", "shuffle", "order"):
            if description.get(key) != known[0].get(key):
                raise ConfigError(
                    f"The training data differs between ranks: {key} is {known[0].get(key)!r} on rank 0 and "
                    f"{description.get(key)!r} on rank {rank}. Give every rank the same dataset and loader options; if "
                    "each rank is meant to have its own data, set use_distributed_sampler=False."
                )


def _warn_if_lost(loader: Any, rank: int) -> None:
    if rank == 0 and not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        warnings.warn(
            f"The position in {type(loader).__name__} cannot be saved: its data is iterable or its sampler has no "
            "length. A resumed run starts the data anew. Use a map-style dataset, or a loader with state_dict and "
            "load_state_dict such as torchdata's StatefulDataLoader.",
            stacklevel=3,
        )


def _has_length(sized: Any) -> bool:
    try:
        return len(sized) < float("inf")
    except (TypeError, NotImplementedError):
        return False


def _none_ahead() -> int:
    return 0


def _gather_over_default_group(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
