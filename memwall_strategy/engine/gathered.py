"""Counting what FSDP2 allocates in a step: gathered weights, flat buffers, whole and sharded gradients.

Five methods of each ``FSDPParamGroup`` are wrapped on the instance; each is called once a gather or reduction:

- ``unshard``: allocates the flat buffer that the gather fills; tracked until it is freed, whatever comm made it;
- ``_to_unsharded``: the gathered weights have storage, the flat buffer still lives;
- ``_to_sharded``, ``_to_sharded_post_forward``: the storages of the gathered weights were resized to nothing (FSDP2
  keeps the tensors, so no reference dies);
- ``post_backward``: at its entry whole gradients are complete, at its exit the sharded ones may be there.

FSDP2's own reduce-scatter comm is asked for its buffers through ``allocate``, wrapped on its instance; memwall's lanes
book theirs themselves.

Python between two kernels runs with cold caches, ten times slower than in a loop, so what happens at each of these
calls is kept short: gathered weights and whole gradients are numbers, only buffers are tracked by reference.

Relied on: autograd's nodes and the hooks of the module look these methods up on the instance; the attributes
``_all_gather_result.all_gather_output``, ``all_gather_outputs``, ``_unsharded_inner_tensors``, ``_unsharded_param``,
``unsharded_accumulated_grad``, ``_sharded_post_forward_param_data``, ``_partial_reduce_output``, ``param_dtype``,
``_orig_dtype``, ``_reduce_dtype``, ``_reduce_scatter_comm``; that each group has a comm of its own, whose reduction
asks for its output after the whole gradients were dropped. ``tests/engine/test_memory_ranks.py`` fails when one of them
changes.

Not seen: temporaries of parameters sharded on another dim than 0, zeros that stand in for missing gradients, the
quotient where one rank divides its gradients by a factor, one parameter's conversion of an unreduced gradient, and the
first gradient of a weight used twice, which waits inside autograd for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memwall_strategy.core.block import Kind
from memwall_strategy.engine.fsdp import FSDPParam, FSDPParamGroup, TrainingState, fsdp_groups
from memwall_strategy.engine.storages import Book, StorageRef


class Wrap:
    """One method replaced on one instance, and the way back."""

    def __init__(self, owner: object, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name)  # somebody else's replacement, or nothing: then the class's own shows
        self._outer = around(getattr(owner, name))
        setattr(owner, name, self._outer)

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
        model: the counter of all groups.
        book: where to count.
    """

    def __init__(self, group: FSDPParamGroup, model: ModelCounter, book: Book) -> None:
        self.group, self._model, self._book = group, model, book
        self.book = book
        self._active = True
        # - What is booked: bytes of gathered weights and of whole gradients
        self._gathered_bytes = 0
        self._whole_bytes = 0
        self._added_bytes = 0
        """The part of these that the end of the backward adds to earlier micro-batches' gradients, and drops first."""
        # - What does not change from step to step; read anew by ``look``
        self._full_bytes: int | None = None
        self._whole: list[nn.Parameter] = []
        self._casts: list[tuple[int, int]] = []
        self._cast_bytes = 0
        self._may_convert = True
        self._keeps_whole = True
        """Whether gradients may rest unreduced: then also in another dtype than backward makes."""
        # - The reduction in progress
        self._buffers: list[tuple[StorageRef | None, torch.dtype]] = []

        self._wraps = [
            Wrap(group, "unshard", self._around_unshard),
            Wrap(group, "_to_unsharded", self._around_to_unsharded),
            Wrap(group, "_to_sharded", self._around_to_sharded),
            Wrap(group, "_to_sharded_post_forward", self._around_to_sharded_post_forward),
            Wrap(group, "post_backward", self._around_post_backward),
        ]

    def remove(self) -> None:
        """Give the group its methods back, and forget what was booked as numbers."""
        self._active = False
        self._set_gathered(0)
        self._set_whole(0)
        for wrap in reversed(self._wraps):
            wrap.remove()
        self._wraps.clear()

    # -- what the group holds --

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

    def look(self) -> None:
        """Read everything that is otherwise taken to be as it was."""
        params = self.group.fsdp_params
        self._whole = [whole for p in params if (whole := getattr(p, "_unsharded_param", None)) is not None]
        self._casts = [_conversion(param) for param in params if hasattr(param, "param_dtype")]  # set before a gather
        self._cast_bytes = sum(cast for _, cast in self._casts)
        self._may_convert = self._cast_bytes > 0 or getattr(self.group, "_reduce_dtype", None) is not None
        self._keeps_whole = True
        self._full_bytes = None
        nbytes = 0
        for param in params:
            for tensor in gathered_tensors(param):
                storage = tensor.untyped_storage()
                nbytes += storage.nbytes()
                self._model.gathered_ids.add(id(storage))
        self._set_gathered(nbytes)
        self.look_at_gradients()

    def look_at_gradients(self) -> None:
        """Read every gradient that the group has, whole and sharded."""
        self._look_at_whole()
        seen = None
        for param in self.group.fsdp_params:
            gradient = param.sharded_param.grad
            if gradient is None:
                continue
            local = getattr(gradient, "_local_tensor", gradient)
            if (key := id(local.untyped_storage())) != seen:  # gradients that were reduced together share one storage
                seen = key
                self._book.track(local, Kind.GRAD)
        if self.group._partial_reduce_output is not None:
            self._book.track(self.group._partial_reduce_output, Kind.GRAD)

    def _look_at_whole(self) -> None:
        new_bytes = kept_bytes = 0
        for whole in self._whole:
            if (gradient := whole.grad) is not None:
                new_bytes += _own_bytes(gradient)
        if self._keeps_whole:
            for param in self.group.fsdp_params:
                if (gradient := param.unsharded_accumulated_grad) is not None:
                    kept_bytes += _own_bytes(gradient)
        self._set_whole(new_bytes + kept_bytes)
        self._added_bytes = new_bytes if kept_bytes else 0
        self._keeps_whole = kept_bytes > 0

    def _set_whole(self, nbytes: int) -> None:
        if nbytes != self._whole_bytes:
            self._book.change(Kind.GRAD, nbytes - self._whole_bytes)
            self._whole_bytes = nbytes

    def _set_gathered(self, nbytes: int) -> None:
        if nbytes != self._gathered_bytes:
            self._book.change(Kind.GATHERED, nbytes - self._gathered_bytes)
            self._gathered_bytes = nbytes
            (self._model.live.add if nbytes else self._model.live.discard)(self)

    # -- gathering --

    def _around_unshard(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        group = self.group

        def unshard(*args: Any, **kwargs: Any) -> None:
            before = group._all_gather_result
            inner(*args, **kwargs)
            result = group._all_gather_result
            if result is None or result is before or not self._active:
                return
            if self._full_bytes is None:
                self.look()  # the dtypes are settled by now
            flat = result.all_gather_output
            self._book.hold(flat, Kind.COMM)
            if self._cast_bytes and flat.numel():
                self._book.brief({Kind.COMM: self._cast_bytes})  # copies in the compute's dtype lived until just now

        return unshard

    def _around_to_unsharded(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        group = self.group

        def to_unsharded() -> None:
            was = group.is_unsharded
            if not was and self._active and group._training_state != TrainingState.FORWARD:
                self._model.look_at_live()  # before this gather is booked: their gradients grew meanwhile
            inner()
            if was or not self._active:
                return
            if self._full_bytes is None:
                self.look()  # the first gather after a walk
                if not any(param._unsharded_inner_tensors for param in group.fsdp_params):
                    self._full_bytes = self._gathered_bytes  # else an extension decides anew each time
            else:
                self._set_gathered(self._full_bytes)
            result = group._all_gather_result  # None where the weights were kept from an earlier micro-batch
            if self._cast_bytes and result is not None and not result.all_gather_output.numel():
                self._brief_single_rank_cast()

        return to_unsharded

    def _around_to_sharded(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def to_sharded() -> None:
            inner()
            if self._active:
                self._set_gathered(0)

        return to_sharded

    def _around_to_sharded_post_forward(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def to_sharded_post_forward() -> None:
            inner()
            if self._active:  # a piece of the gathered weights stays
                tensors = (tensor for param in self.group.fsdp_params for tensor in gathered_tensors(param))
                self._set_gathered(sum(tensor.untyped_storage().nbytes() for tensor in tensors))

        return to_sharded_post_forward

    # -- reducing --

    def _around_post_backward(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(*args: Any) -> None:
            if not self._active:
                inner(*args)
                return
            self._model.look_at_live()
            if not self._gathered_bytes:
                self._look_at_whole()
            self._set_whole(self._whole_bytes - self._added_bytes)
            self._watch_reduce_comm()
            self._buffers.clear()
            before = self._before_reduction() if self._may_convert else (False, 0)
            inner(*args)
            if not self.group.reduce_grads:
                self._keeps_whole = True
            if self._whole_bytes:  # a reduction that is not FSDP2's own, or none
                self._look_at_whole()
            if len(self._buffers) == 2:
                self._settle_reduction(*before)
                self._buffers.clear()

        return post_backward

    def _watch_reduce_comm(self) -> None:
        comm = self.group._reduce_scatter_comm
        # Others' comms book their own buffers. A comm that was set since the last backward is met here.
        if "allocate" in vars(comm) or not type(comm).__module__.startswith("torch."):
            return

        def around(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
                buffer = inner(*args, **kwargs)
                if self._active:
                    if self._buffers:  # the second of two, the output: the whole gradients are gone
                        self._set_whole(0)
                    self._buffers.append((self._book.hold(buffer, Kind.COMM), buffer.dtype))
                return buffer

            return allocate

        self._wraps.append(Wrap(comm, "allocate", around))

    def _before_reduction(self) -> tuple[bool, int]:
        """Whether there is a gradient to add to, and the bytes of the sum of earlier micro-batches."""
        partial = self.group._partial_reduce_output
        adds = any(param.sharded_param.grad is not None for param in self.group.fsdp_params)
        return adds, 0 if partial is None else partial.nbytes

    def _settle_reduction(self, adds: bool, partial_bytes: int) -> None:
        """The reduction's output has become the sharded gradient, or was converted or added to it."""
        group, (ref, dtype) = self.group, self._buffers[1]
        if ref is None:
            return
        if group._partial_reduce_output is not None:
            self._book.track(group._partial_reduce_output, Kind.GRAD)
            return
        wanted = group._orig_dtype
        if dtype == wanted:
            for param in group.fsdp_params:
                if (gradient := param.sharded_param.grad) is not None:
                    if id(gradient._local_tensor.untyped_storage()) == ref.key:  # a view of the output, as all others
                        self._book.rename(ref, Kind.GRAD)
                    return
            return
        self.look_at_gradients()
        output_bytes = 0 if ref() is not None else ref.nbytes  # held further for replicas: then it is counted as it is
        converted_bytes = ref.nbytes // dtype.itemsize * wanted.itemsize if adds else 0
        self._book.brief({Kind.COMM: output_bytes, Kind.GRAD: converted_bytes + partial_bytes})

    def _brief_single_rank_cast(self) -> None:
        """On one rank each parameter is converted, then copied; a copy is dropped when the next one is made."""
        copied = previous = highest = 0
        for gathered, cast in self._casts:
            highest = max(highest, copied + previous + cast, copied + gathered + cast)
            copied, previous = copied + gathered, cast
        if highest > self._gathered_bytes:
            self._book.brief({Kind.COMM: highest - self._gathered_bytes})


class ModelCounter:
    """Counts every parameter group of a model."""

    def __init__(self, model: nn.Module, book: Book, book_of: Callable[[nn.Module], Book] | None = None) -> None:
        self.gathered_ids: set[int] = set()
        """Ids of the storages of gathered weights; FSDP2 keeps these for good and resizes them."""
        self.live: set[GroupCounter] = set()
        """Groups whose weights are gathered."""
        self.groups = [
            GroupCounter(group, self, book if book_of is None else book_of(group.modules[0]))
            for group in fsdp_groups(model)
        ]

    def look_at_live(self) -> None:
        """Read the whole gradients that backward may be making."""
        for group in self.live:
            group._look_at_whole()

    def remove(self) -> None:
        """Give all groups their methods back."""
        for group in self.groups:
            group.remove()


def gathered_tensors(param: FSDPParam) -> Iterator[torch.Tensor]:
    """What FSDP2 holds of one parameter's gathered weights."""
    yield from param.all_gather_outputs
    yield from param._unsharded_inner_tensors
    piece = getattr(param, "_sharded_post_forward_param_data", None)  # set by the first such reshard
    if piece is not None:
        yield piece


def _conversion(param: FSDPParam) -> tuple[int, int]:
    """Bytes of this rank's piece as gathered, and of its converted copy (0 where none is made)."""
    dtype = param.param_dtype or param.sharded_param.dtype
    nbytes = param.padded_sharded_param_size.numel() * dtype.itemsize
    return nbytes, nbytes if param.param_dtype is not None else 0


def _own_bytes(gradient: torch.Tensor) -> int:
    """Bytes of a whole gradient: autograd gives each its own storage."""
    return gradient.nbytes if type(gradient) is torch.Tensor else getattr(gradient, "_local_tensor", gradient).nbytes
