"""The budget held against every step: what gives way when one was short, in order, and comes back when there is room.

Between two steps each rank knows its own step's peak. One small all-reduce tells all of them how much the shortest one
misses, so that all decide alike; then the reliefs are asked in the order of ``PLACES`` until nothing is missing. Each
that gave way is put on a stack. When the peaks have left room for the top of the stack with a margin, for some measured
steps in a row, it comes back; if that was too soon, the next time takes twice as many steps, so that nothing flaps.

Activations are in the peak only in steps where they are counted (``measures``): such steps alone give anything back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import PoolFull
from memwall_strategy.pool.agreement import Agreement
from memwall_strategy.pool.relief import Relief
from memwall_strategy.pool.reserve import Reserve
from memwall_strategy.telemetry.events import EventKind

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime

PLACES = (
    "reserve", "optimizer state", "recompute", "offload", "gathered weights", "second buffers", "micro-batch",
)  # fmt: skip
"""In which order things give way, the cheapest first; they come back in the opposite one."""

FIRST_STEPS = 3
"""Measured at the start of a run, when its peaks are new."""

EVERY_STEPS, EVERY_STEPS_EASED = 50, 10
"""Measured from then on, and while something has given way that may come back; such a step is a few percent slower."""

WATCH_STEPS = 2
"""Measured after a change."""

MARGIN = 1.25
"""How much more room than it takes must be there before something comes back."""

PATIENCE, MOST_PATIENCE = 2, 64
"""Measured steps in a row that must have that room: at first, and after it was too soon several times."""

TOO_SOON_STEPS = 20
"""A step that is short within so many of a return was a return too soon."""


@dataclass(slots=True)
class _Eased:
    """Something that gave way, with the bytes that this frees on this rank."""

    relief: Relief
    freed_bytes: int


class Escalation:
    """What gives way, and when.

    Args:
        reserve: lent first.
    """

    def __init__(self, reserve: Reserve) -> None:
        self._reserve = reserve
        self._places: dict[str, Relief | None] = dict.fromkeys(PLACES)
        self._places["reserve"] = reserve
        self._eased: list[_Eased] = []
        self._runtime: Runtime | None = None
        self._agreement: Agreement | None = None
        self._pending: tuple[list[str], int, int] | None = None
        self._calm, self._patience = 0, PATIENCE
        self._returned_at: int | None = None
        self._steps = self._watch_until = 0  # steps that were held against the budget, in this process
        self.counts_sometimes = False
        """Whether activations are counted in some steps only."""

    def attach(self, runtime: Runtime, agreement: Agreement, *, counts_sometimes: bool) -> None:
        """Watch ``runtime``'s steps."""
        self._runtime, self._agreement, self.counts_sometimes = runtime, agreement, counts_sometimes
        self.forget()

    def add(self, relief: Relief, place: str) -> None:
        """Ask a relief at its place of ``PLACES``; another one there is replaced.

        A relief with ``alike = False`` is asked on ranks that are short alone, with what these miss themselves.
        """
        if place not in self._places:
            raise ValueError(f"{place!r} is no place; there are {', '.join(PLACES)}")
        self._places[place] = relief

    @property
    def reliefs(self) -> list[Relief]:
        """In the order in which they are asked."""
        return [relief for relief in self._places.values() if relief is not None]

    @property
    def eased(self) -> list[str]:
        """Names of what gave way and has not come back, the first one first."""
        return [each.relief.name for each in self._eased]

    def forget(self, relief: Relief | None = None) -> None:
        """What gave way is placed anew by others: all of it (set-up of optimizers), or what one relief did."""
        if relief is not None:
            self._eased = [each for each in self._eased if each.relief is not relief]
            return
        self._eased.clear()
        self._pending = None
        self._calm, self._patience, self._returned_at = 0, PATIENCE, None
        self._watch_until = self._steps + FIRST_STEPS

    @property
    def measures(self) -> bool:
        """Whether the coming step counts activations."""
        steps, every = self._steps, EVERY_STEPS_EASED if self._eased else EVERY_STEPS
        return not self.counts_sometimes or steps < self._watch_until or steps % every == 0

    @property
    def limit_bytes(self) -> int:
        """What a step of this rank may hold: the budget without what is left of the reserve."""
        return self._runtime.budget_bytes - self._reserve.free_bytes

    # -- between two steps --

    def hold(self) -> None:
        """Hold the step that ended against the budget, on every rank; before its peaks are forgotten.

        Raises:
            PoolFull: it was short on some rank, and nothing is left that could give way; the same on every rank.
        """
        self._steps += 1
        runtime, memory = self._runtime, self._runtime.memory
        peak_bytes, limit_bytes = memory.peak_bytes, self.limit_bytes
        measured = memory.deep or not self.counts_sometimes
        if measured:
            self._measure(peak_bytes)
        if peak_bytes > runtime.budget_bytes:
            runtime.events.emit(
                EventKind.BUDGET_EXCEEDED, peak_bytes=peak_bytes, budget_bytes=runtime.budget_bytes
            )
        excess = peak_bytes - limit_bytes
        back = excess + int(MARGIN * self._eased[-1].freed_bytes) if self._eased else 0
        worst, worst_back = self._agreement.highest(excess, back)
        if worst > 0:
            self._calm = 0
            if self._ease(excess, worst, peak_bytes) <= 0:
                self._give_up(excess)
        elif self._eased and measured:
            self._wait_for_room(worst_back <= 0, -worst)

    def escalate(self, missing_bytes: int) -> int:
        """Let things give way between two steps, e.g. after an allocation failed; all ranks call it together.

        Args:
            missing_bytes: on this rank; 0 where it lacks nothing.

        Returns:
            Bytes that this frees, up to what the shortest rank misses, as predicted; the same on every rank. 0: nothing
            is left that could give way.
        """
        (worst,) = self._agreement.highest(missing_bytes)
        if worst <= 0:
            return 0
        memory = self._runtime.memory
        if memory is not None and memory.deep:
            self._tell_reliefs()
        self._calm = 0
        return self._ease(missing_bytes, worst, memory.peak_bytes if memory is not None else 0)

    def _tell_reliefs(self) -> None:
        kinds = self._runtime.memory.kind_peaks().values()
        activation_bytes = max((peaks.get(Kind.ACTIVATION, 0) for peaks in kinds), default=0)
        for relief in self.reliefs:
            if hasattr(relief, "measured"):
                relief.measured(activation_bytes)

    def _measure(self, peak_bytes: int) -> None:
        """A measured step ended: tell the reliefs, and what the last change did."""
        self._tell_reliefs()
        if self._pending is None:
            return
        names, before_bytes, predicted_bytes = self._pending
        self._pending = None
        self._runtime.events.emit(
            EventKind.RELIEF_MEASURED, reliefs=names, before_bytes=before_bytes, predicted_bytes=predicted_bytes,
            after_bytes=peak_bytes,
        )  # fmt: skip
        if len(names) == 1 and self._eased and (top := self._eased[-1]).relief is not self._reserve:
            top.freed_bytes = max(top.freed_bytes, before_bytes - peak_bytes)

    def _ease(self, excess: int, worst: int, peak_bytes: int) -> int:
        """Ask the reliefs in turn; returns the bytes freed on the rank that is shortest."""
        steps, wanted, left, lighter, names = self._steps, worst, excess, 0, []
        if self._returned_at is not None and steps - self._returned_at <= TOO_SOON_STEPS:
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
        for relief in self.reliefs:
            asked = worst if getattr(relief, "alike", True) else left
            freed = relief.relieve(asked) if asked > 0 else 0
            left -= freed
            lighter += 0 if relief is self._reserve else freed  # a loan raises the limit, not what the step holds
            before, (worst, most_freed) = worst, self._agreement.highest(left, freed)
            if most_freed > 0:
                self._eased.append(_Eased(relief, freed))
                names.append(relief.name)
                self._runtime.events.emit(
                    EventKind.MEMORY_RELIEVED, relief=relief.name, missing_bytes=before, peak_bytes=peak_bytes,
                    freed_bytes=freed,
                )  # fmt: skip
            if worst <= 0:
                break
        if names:
            self._pending = (names, peak_bytes, peak_bytes - lighter)
            self._watch_until = steps + WATCH_STEPS
        gone = wanted - max(0, worst)
        return max(gone, int(bool(names)))  # something gave way, if not on the shortest: the next step shows

    def _wait_for_room(self, enough: bool, room_bytes: int) -> None:
        """Give the last thing back that gave way once there was room for it often enough."""
        self._calm = self._calm + 1 if enough else 0
        if enough:
            self._watch_until = max(self._watch_until, self._steps + 1)
        if self._calm < self._patience:
            return
        self._calm = 0
        top = self._eased.pop()
        taken = top.relief.restore(room_bytes)
        (most,) = self._agreement.highest(taken)
        if not most:
            self._eased.append(top)
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
            return
        self._pending = None
        self._returned_at, self._watch_until = self._steps, self._steps + WATCH_STEPS
        self._runtime.events.emit(
            EventKind.MEMORY_RESTORED, relief=top.relief.name, room_bytes=room_bytes, taken_bytes=taken
        )

    def _give_up(self, excess: int) -> None:
        """Raise on every rank what the shortest one says."""
        runtime = self._runtime
        remedies = " ".join(relief.remedy for relief in self.reliefs if relief.remedy)
        tried = f" Gave way before: {', '.join(dict.fromkeys(self.eased))}." if self._eased else ""
        text = runtime.memory.describe_excess(self.limit_bytes, rank=runtime.events.rank)
        found = self._agreement.gather((excess, f"{text}{tried} {remedies} Or raise pool.device_budget."))
        rank = max(range(len(found)), key=lambda each: found[each][0])
        missing_bytes, text = found[rank]
        raise PoolFull(" ".join(text.split()), tier=Tier.DEVICE, owner=rank, missing_bytes=missing_bytes)

    def metrics(self) -> dict[str, float]:
        """Figures of the interface."""
        figures: dict[str, float] = {}
        if self._reserve.bytes:
            figures["memwall/pool/reserve_bytes"] = float(self._reserve.free_bytes)
            figures["memwall/pool/lent_bytes"] = float(self._reserve.lent_bytes)
        if self._eased:
            figures["memwall/pool/relieved"] = float(len(self._eased))
        return figures
