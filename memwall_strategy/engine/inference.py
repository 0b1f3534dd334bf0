"""Gathers under ``torch.inference_mode``.

Inference mode marks what is allocated in it: such a tensor can never be written outside again. FSDP2 keeps the tensors
of gathered weights from their first use on, so a model that is evaluated in inference mode before it is trained could
not be trained any more, and a lane, whose thread is not in that mode, could not write them. Here gathers leave the mode
for as long as they last; the forward itself stays in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memwall_strategy.engine.fsdp import fsdp_groups

_GATHERING = ("unshard", "wait_for_unshard")
"""Methods of ``FSDPParamGroup`` in which gathered weights and buffers are allocated and written."""


def gather_outside_inference_mode(model: nn.Module) -> None:
    """Override both methods on every parameter group of ``model``. Idempotent."""
    for group in fsdp_groups(model):
        for name in _GATHERING:
            method = getattr(group, name)
            if not hasattr(method, "leaves_inference_mode"):
                setattr(group, name, _outside(method))


def _outside(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def outside(*args: Any, **kwargs: Any) -> None:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    outside.leaves_inference_mode = True
    return outside
