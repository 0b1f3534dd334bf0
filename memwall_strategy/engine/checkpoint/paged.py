"""Optimizer state that is not in memory: fetched when its bytes are written, sent away as soon as they were read.

An optimizer whose state rests elsewhere has the methods of ``PagedState`` (the pool's does). In a checkpoint's contents
such a block is a tensor of the right shape, type and placement whose own memory is empty, with a ``fetch`` tied to it;
planning needs no more. While loading, state is read part by part, and each part is sent away before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer


@runtime_checkable
class PagedState(Protocol):
    """What an optimizer with paged state offers to checkpoints."""

    def settle_state(self) -> None:
        """Wait until nothing is on its way; every state tensor then shows where it rests."""

    def fetch_state(self, parameter: Tensor, key: str) -> Callable[[], Tensor] | None:
        """How to get a copy of a state tensor that is not in memory; None where it is."""

    def state_parts(self) -> Sequence[Sequence[Tensor]]:
        """The parameters whose state may be in memory together, part by part."""

    def adopt_state(self) -> None:
        """Send what was put into ``state`` to where it rests."""


def settle(optimizer: Optimizer) -> None:
    """Before an optimizer's state is looked at."""
    if isinstance(optimizer, PagedState):
        optimizer.settle_state()


def tie(block: Tensor, optimizer: Optimizer, parameter: Any, key: str) -> Tensor:
    """Tie to a block how its bytes are fetched, where they are not in memory; returns the block."""
    if isinstance(optimizer, PagedState) and isinstance(parameter, Tensor):
        fetch = optimizer.fetch_state(parameter, key)
        if fetch is not None:
            block.memwall_fetch = fetch
    return block


def is_paged(block: Tensor) -> bool:
    """Whether a block's bytes must be fetched."""
    return hasattr(block, "memwall_fetch")


def resident(block: Tensor) -> Tensor:
    """The block with its bytes: itself, or a copy that was fetched now."""
    return block.memwall_fetch() if is_paged(block) else block
