"""What a Weights & Biases run gets besides the figures: alerts and the plan's table.

The figures themselves go through the trainer's logger (Lightning's ``WandbLogger`` defines every metric over
``trainer/global_step``, once) or Accelerate's tracker (over W&B's own step).
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import wandb

from memwall_strategy.telemetry.events import EVENTS, Event, EventKind, Events, Severity

if TYPE_CHECKING:
    from memwall_strategy.planner import Plan

PLAN_TABLE = "memwall/plan"
_LEVELS = {Severity.WARNING: wandb.AlertLevel.WARN, Severity.ERROR: wandb.AlertLevel.ERROR}
_LONGEST_TEXT = 1000
"""Characters of an alert."""


class WandbRun:
    """One W&B run of rank 0.

    When W&B fails it is left out from then on, with a warning and an event; training goes on.

    Args:
        run: what ``wandb.init`` returned (``logger.experiment``, ``accelerator.get_tracker("wandb", unwrap=True)``).
        events: whose alerts become W&B's.
        alert_every_s: least time between two alerts of one kind; those in between are counted in the next.
    """

    def __init__(self, run: Any, events: Events, *, alert_every_s: float) -> None:
        self._run, self._events, self._every_s = run, events, alert_every_s
        self._told_s: dict[EventKind, float] = {}
        self._held_back: dict[EventKind, int] = {}
        self._has_plan = False

    def follow(self, plan: Plan | None = None) -> None:
        """Turn alerts into W&B's from now on; log the plan's table, once a run."""
        self._events.subscribe(self.on_event)
        if plan is not None and not self._has_plan:
            self._has_plan = True
            columns, rows = plan_table(plan)
            self._try(lambda: self._run.log({PLAN_TABLE: wandb.Table(columns=columns, data=rows)}, commit=False))

    def leave(self) -> None:
        """Listen no longer."""
        self._events.unsubscribe(self.on_event)

    def on_event(self, event: Event) -> None:
        """Alert, unless one of this kind was told a short while ago."""
        if not event.is_alert or event.kind is EventKind.LOGGER_FAILED:
            return
        now_s = time.monotonic()
        told_s = self._told_s.get(event.kind)
        if told_s is not None and now_s - told_s < self._every_s:
            self._held_back[event.kind] = self._held_back.get(event.kind, 0) + 1
            return
        self._told_s[event.kind] = now_s
        held = self._held_back.pop(event.kind, 0)
        shown = ", ".join(f"{name}: {value}" for name, value in event.fields.items())
        text = f"rank {event.rank}, step {event.step}: {EVENTS[event.kind].meaning}. {shown}"
        text = text[:_LONGEST_TEXT] + (f" ({held} more since the last alert)" if held else "")
        self._try(lambda: self._run.alert(f"memwall: {event.kind}", text, level=_LEVELS[event.severity]))

    def _try(self, call: Any) -> None:
        try:
            call()
        except (OSError, wandb.Error) as error:  # its service is gone, or refuses
            self.leave()
            warnings.warn(f"W&B failed and gets no more alerts: {error}", stacklevel=3)
            self._events.emit(EventKind.LOGGER_FAILED, logger=type(self._run).__name__, message=str(error))


def plan_table(plan: Plan) -> tuple[list[str], list[list[Any]]]:
    """The plan as columns and rows: bytes of each kind between steps and at the peak of each phase."""
    columns = {"between_steps": plan.resident, **{str(phase): kinds for phase, kinds in plan.peaks.items()}}
    kinds = [kind for kind in dict.fromkeys(k for held in columns.values() for k in held)
             if any(held.get(kind) for held in columns.values())]  # fmt: skip
    rows = [[str(kind), *(int(held.get(kind, 0)) for held in columns.values())] for kind in kinds]
    return ["kind", *(f"{name}_bytes" for name in columns)], rows
