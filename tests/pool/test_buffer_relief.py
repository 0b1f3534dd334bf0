"""Second buffers that give way and come back, decided from numbers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memwall_strategy.config import MemwallConfig, OverlapConfig
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.pool.buffer_relief import BufferRelief
from memwall_strategy.telemetry.events import Event, Events

GATHER_BYTES, REDUCE_BYTES = 100, 30


class Engine:
    """Stands for ``engine.second_buffers``."""

    def __init__(self) -> None:
        self.used: list[tuple[int, int, bool]] = []

    def use(self, *, prefetch: int, reduce_buffers: int, early: bool) -> None:
        self.used.append((prefetch, reduce_buffers, early))

    def held_bytes(self, *, prefetch: int, reduce_buffers: int, early: bool) -> int:
        return GATHER_BYTES * max(1, prefetch + early) + REDUCE_BYTES * reduce_buffers


def started(**overlap: Any) -> tuple[BufferRelief, Engine, list[Event]]:
    events, engine, told = Events(), Engine(), []
    events.subscribe(told.append)
    runtime = SimpleNamespace(
        config=MemwallConfig(overlap=OverlapConfig(**overlap)), device=SimpleNamespace(type="cpu"), events=events,
        second_buffers=engine, budget_bytes=1000,
    )  # fmt: skip
    relief = BufferRelief()
    relief.attach(runtime)
    return relief, engine, told


def test_no_more_gives_way_than_must_and_all_of_it_comes_back() -> None:
    relief, engine, told = started(prefetch=2, reduce_buffers=2)
    assert relief.relieve(90) == 100 and engine.used == [(1, 2, True)]
    assert relief.relieve(500) == 130 and engine.used[-1] == (0, 1, False), "as much as there is"
    assert relief.relieve(1) == 0
    assert relief.metrics() == {"memwall/overlap/prefetch": 0.0, "memwall/overlap/reduce_buffers": 1.0}
    assert relief.restore(129) == 0 and len(engine.used) == 2
    assert relief.restore(130) == 130 and engine.used[-1] == (1, 2, True)
    assert relief.restore(10**9) == 100 and engine.used[-1] == (2, 2, True)
    assert relief.restore(10**9) == 0
    assert [(e.fields["before_bytes"], e.fields["bytes"]) for e in told] == [
        (360, 260), (260, 130), (130, 260), (260, 360),
    ]  # fmt: skip
    assert {e.fields["asked_bytes"] for e in told} == {360}
    assert [e.fields["cause"] for e in told] == ["a step was short"] * 2 + ["there is room again"] * 2


def test_a_rung_that_frees_nothing_by_itself_is_not_where_it_stops() -> None:
    relief, engine, _ = started(prefetch=1, reduce_buffers=1)
    engine.held_bytes = lambda *, prefetch, reduce_buffers, early: 50 + 10 * prefetch  # windows hold the early ones
    assert relief.relieve(5) == 10 and engine.used == [(0, 1, False)]
    engine.held_bytes = lambda **_: 50
    relief, engine, told = started()
    engine.held_bytes = lambda **_: 50
    assert relief.relieve(5) == 0 and not engine.used and not told


def test_set_up_leaves_out_what_has_no_room_and_keeps_to_it() -> None:
    relief, engine, told = started()
    needed = {(1, 2, True): 300, (1, 1, True): 270, (1, 1, False): 200, (0, 1, False): 190}

    def place_in(room: int):
        def place(overlap: OverlapConfig) -> None:
            found = needed[overlap.prefetch, overlap.reduce_buffers, overlap.next_iteration_early]
            if found > room:
                raise ConfigError(f"{found - room} are missing")

        return place

    assert [relief.fit(place_in(room)) for room in (400, 300, 299, 269, 190)] == [0, 0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"^1 are missing"):
        relief.fit(place_in(189))
    assert not engine.used and not told
    relief.start(1)
    assert engine.used == [(1, 1, True)] and told[-1].fields["cause"] == "set-up"
    assert (relief.planned.prefetch, relief.planned.reduce_buffers) == (1, 1)
    assert relief.relieve(1) == 100 and relief.restore(10**9) == 100 and relief.restore(10**9) == 0
    assert engine.used[-1] == (1, 1, True), "not what set-up had no room for"
    assert relief.relieve(1) == 100 and relief.planned.next_iteration_early, "plans count on what will come back"
    assert relief.leaner() and not relief.planned.next_iteration_early
    assert engine.used[-1] == (1, 1, False) and len(engine.used) == 4, "that was so already"
    assert relief.leaner() and not relief.leaner() and engine.used[-1] == (0, 1, False)
    relief.start(0)
    assert engine.used[-1] == (1, 2, True)


def test_nothing_to_do_without() -> None:
    relief, engine, told = started(lanes=False)
    assert relief.fit(lambda _: None) == 0 and relief.relieve(10) == 0 and not relief.leaner()
    relief.start(0)
    assert not engine.used and not told and relief.metrics() == {}
