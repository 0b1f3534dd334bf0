"""recipes.overlap: what its figures are made of."""

from __future__ import annotations

import pytest

from recipes.overlap import __main__ as overlap

TINY = {"layers": 2, "heads": 2, "hidden": 32, "context": 16, "dropout": 0.0}


def run(step_s: float, cpu_s: float | None = None, **figures: float) -> dict:
    """One run of two steps."""
    return {
        "period_s": [step_s] * 2, "step_s": [step_s] * 2, "cpu_s": [step_s if cpu_s is None else cpu_s] * 2,
        "losses": [3.0, 2.0], "lanes": [figures] * 2,
    }  # fmt: skip


RUNS = {
    "stock": [run(5.0)],
    "memwall": [
        run(2.5, 2.0, **{
            "exposed_s": 0.25, "contention_s": 0.375, "copy_s": 0.0625, "lane_saturation/gather": 0.5,
            "lane_saturation/reduce": 0.25, "lane_bytes/gather": 80e6, "lane_bytes/reduce": 40e6,
        })
    ],
    "compute": [run(2.0, 1.875)],
}  # fmt: skip


def test_rates() -> None:
    assert overlap.bytes_per_s("400mbit") == 50e6 and overlap.bytes_per_s("1.5gbit") == 187.5e6
    with pytest.raises(SystemExit, match="400mbit or 1gbit"):
        overlap.bytes_per_s("fast")


@pytest.mark.parametrize("rate", ["400mbit", None])
def test_rows(monkeypatch: pytest.MonkeyPatch, rate: str | None) -> None:
    monkeypatch.setattr(overlap, "alternate", lambda *_: RUNS)
    monkeypatch.setattr(overlap, "why_not", lambda: None if rate else "no root")
    monkeypatch.setattr(overlap, "linked_hosts", _Hosts)
    rows = {name: (claimed, measured) for name, claimed, measured, _ in overlap.against_stock(1, rate, overlap.ALWAYS)}
    assert rows["memwall / stock: step time"][1].startswith("0.500")
    assert rows["communication / step, stock -> memwall"][1] == "60% -> 20%"
    assert rows["communication, memwall / stock"][1] == "0.17"
    assert rows["compute utilisation (MFU), memwall / stock"][1] == "+100%"
    assert rows["exposed communication / step"][1] == "10%"
    assert rows["said inside / seen from outside"] == ("0.90..1.10", f"{(0.25 + 0.25 + 0.0625) / 0.5:.2f}")
    assert rows["losses of every step"] == ("equal", "equal to the last digit")
    if rate:  # 120 MB at 50 MB/s
        assert rows["memwall: step / max(compute, transfer)"] == ("within 1.10", f"{2.5 / 2.4:.2f}")


class _Hosts:
    def __init__(self, count: int, rate: str) -> None:
        assert (count, rate) == (2, "400mbit")

    def __enter__(self) -> list:
        return ["one", "other"]

    def __exit__(self, *_: object) -> None:
        return None


def test_without_namespaces_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "why_not", lambda: "network namespaces need root")
    with overlap.link_of("400mbit") as (hosts, where):
        assert hosts is None and where == "loopback and no link of 400mbit, because network namespaces need root"


def test_variants_run_next_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, tiny, on loopback: three ways to train, twice, in the same processes."""
    monkeypatch.setattr(overlap, "TASK", {**overlap.TASK, "model": TINY, "batch": 2, "steps": 2})
    runs = overlap.alternate(overlap.KINDS, 2, None)
    assert {name: len(each) for name, each in runs.items()} == dict.fromkeys(overlap.KINDS, 2)
    assert runs["stock"][0]["losses"] == runs["memwall"][1]["losses"]
    for name in overlap.KINDS:
        assert all(len(each["period_s"]) == 1 and min(each["period_s"]) > 0 for each in runs[name])
    assert overlap.moved_bytes(runs) > 0 and overlap.inside(runs, "copy_s") > 0
    assert not runs["stock"][0]["lanes"] and not runs["compute"][0]["lanes"]
