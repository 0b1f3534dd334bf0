"""A unit: one sharded module, the granule of every decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """One FSDP2-sharded module, normally one transformer block.

    Attributes:
        index: position in definition order; the root unit, which holds what no other unit holds, comes last.
        name: fully qualified name of the module; ``"root"`` for the root unit.
        parameters: fully qualified names of its parameters.
        numel: elements of its parameters over all ranks.
        sharded_numel: elements that this rank keeps, padding included.
        trainable_numel: the part of ``numel`` that requires a gradient.
    """

    index: int
    name: str
    parameters: tuple[str, ...]
    numel: int
    sharded_numel: int
    trainable_numel: int
