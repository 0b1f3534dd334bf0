"""The input lane under Accelerate: the same run to the last bit, resumed behind what was trained on."""

from __future__ import annotations

from memwall_strategy.runtime import input_lane
from tests.accelerate.test_resume import Run
from tests.lightning.checks import Here, on_ranks
from tests.runtime.lane_standin import Standin


@on_ranks(2, "0", "2")
def test_the_run_is_the_one_without(here: Here) -> None:
    workers = int(here.case)
    plain = Run(workers=workers)
    wanted = plain.train(15)
    plain.acc.free_memory()
    input_lane.STREAMS["cpu"] = Standin
    try:
        run = Run(workers=workers)
        rows = run.train(15, 4, here.folder / "state")
        assert rows == wanted
        figures = run.acc.metrics()
        assert figures["memwall/input/exposed_s"] > 0 and "memwall/overlap/lane_busy_s/input" in figures
        # Its last epoch was left in the middle.
        assert set(Standin.made.copied) == ({"memwall-input"} if workers else {"MainThread"})
        assert Standin.made.handed == 15
        run.acc.free_memory()
        resumed = Run(workers=workers, seed=99)
        resumed.acc.load_state(here.folder / "state")
        assert [row["ids"] for row in resumed.train(11)] == [row["ids"] for row in wanted[4:]]
        resumed.acc.free_memory()
    finally:
        input_lane.STREAMS.pop("cpu", None)
