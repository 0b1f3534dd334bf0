"""A prepared loader: dealt over the ranks with a position, and known to Accelerate while a pass is under way.

memwall deals map-style data (``runtime.data``): every sample once, the last step as evenly as it can be, a position
that can be saved. Iterable data and ``dispatch_batches=True`` stay with Accelerate's own loaders, whose position is not
saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, IterableDataset

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.accelerate_bridge import PassState
from memwall_strategy.runtime.even import EvenLoader
from memwall_strategy.runtime.sampler import Position


class PreparedLoader(PassState):
    """Yields this rank's batches, on its device.

    Args:
        inner: from ``runtime.data.position_loader``.
        device: where batches go; None leaves them.
        world: number of ranks.

    Attributes:
        own_samples: of the batch handed out last, how many samples each rank has; None where that is not known. A rank
            with none repeats a sample of another.
        weight: of the batch handed out last: its mean loss times this, averaged over ranks, is the step's.
        state_before: the position, where a batch beyond it was fetched already.
    """

    def __init__(self, inner: Any, *, device: torch.device | None, non_blocking: bool, world: int) -> None:
        super().__init__(inner)
        self.device, self.non_blocking, self.world = device, non_blocking, world
        self.own_samples: list[int] | None = None
        self.weight = 1.0
        self.state_before: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self.enter_pass()
        try:
            # An EvenLoader cannot tell beforehand which batch is the last.
            yield from self._looking_ahead() if isinstance(self.inner, EvenLoader) else self._dealt()
        finally:
            self.weight, self.own_samples, self.state_before = 1.0, None, None
            self.leave_pass()

    def _dealt(self) -> Iterator[Any]:
        positions = self.inner.positions
        before: Position | None = None
        for batch in self.inner:
            before, at = before or positions.start, self.inner.position
            self.end_of_dataloader = positions.steps_left(at) == 0
            self.own_samples = self._shares(at.consumed - before.consumed)
            self.weight = self.inner.weight
            before = at
            yield self._placed(batch)

    def _shares(self, taken: int) -> list[int] | None:
        positions = self.inner.positions
        if positions.by_rank or positions.order.items_are_batches:
            return None
        share, more = divmod(taken, self.world)
        return [share + int(rank < more) for rank in range(self.world)]

    def _looking_ahead(self) -> Iterator[Any]:
        batches, nothing = iter(self.inner), object()
        batch = next(batches, nothing)
        while batch is not nothing:
            self.weight, self.state_before = self.inner.weight, self.inner.state_dict()
            following = next(batches, nothing)
            self.end_of_dataloader = following is nothing
            yield self._placed(batch)
            batch = following

    def _placed(self, batch: Any) -> Any:
        return batch if self.device is None else send_to_device(batch, self.device, non_blocking=self.non_blocking)

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in a step; of a loader of whole batches, batches."""
        return self.inner.positions.batch_size * self.world

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that of ``epoch``. Without it each pass is the next epoch, as under Accelerate."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        positions = self.inner.positions
        coming = positions.start.epoch + int(positions.begun)
        if epoch != coming:
            positions.move_to(Position(epoch=epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return self.inner.state_dict() if self.state_before is None else self.state_before

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass start at a saved position."""
        self.inner.load_state_dict(state)

    def skip(self, batches: int) -> None:
        """Let the next pass start after so many batches; nothing where a saved position was loaded and not yet used.

        Raises:
            ConfigError: the loader has no position.
        """
        positions = getattr(self.inner, "positions", None)
        if positions is None:
            raise ConfigError("skip_first_batches: this loader has no position. Use a map-style dataset.")
        restored = self.inner.restored and not positions.begun and positions.start.batches > 0
        if not restored:
            self.inner.skip(positions.start.epoch + int(positions.begun), batches)


def deals(loader: DataLoader, dispatch: bool | None) -> bool:
    """Whether memwall deals this loader's data over the ranks; otherwise Accelerate's own loader does.

    Args:
        dispatch: Accelerate's ``dispatch_batches``.
    """
    keeps_its_own = hasattr(loader, "state_dict") and not isinstance(loader, PreparedLoader)
    return not (dispatch or isinstance(loader.dataset, IterableDataset) or keeps_its_own)
