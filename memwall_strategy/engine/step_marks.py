"""What a forward changes beside gradients, kept so that it can be run again exactly: random states and buffers.

Buffers (running statistics) are copied where they are small. A large one, a table that no forward changes, is only
watched: if its version moved, the forward cannot be run again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

LARGEST_COPY_BYTES = 2**20
"""Buffers up to this size are copied at the start of each step."""


class RngMark:
    """States of torch's (CPU, and CUDA where it is in use), Python's and NumPy's generators at one moment."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class BufferMark:
    """The buffers of some modules at one moment.

    Args:
        modules: from ``modules_with_buffers``.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor | int]] = []
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    kept = buffer.detach().clone() if buffer.nbytes <= LARGEST_COPY_BYTES else buffer._version
                    self._kept.append((module._buffers, name, buffer, kept))

    def changed_for_good(self) -> str:
        """Name of a buffer that changed and was not copied; empty where all can be set back."""
        for owner, name, buffer, kept in self._kept:
            if isinstance(kept, int) and (owner.get(name) is not buffer or buffer._version != kept):
                return name
        return ""

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers back."""
        for owner, name, buffer, kept in self._kept:
            owner[name] = buffer
            if isinstance(kept, torch.Tensor):
                buffer.copy_(kept)


def modules_with_buffers(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that hold buffers themselves."""
    # Private of torch: ``_buffers`` is where a module keeps them, under the names that they are set back to.
    return [module for module in model.modules() if module._buffers]
