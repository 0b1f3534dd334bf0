"""Many checks in one set of ranks, because starting ranks costs more than most checks.

A test that runs on ranks is a function of one argument, marked with ``on_ranks``:

    @on_ranks(2)
    def test_something(here):
        assert here.rank < here.world

pytest sees a test of that name. All selected tests of one module, world and group run in one set of processes, in
order, each on every rank; the test then passes if it passed on every rank and shows every rank's traceback otherwise.
When a test fails on some ranks only, the others may wait for them in a collective: a watch ends all of them after a few
seconds. After a failed test new ranks go on with the next, so that each is judged by itself.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.ranks import RanksFailed, run_ranks

ELASTIC = {"TORCHELASTIC_RUN_ID": "memwall-tests"}
"""With this in the environment Lightning takes rank and world size from it and starts no process itself."""

_GRACE_S = 8.0
"""How long ranks may still take for a check that failed on another rank."""

_LIMIT_S = 60.0
"""How long one check may take."""

_RUN_S = 150.0
"""For all the tests that share one set of ranks; below the limit of a single test, which the first of them has."""


@dataclass
class Here:
    """Where a check runs."""

    rank: int
    world: int
    case: str | None
    folder: pathlib.Path
    """Empty at first, the same on every rank, gone afterwards."""
    kept: dict[str, Any] = field(default_factory=dict)
    """The same dictionary for every check of the process, for what is costly to make."""


def on_ranks(world: int, *cases: str, group: str = "") -> Callable[[Callable[[Here], None]], Callable]:
    """Run the test on ``world`` ranks; once for each of ``cases`` (``here.case``), if any are given.

    Args:
        group: tests of one module and group share a set of processes.
    """

    def mark(body: Callable[[Here], None]) -> Callable:
        if cases:

            @pytest.mark.parametrize("case", cases)
            def test(rank_results: Callable, request: pytest.FixtureRequest, case: str) -> None:
                rank_results(request.node)
        else:

            def test(rank_results: Callable, request: pytest.FixtureRequest) -> None:
                rank_results(request.node)

        test.__name__ = test.__qualname__ = body.__name__
        test.__module__, test.__doc__ = body.__module__, body.__doc__
        test.body, test.world, test.group = body, world, f"{body.__module__} {group}"
        return test

    return mark


@pytest.fixture(scope="session")
def rank_results(request: pytest.FixtureRequest) -> Results:
    """Import this into a ``conftest.py`` or a test module to use ``on_ranks`` there."""
    return Results(request.session.items, _RUN_S)


class Results:
    """Starts each set of ranks once, when the first of its tests asks, and holds what came out."""

    def __init__(self, items: list[pytest.Item], timeout_s: float) -> None:
        self._items = [item for item in items if hasattr(getattr(item, "function", None), "body")]
        self._timeout_s = timeout_s
        self._runs: dict[tuple[int, str], dict[str, list[str | None]]] = {}

    def __call__(self, item: pytest.Item) -> None:
        """Fail with every rank's traceback unless the test passed on every rank."""
        function = item.function
        key = (function.world, function.group)
        if key not in self._runs:
            same = [i for i in self._items if (i.function.world, i.function.group) == key]
            self._runs[key] = self._run(function.world, same)
        reports = self._runs[key][item.nodeid]
        if any(reports):
            shown = [f"--- rank {rank} ---\n{report or 'passed'}" for rank, report in enumerate(reports)]
            pytest.fail("\n".join(shown), pytrace=False)

    def _run(self, world: int, items: list[pytest.Item]) -> dict[str, list[str | None]]:
        checks = [[i.nodeid, i.module.__name__, i.function.__name__, _case_of(i)] for i in items]
        found: dict[str, list[str | None]] = {}
        while checks:
            failure = ""
            with tempfile.TemporaryDirectory(prefix="memwall-checks-") as folder:
                base = pathlib.Path(folder)
                try:
                    run_ranks(worker, world, timeout_s=self._timeout_s, env=ELASTIC, folder=folder, checks=checks)
                except RanksFailed as error:
                    failure = str(error)
                # After a failure the ranks are given up, and new ones do the rest.
                done = max(1, sum(1 for i in range(len(checks)) if list(base.glob(f"{i}.*.json"))))
                for index, (nodeid, *_) in enumerate(checks[:done]):
                    found[nodeid] = [_report(base, index, rank, failure) for rank in range(world)]
                checks = checks[done:]
        return found


def _case_of(item: pytest.Item) -> str | None:
    spec = getattr(item, "callspec", None)
    return None if spec is None else spec.params.get("case")


def _report(folder: pathlib.Path, index: int, rank: int, failure: str) -> str | None:
    path = folder / f"{index}.{rank}.json"
    if path.exists():
        return json.loads(path.read_text())
    return f"did not end. {failure}"


# -- in the ranks --


def worker(rank: int, world: int, folder: str, checks: list[list[Any]]) -> None:
    """Run every check; one file for each with null or the traceback."""
    base = pathlib.Path(folder)
    _quiet()
    kept: dict[str, Any] = {}
    watch = _Watch(base, rank, world)
    for index, (_, module, name, case) in enumerate(checks):
        scratch = base / f"scratch-{index}"
        scratch.mkdir(exist_ok=True)
        here = Here(rank, world, case, scratch, kept)
        watch.start(index)
        report = None
        try:
            getattr(importlib.import_module(module), name).body(here)
        except BaseException:  # noqa: BLE001 - shown by the test that this is
            report = traceback.format_exc()
        watch.write(index, report)
        if not watch.all_passed(index):
            return


class _Watch:
    """Ends this process when a check failed on another rank and this rank does not come out of it."""

    def __init__(self, base: pathlib.Path, rank: int, world: int) -> None:
        self.base, self.rank, self.world, self.index = base, rank, world, 0
        self.started_s = time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, index: int) -> None:
        self.index, self.started_s = index, time.monotonic()

    def write(self, index: int, report: str | None) -> None:
        part = self.base / f"{index}.{self.rank}.part"
        part.write_text(json.dumps(report))
        part.rename(self.base / f"{index}.{self.rank}.json")

    def all_passed(self, index: int) -> bool:
        while len(reports := self._reports(index)) < self.world:
            time.sleep(0.005)  # the watch bounds this wait
        return all(report is None for report in reports)

    def _reports(self, index: int) -> list[str | None]:
        paths = [self.base / f"{index}.{rank}.json" for rank in range(self.world)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def _run(self) -> None:
        failed_s: float | None = None
        watched = -1
        while True:
            time.sleep(0.25)
            now, index = time.monotonic(), self.index
            if index != watched:
                watched, failed_s = index, None
            if failed_s is None and any(report is not None for report in self._reports(index)):
                failed_s = now
            if failed_s is not None and now - failed_s > _GRACE_S:
                self._end(index, "still in the test when another rank had failed")
            if now - self.started_s > _LIMIT_S:
                self._end(index, f"did not end within {_LIMIT_S:.0f} s")

    def _end(self, index: int, why: str) -> None:
        if not (self.base / f"{index}.{self.rank}.json").exists():
            self.write(index, f"{why}:\n{_main_stack()}")
        os._exit(0)


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident)
    return "".join(traceback.format_stack(frame)) if frame is not None else "no main thread"


def _quiet() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
