"""What happens in a run, as typed events: the runtime, the pillars and the front ends emit them, sinks write them down.

An event has a kind, and a kind has fixed field names: an emitter that names others is wrong and is told so. A new kind
is one member of ``EventKind`` and one entry of ``EVENTS``.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

_KEPT = 100
"""Events kept for who listens later."""


class EventKind(StrEnum):
    """Names of events, as they stand in ``events.jsonl``."""

    RUN_STARTED = "run_started"
    RUN_RESUMED = "run_resumed"
    RUN_ENDED = "run_ended"
    RUN_STOPPED = "run_stopped"
    RUN_FAILED = "run_failed"
    PLAN = "plan"
    STATE_PLACED = "state_placed"
    ACTIVATIONS_CHANGED = "activations_changed"
    ACTIVATIONS_KEPT = "activations_kept"
    RETENTION_CHANGED = "retention_changed"
    PHASE_CHANGED = "phase_changed"
    BUFFERS_CHANGED = "buffers_changed"
    MEMORY_HIGH = "memory_high"
    BUDGET_EXCEEDED = "budget_exceeded"
    MEMORY_RELIEVED = "memory_relieved"
    RELIEF_MEASURED = "relief_measured"
    MEMORY_RESTORED = "memory_restored"
    STATE_MOVED = "state_moved"
    RESERVE_LENT = "reserve_lent"
    RESERVE_RETURNED = "reserve_returned"
    OUT_OF_MEMORY = "out_of_memory"
    STEP_RESTARTED = "step_restarted"
    STEP_ABORTED = "step_aborted"
    LANE_FAILED = "lane_failed"
    PEER_LOST = "peer_lost"
    COLLECTIVE_FAILED = "collective_failed"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    LOSS_NOT_FINITE = "loss_not_finite"
    PROFILE_WRITTEN = "profile_written"
    LOGGER_FAILED = "logger_failed"


class Severity(IntEnum):
    """From ``WARNING`` on, an event is an alert."""

    INFO = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class EventType:
    """What a kind of event means.

    Attributes:
        severity: whether somebody should look.
        fields: name -> unit and meaning; an event has exactly these.
        meaning: in one line.
    """

    severity: Severity
    meaning: str
    fields: dict[str, str] = field(default_factory=dict)


_ERROR_FIELDS = {"error": "the error's class", "message": "what it says"}

EVENTS: dict[EventKind, EventType] = {
    EventKind.RUN_STARTED: EventType(
        Severity.INFO, "a model was set up for training or evaluation",
        {"ranks": "data-parallel ranks", "device": "of this rank", "precision": "as configured",
         "units": "sharded units, the root included", "budget_bytes": "of this rank; null where none is set"},
    ),
    EventKind.RUN_RESUMED: EventType(Severity.INFO, "training goes on from a checkpoint", {"path": "that was loaded"}),
    EventKind.RUN_ENDED: EventType(Severity.INFO, "training came to its end", {"steps": "optimizer steps taken"}),
    EventKind.RUN_STOPPED: EventType(Severity.WARNING, "the run was told to stop (signal, keyboard)", _ERROR_FIELDS),
    EventKind.RUN_FAILED: EventType(Severity.ERROR, "an error ended the run", _ERROR_FIELDS),
    EventKind.PLAN: EventType(
        Severity.INFO, "the memory plan that the run was started with",
        {"resident_bytes": "of a rank between two steps", "peak_bytes": "of a rank within a step",
         "limit_bytes": "the budget; null where none is known", "fits": "true, false or null"},
    ),
    EventKind.STATE_PLACED: EventType(
        Severity.INFO, "the optimizers' state was given its places",
        {"device_bytes": "that stay on the device", "host_bytes": "that rest on the host", "disk_bytes": "that rest on "
         "disk", "slots": "units whose state may be on its way at a time; 0 where nothing is paged",
         "slot_bytes": "of each"},
    ),
    EventKind.ACTIVATIONS_CHANGED: EventType(
        Severity.INFO, "from this step on, units treat their activations otherwise",
        {"units": "unit -> what it does, of all that do not keep them", "together": "units that recompute together"},
    ),
    EventKind.ACTIVATIONS_KEPT: EventType(
        Severity.WARNING, "the host tier had no room for a unit's activations, which stay on the device (told once)",
        {"unit": "its name", "message": "what is missing"},
    ),
    EventKind.RETENTION_CHANGED: EventType(
        Severity.INFO, "from this step on, other units' gathered weights, or whole gradients, stay on the device",
        {"units": "whose gathered weights stay", "whole_gradients": "units whose gradients rest unreduced between "
         "micro-batches", "gathered_bytes": "that the first take", "gradient_bytes": "that the second take at most",
         "room_bytes": "that the budget leaves on the rank with least; null where no budget is set"},
    ),
    EventKind.BUFFERS_CHANGED: EventType(
        Severity.INFO, "from the next forward on, fewer or more second buffers hide communication",
        {"prefetch": "units gathered ahead at most", "reduce_buffers": "most reductions in flight", "early": "whether "
         "the next iteration's first units are gathered after the step", "before_bytes": "that this rank's buffers "
         "took at most", "bytes": "that they take from now on", "asked_bytes": "of those that the options ask for",
         "cause": "set-up, a step that was short, or room"},
    ),
    EventKind.PHASE_CHANGED: EventType(
        Severity.INFO, "training entered another phase; the pool's mapping follows from the next step on",
        {"phase": "warmup, steady or converging", "before": "the phase until now", "cause": "what showed it"},
    ),
    EventKind.MEMORY_HIGH: EventType(
        Severity.WARNING, "a step's peak passed the watched share of the budget (told again once it fell below)",
        {"peak_bytes": "of the step", "budget_bytes": "of this rank", "utilization": "peak over budget",
         "threshold": "that was passed"},
    ),
    EventKind.BUDGET_EXCEEDED: EventType(
        Severity.WARNING, "a step held more than pool.device_budget; the next ones hold less, or the run ends",
        {"peak_bytes": "of the step", "budget_bytes": "of this rank"},
    ),
    EventKind.MEMORY_RELIEVED: EventType(
        Severity.INFO, "a step was short; from the next one on less is held on the device",
        {"relief": "what gives way", "missing_bytes": "on the rank that is shortest", "peak_bytes": "of this rank's "
         "step, before", "freed_bytes": "on this rank, as predicted"},
    ),
    EventKind.RELIEF_MEASURED: EventType(
        Severity.INFO, "the first measured step after something gave way",
        {"reliefs": "what gave way", "before_bytes": "this rank's peak before", "predicted_bytes": "its peak as "
         "predicted", "after_bytes": "its peak as measured"},
    ),
    EventKind.MEMORY_RESTORED: EventType(
        Severity.INFO, "there was room for some steps; what gave way comes back from the next one on",
        {"relief": "what comes back", "room_bytes": "on the rank that has least", "taken_bytes": "on this rank, as "
         "predicted"},
    ),
    EventKind.STATE_MOVED: EventType(
        Severity.INFO, "optimizer state was given other places between two steps",
        {"device_bytes": "that stay on the device now", "host_bytes": "that rest on the host", "disk_bytes": "that "
         "rest on disk", "slots": "units whose state may be on its way at a time", "slot_bytes": "of each"},
    ),
    EventKind.RESERVE_LENT: EventType(
        Severity.INFO, "a part of the reserve was lent",
        {"what": "who borrows", "bytes": "of the loan", "left_bytes": "of the reserve"},
    ),
    EventKind.RESERVE_RETURNED: EventType(
        Severity.INFO, "a loan came back to the reserve",
        {"what": "who borrowed", "bytes": "of the loan", "left_bytes": "of the reserve"},
    ),
    EventKind.OUT_OF_MEMORY: EventType(
        Severity.WARNING, "an allocation failed on some rank; told by every rank, each with what its own pool holds",
        {"ranks": "that ran out", "phase": "of the step, on the first of them", "asked_bytes": "by the allocation that "
         "failed there; 0 where unknown", "held": "tier -> kind -> bytes of this rank's address table",
         "message": "what the first of them says"},
    ),
    EventKind.STEP_RESTARTED: EventType(
        Severity.WARNING, "the step under way begins anew on every rank, exactly as it began before",
        {"ranks": "that ran out of memory", "freed_bytes": "by what gave way, as predicted", "restarts": "of this step",
         "duration_s": "from the failure to the restart, on this rank"},
    ),
    EventKind.STEP_ABORTED: EventType(Severity.ERROR, "an error broke a step; gradients are dropped", _ERROR_FIELDS),
    EventKind.LANE_FAILED: EventType(Severity.ERROR, "a transfer on a lane failed", _ERROR_FIELDS),
    EventKind.PEER_LOST: EventType(
        Severity.ERROR, "a process of the group died or stopped answering",
        {"ranks": "that were lost; empty where unknown", "message": "what the error says"},
    ),
    EventKind.COLLECTIVE_FAILED: EventType(
        Severity.ERROR, "a collective failed although every rank is alive",
        {"ranks": "that had not arrived; empty where unknown", "message": "what the error says"},
    ),
    EventKind.CHECKPOINT_SAVED: EventType(
        Severity.INFO, "a checkpoint is whole on disk",
        {"path": "of the checkpoint", "duration_s": "from the call to the commit", "background": "true or false"},
    ),
    EventKind.CHECKPOINT_FAILED: EventType(
        Severity.ERROR, "a checkpoint could not be written; the one before still stands",
        {"path": "of the checkpoint", "message": "what the error says"},
    ),
    EventKind.LOSS_NOT_FINITE: EventType(
        Severity.WARNING, "the loss of this rank is NaN or infinite (told again once it was finite)",
        {"loss": "its value"},
    ),
    EventKind.PROFILE_WRITTEN: EventType(
        Severity.INFO, "a Chrome trace of some steps was written",
        {"path": "of the trace", "first_step": "that it holds", "last_step": "that it holds"},
    ),
    EventKind.LOGGER_FAILED: EventType(
        Severity.WARNING, "a logger failed and is left out from now on; training goes on",
        {"logger": "its class", "message": "what the error says"},
    ),
}  # fmt: skip
"""Every kind, described."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        time_s: seconds since 1970.
        step: optimizer steps that had ended.
        rank: of the process that tells it.
        kind: what happened.
        fields: as ``EVENTS[kind]`` describes them.
    """

    time_s: float
    step: int
    rank: int
    kind: EventKind
    fields: dict[str, Any]

    @property
    def severity(self) -> Severity:
        """Of the kind."""
        return EVENTS[self.kind].severity

    @property
    def is_alert(self) -> bool:
        """Whether somebody should look."""
        return self.severity >= Severity.WARNING

    def to_json(self) -> str:
        """One line of ``events.jsonl``; numbers that JSON does not know (NaN, infinities) become text."""
        shown = {
            "time_s": round(self.time_s, 3), "step": self.step, "rank": self.rank, "kind": str(self.kind),
            "severity": self.severity.name.lower(), "fields": _plain(self.fields),
        }  # fmt: skip
        return json.dumps(shown, allow_nan=False)


class Events:
    """Emitter of one process. Thread-safe; sinks are called one event at a time, on the thread that emits.

    Attributes:
        rank: written into each event; the front end sets it.
        step: optimizer steps that ended; the runtime keeps it.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.step = 0
        self._sinks: list[Callable[[Event], None]] = []
        self._told: deque[Event] = deque(maxlen=_KEPT)
        self._mutex = threading.RLock()  # a sink may emit: a logger that failed does

    def subscribe(self, sink: Callable[[Event], None], *, from_start: bool = False) -> None:
        """Call ``sink`` with every later event; a second time for the same sink changes nothing.

        Args:
            from_start: also with those told before, as far back as they are kept.
        """
        with self._mutex:
            if sink in self._sinks:
                return
            self._sinks.append(sink)
            if from_start:
                for event in self._told:
                    self._give(sink, event)

    def unsubscribe(self, sink: Callable[[Event], None]) -> None:
        """Leave a sink out; one that is not there is no error."""
        with self._mutex:
            if sink in self._sinks:
                self._sinks.remove(sink)

    def emit(self, kind: EventKind, **fields: Any) -> Event:
        """Tell every sink what happened.

        A sink that cannot write (``OSError``) is left out from then on, with a warning: events often tell of another
        error, which must not be hidden by this one.

        Raises:
            TypeError: the fields are not those of the kind.
        """
        if missing := set(EVENTS[kind].fields) ^ set(fields):
            raise TypeError(f"event {kind} has the fields {sorted(EVENTS[kind].fields)}; wrong: {sorted(missing)}")
        event = Event(time.time(), self.step, self.rank, kind, fields)
        with self._mutex:
            self._told.append(event)
            for sink in list(self._sinks):
                self._give(sink, event)
        return event

    def _give(self, sink: Callable[[Event], None], event: Event) -> None:
        try:
            sink(event)
        except OSError as error:
            self.unsubscribe(sink)
            warnings.warn(f"events are no longer written: {error}", stacklevel=4)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
