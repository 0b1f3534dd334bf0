"""Counting what FSDP2 allocates in a step: gathered weights, flat buffers, whole and sharded gradients.

Five methods of each ``FSDPParamGroup`` are wrapped on the instance; each is called once a gather or reduction, so the
cost is a few microseconds a unit:

- ``unshard``: allocates the flat buffer that the gather fills; tracked until it is freed, whatever comm made it;
- ``_to_unsharded``: the gathered weights have storage, the flat buffer still lives;
- ``_to_sharded``, ``_to_sharded_post_forward``: the storages of the gathered weights were resized to nothing (FSDP2
  keeps the tensors, so no reference dies: this is read from the storages' sizes);
- ``post_backward``: at its entry whole gradients are complete, at its exit the sharded ones may be there.

FSDP2's own reduce-scatter comm is asked for its buffers through ``allocate``, wrapped on its instance; memwall's lanes
book theirs themselves.

Relied on: autograd's nodes and the hooks of the module look these methods up on the instance; the attributes
``_all_gather_result.all_gather_output``, ``all_gather_outputs``, ``_unsharded_inner_tensors``, ``_unsharded_param``,
``unsharded_accumulated_grad``, ``_sharded_post_forward_param_data``, ``_partial_reduce_output``, ``param_dtype``,
``_orig_dtype``, ``_reduce_scatter_comm``. ``tests/engine/test_memory.py`` fails when one of them changes.

Not seen: temporaries of parameters sharded on another dim than 0, zeros that stand in for missing gradients, the
quotient where one rank divides its gradients by a factor, and one parameter's conversion of an unreduced gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memwall_strategy.core.block import Kind
from memwall_strategy.engine.fsdp import FSDPParam, FSDPParamGroup, TrainingState, fsdp_groups
from memwall_strategy.engine.storages import Book


class _Wrap:
    """One method replaced on one instance, and the way back."""

    def __init__(self, owner: object, name: str, outer: Callable[..., Any]) -> None:
        self._owner, self._name, self._outer = owner, name, outer
        self._before = vars(owner).get(name)  # somebody else's replacement, or nothing: then the class's own shows
        setattr(owner, name, outer)

    def remove(self) -> None:
        if vars(self._owner).get(self._name) is not self._outer:
            return  # wrapped again, or removed, by somebody else since: the outer function only passes calls on
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class GroupCounter:
    """Counts one parameter group in a book.

    Args:
        group: of the sharded model.
        book: where to count.
        refresh: called before a gather's bytes are booked in backward: other groups' gradients may have grown.
        gathered_ids: where the ids of the storages of gathered weights are put; FSDP2 keeps these for good.
    """

    def __init__(self, group: FSDPParamGroup, book: Book, refresh: Callable[[], None], gathered_ids: set[int]) -> None:
        self.group, self._book, self._refresh, self._gathered_ids = group, book, refresh, gathered_ids
        self._gathered_bytes = 0
        self._full_bytes: int | None = None
        self._casts: list[tuple[int, int]] | None = None
        self._all_casts_bytes = 0
        self._whole: list[nn.Parameter] = []
        self._active = True
        self._last_output: tuple[Any, int, torch.dtype] | None = None
        self._wraps = [
            self._wrap(group, "unshard", self._unshard),
            self._wrap(group, "_to_unsharded", self._to_unsharded),
            self._wrap(group, "_to_sharded", self._to_sharded),
            self._wrap(group, "_to_sharded_post_forward", self._to_sharded_post_forward),
            self._wrap(group, "post_backward", self._post_backward),
        ]
        self.measure_gathered()

    def remove(self) -> None:
        """Give the group its methods back, and forget its gathered weights."""
        self._active = False
        self._book.remove(Kind.GATHERED, self._gathered_bytes)
        self._gathered_bytes = 0
        for wrap in reversed(self._wraps):
            wrap.remove()
        self._wraps.clear()

    def _wrap(self, owner: object, name: str, around: Callable[..., Any]) -> _Wrap:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs) if self._active else inner(*args, **kwargs)

        return _Wrap(owner, name, outer)

    # -- what the group holds --

    @property
    def is_gathered(self) -> bool:
        """Whether the group's weights are whole at the moment."""
        return self._gathered_bytes > 0

    def sharded_data(self) -> Iterator[torch.Tensor]:
        """This rank's pieces, padding included."""
        for param in self.group.fsdp_params:
            yield param._sharded_param_data

    def managed(self) -> Iterator[nn.Parameter]:
        """Every parameter object that the group may have put on its modules."""
        for param in self.group.fsdp_params:
            for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param"):
                if (found := getattr(param, name, None)) is not None:
                    yield found

    def track_whole_gradients(self) -> None:
        """Look at the gradients that backward accumulated on the gathered weights."""
        track = self._book.track_gradient
        for whole in self._whole:
            if (gradient := whole.grad) is not None:
                track(gradient)

    def track_gradients(self) -> None:
        """Look at every gradient that the group has, whole and sharded."""
        self.track_whole_gradients()
        for param in self.group.fsdp_params:
            if (gradient := param.unsharded_accumulated_grad) is not None:
                self._book.track_gradient(gradient)
            if (gradient := param.sharded_param.grad) is not None:
                self._book.track_gradient(gradient)
        if self.group._partial_reduce_output is not None:
            self._book.track_gradient(self.group._partial_reduce_output)

    def _track_reduced(self) -> None:
        """After a reduction: new sharded gradients are views of one storage, so the first that is there stands for all.

        The look over all gradients at the end of the backward finds what differs from that.
        """
        if not self.group.reduce_grads:
            self.track_gradients()
            return
        if self.group._partial_reduce_output is not None:
            self._book.track_gradient(self.group._partial_reduce_output)
        for param in self.group.fsdp_params:
            if (gradient := param.sharded_param.grad) is not None:
                self._book.track_gradient(gradient)
                return

    def measure_gathered(self) -> None:
        """Read the sizes of the storages of the gathered weights."""
        nbytes = 0
        self._casts = None
        self._whole = [w for p in self.group.fsdp_params if (w := getattr(p, "_unsharded_param", None)) is not None]
        inner_tensors = False
        for param in self.group.fsdp_params:
            inner_tensors = inner_tensors or bool(param._unsharded_inner_tensors)
            for tensor in _gathered_tensors(param):
                storage = tensor.untyped_storage()
                nbytes += storage.nbytes()
                self._gathered_ids.add(id(storage))
        self._full_bytes = None if inner_tensors else nbytes or None
        self._set_gathered(nbytes)

    def _set_gathered(self, nbytes: int) -> None:
        if change := nbytes - self._gathered_bytes:
            (self._book.add if change > 0 else self._book.remove)(Kind.GATHERED, abs(change))
            self._gathered_bytes = nbytes

    # -- around FSDP2's methods --

    def _unshard(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        before = self.group._all_gather_result
        inner(*args, **kwargs)
        result = self.group._all_gather_result
        if result is None or result is before:
            return
        self._book.track(result.all_gather_output, Kind.COMM)
        cast_bytes = self._cast_bytes()
        if cast_bytes and result.all_gather_output.numel():
            self._book.brief({Kind.COMM: cast_bytes})  # the copies in the dtype of the compute lived until just now

    def _to_unsharded(self, inner: Callable[..., Any]) -> None:
        if self.group._training_state != TrainingState.FORWARD:
            self._refresh()
        was = self.group.is_unsharded
        inner()
        if was:
            return
        if self._full_bytes is None:
            self.measure_gathered()  # the first time, and where extensions may change the sizes
        else:
            self._set_gathered(self._full_bytes)
        result = self.group._all_gather_result
        if self._cast_bytes() and result is not None and not result.all_gather_output.numel():
            self._brief_single_rank_cast()

    def _to_sharded(self, inner: Callable[..., Any]) -> None:
        inner()
        self._set_gathered(0)

    def _to_sharded_post_forward(self, inner: Callable[..., Any]) -> None:
        inner()
        full_bytes = self._full_bytes
        self.measure_gathered()
        self._full_bytes = full_bytes

    def _post_backward(self, inner: Callable[..., Any], *args: Any) -> None:
        self._refresh()
        if not self.is_gathered:
            self.track_whole_gradients()
        self._watch_reduce_comm()
        if not self._converts():
            inner(*args)
            self._track_reduced()
            return
        self._last_output = None
        adds = any(param.sharded_param.grad is not None for param in self.group.fsdp_params)
        partial = self.group._partial_reduce_output
        partial_bytes = 0 if partial is None else partial.nbytes
        del partial  # dropped by the reduction if it is the last one
        inner(*args)
        self._track_reduced()
        if self.group._partial_reduce_output is not None:
            partial_bytes = 0
        self._brief_reduction_cast(adds, partial_bytes)

    def _converts(self) -> bool:
        """Whether the dtype of a gradient may change between backward and the sharded gradient."""
        return self.group._reduce_dtype is not None or self._cast_bytes() > 0

    # -- buffers --

    def _watch_reduce_comm(self) -> None:
        comm = self.group._reduce_scatter_comm
        # Others' comms book their own buffers. A comm that was set since the last backward is met here.
        if "allocate" in vars(comm) or not type(comm).__module__.startswith("torch."):
            return

        def allocate(inner: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            buffer = inner(*args, **kwargs)
            ref = self._book.track(buffer, Kind.COMM)
            self._last_output = (ref, buffer.nbytes, buffer.dtype)  # the second of two is the output
            return buffer

        self._wraps.append(self._wrap(comm, "allocate", allocate))

    def _brief_reduction_cast(self, adds: bool, partial_bytes: int) -> None:
        """Book what lived beside the conversion of the reduction's output and is gone again.

        Args:
            adds: the conversion was added to a gradient that was there, so it is gone too.
            partial_bytes: sum of earlier micro-batches, which lived until the reduction returned.
        """
        wanted = self.group._orig_dtype
        if self._last_output is None or wanted is None:
            return
        ref, nbytes, dtype = self._last_output
        if dtype == wanted or ref is None:
            return
        output_bytes = 0 if ref() is not None else nbytes  # held further for replicas: then it is counted as it is
        converted_bytes = nbytes // dtype.itemsize * wanted.itemsize if adds else 0
        self._book.brief({Kind.COMM: output_bytes, Kind.GRAD: converted_bytes + partial_bytes})

    def _conversions(self) -> list[tuple[int, int]]:
        """Per parameter: bytes of this rank's piece as gathered, and of its converted copy (0 where none is made)."""
        if self._casts is None:
            self._casts = []
            for param in self.group.fsdp_params:
                dtype = param.param_dtype or param.sharded_param.dtype
                nbytes = param.padded_sharded_param_size.numel() * dtype.itemsize
                self._casts.append((nbytes, nbytes if param.param_dtype is not None else 0))
            self._all_casts_bytes = sum(cast for _, cast in self._casts)
        return self._casts

    def _cast_bytes(self) -> int:
        """Bytes of all converted copies."""
        if self._casts is None:
            self._conversions()
        return self._all_casts_bytes

    def _brief_single_rank_cast(self) -> None:
        """On one rank each parameter is converted, then copied; a copy is dropped when the next one is made."""
        copied = previous = highest = 0
        for gathered, cast in self._conversions():
            highest = max(highest, copied + previous + cast, copied + gathered + cast)
            copied, previous = copied + gathered, cast
        if highest > self._gathered_bytes:
            self._book.brief({Kind.COMM: highest - self._gathered_bytes})


class ModelCounter:
    """Counts every parameter group of a model."""

    def __init__(self, model: nn.Module, book: Book) -> None:
        self.gathered_ids: set[int] = set()
        """Ids of the storages of gathered weights."""
        self.groups = [GroupCounter(group, book, self._refresh, self.gathered_ids) for group in fsdp_groups(model)]

    def _refresh(self) -> None:
        for group in self.groups:
            if group.is_gathered:
                group.track_whole_gradients()

    def remove(self) -> None:
        """Give all groups their methods back."""
        for group in self.groups:
            group.remove()


def _gathered_tensors(param: FSDPParam) -> Iterator[torch.Tensor]:
    yield from param.all_gather_outputs
    yield from param._unsharded_inner_tensors
    piece = getattr(param, "_sharded_post_forward_param_data", None)  # set by the first such reshard
    if piece is not None:
        yield piece
