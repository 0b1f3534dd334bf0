"""Second buffers, which hide communication, and in which order a run does without them where memory is short."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memwall_strategy.config import OverlapConfig


@dataclass(frozen=True, slots=True)
class Buffers:
    """How many there are.

    Attributes:
        prefetch: units gathered ahead.
        reduce_buffers: most reductions in flight.
        early: whether the next iteration's first units are gathered after the step.
    """

    prefetch: int
    reduce_buffers: int
    early: bool

    @classmethod
    def of(cls, overlap: OverlapConfig) -> Buffers:
        """Those that the options ask for."""
        return cls(overlap.prefetch, overlap.reduce_buffers, overlap.next_iteration_early)

    def within(self, overlap: OverlapConfig) -> OverlapConfig:
        """The options with these in place of their own."""
        return replace(
            overlap, prefetch=self.prefetch, reduce_buffers=self.reduce_buffers, next_iteration_early=self.early
        )


def buffer_ladder(overlap: OverlapConfig, device_type: str) -> tuple[Buffers, ...]:
    """From what the options ask for down to the fewest; just the former where there is nothing to do without.

    Depth goes first, since a second unit ahead hides less than the first did; then all reductions in flight but one;
    then the gathers between two steps; prefetch itself last, without which no gather is hidden. On CUDA the engine's
    own streams always work one unit ahead.

    Args:
        overlap: the options.
        device_type: ``cpu`` or ``cuda``.
    """
    rungs = [Buffers.of(overlap)]
    on_lanes = device_type == "cpu"
    if not overlap.enabled or (on_lanes and not overlap.lanes):
        return tuple(rungs)
    for prefetch in range(overlap.prefetch - 1, 0, -1):
        rungs.append(replace(rungs[-1], prefetch=prefetch))
    for reduce_buffers in range(overlap.reduce_buffers - 1, 0, -1):
        rungs.append(replace(rungs[-1], reduce_buffers=reduce_buffers))
    if on_lanes and overlap.next_iteration_early:
        rungs.append(replace(rungs[-1], early=False))
    if on_lanes and rungs[-1].prefetch:
        rungs.append(replace(rungs[-1], prefetch=0))
    return tuple(rungs)
