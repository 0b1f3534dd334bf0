"""Hearing of ``zero_grad``, which torch has no hook for: an attribute of the instance calls the class's own."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class ZeroGradWatch:
    """Calls ``then`` after each ``zero_grad`` of one model or optimizer, until ``remove``.

    A copy of the owner, or what is unpickled from it, has its class's own method.
    """

    def __init__(self, owner: nn.Module | Optimizer, then: Callable[[], None]) -> None:
        self._owner, self._then = owner, then
        self._before = owner.__dict__.get("zero_grad")
        owner.zero_grad = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        inner = self._before if self._before is not None else _own(self._owner)
        inner(*args, **kwargs)
        self._then()

    def remove(self) -> None:
        """Give the owner its method back; where somebody replaced it since, this one only passes calls on."""
        if self._owner.__dict__.get("zero_grad") is self:
            if self._before is None:
                del self._owner.__dict__["zero_grad"]
            else:
                self._owner.__dict__["zero_grad"] = self._before
        self._then = _nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _own, (self._owner,)


def _own(owner: nn.Module | Optimizer) -> Callable[..., None]:
    return types.MethodType(type(owner).zero_grad, owner)


def _nothing() -> None:
    return None
