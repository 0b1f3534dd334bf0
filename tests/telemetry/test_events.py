"""Events: typed, written as JSON lines, and a sink that cannot write costs the sink alone."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from memwall_strategy.telemetry.events import EVENTS, Event, EventKind, Events, Severity
from memwall_strategy.telemetry.run_folder import RunFolder


def test_every_kind_is_described() -> None:
    assert set(EVENTS) == set(EventKind)
    assert all(kind.meaning and all(kind.fields.values()) for kind in EVENTS.values())


@pytest.mark.parametrize("fields", [{}, {"steps": 1, "more": 2}, {"step": 1}])
def test_wrong_fields_are_refused(fields: dict[str, int]) -> None:
    events = Events()
    seen: list[Event] = []
    events.subscribe(seen.append)
    with pytest.raises(TypeError, match=r"event run_ended has the fields \['steps'\]; wrong"):
        events.emit(EventKind.RUN_ENDED, **fields)
    assert seen == []


def test_an_event_knows_step_rank_and_severity_and_is_json() -> None:
    events = Events(rank=3)
    events.step = 7
    event = events.emit(EventKind.LOSS_NOT_FINITE, loss=float("nan"))
    assert (event.step, event.rank, event.severity, event.is_alert) == (7, 3, Severity.WARNING, True)
    shown = json.loads(event.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert shown.pop("time_s") > 1.6e9
    assert shown == {
        "step": 7, "rank": 3, "kind": "loss_not_finite", "severity": "warning", "fields": {"loss": "nan"}
    }  # fmt: skip
    lost = events.emit(EventKind.PEER_LOST, ranks=(1, 2), message="gone")
    assert json.loads(lost.to_json())["fields"]["ranks"] == [1, 2]


def test_a_sink_that_cannot_write_is_left_out_with_a_warning() -> None:
    events = Events()
    seen: list[Event] = []

    def full(event: Event) -> None:
        raise OSError(28, "No space left on device")

    events.subscribe(full)
    events.subscribe(seen.append)
    events.subscribe(seen.append)  # the same: once
    with pytest.warns(UserWarning, match="events are no longer written: .*No space left"):
        events.emit(EventKind.RUN_ENDED, steps=1)
    events.emit(EventKind.RUN_ENDED, steps=2)
    assert [event.fields["steps"] for event in seen] == [1, 2]
    events.unsubscribe(seen.append)
    events.unsubscribe(full)
    events.emit(EventKind.RUN_ENDED, steps=3)
    assert len(seen) == 2


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def write(rank: int) -> None:
        events = Events(rank)
        events.subscribe(folder.write_event)
        for _ in range(50):
            events.emit(EventKind.STEP_ABORTED, error="E", message="x" * 2000)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted(line["rank"] for line in lines) == sorted([*range(4)] * 50)
