"""The end of every backward that reached a sharded unit, after the engine put its gradients in place.

FSDP2 queues ``_root_post_backward_final_callback`` of whichever state meets the backward first as autograd's final
callback, looked up on the instance: an attribute there wins. It runs on the thread that called ``backward``, inside it;
on CUDA the current stream has been told to wait for the reductions by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from memwall_strategy.engine.fsdp import FSDPState, fsdp_states

_NAME = "_root_post_backward_final_callback"


class BackwardEnd:
    """Calls ``then`` at the end of each backward of ``model``, until ``remove``.

    Args:
        model: after ``fully_shard``. Who also replaces the callback comes before, and goes after.
    """

    def __init__(self, model: nn.Module, then: Callable[[], None]) -> None:
        self._before: list[tuple[FSDPState, object | None]] = []
        for state in fsdp_states(model):
            self._before.append((state, state.__dict__.get(_NAME)))
            setattr(state, _NAME, functools.partial(_both, getattr(state, _NAME), then))

    def remove(self) -> None:
        """Give every state its own callback back. Idempotent."""
        for state, before in self._before:
            if before is None:
                state.__dict__.pop(_NAME, None)
            else:
                setattr(state, _NAME, before)
        self._before.clear()


def _both(first: Callable[[], None], then: Callable[[], None]) -> None:
    first()
    then()
