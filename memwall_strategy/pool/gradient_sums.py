"""The arithmetic of gradients that rest on the host: add one to its sum there, or a sum to one on the device.

Both run on a lane's thread. A sum on the host is added to by the host, element by element in the gradient's own dtype,
as the device would: IEEE addition rounds alike and commutes, so sums are those of plain accumulation bit for bit.

What orders what on CUDA. The gradient was last written on the stream whose mark is ``after`` (the engine's reduction,
or the current stream). The lane's own stream waits for that mark, and everything the lane allocates is allocated on
its own stream, so no memory is taken over from another stream's unfinished work. The call returns when the lane's
stream is empty: the host may then read the staging buffer, any stream may use the gradient, and dropping the last
reference to it hands its memory back to the stream that it came from with no work left on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memwall_strategy.core.block import Placement
from memwall_strategy.pool.store import MemoryStore

Job = tuple[Placement, torch.Tensor, bool]
"""A sum's place on the host, a gradient on the device, and whether there is a sum already."""


class GradientSums:
    """Sums in one store, on one lane.

    Args:
        store: the host tier.
        staging: CUDA: where a gradient lies on the host before it is added; as long as the longest.
    """

    def __init__(self, store: MemoryStore, staging: Placement | None = None) -> None:
        self._store, self._staging = store, staging
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def take(self, jobs: Sequence[Job], after: torch.cuda.Event | None) -> None:
        """Host sum = host sum + gradient, or the gradient where there is no sum."""
        for placement, gradient, there in jobs:
            total = self._store.view(placement, gradient.dtype, gradient.shape)
            if gradient.is_cpu:
                total.add_(gradient) if there else total.copy_(gradient)
                continue
            landing = self._landing(gradient) if there else total
            with torch.cuda.stream(self._own(gradient.device)):
                if after is not None:
                    self._stream.wait_event(after)
                landing.copy_(gradient, non_blocking=True)
            self._stream.synchronize()
            if there:
                total.add_(landing)

    @torch.no_grad()
    def give(self, jobs: Sequence[Job], after: torch.cuda.Event | None) -> None:
        """Gradient = gradient + host sum, or the host sum where the gradient is not there."""
        for placement, gradient, there in jobs:
            total = self._store.view(placement, gradient.dtype, gradient.shape)
            if gradient.is_cpu:
                gradient.add_(total) if there else gradient.copy_(total)
                continue
            with torch.cuda.stream(self._own(gradient.device)):
                if after is not None:
                    self._stream.wait_event(after)
                if there:
                    gradient.add_(total.to(gradient.device, non_blocking=True))
                else:
                    gradient.copy_(total, non_blocking=True)
            self._stream.synchronize()

    def _own(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _landing(self, gradient: torch.Tensor) -> torch.Tensor:
        staging = self._store.bytes_of(self._staging)[: gradient.nbytes]
        return staging.view(gradient.dtype).view(gradient.shape)
