"""Optimizer state that is quantised in blocks: a tensor subclass around codes and scales (torchao's 8-bit optimizers).

How a parameter's state is laid out depends on the number of its elements (torchao leaves small and odd ones alone), so
that tiny tensors do not tell: torchao's optimizer is asked, on the meta device. Relies on private names of torchao:
``_new_buffer(parameter, signed)`` makes a state tensor, and the subclass has ``__tensor_flatten__``;
``tests/pool/test_eightbit.py`` fails when they change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from memwall_strategy.engine.fsdp import local_tensor

_SHARED = "qmap"
"""The table of codes, the same for every tensor, small: never paged."""


def _package(optimizer: Optimizer) -> set[str]:
    return {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}


def why_not_paged(optimizer: Optimizer) -> str:
    """Why an optimizer's quantised state cannot be paged; empty for most, and for torchao's."""
    if "bitsandbytes" in _package(optimizer):
        return (
            f"{type(optimizer).__name__} of bitsandbytes keeps quantised state in a layout of its own; "
            "torchao.optim has optimizers of the same kind"
        )
    return ""


@contextmanager
def uncompiled(optimizer: Optimizer) -> Iterator[None]:
    """Inside, torchao's step is not compiled: it would be, for each shape of a probe."""
    if "torchao" not in _package(optimizer):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def parts_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Inner tensors of a state tensor of this parameter: name -> dtype and shape; nothing where it is plain."""
    if not hasattr(optimizer, "_new_buffer") or "torchao" not in _package(optimizer):
        return {}
    local = local_tensor(parameter)
    made = optimizer._new_buffer(torch.empty(local.shape, dtype=local.dtype, device="meta"), True)
    if not is_quantised(made):
        return {}
    inner = {name: getattr(made, name) for name in made.__tensor_flatten__()[0]}
    return {name: (each.dtype, each.shape) for name, each in inner.items() if name != _SHARED}


def is_quantised(value: Any) -> bool:
    """Whether a tensor is a wrapper around inner tensors; a DTensor is looked into."""
    value = local_tensor(value) if isinstance(value, torch.Tensor) else value
    return type(value) is not torch.nn.Parameter and hasattr(value, "__tensor_flatten__")


def with_parts(like: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor as ``like`` with these inner tensors, and copies of the others."""
    names, context = like.__tensor_flatten__()
    inner = {name: parts[name] if name in parts else getattr(like, name).clone() for name in names}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())
