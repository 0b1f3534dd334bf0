"""The tensors of an optimizer's state, by unit, whether they exist yet or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from memwall_strategy.core.block import Block
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.optimizer_parts import MASTER, Parts, kind_of
from memwall_strategy.engine.quantised import parts_of


@dataclass(frozen=True, slots=True)
class StateField:
    """One state tensor of one parameter, whether it exists yet or not; of a quantised one, one of its inner tensors."""

    block: Block
    parameter: torch.nn.Parameter
    key: str
    dtype: torch.dtype
    shape: torch.Size
    part: str | None = None

    @property
    def nbytes(self) -> int:
        """Of this rank's part."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(slots=True)
class UnitState:
    """The state of the parameters that step together.

    Attributes:
        name: of the unit.
        parameters: in the order of the param groups.
        names: theirs.
        fields: block -> what it is.
        on_host: it runs on the host; torch keeps its state there, and it is never paged.
    """

    name: str
    parameters: list[torch.nn.Parameter]
    names: list[str]
    fields: dict[Block, StateField] = field(default_factory=dict)
    on_host: bool = False

    def sizes(self) -> dict[Block, int]:
        """Bytes of every block."""
        return {block: each.nbytes for block, each in self.fields.items()}


def unit_states(
    optimizer: Optimizer, parts: Parts, unit_of: Callable[[torch.Tensor], tuple[str, str]]
) -> list[UnitState]:
    """The optimizer's parameters by unit, with the state that they have or will have.

    Args:
        optimizer: whose.
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
            shape, inner = local_tensor(parameter).shape, parts_of(optimizer, parameter)
            for key, dtype in parts.like.get(kind_of(parameter, index), {}).items():
                block = Block(unit_name, name, key)
                if not inner or key == MASTER:
                    unit.fields[block] = StateField(block, parameter, key, dtype, shape)
                    continue
                for part, (its_dtype, its_shape) in inner.items():
                    block = Block(unit_name, name, f"{key}.{part}")
                    unit.fields[block] = StateField(block, parameter, key, its_dtype, its_shape, part)
    return list(units.values())


def covers(units: list[UnitState], optimizer: Optimizer) -> bool:
    """Whether the units hold the optimizer's parameters, all of them and no other."""
    held = {id(parameter) for unit in units for parameter in unit.parameters}
    return held == {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
