"""What a plan says, and how it is written: as JSON, as a table for a log, and beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Kind, Phase
from memwall_strategy.planner.bounds import StepBounds
from memwall_strategy.planner.buffers import Buffers
from memwall_strategy.planner.host import HostArithmetic

KINDS = (
    Kind.PARAM, Kind.GRAD, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.OPTIMIZER, Kind.BUFFER, Kind.GATHERED, Kind.COMM,
    Kind.ACTIVATION, Kind.STAGING,
)  # fmt: skip
"""Rows of the table, in this order."""

PHASES = (Phase.IDLE, Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank holds.

    Attributes:
        world: ranks; shard_ranks: those that share one copy of the weights; rank: the plan is for (0 holds most).
        parameters: elements of all parameters; units: how many, the root included.
        optimizer: its name; precision: its name.
        micro_batch: samples of one rank's micro-batch; accumulate: micro-batches per optimizer step.
        activations: ``"estimated"``, ``"measured"`` or ``"not counted"``.
        resident: bytes per kind between two steps, gradients included.
        peaks: phase -> bytes per kind at the moment of the phase's highest total.
        kind_peaks: phase -> highest bytes of each kind within the phase, whenever; compare these with measured ones.
        communication: ``"exact"`` or ``"upper bound"``: how gathered weights and communication buffers are meant.
        limit_bytes: the budget, or None where none is known.
        fits: whether the highest total is within the limit; None without a limit.
        advice: one thing to change where it does not fit.
        bounds: the least time of a step on the hardware that the plan is for; None where none was described.
        placed: tier -> bytes of optimizer state that rest off the device and are paged; None where nothing is.
        reliefs: what is expected to give way after the first steps -> bytes that it frees, in order; the peaks are
            those after it. None where nothing is.
        retained: unit -> bytes of its gathered weights, of those that stay until the step's last backward; None where
            none does.
        host: what the optimizer's arithmetic takes on the host; None where there is none.
        buffers: second buffers that the run will have; None: those that its options ask for.
    """

    world: int
    shard_ranks: int
    rank: int
    parameters: int
    units: int
    optimizer: str
    precision: str
    micro_batch: int
    accumulate: int
    activations: str
    resident: Mapping[str, int]
    peaks: Mapping[str, Mapping[str, int]]
    kind_peaks: Mapping[str, Mapping[str, int]]
    communication: str
    limit_bytes: int | None
    fits: bool | None
    advice: str | None
    bounds: StepBounds | None = None
    placed: Mapping[str, int] | None = None
    reliefs: Mapping[str, int] | None = None
    retained: Mapping[str, int] | None = None
    host: HostArithmetic | None = None
    buffers: Buffers | None = None

    @property
    def resident_bytes(self) -> int:
        """Total between two steps."""
        return sum(self.resident.values())

    @property
    def peak_bytes(self) -> int:
        """Highest total of the step."""
        return max(sum(kinds.values()) for kinds in self.peaks.values())

    @property
    def peak_phase(self) -> str:
        """Phase of the highest total."""
        return max(self.peaks, key=lambda phase: sum(self.peaks[phase].values()))

    def to_json(self, indent: int | None = 2) -> str:
        """The plan as JSON: its attributes, ``resident_bytes``, ``peak_bytes`` and ``peak_phase``."""
        derived = {name: getattr(self, name) for name in ("resident_bytes", "peak_bytes", "peak_phase")}
        return json.dumps(asdict(self) | derived, indent=indent)

    def table(self) -> str:
        """The plan as plain text for a log: one row a kind, one column a phase, at the moment of the phase's peak."""
        columns = {"between steps": self.resident} | {
            str(phase): self.peaks[phase] for phase in PHASES if phase is not Phase.IDLE
        }
        kinds = [kind for kind in KINDS if any(column.get(kind) for column in columns.values())]
        rows = [["bytes per rank", *columns]]
        rows += [[str(kind), *(format_size(column.get(kind, 0)) for column in columns.values())] for kind in kinds]
        rows += [["total", *(format_size(sum(column.values())) for column in columns.values())]]
        notes = [each.text() for each in (self.bounds, self.host) if each is not None]
        return "\n".join([self._title(), *align(rows), self._verdict(), *notes])

    def beside(self, measured: Mapping[str, Mapping[str, int]]) -> str:
        """A table of predicted beside measured highest bytes, per phase and kind.

        Args:
            measured: phase -> kind -> bytes, as ``MemoryAccount.kind_peaks()`` returns them.
        """
        rows = [["phase", "kind", "predicted", "measured", "difference"]]
        for phase in PHASES:
            for kind in KINDS:
                predicted, seen = self.kind_peaks.get(phase, {}).get(kind, 0), measured.get(phase, {}).get(kind)
                if seen is None or not (predicted or seen):
                    continue
                difference = f"{(predicted - seen) / seen:+.1%}" if seen else "not seen"
                rows.append([str(phase), str(kind), format_size(predicted), format_size(seen), difference])
        return "\n".join(align(rows))

    def _title(self) -> str:
        sharing = f"{self.world} rank{'s' if self.world > 1 else ''}"
        if self.shard_ranks != self.world:
            sharing += f", weights over {self.shard_ranks}"
        return (
            f"memory plan: {self.parameters:,} parameters in {self.units} units, {sharing}, {self.optimizer}, "
            f"{self.precision}, micro-batch {self.micro_batch} x {self.accumulate}, rank {self.rank}"
        )

    def _verdict(self) -> str:
        notes = f"activations {self.activations}; gathered and comm: {self.communication}"
        if self.limit_bytes is None:
            return f"peak {format_size(self.peak_bytes)} in {self.peak_phase}; no limit known ({notes})"
        left = self.limit_bytes - self.peak_bytes
        verdict = f"fits, {format_size(left)} to spare" if self.fits else f"does NOT fit, {format_size(-left)} missing"
        peak = f"peak {format_size(self.peak_bytes)} in {self.peak_phase}, limit {format_size(self.limit_bytes)}"
        if self.placed:
            rest = " and ".join(f"{format_size(size)} on {tier}" for tier, size in self.placed.items() if size)
            notes += f"; optimizer state paged: {rest}"
        if self.reliefs:
            eased = ", ".join(f"{name} {format_size(size)}" for name, size in self.reliefs.items())
            notes += f"; expected to give way: {eased}"
        if self.retained:
            size = format_size(sum(self.retained.values()))
            notes += f"; {len(self.retained)} of {self.units} units stay gathered ({size})"
        if self.buffers is not None:
            each = self.buffers
            notes += f"; fewer second buffers: prefetch {each.prefetch}, reductions {each.reduce_buffers}"
            notes += "" if each.early else ", none for the next iteration"
        return f"{peak}: {verdict} ({notes})" + (f"\nadvice: {self.advice}" if self.advice else "")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain table: the first column to the left, the others to the right, a rule under the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
