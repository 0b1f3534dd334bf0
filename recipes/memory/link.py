"""A link of a given rate between host and device, for a machine that has none.

A card's link is told by what it moves for each operation that the card computes, because that ratio decides what can be
hidden; the bench machine's link is made as slow for its own arithmetic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memwall_strategy.pool.store import MemoryStore, Pairs

CARD_FLOPS = 400e12
"""Operations per second that training reaches on an H100 in bf16: about 40 % of its 989 TFLOP/s (NVIDIA's data sheet),
which is what published runs of large models reach."""

CARD_LINK_BYTES_PER_S = 64e9
"""PCIe 5.0 x16, each way."""

CARD_TOKENS = 8 * 4096
"""Tokens of a step for each whole state that a link moves: with 8 ranks that train 4,096 tokens each, a link moves an
eighth of the state, so bytes are to arithmetic as in 32,768 tokens over one link that moves all of it."""

FLOPS_PER_WEIGHT_AND_TOKEN = 6
"""Of forward and backward (Kaplan et al. 2020, section 2.1)."""


def scaled_rate(parameters: int, tokens: int, step_s: float) -> float:
    """Bytes per second, each way, of a link that is to this machine's arithmetic as the card's is to the card's.

    Args:
        parameters, tokens: of a step here, in one process that moves all of the state.
        step_s: of a step with all state on the device.
    """
    flops = FLOPS_PER_WEIGHT_AND_TOKEN * parameters * tokens / step_s
    return flops * CARD_LINK_BYTES_PER_S / CARD_FLOPS * (CARD_TOKENS / tokens)


@dataclass
class SlowLink:
    """Every copy of the host tier takes as long as its bytes take at ``bytes_per_s``; the two ways do not share it.

    Attributes:
        moved_s: what all copies take, both ways, since ``take``.
    """

    bytes_per_s: float
    moved_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # each way has a thread of its own

    def install(self, store: MemoryStore) -> None:
        """Slow the store's copies down."""
        store.read, store.write = self._slow(store.read), self._slow(store.write)  # type: ignore[method-assign]

    def take(self) -> float:
        """Seconds of all copies since the last call."""
        with self._lock:
            taken, self.moved_s = self.moved_s, 0.0
        return taken

    def _slow(self, copy: Callable[..., None]) -> Callable[..., None]:
        def slowed(pairs: Pairs, after: torch.cuda.Event | None = None) -> None:
            start, pairs = time.perf_counter(), list(pairs)
            copy(pairs, after)
            wanted = sum(placement.bytes for placement, _ in pairs) / self.bytes_per_s
            time.sleep(max(0.0, start + wanted - time.perf_counter()))  # the lane's thread: it computes nothing
            with self._lock:
                self.moved_s += max(wanted, time.perf_counter() - start)

        return slowed
