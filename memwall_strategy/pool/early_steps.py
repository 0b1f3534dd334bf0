"""Optimizer steps inside the backward: each unit steps as soon as its gradients are there, and lets go of them.

So no more than a few units' gradients are alive at a time, and paging hides behind the backward of the other units.
The arithmetic is the ordinary step's, unit by unit, so the weights come out the same to the last bit.

It holds only where nothing looks at all gradients together between backward and step (clipping by norm, a gradient
scaler, user hooks): front ends refuse these by name. A unit whose parameters did not all get a gradient steps after the
backward, like everything else.

Relies on ``register_post_accumulate_grad_hook``, which the engine runs once for each parameter and backward, on the
training thread, when the reduced gradient is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.pool.state_pager import UnitState


class EarlySteps:
    """Watches the gradients of one optimizer.

    Args:
        units: whose parameters step together.
        step_unit: steps one, given the units that are expected after it, in order.

    Attributes:
        done: units that stepped in this backward, in order; a dict for its order and its quick look-up.
    """

    def __init__(self, units: Sequence[UnitState], step_unit: Callable[[int, Sequence[int]], None]) -> None:
        self.done: dict[int, None] = {}
        self._units, self._step_unit = units, step_unit
        self._armed = False
        self._missing: list[int] = []
        self._order = list(reversed(range(len(units))))  # of the last backward; before the first, the usual one
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._landed, index))
            for index, unit in enumerate(units)
            for parameter in unit.parameters
            if parameter.requires_grad
        ]

    @property
    def order(self) -> Sequence[int]:
        """Units in the order in which they are expected to step."""
        return self._order

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Around forward and backward of the step's last micro-batch."""
        self.done.clear()
        self._missing = [sum(p.requires_grad for p in unit.parameters) for unit in self._units]
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
        self._order = [*self.done, *(index for index in self._order if index not in self.done)]

    def close(self) -> None:
        """Let the parameters go."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _landed(self, index: int, parameter: torch.nn.Parameter) -> None:
        if not self._armed:
            return
        unit = self._units[index]
        if index in self.done:
            raise MemwallError(
                f"unit {unit.name!r} got gradients twice in one backward, after it had stepped: it runs more than once "
                "in a forward, or there are two backwards. Set overlap.optimizer_in_backward=false."
            )
        self._missing[index] -= 1
        if self._missing[index]:
            return
        self.done[index] = None
        with torch.no_grad():
            self._step_unit(index, [other for other in self._order if other not in self.done])
        for each in unit.parameters:
            each.grad = None
