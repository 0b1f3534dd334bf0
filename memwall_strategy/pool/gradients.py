"""Gradients that rest on the host between the micro-batches of a step.

In every micro-batch but the last, a unit's reduced gradient is handed to lane ``page-out`` as soon as it lands, added
there to a sum on the host, and let go: ``parameter.grad`` is None. In the last one the sum comes back on lane
``page-in`` and is added to the gradient that landed, unit by unit while the backward goes on; when ``backward`` returns
all totals are in place, as without this. What the last micro-batch did not reach is brought back then too, or, where no
sharded unit was reached at all, before clipping and optimizer.

Two summands commute, so the totals are those of plain accumulation to the last bit: ``((g1 + g2) + g3)``.

A gradient is taken out of ``parameter.grad`` while a lane works on it, so a second reduction in the same backward (a
unit that ran twice, several losses) never meets the lane; it is added afterwards, in order.

Not seen: ``parameter.grad`` set or edited by hand between micro-batches. It is None then; a gradient put there counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.core.lane import Transfer
from memwall_strategy.engine.backward_end import BackwardEnd
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.zero_grad import ZeroGradWatch
from memwall_strategy.pool.arena import PAGE_BYTES, Arena, aligned
from memwall_strategy.pool.gradient_sums import GradientSums
from memwall_strategy.pool.pool import Pool

if TYPE_CHECKING:
    from memwall_strategy.pool.tiers import Tiers
    from memwall_strategy.runtime.runtime import Runtime

STAGING = Block("gradients", "staging", Kind.STAGING)
"""CUDA: where a gradient lies on the host before it is added to its sum."""

UnitOf = Callable[[torch.Tensor], tuple[str, str]]


@dataclass(slots=True, eq=False)
class _Seat:
    """One parameter's place: its block, and whether the block holds a sum."""

    parameter: nn.Parameter
    block: Block
    holds: bool = False


@dataclass(slots=True)
class _Coming:
    """A total on its way: the gradient that the lane adds the sum to, and what landed since, in order."""

    transfer: Transfer
    gradient: torch.Tensor
    later: list[torch.Tensor] = field(default_factory=list)


