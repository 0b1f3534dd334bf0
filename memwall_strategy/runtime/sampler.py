"""Deals one order of samples over data-parallel ranks, so that the position in the data is one number.

Each epoch has one order of all its samples: a permutation that follows from (seed, epoch), the dataset's own order, or
what a user's sampler drew. A step takes the next ``world * batch_size`` samples of that order, and rank r gets every
``world``-th of them from the r-th on. What has been consumed is therefore always a prefix of the order, whatever the
number of ranks, and a run may go on from its length with another world size, batch size or number of workers: no
sample is lost, none is seen twice.

Batches are the same, sample for sample, as those of ``torch.utils.data.DistributedSampler`` with the same seed, except
in the last step of an epoch. There DistributedSampler repeats samples until the ranks are even. Here the last step is
dealt as evenly as it can be: ranks differ by at most one sample, each batch carries the weight with which its mean
enters the mean over ranks, and only a rank that would have nothing gets a repeated sample, of weight 0, so that every
rank makes the same number of steps. ``drop_last`` leaves the last, smaller step out.

A "round" is a pass through the data that began without a new epoch (a short loader that is cycled while a longer one
lasts, a plain loop that never calls ``set_epoch``). Each round of an epoch has an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch.utils.data import Sampler, get_worker_info

from memwall_strategy.core.errors import CheckpointError, ConfigError
from memwall_strategy.runtime.order import Order, as_list, mix_seeds, seed_generators

STATE_VERSION = 1
"""Of the dictionary that ``PositionSampler.state_dict`` makes."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the data, the same on every rank."""

    epoch: int = 0
    """Number of the epoch, as the trainer counts it."""

    round: int = 0
    """Passes through the data that this epoch has had before this one."""

    consumed: int = 0
    """Samples of this pass's order that all ranks together have consumed: a prefix of it."""

    batches: int = 0
    """Batches that each rank has had in this pass, under whatever world sizes."""


STATE_KEYS = {f.name for f in fields(Position)} | {
    "version", "by_rank", "rank", "world", "batch_size", "order", "seed", "shuffle", "length", "fingerprint",
}  # fmt: skip
"""What ``PositionSampler.state_dict`` holds."""


