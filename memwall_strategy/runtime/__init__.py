"""The runtime: one sharded model, its lanes, its memory account and the pillars, driven through one step."""

from memwall_strategy.runtime.runtime import Runtime

__all__ = ["Runtime"]
