"""A step of some of an optimizer's parameters, by its own arithmetic.

``only`` leaves the chosen parameters in the param groups for a while, or others in their stead (``stand_in``): tensors
that hold the weights in another type or in other memory. The optimizer then steps those, and keeps its state for the
parameters that they stand for.

Relies on private facts of ``torch.optim.Optimizer``: ``_patch_step_function`` wraps ``step`` once per class by
``profile_hook_step``, which sets ``hooked`` and keeps the original as ``__wrapped__``; and on FSDP2's
``_from_local_no_grad``, ``DTensor._spec`` and its ``tensor_meta``. ``tests/engine/test_optimizer_parts.py`` fails when
they change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.fsdp import local_tensor


def bare_step(optimizer: Optimizer, kind: type[Optimizer] | None = None) -> Callable[[], Any]:
    """``step`` of the optimizer's class, or of ``kind``, without hooks and profiling, bound to it."""
    step = (kind or type(optimizer)).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step.__get__(optimizer)


def follow_class(optimizer: Optimizer) -> None:
    """After ``optimizer`` was given another class: let its ``step`` be that class's, hooks and profiling included.

    A scheduler that was made before has put a ``step`` on the instance, which calls the former class's; it is made
    anew. Relies on ``LRScheduler`` marking it with ``_wrapped_by_lr_sched`` and reading ``_opt_called``.

    Raises:
        ConfigError: somebody else replaced ``optimizer.step``.
    """
    optimizer._patch_step_function()
    before = vars(optimizer).pop("step", None)
    if before is None:
        return
    if not hasattr(before, "_wrapped_by_lr_sched"):
        optimizer.step = before
        raise ConfigError(
            f"{type(optimizer).__name__}.step was replaced on the object by {before!r}, so that it cannot be paged. "
            "Subclass the optimizer instead, or set pool.enabled=false."
        )
    this = weakref.ref(optimizer)

    @functools.wraps(before)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = this()
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step


@contextmanager
def only(
    optimizer: Optimizer,
    chosen: Collection[torch.Tensor],
    instead: Mapping[torch.Tensor, torch.nn.Parameter] | None = None,
    aside: Collection[str] = (),
) -> Iterator[None]:
    """Inside, the optimizer's param groups hold no parameter but those of ``chosen`` (compared by identity).

    Args:
        optimizer: whose.
        chosen: the parameters.
        instead: parameter -> its stand-in, which takes its place in groups and state.
        aside: entries of these parameters' state that the optimizer must not see.
    """
    instead = instead or {}
    ids = {id(parameter): instead.get(parameter, parameter) for parameter in chosen}
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    state, hidden = optimizer.state, {}
    for group, params in zip(groups, whole, strict=True):
        group["params"] = [ids[id(parameter)] for parameter in params if id(parameter) in ids]
    for parameter, stand in instead.items():
        entries = state.pop(parameter, {})
        hidden[parameter] = entries, {key: entries.pop(key) for key in aside if key in entries}
        if entries:
            state[stand] = entries
    try:
        yield
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params
        for parameter, (entries, kept) in hidden.items():
            made = state.pop(instead[parameter], entries)
            made.update(kept)
            if made:
                state[parameter] = made


def stand_in(parameter: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor | None) -> torch.nn.Parameter:
    """A parameter over other memory: this rank's ``weight`` and ``gradient``, spread as ``parameter`` is."""
    stand = torch.nn.Parameter(spread_like(parameter, weight), requires_grad=parameter.requires_grad)
    if gradient is not None:
        stand.grad = spread_like(parameter, gradient)
    return stand


def spread_like(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as this rank's part of a tensor that is spread as ``like`` is, whatever its type and device."""
    if not isinstance(like, DTensor):
        return local
    if local.device != local_tensor(like).device:  # the whole says ``like``'s device, so that its mesh stays right
        made = torch.empty_like(like.detach(), dtype=local.dtype)
        local_tensor(made).data = local
        return made
    spec = like._spec
    return _from_local_no_grad(local, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype)))


@contextmanager
def localised(optimizer: Optimizer, parameters: Collection[torch.Tensor]) -> Iterator[None]:
    """Inside, the state of these parameters is this rank's part alone, and what is small of it is on the CPU."""
    wrapped: list[tuple[torch.Tensor, dict[str, Any], dict[str, torch.Tensor]]] = []
    for parameter in parameters:
        entries = optimizer.state.get(parameter, {})
        before = {key: value for key, value in entries.items() if isinstance(value, DTensor)}
        wrapped.append((parameter, entries, before))
        for key, value in entries.items():
            if isinstance(value, DTensor):
                entries[key] = local_tensor(value)
            elif isinstance(value, torch.Tensor) and value.dim() == 0:
                entries[key] = value.cpu()
    try:
        yield
    finally:
        for parameter, _, before in wrapped:
            entries = optimizer.state.get(parameter, {})
            shape = local_tensor(parameter).shape
            for key, value in entries.items():
                if key in before and value is local_tensor(before[key]):
                    entries[key] = before[key]
                elif isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                    entries[key] = spread_like(parameter, value)


def counters_beside(optimizer: Optimizer, parameters: Collection[torch.Tensor]) -> None:
    """Bring step counters back to the weights' device, where the optimizer wants them there (fused, capturable)."""
    ids = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            for parameter in (p for p in group["params"] if id(p) in ids):
                entries, device = optimizer.state.get(parameter, {}), local_tensor(parameter).device
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != device:
                        entries[key] = value.to(device)


def plain_class(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's class, without what pooling put before it."""
    return getattr(type(optimizer), "memwall_plain_class", type(optimizer))
