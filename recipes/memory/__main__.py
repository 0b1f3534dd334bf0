"""What paging the optimizer's state costs, and what a rank holds on its device.

    python -m recipes.memory                       # all figures, a few minutes on 2 cores
    python -m recipes.memory paging --repeats 5    # one of: paging, overhead, ranks, phases

- ``paging``: AdamW state on the host, on disk, and on the host with units that step inside the backward, beside all of
  it on the device; one process, 6.4 million parameters, the device budget that lets all state leave. Variants alternate
  inside one process. Hidden: the share of the lanes' time that the training thread did not wait for. Jitter:
  (p95 - p50) / p50 of the page-ins, and of raw copies of the same sizes made between the steps.
- ``overhead``: the pool on, with everything on the device, beside the pool off.
- ``ranks``: device bytes of one of 8 ranks, weights sharded and state on the host, beside 16 bytes a parameter, what
  one process holds that trains in fp32 with AdamW.
- ``phases``: see ``recipes.memory.phases``.

On CPU, "device", "host" and "disk" are capped arenas, and every byte between them is really copied.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ..bench_engine.__main__ import compare, median_step, run_ranks
from ..figures import Row, figures_parser, measure, parse
from .phases import phases

MODEL = {"layers": 8, "heads": 4, "hidden": 256, "context": 128, "dropout": 0.0}
BASELINE_BYTES = 16
"""fp32 weight, gradient and two moments, a parameter."""
FIGURES = ("paging", "overhead", "ranks", "phases")


def task_of(variants: list[str], folder: Path, **changes: Any) -> dict[str, Any]:
    task = {
        "variants": variants, "model": MODEL, "batch": 8, "steps": 12, "warmup": 3, "threads": 1, "folder": str(folder),
    }  # fmt: skip
    return task | changes


def run(task: dict[str, Any], world: int) -> list[dict[str, Any]]:
    return run_ranks(task, None, world=world, worker=f"{__package__}.worker")


def jitter(times: list[float]) -> float:
    """(p95 - p50) / p50."""
    ordered = sorted(times)
    middle = statistics.median(ordered)
    return (ordered[int(0.95 * (len(ordered) - 1))] - middle) / middle


def paging(repeats: int, folder: Path) -> list[Row]:
    """All state on the host, and on disk, against all on the device."""
    kinds = ["device", "host", "host, stepped there", "host, in backward", "disk"]
    order = ["device", *(kinds[(i + j) % len(kinds)] for i in range(repeats) for j in range(len(kinds)))]
    runs = run(task_of(order, folder), 1)[1:]  # the first one says how little the device needs, and warms up
    by = {name: [r for r in runs if r["variant"] == name] for name in kinds}
    equal = len({tuple(r["losses"]) for r in runs}) == 1
    base = statistics.median(median_step(r) for r in by["device"])
    parameters = by["device"][0]["parameters"]
    how = f"{parameters:,} parameters, 1024 tokens a step, 1 process, device step {base * 1e3:.0f} ms"
    rows = [("losses of all placements", "equal", "equal" if equal else "different", f"{len(runs)} runs")]
    for place, limit in (("host", "at most 1.15"), ("host, in backward", "at most 1.15"), ("disk", "at most 1.6")):
        pairs = list(zip(map(median_step, by[place]), map(median_step, by["device"]), strict=True))
        ratio = compare([(device, other) for other, device in pairs])
        rows.append((f"state on {place} / on device: step time", limit, ratio, how))
        busy = statistics.median(r["page_in_s"] + r["page_out_s"] for r in by[place])
        exposed = statistics.median(r["exposed_s"] for r in by[place])
        held = by[place][0]["disk_bytes" if place == "disk" else "host_bytes"]
        moved = f"{held / 2**20:.0f} MiB each way a step; lanes busy {busy * 1e3:.1f} ms, waited {exposed * 1e3:.1f} ms"
        rows.append((f"state on {place}: paging hidden", "-", f"{max(0.0, 1 - exposed / busy):.2f}", moved))
        pages, raw = ([t for r in by[place] for t in r[key]] for key in ("page_s", "raw_s"))
        rows.append(
            (f"state on {place}: jitter of page-ins, of raw copies", "excess 0.05" if place != "disk" else "-",
             f"{jitter(pages):.2f}, {jitter(raw):.2f}", f"{len(pages)} page-ins")
        )  # fmt: skip
    pairs = zip(map(median_step, by["device"]), map(median_step, by["host, stepped there"]), strict=True)
    rows.append(
        ("state on host, stepped there / on device: step time", "at most 1.15", compare(list(pairs)),
         f"{by['host, stepped there'][0]['host_bytes'] / 2**20:.0f} MiB rest there; nothing moves on CPU")
    )  # fmt: skip
    disk = by["disk"][0]
    per_step = disk["io_bytes"] / disk["steps"] / 2**20
    rows.append(("state on disk: disk traffic", "-", f"{per_step:.0f} MiB a step", "the kernel's I/O counters"))
    return rows


def overhead(repeats: int, folder: Path) -> list[Row]:
    """The pool on while everything fits, against off."""
    order = [v for i in range(repeats) for v in (("off", "device") if i % 2 == 0 else ("device", "off"))]
    runs = run(task_of(order, folder), 1)
    pairs = []
    for i in range(repeats):
        both = {r["variant"]: median_step(r) for r in runs[2 * i : 2 * i + 2]}
        pairs.append((both["off"], both["device"]))
    return [("pool on, all on the device / pool off: step time", "under 1.01", compare(pairs), "account included")]


def ranks(repeats: int, folder: Path) -> list[Row]:
    """Device bytes of one of 8 ranks."""
    runs = run(task_of(["device", "host"], folder, steps=2, warmup=1, batch=1), 8)
    parameters = runs[0]["parameters"]
    rows = []
    for result in runs:
        share = result["peak_bytes"] / (BASELINE_BYTES * parameters)
        rows.append(
            (f"device bytes of one of 8 ranks, state on {result['variant']}", "at most 0.375", f"{share:.3f}",
             f"highest of a step, {result['peak_bytes'] / 2**20:.1f} MiB of "
             f"{BASELINE_BYTES * parameters / 2**20:.1f} MiB; activations on neither side")
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure, then print claimed | measured | how."""
    parser = figures_parser("recipes.memory", __doc__, FIGURES)
    parser.add_argument("--folder", type=Path, help="where the disk tier goes (default: a temporary folder)")
    arguments = parse(parser)
    with tempfile.TemporaryDirectory(prefix="memwall-memory-", dir=arguments.folder) as folder:
        known = {"paging": paging, "overhead": overhead, "ranks": ranks}
        placed = {name: partial(function, folder=Path(folder)) for name, function in known.items()}
        measure(arguments, placed | {"phases": phases})


if __name__ == "__main__":
    main()
