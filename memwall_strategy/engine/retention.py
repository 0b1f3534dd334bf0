"""Units whose gathered weights stay on the device after their forward, chosen per unit and changed between steps.

A *retained* unit is gathered once a micro-batch and not twice: it is not resharded after its forward (what FSDP2's
``set_reshard_after_forward(False)`` does, for one unit and back again). Over an accumulation window it is gathered once
a step: see ``engine.kept``. Every rank must retain the same units, because gathers are collectives.

Relied on: ``reshard`` looks at ``post_forward_mesh_info``, whose None means that the weights stay;
``_to_unsharded`` and ``_to_sharded`` are called on the instance, and their ends are where the memory of gathered
weights was taken and was given back; ``_auto_reshard_after_forward`` of a state whose owner left the choice to FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from memwall_strategy.core.unit import Unit
from memwall_strategy.engine.fsdp import FSDPMeshInfo, FSDPParam, FSDPParamGroup, FSDPState, fsdp_states, state_groups
from memwall_strategy.engine.gathered import Wrap, gathered_tensors
from memwall_strategy.engine.kept import KeptWeights


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory of one gathered weight: which parameter, where, and how many bytes, padding included."""

    parameter: str
    address: int
    bytes: int


class Holder(Protocol):
    """Told of every gathered weight of a retained unit, at its allocation and at its release."""

    def gathered(self, unit: str, pieces: Sequence[Piece]) -> None: ...

    def released(self, unit: str, pieces: Sequence[Piece]) -> None: ...


class RetainedUnit:
    """One unit whose weights may stay.

    Args:
        unit: its description.
        state, group: of FSDP2.
        holder: told what is held while the unit is retained.

    Attributes:
        module: the unit's module.
        kept: what stays over the end of a backward.
        retained: whether its weights stay after its forward.
    """

    def __init__(self, unit: Unit, state: FSDPState, group: FSDPParamGroup, holder: Holder) -> None:
        self.unit, self.module = unit, group.modules[0]
        self.kept: KeptWeights = group.memwall_gathers.kept
        self.retained = False
        self._state, self._group, self._holder = state, group, holder
        self._pieces: list[Piece] = []
        self._before = group.post_forward_mesh_info
        self._wraps: list[Wrap] = []

    @property
    def stays_anyway(self) -> bool:
        """Whether the engine itself keeps the weights from forward to backward, as it does for a root's."""
        return (self._before if self.retained else self._group.post_forward_mesh_info) is None

    @property
    def gathered_bytes(self) -> int:
        """What the gathered weights take on each rank."""
        group = self._group
        ranks = group.mesh_info.shard_mesh_size if isinstance(group.mesh_info, FSDPMeshInfo) else 1
        wanted = group.mp_policy.param_dtype
        return ranks * sum(_shard_bytes(param, wanted) for param in group.fsdp_params)

    @property
    def whole_gradient_bytes(self) -> int:
        """Most that whole, unreduced gradients take on each rank, the conversion of the newest included."""
        policy, total = self._group.mp_policy, 0
        for param in self._group.fsdp_params:
            if param.sharded_param.requires_grad:
                kept = policy.reduce_dtype or policy.param_dtype or param.sharded_param.dtype
                made = policy.param_dtype or param.sharded_param.dtype
                total += param._orig_size.numel() * (kept.itemsize + (made.itemsize if made != kept else 0))
        return total

    def retain(self) -> None:
        """The weights stay after the next forward. Between two steps."""
        if self.retained:
            return
        self.retained = True
        self._before, self._group.post_forward_mesh_info = self._group.post_forward_mesh_info, None
        if not self._wraps:
            self._wraps = [
                Wrap(self._group, "_to_unsharded", self._around_to_unsharded),
                Wrap(self._group, "_to_sharded", self._around_to_sharded),
            ]

    def release(self) -> None:
        """As the engine does it, from the next forward on."""
        self.kept.wanted = False
        self.kept.free()
        if not self.retained:
            return
        self.retained = False
        is_root_by_choice_of_the_engine = self._state._is_root and self._state._auto_reshard_after_forward
        if not is_root_by_choice_of_the_engine:
            self._group.post_forward_mesh_info = self._before

    def remove(self) -> None:
        """``release``, and take the wrappers off."""
        self.release()
        for wrap in reversed(self._wraps):
            wrap.remove()
        self._wraps.clear()

    def _around_to_unsharded(self, inner: Callable[[], None]) -> Callable[[], None]:
        def to_unsharded() -> None:
            inner()
            if self.retained and not self._pieces:
                self._pieces = list(self._read_pieces())
                self._holder.gathered(self.unit.name, self._pieces)

        return to_unsharded

    def _around_to_sharded(self, inner: Callable[[], None]) -> Callable[[], None]:
        def to_sharded() -> None:
            inner()
            pieces, self._pieces = self._pieces, []
            if pieces:
                self._holder.released(self.unit.name, pieces)

        return to_sharded

    def _read_pieces(self) -> Iterator[Piece]:
        for name, param in zip(self.unit.parameters, self._group.fsdp_params, strict=True):
            for i, tensor in enumerate(gathered_tensors(param)):
                storage = tensor.untyped_storage()
                yield Piece(f"{name}[{i}]" if i else name, storage.data_ptr(), storage.nbytes())


class Retainer:
    """The units of one sharded model.

    Args:
        model: sharded, watched by ``engine.fresh``.
        units: from ``describe_units``.
        holder: see ``Holder``.

    Attributes:
        units: one for each group of weights that are gathered together, in module order.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], holder: Holder) -> None:
        groups = [(state, group) for state in fsdp_states(model) for group in state_groups(state)]
        self.units = [
            RetainedUnit(unit, state, group, holder) for unit, (state, group) in zip(units, groups, strict=True)
        ]

    def set(self, names: Collection[str]) -> None:
        """Retain these units and no others. Between two steps."""
        for each in self.units:
            if each.unit.name in names:
                each.retain()
            else:
                each.release()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around a micro-batch that another one of the same step follows: retained units stay gathered after it."""
        retained = [each for each in self.units if each.retained]
        for each in retained:
            each.kept.wanted = True
        try:
            yield
        finally:
            for each in retained:
                each.kept.wanted = False

    def forget(self) -> None:
        """Let go of what earlier micro-batches left: the weights change now."""
        for each in self.units:
            each.kept.free()

    def close(self) -> None:
        """The engine's own way again, for every unit."""
        for each in self.units:
            each.remove()


def _shard_bytes(param: FSDPParam, wanted: object) -> int:
    dtype = param.sharded_param.dtype
    if wanted is not None and dtype.is_floating_point:
        dtype = wanted
    return param.padded_sharded_param_size.numel() * dtype.itemsize
