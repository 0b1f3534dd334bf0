"""Where the lanes book their buffers: a ``MemoryAccount``, or nowhere."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Account(Protocol):
    """Where buffers count while they live, and windows until they are closed (``engine.memory.MemoryAccount``)."""

    def track(self, tensor: torch.Tensor, kind: str, module: nn.Module | None = None) -> None: ...
    def add(self, kind: str, nbytes: int) -> None: ...
    def remove(self, kind: str, nbytes: int) -> None: ...
    def ignore(self, storage: torch.UntypedStorage, *, on_host: bool = False) -> None: ...
    def heed(self, storage: torch.UntypedStorage) -> None: ...


class NoAccount:
    """Counts nothing."""

    def _nothing(self, *_: object, **__: object) -> None:
        return None

    track = add = remove = ignore = heed = _nothing
