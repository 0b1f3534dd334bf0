"""What autograd saves between forward and backward: the account's deep mode, and a measurement for the planner.

A saved-tensor hook wraps each saved tensor in a holder that lives as long as autograd needs it. A storage counts once,
however many tensors on it are saved, until its last holder is gone. Weights are skipped by storage: autograd saves them
too, gathered ones included, but they are counted elsewhere.

Not seen: what ``torch.utils.checkpoint`` keeps of its arguments (it holds them in a closure, and its own hooks hide
what the function saves, which is the point of recomputing), and tensors that a custom ``autograd.Function`` keeps as
attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memwall_strategy.core.errors import ConfigError, nearest
from memwall_strategy.engine.storages import Book, storages


class _Holder:
    """Keeps a saved tensor; dies when autograd lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a saved output that held its own graph would be a cycle, freed only by the garbage collector.
        self.tensor = tensor.detach()


def _unpack(packed: _Holder | torch.Tensor) -> torch.Tensor:
    return packed.tensor if isinstance(packed, _Holder) else packed


@contextmanager
def counting_saved_tensors(book: Book, skip: set[int]) -> Iterator[None]:
    """Count what autograd saves inside, in ``book`` under ``activation``.

    Args:
        skip: ids of the storages of gathered weights; may grow meanwhile.
    """

    def pack(tensor: torch.Tensor) -> _Holder | torch.Tensor:
        if tensor.is_leaf and isinstance(tensor, nn.Parameter):
            return tensor  # a weight, sharded or gathered
        holder = _Holder(tensor)
        book.save(holder, tensor, skip)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def measure_activations(
    module: nn.Module, *inputs: Any, unit_names: Iterable[str] = (), loss: Callable[[Any], torch.Tensor] | None = None
) -> tuple[tuple[int, ...], int]:
    """Run one forward and count the bytes that autograd saves, per unit and outside the units.

    On the meta device nothing is computed or allocated, so a model of any size can be measured; there, fused attention
    of the real device may be another kernel that saves less.

    Args:
        module: not sharded, on meta or any device; left as it is.
        inputs: arguments of ``forward``, on the module's device; their batch is the micro-batch.
        unit_names: modules to count apart, in forward order.
        loss: maps the output to a scalar, so that what the loss saves is counted; None: the output is where it ends.

    Returns:
        Bytes per unit, and bytes outside them: the arguments of ``planner.ActivationSpec``.

    Raises:
        ConfigError: a name that is no module of the model.
    """
    names = list(unit_names)
    modules = dict(module.named_modules())
    for name in names:
        if name not in modules:
            raise ConfigError(f"unit {name!r} is no module of {type(module).__name__}.{nearest(name, modules)}")
    known = {id(s) for t in (*module.parameters(), *module.buffers()) for s in storages(t)}
    sizes = dict.fromkeys([*names, ""], 0)
    inside: list[str] = [""]
    alive: list[torch.Tensor] = []  # a freed storage's id would be given to another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        for storage in storages(kept):
            if id(storage) not in known:
                known.add(id(storage))
                alive.append(kept)
                sizes[inside[-1]] += storage.nbytes()
        return kept

    def leave(*_: Any) -> None:
        inside.pop()

    handles = []
    for name in names:
        handles.append(modules[name].register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        handles.append(modules[name].register_forward_hook(leave))
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            output = module(*inputs)
            if loss is not None:
                output = loss(output)
    finally:
        for handle in handles:
            handle.remove()
    outside = sizes.pop("")
    return tuple(sizes.values()), outside
