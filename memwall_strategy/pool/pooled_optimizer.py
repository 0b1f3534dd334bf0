"""Any torch optimizer, with its state paged: the same object, stepped unit by unit.

``pool_optimizer`` does not put a second optimizer around the first. It gives the optimizer a class derived from its
own, as FSDP2 does with modules, so that whatever holds it goes on working: schedulers, gradient scalers, Lightning's
and Accelerate's wrappers, ``isinstance``. ``step`` runs the closure once and hooks once, as ever; between, it steps one
unit after the other with the optimizer's own arithmetic (fused and foreach included), while the state of the next unit
comes in and that of the last goes out.

An optimizer whose parameters depend on each other (LBFGS) cannot be stepped in parts: ``optimizer_parts.probe`` finds
that out beforehand, and it is refused by name where its state does not fit, or left as it is where it does.

Between steps the state's tensors show where it rests, so that an edit of state on the host counts. What it does not
do: state that rests on disk shows as tensors without elements in ``optimizer.state``; ``state_dict()`` brings it in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer

from memwall_strategy.core.block import Block
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.optimizer_parts import Parts, bare_step, follow_class, kind_of, only
from memwall_strategy.pool.early_steps import EarlySteps
from memwall_strategy.pool.state_pager import StateField, StatePager, UnitState


class PooledOptimizer(Optimizer):
    """What ``pool_optimizer`` adds to an optimizer's class.

    Attributes:
        pager: where its state is; ``pager.placement.homes`` says by block.
        early_steps: where units step inside the backward; None where all step after it.
        memwall_plain_class: the class that it had before.
    """

    pager: StatePager
    early_steps: EarlySteps | None
    memwall_plain_class: type[Optimizer]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure once, then step unit by unit; parameters without a gradient are left out, as ever.

        With ``early_steps``, units step inside the closure's backward, and the others after it.
        """
        loss, early, units = None, self.early_steps, self.pager.units
        if closure is not None:
            with torch.enable_grad(), early.armed() if early is not None else nullcontext():
                loss = closure()
        if sum(len(group["params"]) for group in self.param_groups) != sum(len(u.parameters) for u in units):
            raise ConfigError(
                f"{self.memwall_plain_class.__name__} was given parameters after it was pooled. Add param groups "
                "before training starts, or set pool.enabled=false."
            )
        active = active_units(units)
        for position, index in enumerate(active):
            self._step_unit(index, active[position + 1 :])
        self.pager.rest()  # whoever edits the state before the next step edits it where it rests
        return loss

    def _step_unit(self, index: int, upcoming: Sequence[int]) -> None:
        self.pager.enter(index, upcoming)
        with only(self, self.pager.units[index].parameters):
            bare_step(self, self.memwall_plain_class)()
        self.pager.leave(index)

    def prefetch(self) -> None:
        """Start to bring in the state of the units that step first."""
        self.pager.prefetch(self.early_steps.order if self.early_steps else range(len(self.pager.units)))

    def state_dict(self) -> dict[str, Any]:
        """As ever; what is paged is copied into ordinary memory on the CPU, so that later steps do not change it."""
        self.pager.rest()
        packed = super().state_dict()
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for each in self._paged_fields():
            number = numbers[id(each.parameter)]
            packed["state"][number] = packed["state"][number] | {each.key: self.pager.whole(each)}
        return packed

    def _paged_fields(self) -> list[StateField]:
        """The state that exists and rests off the device."""
        fields = (each for unit in self.pager.units for each in unit.fields.values())
        return [f for f in fields if f.key in self.state.get(f.parameter, {}) and self.pager.is_paged(f.block)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ever; what was loaded then goes to where it rests, unit by unit."""
        self.pager.rest()
        super().load_state_dict(state_dict)
        self.pager.adopt()

    # -- for checkpoints, see engine.checkpoint.paged --

    def settle_state(self) -> None:
        """Wait until nothing is on its way; every state tensor then shows where it rests."""
        self.pager.rest()

    def fetch_state(self, parameter: torch.Tensor, key: str) -> Callable[[], torch.Tensor] | None:
        """How to get a copy of a state tensor that is not in memory; None where it is."""
        each = self.pager.field_of(parameter, key)
        if each is None or not self.pager.is_paged(each.block) or local_tensor(self.state[parameter][key]).numel():
            return None
        return partial(self.pager.whole, each)

    def state_parts(self) -> list[list[torch.Tensor]]:
        """The parameters of each unit."""
        return [list(unit.parameters) for unit in self.pager.units]

    def adopt_state(self) -> None:
        """Send what was put into ``state`` to where it rests."""
        self.pager.adopt()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied or pickled, it comes out as an ordinary optimizer that holds the state itself."""
        state = self.__getstate__()
        groups = self.param_groups
        whole = {p: dict(entries) for p, entries in self.state.items()}
        for each in self._paged_fields():
            whole[each.parameter][each.key] = self.pager.whole(each)
        return _remake, (self.memwall_plain_class, state | {"state": whole, "param_groups": groups})

    def unpool(self, *, keep: bool = True) -> Optimizer:
        """Back to the class it had; returns itself.

        Args:
            keep: its state becomes ordinary tensors on the parameters' device. Otherwise parameters whose state is
                paged have none any more.
        """
        self.pager.close(keep=keep)
        if self.early_steps is not None:
            self.early_steps.close()
        del self.early_steps
        self.__class__ = self.memwall_plain_class
        follow_class(self)
        del self.pager
        return self


def pool_optimizer(optimizer: Optimizer, pager: StatePager, *, in_backward: bool = False) -> PooledOptimizer:
    """Let ``optimizer`` page its state through ``pager``, in place; state that it has goes to where it rests.

    Args:
        in_backward: units step inside the backward of ``step``'s closure; see ``early_steps``.
    """
    plain = type(optimizer)
    optimizer.__class__ = _pooled_class(plain)
    try:
        follow_class(optimizer)
    except BaseException:
        optimizer.__class__ = plain
        raise
    optimizer.pager = pager
    optimizer.early_steps = EarlySteps(pager.units, optimizer._step_unit) if in_backward else None
    pager.adopt()
    return optimizer


def active_units(units: Sequence[UnitState]) -> list[int]:
    """The units that have a gradient to step with, in order."""
    return [index for index, unit in enumerate(units) if any(p.grad is not None for p in unit.parameters)]


def unit_states(
    optimizer: Optimizer, parts: Parts, unit_of: Callable[[torch.Tensor], tuple[str, str]]
) -> list[UnitState]:
    """The optimizer's parameters by unit, with the state that they have or will have.

    Args:
        parts: what ``probe`` found of this optimizer.
        unit_of: parameter -> (name of its unit, its own name).
    """
    units: dict[str, UnitState] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            unit_name, name = unit_of(parameter)
            unit = units.setdefault(unit_name, UnitState(unit_name, [], []))
            unit.parameters.append(parameter)
            unit.names.append(name)
            shape = local_tensor(parameter).shape
            for key, dtype in parts.like.get(kind_of(parameter, index), {}).items():
                block = Block(unit_name, name, key)
                unit.fields[block] = StateField(block, parameter, key, dtype, shape)
    return list(units.values())


@cache
def _pooled_class(plain: type[Optimizer]) -> type[Optimizer]:
    return type(f"Pooled{plain.__name__}", (PooledOptimizer, plain), {"memwall_plain_class": plain})


def _remake(plain: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    made = object.__new__(plain)
    made.__setstate__(state)
    return made
