"""Extents: stretches of a tensor's memory, cut and copied without making a tensor of each.

A unit's optimizer state is often hundreds of small tensors; a torch view costs about as much as copying 100 KiB.
"""

from __future__ import annotations

import torch

from memwall_strategy.core.errors import BlockError


class Extent:
    """``nbytes`` of memory from ``address`` on; keeps the tensor alive that they belong to.

    Args:
        owner: a contiguous tensor.
        at: first byte within it.
        nbytes: length.
        address: of the first byte.
    """

    __slots__ = ("_at", "_owner", "address", "nbytes")

    def __init__(self, owner: torch.Tensor, at: int, nbytes: int, address: int) -> None:
        self._owner, self._at = owner, at
        self.nbytes, self.address = nbytes, address

    @property
    def on_cpu(self) -> bool:
        return self._owner.is_cpu

    def part(self, low: int, high: int) -> Extent:
        """Bytes ``low`` to ``high`` of it."""
        return Extent(self._owner, self._at + low, high - low, self.address + low)

    def tensor(self) -> torch.Tensor:
        """It as a vector of bytes."""
        return self._owner.detach().reshape(-1).view(torch.uint8)[self._at : self._at + self.nbytes]

    def memory(self) -> memoryview:
        """It as a buffer, for I/O; on CPU only."""
        return memoryview(self.tensor().numpy())


def extent_of(tensor: torch.Tensor | Extent) -> Extent:
    """All memory of a tensor, without a copy.

    Raises:
        BlockError: its bytes do not follow each other in real memory.
    """
    if isinstance(tensor, Extent):
        return tensor
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise BlockError(
            f"a tensor of shape {tuple(tensor.shape)} in {tensor.layout} is not contiguous, or a lazy view. Page its "
            ".contiguous() copy, or the storage that it views."
        )
    nbytes = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr()
    if (nbytes and not address) or not (tensor.is_cpu or tensor.is_cuda):
        raise BlockError(
            f"a {type(tensor).__name__} on device {tensor.device} has no memory here. Page its local part."
        )
    return Extent(tensor, 0, nbytes, address)