class SeededBatch(list):
    """A batch's indices; going through them in a loader's worker first seeds that worker's generators.

    Augmentations that draw from torch's, Python's or NumPy's generators in a worker then depend on the place of the
    batch in the data alone, not on the number of workers nor on what a worker did before.
    """

    def __init__(self, indices: Sequence[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list.copy(self), self.seed)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            seed_generators(self.seed)
        return super().__iter__()


class PositionSampler(Sampler[Any]):
    """Deals an ``Order`` to one rank from any position on.

    Args:
        order: the samples of each epoch.
        rank, world: of the data-parallel group.
        batch_size: samples of a rank in a step.
        drop_last: leave the last, smaller step of an epoch out.
        by_rank: the order is this rank's own, not dealt over ranks: positions cannot move to another world size.
        count_passes: each pass is an epoch of its own and ``set_epoch`` is ignored (Fabric counts from 0 after a
            resume).
        seed_workers: make batches that seed the generators of the worker that loads them.
        consecutive: a rank's samples of a step follow each other in the order, so that what is gathered over ranks
            is in the order (Accelerate's way). Else rank r gets every ``world``-th from the r-th on. Positions mean
            the same either way.
    """

    def __init__(
        self,
        order: Order,
        *,
        rank: int = 0,
        world: int = 1,
        batch_size: int = 1,
        drop_last: bool = False,
        by_rank: bool = False,
        count_passes: bool = False,
        seed_workers: bool = False,
        consecutive: bool = False,
    ) -> None:
        self.order = order
        self.rank, self.world = rank, world
        self.batch_size, self.drop_last = batch_size, drop_last
        self.by_rank, self.count_passes, self.seed_workers = by_rank, count_passes, seed_workers
        self.consecutive = consecutive
        self.start = Position()
        self.on_move: Callable[[], None] = _nothing
        """Called whenever ``start`` was set from outside: the number of batches may be another one now."""
        self._begun = False
        self._deal_rank, self._deal_world = (0, 1) if by_rank else (rank, world)

    # -- the epoch's steps -------------------------------------------------------------------------------------------

    def size(self, at: Position) -> int:
        """Samples in the order of the pass that ``at`` is in."""
        return self.order.size(at.epoch, at.round)

    def steps_left(self, at: Position) -> int:
        """Steps from ``at`` to the end of the pass; the same on every rank."""
        full, rest = divmod(self.size(at) - at.consumed, self._deal_world * self.batch_size)
        return full + int(rest > 0 and not self.drop_last)

    def after(self, at: Position) -> tuple[Position, float]:
        """The position after one more step, and the weight of this rank's batch in it.

        Losses that are means over a rank's samples, times their weights, average over ranks to the mean over the
        step's samples.
        """
        taken = min(self._deal_world * self.batch_size, self.size(at) - at.consumed)
        own = len(range(self._deal_rank, taken, self._deal_world))
        return replace(at, consumed=at.consumed + taken, batches=at.batches + 1), own * self._deal_world / taken

    def batches(self, at: Position) -> Iterator[list[Any]]:
        """This rank's batches from ``at`` to the end of the pass."""
        items = self.order.items(at.epoch, at.round)
        for _ in range(self.steps_left(at)):
            behind, _weight = self.after(at)
            block = items[at.consumed : behind.consumed]
            own = as_list(block[self._own_part(len(block))])
            if not own:  # fewer samples than ranks are left: a repeated one, of weight 0, keeps the ranks in step
                own = as_list(block)[self._deal_rank % len(block) :][:1]
            batch = own[0] if self.order.items_are_batches else own
            yield SeededBatch(batch, self._batch_seed(at)) if self.seed_workers else batch
            at = behind

    def _own_part(self, taken: int) -> slice:
        if not self.consecutive:
            return slice(self._deal_rank, None, self._deal_world)
        share, more = divmod(taken, self._deal_world)
        first = share * self._deal_rank + min(self._deal_rank, more)
        return slice(first, first + share + int(self._deal_rank < more))

    def _batch_seed(self, at: Position) -> int:
        return mix_seeds("batch", self.order.seed, at.epoch, at.round, at.batches, self.rank)

    # -- where a pass starts -----------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; nothing happens when that is where the data already is."""
        if not self.count_passes and epoch != self.start.epoch:
            self.move_to(Position(epoch=epoch))

    def move_to(self, start: Position) -> None:
        """Let the next pass start there."""
        self.start, self._begun = start, False
        self.on_move()

    @property
    def begun(self) -> bool:
        """Whether a pass has begun at ``start``."""
        return self._begun

    def begin(self) -> Position:
        """Begin a pass: at ``start``, or anew where that pass has begun before or has nothing left."""
        used_up = self.start.batches > 0 and self.steps_left(self.start) == 0
        if self._begun or used_up:
            if self.count_passes:
                self.start = Position(epoch=self.start.epoch + 1)
            else:
                self.start = Position(epoch=self.start.epoch, round=self.start.round + 1)
        self._begun = True
        return self.start

    def __iter__(self) -> Iterator[Any]:
        batches = self.batches(self.start)  # bound to this start now: a later pass must not move an earlier one
        return (item for batch in batches for item in batch)

    def __len__(self) -> int:
        """Items of this rank in the whole pass (a smaller last batch counted as a whole one)."""
        return (self.start.batches + self.steps_left(self.start)) * self.batch_size

    # -- saved and restored ------------------------------------------------------------------------------------------

    def state_dict(self, at: Position) -> dict[str, Any]:
        """``at`` with all that is needed to find out, later, whether it still means the same."""
        return asdict(at) | {
            "version": STATE_VERSION,
            "by_rank": self.by_rank,
            "rank": self.rank,
            "world": self.world,
            "batch_size": self.batch_size,
            "order": self.order.name,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "length": self.size(at),
            "fingerprint": self.order.fingerprint(at.epoch, at.round),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Start the next pass at a saved position.

        Returns:
            What to tell the user where the saved order is not the one that this run asked for, else None.

        Raises:
            CheckpointError: not a data position, or one in other data.
        """
        if not isinstance(state, Mapping) or not set(state) >= STATE_KEYS or state["version"] != STATE_VERSION:
            raise CheckpointError(
                "The checkpoint's data position was not written by this version of memwall: it has "
                f"{sorted(state) if isinstance(state, Mapping) else type(state).__name__}. "
                "Resume with the loader that the checkpoint was saved with."
            )
        self._check_kind(state)
        at = Position(**{f.name: state[f.name] for f in fields(Position)})
        told = None
        if (state["seed"], state["shuffle"]) != (self.order.seed, self.order.shuffle):
            told = (
                f"The checkpoint's order of samples (seed {state['seed']}, shuffle {state['shuffle']}) is continued; "
                f"this run's own (seed {self.order.seed}, shuffle {self.order.shuffle}) is not used."
            )
            self.order.seed, self.order.shuffle = state["seed"], state["shuffle"]
        if not self.by_rank or state["rank"] == self.rank:  # the saver's own data says nothing about another rank's
            self._check_data(state, at)
        if self.by_rank:
            at = replace(at, consumed=min(at.consumed, self.size(at)))
        self.move_to(at)
        return told

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if state["by_rank"] != self.by_rank or state["order"] != self.order.name:
            raise CheckpointError(
                f"The checkpoint's data position counts samples of {_kind(state['order'], state['by_rank'])}, but this "
                f"run's come from {_kind(self.order.name, self.by_rank)}. Resume with the same kind of sampler."
            )
        saved, here = (state["world"], state["batch_size"]), (self.world, self.batch_size)
        if self.by_rank and saved != here:
            raise CheckpointError(
                f"The checkpoint was saved by {saved[0]} ranks with batches of {saved[1]} and this run has {here[0]} "
                f"ranks with batches of {here[1]}, but the data is dealt by {_kind(self.order.name, True)}: where each "
                "rank was cannot be moved. Resume with the same numbers, or from a checkpoint saved at the end of an "
                "epoch."
            )

    def _check_data(self, state: Mapping[str, Any], at: Position) -> None:
        if state["length"] != self.size(at):
            raise CheckpointError(
                f"The data had {state['length']} samples when the checkpoint was saved and has {self.size(at)} now, "
                f"so its position ({at.consumed} samples into epoch {at.epoch}) means nothing. Resume with the same "
                "data, or from a checkpoint saved at the end of an epoch."
            )
        if state["fingerprint"] != self.order.fingerprint(at.epoch, at.round):
            raise CheckpointError(
                f"The order of samples of epoch {at.epoch} could not be made again: {self.order.name} yields another "
                "one than when the checkpoint was saved. Make it depend only on its epoch and on the generators of "
                "torch, Python and NumPy, or resume from a checkpoint saved at the end of an epoch."
            )


class PositionBatchSampler(Sampler[list[Any]]):
    """The batches of a ``PositionSampler``, for ``DataLoader(batch_sampler=...)``."""

    def __init__(self, sampler: PositionSampler, **options: Any) -> None:
        if options or not isinstance(sampler, PositionSampler):  # a trainer tries to put its own sampler under this
            raise ConfigError(
                "The training loader was taken from a trainer, which has dealt its samples over the ranks already. "
                "Pass the loader that you made yourself."
            )
        self.sampler = sampler
        self.batch_size, self.drop_last = sampler.batch_size, sampler.drop_last

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        return self.sampler.batches(self.sampler.start)

    def __len__(self) -> int:
        """Batches of a rank in the whole pass, those before the start included."""
        return self.sampler.start.batches + self.sampler.steps_left(self.sampler.start)


def _nothing() -> None:
    pass


def _kind(name: str, by_rank: bool) -> str:
    return f"each rank's own {name}" if by_rank else f"one global order ({name})"
