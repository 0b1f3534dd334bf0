"""What following the training phase changes: bytes, step time and device peak in each phase.

Two ranks over a rate-limited link (two network namespaces; loopback where these need root and there is none), four
micro-batches a step. The learning rate rises, stays and falls, so that the run passes through warmup, steady and
converging. Three mappings take turns in the same processes: ``engine`` (FSDP2's own: every unit gathered twice in a
micro-batch), ``frozen`` (gathered weights stay as room allows, for good) and ``follow`` (the same, and while training
converges the room that is left holds whole gradients). Bytes are those that the lanes moved, and beside them what the
kernel counted on the network interface.
"""

from __future__ import annotations

import statistics
from typing import Any

from ..bench_engine.__main__ import compare, run_ranks
from ..figures import Row
from ..netns import linked_hosts, why_not

MODEL = {"layers": 6, "heads": 4, "hidden": 128, "context": 64, "dropout": 0.0}
RATE = "400mbit"
TASK = {
    "model": MODEL, "batch": 2, "micro_batches": 4, "window": 4, "threads": 1,
    "budget": "64MiB", "rises": 4, "stays": 4, "steps": 16,
}  # fmt: skip
PHASES = ("warmup", "steady", "converging")
MAPPINGS = ("engine", "frozen", "follow")


def phases(repeats: int) -> list[Row]:
    """Following the phase against a frozen mapping."""
    order = [name for i in range(repeats) for name in (MAPPINGS if i % 2 == 0 else MAPPINGS[::-1])]
    task = TASK | {"variants": order}
    worker = f"{__package__}.phases_worker"
    if reason := why_not():
        where = f"loopback ({reason})"
        runs = run_ranks(task, None, worker=worker)
    else:
        where = f"{RATE} between 2 namespaces"
        with linked_hosts(2, RATE) as hosts:
            runs = run_ranks(task, hosts, worker=worker)
    by = {name: [run for run in runs if run["variant"] == name] for name in MAPPINGS}
    how = f"{where}, {by['engine'][0]['parameters']:,} parameters, 4 micro-batches, budget {TASK['budget']}"
    rows: list[Row] = [("losses: follow, frozen, engine", "equal until converging", _losses(by), f"{len(runs)} runs")]
    for phase in PHASES:
        for name in MAPPINGS:
            rows.append(
                (f"{phase}, {name}: gathered, reduced, on the wire, device peak", "-", _bytes(by[name], phase), how)
            )
        for name, base in (("frozen", "engine"), ("follow", "frozen")):
            pairs = [(_step_s(a, phase), _step_s(b, phase)) for a, b in zip(by[base], by[name], strict=True)]
            middle = statistics.median(a for a, _ in pairs)
            claimed = "below 1" if name == "frozen" or phase == "converging" else "1"
            text = f"{base} {middle * 1e3:.0f} ms a step"
            rows.append((f"{phase}, {name} / {base}: step time", claimed, compare(pairs), text))
    return rows


def _in_phase(run: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    """The steps of a phase, without its first; the first ones of a run show how much room there is."""
    return [step for i, step in enumerate(run["each"]) if step["phase"] == phase and i > 3][1:]


def _step_s(run: dict[str, Any], phase: str) -> float:
    return statistics.median(step["step_s"] for step in _in_phase(run, phase))


def _bytes(runs: list[dict[str, Any]], phase: str) -> str:
    steps = [step for run in runs for step in _in_phase(run, phase)]
    found = [statistics.median(step[key] for step in steps) / 1e6 for key in ("gather", "reduce", "wire", "peak")]
    return ", ".join(f"{value:.2f} MB" for value in found)


def _losses(by: dict[str, list[dict[str, Any]]]) -> str:
    changed = next(i for i, step in enumerate(by["follow"][0]["each"]) if step["phase"] == "converging")
    young = {tuple(step["loss"] for step in run["each"][: changed + 1]) for runs in by.values() for run in runs}
    frozen, follow = by["frozen"][0]["each"], by["follow"][0]["each"]
    gap = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(frozen, follow, strict=True))
    equal = "equal" if len(young) == 1 else f"{len(young)} different"
    return f"{equal} in {changed + 1} steps, then within {gap:.1e}"