class HostGradients:
    """The gradients of one model.

    Args:
        wanted: ``pool.gradients == "host"``; otherwise all methods do nothing.

    Attributes:
        active: whether gradients rest on the host in this run; False until ``open``.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted, self.active = wanted, False
        self._seats: dict[nn.Parameter, _Seat] = {}
        self._units: dict[str, list[_Seat]] = {}
        self._frozen: list[nn.Parameter] = []
        self._landed: list[_Seat] = []
        self._leaving: deque[Transfer] = deque()
        self._coming: dict[nn.Parameter, _Coming] = {}
        self._resting = False
        self._most_leaving = 1
        self._pool: Pool | None = None
        self._out: GradientSums | None = None
        self._in: GradientSums | None = None
        self._unit_of: UnitOf | None = None
        self._tiers: Tiers | None = None
        self._handles: list[Any] = []

    # -- set-up --

    def open(self, runtime: Runtime, unit_of: UnitOf, tiers: Tiers) -> None:
        """Take blocks in the host tier, mapped here, and watch gradients land.

        Raises:
            ConfigError: ``pool.host_budget`` has no room for them.
        """
        if not self.wanted:
            return
        parameters, staging = _trainable(runtime), _staging_bytes(runtime)
        sizes = _sizes(parameters, unit_of)
        needed = room_bytes(sizes) + aligned(staging, PAGE_BYTES)
        if needed > (there := tiers.host_budget_bytes()):
            raise ConfigError(
                f"pool.gradients='host' takes {format_size(needed)} of host memory on this rank, pool.host_budget "
                f"allows {format_size(there)}. Raise it, or use pool.gradients='device'."
            )
        tiers.make_room(Tier.HOST, needed, longest_bytes=max(_longest_bytes(sizes), staging))
        pool = self._pool = tiers.pool
        self._tiers, self._unit_of = tiers, unit_of
        host = pool.stores[Tier.HOST]
        self._out = GradientSums(host, pool.allocate(STAGING, staging, Tier.HOST) if staging else None)
        self._in = GradientSums(host)
        self._most_leaving = runtime.config.overlap.reduce_buffers
        self._seat(parameters)
        self._frozen = [p for p in _on_device(runtime) if not p.requires_grad]
        self._handles.append(BackwardEnd(runtime.model, self._end_of_backward))
        self._handles.append(ZeroGradWatch(runtime.model, self.drop))
        for optimizer in runtime.optimizers:
            self._handles.append(ZeroGradWatch(optimizer, partial(self._drop_of, optimizer)))
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.bring_back()))
        self.active = True

    def _seat(self, parameters: list[nn.Parameter]) -> None:
        for sizes in _sizes(parameters, self._unit_of).values():
            self._pool.allocate_group(sizes, Tier.HOST)
        for parameter in parameters:
            unit, name = self._unit_of(parameter)
            seat = self._seats[parameter] = _Seat(parameter, Block(unit, name, Kind.GRAD))
            self._units.setdefault(unit, []).append(seat)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hear))

    def before_step(self, runtime: Runtime) -> None:
        """Weights that learn since the last step (fine-tuning unfreezes them) get room on the host too.

        Raises:
            ConfigError: there is none left.
        """
        if not self.active or not (fresh := [p for p in self._frozen if p.requires_grad]):
            return
        self._frozen = [p for p in self._frozen if not p.requires_grad]
        sizes = _sizes(fresh, self._unit_of)
        self._tiers.make_room(Tier.HOST, room_bytes(sizes), longest_bytes=_longest_bytes(sizes))
        self._seat(fresh)

    def close(self) -> None:
        """Bring what rests on the host back, give the blocks up, and let the gradients be."""
        if not self.active:
            return
        self.bring_back()
        for handle in reversed(self._handles):
            handle.remove()
        for seat in self._seats.values():
            self._pool.drop(seat.block)
        if STAGING in self._pool.table:
            self._pool.drop(STAGING)
        self._handles.clear()
        self._seats.clear()
        self._units.clear()
        self._frozen.clear()
        self._pool = self._out = self._in = None
        self.active = False

    # -- a step --

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Around a micro-batch that no optimizer step follows."""
        before, self._resting = self._resting, self.active
        try:
            yield
        finally:
            self._resting = before

    def bring_back(self) -> None:
        """Put every sum that is on the host into ``parameter.grad``; returns when all are there."""
        if not self.active:
            return
        self._send()
        self._settle()
        seats = [seat for seat in self._seats.values() if seat.holds]
        for unit in dict.fromkeys(seat.block.unit for seat in seats):
            self._give([seat for seat in seats if seat.block.unit == unit])
        self._settle()

    def drop(self) -> None:
        """Forget every sum, as ``zero_grad`` does. Never waits."""
        self._forget(self._seats.values())

    def _drop_of(self, optimizer: Optimizer) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._forget([self._seats[p] for p in parameters if p in self._seats])

    def _forget(self, seats: Iterable[_Seat]) -> None:
        seats = list(seats)
        for seat in seats:
            seat.holds = False
            self._coming.pop(seat.parameter, None)
        gone = {id(seat) for seat in seats}
        self._landed = [seat for seat in self._landed if id(seat) not in gone]
        if not self._coming and not any(seat.holds for seat in self._seats.values()):
            self._leaving.clear()  # whoever writes such a block next waits for it first

    # -- one gradient --

    def _hear(self, parameter: torch.Tensor) -> None:
        """A reduced gradient is in place; on CUDA the current stream is the one that it was written on."""
        seat = self._seats[parameter]
        if (coming := self._coming.get(parameter)) is not None:
            coming.later.append(parameter.grad)
            parameter.grad = None
            return
        if not self._resting and not seat.holds:
            return
        if self._landed and self._landed[-1].block.unit != seat.block.unit:
            self._send()  # the unit before is through, though not all of its parameters had a gradient
        if seat in self._landed:
            return  # landed again before it was sent: the engine added it
        self._landed.append(seat)
        if len(self._landed) == len(self._units[seat.block.unit]):
            self._send()

    def _send(self) -> None:
        """Hand the unit that landed to a lane."""
        seats, self._landed = self._landed, []
        seats = [seat for seat in seats if seat.parameter.grad is not None]
        if not seats:
            return
        if not self._resting:
            self._give([seat for seat in seats if seat.holds])
            return
        while len(self._leaving) >= self._most_leaving:
            self._leaving.popleft().wait()
        gradients = [_local_gradient(seat) for seat in seats]
        holds = [seat.holds for seat in seats]
        for seat in seats:
            seat.parameter.grad = None
            seat.holds = True
        self._leaving.append(self._submit(seats, gradients, holds, leaving=True))

    def _give(self, seats: list[_Seat]) -> None:
        if not seats:
            return
        wholes, holds = [], []
        for seat in seats:
            gradient = seat.parameter.grad
            holds.append(gradient is not None)
            if gradient is None:
                gradient = torch.empty_like(seat.parameter, requires_grad=False)
            wholes.append(gradient)
        gradients = []
        for seat, whole in zip(seats, wholes, strict=True):
            seat.parameter.grad = None
            seat.holds = False
            gradients.append(local_tensor(whole))
        transfer = self._submit(seats, gradients, holds, leaving=False)
        for seat, whole in zip(seats, wholes, strict=True):
            self._coming[seat.parameter] = _Coming(transfer, whole)

    def _submit(
        self, seats: list[_Seat], gradients: list[torch.Tensor], there: list[bool], *, leaving: bool
    ) -> Transfer:
        blocks = [seat.block for seat in seats]
        places = [self._pool.table.locate(block) for block in blocks]
        jobs = [job for job in zip(places, gradients, there, strict=True) if job[1].numel()]
        nbytes = sum(place.bytes for place in places)
        if leaving:
            return self._pool.update(blocks, "gradient to host", nbytes, partial(self._out.take, jobs))
        return self._pool.consume(blocks, "gradient to device", nbytes, partial(self._in.give, jobs))

    def _settle(self) -> None:
        """Put the totals on their way in place."""
        for parameter, coming in list(self._coming.items()):
            coming.transfer.wait()
            with torch.no_grad():
                for later in (*coming.later, *([parameter.grad] if parameter.grad is not None else [])):
                    local_tensor(coming.gradient).add_(local_tensor(later))
            parameter.grad = coming.gradient
        self._coming.clear()

    def _end_of_backward(self) -> None:
        self._send()
        if not self._resting:
            self.bring_back()


