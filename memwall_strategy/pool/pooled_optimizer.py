"""Any torch optimizer, with its state paged: the same object, stepped unit by unit.

``pool_optimizer`` does not put a second optimizer around the first. It gives the optimizer a class derived from its
own, as FSDP2 does with modules, so that whatever holds it goes on working: schedulers, gradient scalers, Lightning's
and Accelerate's wrappers, ``isinstance``. ``step`` runs the closure once and hooks once, as ever; between, it steps one
unit after the other with the optimizer's own arithmetic (fused and foreach included), while the state of the next unit
comes in and that of the last goes out.

An optimizer whose parameters depend on each other (LBFGS) cannot be stepped in parts: ``optimizer_parts.probe`` finds
that out beforehand, and it is refused by name where its state does not fit, or left as it is where it does.

Parameters that join later (``add_param_group``) are placed before the next step.

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

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.optimizer_parts import needs_master
from memwall_strategy.engine.optimizer_step import bare_step, follow_class
from memwall_strategy.pool.early_steps import EarlySteps
from memwall_strategy.pool.state_fields import StateField, UnitState, covers, unit_states
from memwall_strategy.pool.state_pager import StatePager
from memwall_strategy.pool.state_placement import StatePlacement
from memwall_strategy.pool.unit_steps import UnitSteps

__all__ = ["PooledOptimizer", "active_units", "pool_optimizer", "unit_states"]


class PooledOptimizer(Optimizer):
    """What ``pool_optimizer`` adds to an optimizer's class.

    Attributes:
        pager: where its state is; ``pager.placement.homes`` says by block.
        unit_steps: how each unit is stepped.
        early_steps: where units step inside the backward; None where all step after it.
        follow_groups: places the state of parameters that joined or left; None where nobody does.
        unit_stepped: called with the name of each unit that was stepped outside of a backward, if set.
        memwall_plain_class: the class that it had before.
    """

    pager: StatePager
    unit_steps: UnitSteps
    early_steps: EarlySteps | None
    follow_groups: Callable[[], None] | None
    unit_stepped: Callable[[str], None] | None = None
    memwall_plain_class: type[Optimizer]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure once, then step unit by unit; parameters without a gradient are left out, as ever.

        With ``early_steps``, units step inside the closure's backward, and the others after it.
        """
        self._place_newcomers()
        loss, early = None, self.early_steps
        if closure is not None:
            with torch.enable_grad(), early.armed() if early is not None else nullcontext():
                loss = closure()
        self._place_newcomers()  # a hook between backward and step may add some too
        active = active_units(self.pager.units)
        for position, index in enumerate(active):
            self.unit_steps.step(index, active[position + 1 :], ready=True)
            if self.unit_stepped is not None:
                self.unit_stepped(self.pager.units[index].name)
        self.unit_steps.rest()  # whoever edits the state before the next step edits it where it rests
        return loss

    def _step_early(self, index: int, upcoming: Sequence[int]) -> None:
        self.unit_steps.step(index, upcoming, ready=False)

    def _place_newcomers(self) -> None:
        if covers(self.pager.units, self):
            return
        if self.follow_groups is None:
            raise ConfigError(
                f"{self.memwall_plain_class.__name__} was given parameters after it was pooled, and nobody "
                "places their state. Add param groups before it is pooled, or train through the strategy."
            )
        self.follow_groups()

    def replace_state(self, units: Sequence[UnitState], placement: StatePlacement, **options: Any) -> None:
        """Place the state anew between two steps; ``StatePager.replace`` says how. Slots and desks are made anew."""
        self.unit_steps.rest()
        self.unit_steps.close()
        try:
            self.pager.replace(units, placement, **options)
        finally:
            self._make_steps(in_backward=self.early_steps is not None, **self.unit_steps.options)

    def _make_steps(self, *, in_backward: bool, **options: Any) -> None:
        if self.early_steps is not None:
            self.early_steps.close()
        self.unit_steps = UnitSteps(self, bare_step(self, self.memwall_plain_class), self.pager, **options)
        self.early_steps = EarlySteps(self.pager.units, self._step_early) if in_backward else None

    def prefetch(self) -> None:
        """Start to bring in the state of the units that step first."""
        self.pager.prefetch(self.early_steps.order if self.early_steps else range(len(self.pager.units)))

    def state_dict(self) -> dict[str, Any]:
        """As ever; what is paged is copied into ordinary memory on the CPU, so that later steps do not change it."""
        self.unit_steps.rest()
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
        self._place_newcomers()
        self.unit_steps.rest()
        fine = self._take_fine(state_dict) if self.unit_steps.masters is not None else {}
        super().load_state_dict(state_dict | {"state": {n: e for n, e in state_dict["state"].items() if n not in fine}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, entries in fine.items():
            device = parameters[number].device
            self.state[parameters[number]] = {
                key: value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in entries.items()
            }
        self.pager.adopt()

    def _take_fine(self, state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """State of weights with master copies: torch would round it to the weights' type."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        pairs = zip(numbers, parameters, strict=False)  # torch itself says what does not fit
        return {n: state_dict["state"][n] for n, p in pairs if needs_master(p.dtype) and n in state_dict["state"]}

    # -- for checkpoints, see engine.checkpoint.paged --

    def settle_state(self) -> None:
        """Wait until nothing is on its way; every state tensor then shows where it rests."""
        self._place_newcomers()
        self.unit_steps.rest()

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
        self.unit_steps.close()
        if self.early_steps is not None:
            self.early_steps.close()
        del self.early_steps, self.unit_steps, self.follow_groups
        vars(self).pop("unit_stepped", None)
        self.__class__ = self.memwall_plain_class
        follow_class(self)
        del self.pager
        return self


def pool_optimizer(
    optimizer: Optimizer,
    pager: StatePager,
    *,
    in_backward: bool = False,
    follow_groups: Callable[[], None] | None = None,
    **options: Any,
) -> PooledOptimizer:
    """Let ``optimizer`` page its state through ``pager``, in place; state that it has goes to where it rests.

    Args:
        optimizer: any that can be stepped in parts.
        pager: of its state.
        in_backward: units step inside the backward of ``step``'s closure; see ``early_steps``.
        follow_groups: called when parameters joined or left; places them with ``replace_state``.
        options: for ``UnitSteps``: master, copies, desks.
    """
    plain = type(optimizer)
    optimizer.__class__ = _pooled_class(plain)
    try:
        follow_class(optimizer)
    except BaseException:
        optimizer.__class__ = plain
        raise
    optimizer.pager, optimizer.early_steps, optimizer.follow_groups = pager, None, follow_groups
    optimizer._make_steps(in_backward=in_backward, **options)
    pager.adopt()
    return optimizer


def active_units(units: Sequence[UnitState]) -> list[int]:
    """The units that have a gradient to step with, in order."""
    return [index for index, unit in enumerate(units) if any(p.grad is not None for p in unit.parameters)]


@cache
def _pooled_class(plain: type[Optimizer]) -> type[Optimizer]:
    return type(f"Pooled{plain.__name__}", (PooledOptimizer, plain), {"memwall_plain_class": plain})


def _remake(plain: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    made = object.__new__(plain)
    made.__setstate__(state)
    return made
