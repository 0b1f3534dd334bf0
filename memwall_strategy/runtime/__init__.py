"""The runtime: one sharded model, its lanes, its memory account and the pillars, driven through one step.

Resolved on first use: a data worker that unpickles a batch needs the samplers, not the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime

__all__ = ["Runtime"]


def __getattr__(name: str) -> Any:
    if name != "Runtime":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memwall_strategy.runtime.runtime import Runtime

    return Runtime
