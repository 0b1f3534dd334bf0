"""How one unit is stepped: where its arithmetic runs, and on which tensors.

- On the weights' device, the state in a slot; where there is no such thing as another device (CPU), also with the
  state where it rests on the host. The optimizer steps the parameters themselves: the bits are the plain ones.
- On the host for weights on another device: on copies, see ``desks``.
- With master copies it steps those in either place, see ``master_copies``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.optimizer_parts import MASTER
from memwall_strategy.engine.optimizer_step import counters_beside, only
from memwall_strategy.pool.desks import Desks
from memwall_strategy.pool.master_copies import MasterCopies
from memwall_strategy.pool.state_pager import StatePager


class UnitSteps:
    """Steps the units of one optimizer.

    Args:
        optimizer: whose.
        step: its arithmetic, without hooks.
        pager: of its state.
        master: step float32 copies of coarser weights.
        copies: units whose state rests on the host are stepped there on copies of weights and gradients; needed where
            the weights are on another device.
        desks: how many units may be under way on the host.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[], Any],
        pager: StatePager,
        *,
        master: bool = False,
        copies: bool = False,
        desks: int = 2,
    ) -> None:
        self._optimizer, self._step, self._pager = optimizer, step, pager
        self._options = {"master": master, "copies": copies, "desks": desks}
        self.masters = MasterCopies(optimizer, pager.units, pager.homes.table, pager.name) if master else None
        self._desks = Desks(optimizer, pager, desks, self.masters) if copies and pager.on_host else None

    @property
    def options(self) -> dict[str, Any]:
        """To make another one alike."""
        return dict(self._options)

    def step(self, index: int, upcoming: Sequence[int], *, ready: bool) -> None:
        """Step unit ``index``.

        Args:
            index: of the unit.
            upcoming: the units that are expected to step after it, in order.
            ready: their gradients are there too.
        """
        unit, pager = self._pager.units[index], self._pager
        on_desk = self._desks is not None and index in pager.on_host
        if self._desks is not None:
            self._desks.bring([index, *upcoming] if ready else [index])
        pager.enter(index, upcoming)
        if on_desk:
            with self._desks.stepping(index) as stands, only(self._optimizer, unit.parameters, stands, {MASTER}):
                self._step()
        else:
            stands = self.masters.stand_ins(unit) if self.masters is not None else {}
            if any(local_tensor(parameter).device.type != "cpu" for parameter in unit.parameters):
                counters_beside(self._optimizer, unit.parameters)
            with only(self._optimizer, unit.parameters, stands, {MASTER}):
                self._step()
            MasterCopies.round(stands)
        pager.leave(index)

    def rest(self) -> None:
        """Wait until nothing is on its way; every state tensor then shows its home, and weights are up to date."""
        if self._desks is not None:
            self._desks.rest()
        self._pager.rest()

    def forget(self) -> None:
        """After a failure: what was on its way counts no more."""
        if self._desks is not None:
            self._desks.forget()

    def close(self) -> None:
        """Give desks and scratch memory back; nothing may be on its way."""
        if self._desks is not None:
            self._desks.forget()
            self._desks.close()
        if self.masters is not None:
            self.masters.close()