def _on_device(runtime: Runtime) -> list[nn.Parameter]:
    """Weights on the device; those of modules that run on the host have their gradients there anyway."""
    hosted = {p for module in runtime.host_modules.values() for p in module.parameters()}
    return [p for p in runtime.model.parameters() if p not in hosted]


def _trainable(runtime: Runtime) -> list[nn.Parameter]:
    return [p for p in _on_device(runtime) if p.requires_grad]


def _sizes(parameters: Iterable[nn.Parameter], unit_of: UnitOf) -> dict[str, dict[Block, int]]:
    """Unit -> block -> bytes of its gradient on this rank."""
    found: dict[str, dict[Block, int]] = {}
    for parameter in parameters:
        unit, name = unit_of(parameter)
        found.setdefault(unit, {})[Block(unit, name, Kind.GRAD)] = _bytes_of(parameter)
    return found


def room_bytes(sizes: dict[str, dict[Block, int]]) -> int:
    """What an arena holds for units whose blocks lie together, whole pages each."""
    rule = Arena(0)
    return sum(aligned(sum(map(rule.held, blocks.values())), PAGE_BYTES) for blocks in sizes.values())


def _longest_bytes(sizes: dict[str, dict[Block, int]]) -> int:
    return max((room_bytes({unit: blocks}) for unit, blocks in sizes.items()), default=0)


def _staging_bytes(runtime: Runtime) -> int:
    if runtime.device.type == "cpu":
        return 0  # the lane adds straight from the gradient
    return max(map(_bytes_of, _trainable(runtime)), default=0)


def _bytes_of(parameter: nn.Parameter) -> int:
    local = local_tensor(parameter)
    return local.numel() * local.element_size()


def _local_gradient(seat: _Seat) -> torch.Tensor:
    gradient = local_tensor(seat.parameter.grad)
    if gradient.layout is not torch.strided or gradient.dtype != seat.parameter.dtype:
        raise MemwallError(
            f"the gradient of {seat.block.parameter} is {gradient.layout}, {gradient.dtype}: pool.gradients='host' "
            f"takes dense gradients in the weight's own dtype. Use pool.gradients='device'."
        )
    return gradient


