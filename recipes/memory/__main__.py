"""What paging the optimizer's state costs, what a rank holds on its device, and the largest model under a limit.

    python -m recipes.memory                       # all figures, about 20 minutes on 2 cores
    python -m recipes.memory paging --repeats 5    # one of: paging, jitter, link, overhead, ranks, phases, largest

- ``paging``: AdamW state on the host, on disk, and on the host with units that step inside the backward, beside all of
  it on the device; one process, 6.4 million parameters, the device budget that lets all state leave. Variants alternate
  inside one process. Hidden: the share of the lanes' time that the training thread did not wait for.
- ``jitter``: (p95 - p50) / p50 of page-ins, and of raw copies of the same bytes that the same thread makes in turn with
  them (see ``recipes.memory.beside_raw``); times are taken over the median of their size, so that units of different
  sizes do not mix.
- ``link``: the host behind a link as slow, for this machine's arithmetic, as PCIe 5 is for an H100's (64 GB/s for 400
  TFLOP/s, state over 32,768 tokens a step, see ``recipes.memory.link``): how much of the paging is hidden. State that
  moves in the step after the backward has little to hide behind; claimed is the one that steps in the backward.
- ``overhead``: the pool on, with everything on the device, beside the pool off.
- ``ranks``: device bytes of one of 8 ranks, weights sharded and state on the host, beside 16 bytes a parameter, what
  one process holds that trains in fp32 with AdamW.
- ``phases``: see ``recipes.memory.phases``.
- ``largest``: see ``recipes.memory.largest`` (root).

On CPU, "device", "host" and "disk" are capped arenas, and every byte between them is really copied.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from memwall_strategy.pool.disk import CHUNK_BYTES
from memwall_strategy.pool.disk_file import DiskFile
from memwall_strategy.pool.extent import extent_of
from memwall_strategy.pool.mapping import Mapping

from ..bench_engine.__main__ import compare, median_step, run_ranks
from ..figures import Row, figures_parser, measure, parse
from .largest import largest
from .link import CARD_FLOPS, CARD_LINK_BYTES_PER_S, CARD_TOKENS
from .phases import phases

MODEL = {"layers": 8, "heads": 4, "hidden": 256, "context": 128, "dropout": 0.0}
BASELINE_BYTES = 16
"""fp32 weight, gradient and two moments, a parameter."""
LINK = (
    f"bytes a FLOP as {CARD_LINK_BYTES_PER_S / 1e9:.0f} GB/s for {CARD_FLOPS / 1e12:.0f} TFLOP/s; state over "
    f"{CARD_TOKENS} tokens a step (8 ranks x 4096)"
)
FIGURES = ("paging", "jitter", "link", "overhead", "ranks", "phases", "largest")


def task_of(variants: list[str], folder: Path, **changes: Any) -> dict[str, Any]:
    task = {
        "variants": variants, "model": MODEL, "batch": 8, "steps": 12, "warmup": 3, "threads": 1, "folder": str(folder),
    }  # fmt: skip
    return task | changes


def run(task: dict[str, Any], world: int) -> list[dict[str, Any]]:
    return run_ranks(task, None, world=world, worker=f"{__package__}.worker")


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
    pairs = zip(map(median_step, by["device"]), map(median_step, by["host, stepped there"]), strict=True)
    rows.append(
        ("state on host, stepped there / on device: step time", "at most 1.15", compare(list(pairs)),
         f"{by['host, stepped there'][0]['host_bytes'] / 2**20:.0f} MiB rest there; nothing moves on CPU")
    )  # fmt: skip
    disk = by["disk"][0]
    per_step = disk["io_bytes"] / disk["steps"] / 2**20
    reads, writes = disk_rates(folder)
    rows.append(
        ("state on disk: disk traffic", "-", f"{per_step:.0f} MiB a step",
         f"this process's I/O counters; the disk by itself: {reads / 1e6:.0f} MB/s in, {writes / 1e6:.0f} MB/s out")
    )  # fmt: skip
    return rows


def disk_rates(folder: Path, nbytes: int = 64 * 2**20) -> tuple[float, float]:
    """Bytes per second that one thread reads and writes in a folder, past the page cache where it has direct I/O."""
    file, memory = DiskFile(folder, nbytes), Mapping(CHUNK_BYTES, touch=True)
    try:
        seconds = []
        for transfer in (file.write, file.read):
            start = time.perf_counter()
            for at in range(0, nbytes, CHUNK_BYTES):
                transfer(extent_of(memory.bytes).memory(), at)
            seconds.append(time.perf_counter() - start)
    finally:
        file.close()
    return nbytes / seconds[1], nbytes / seconds[0]


def jitter(repeats: int, folder: Path) -> list[Row]:
    """Page-ins in turn with raw copies; steps are short, so that there are many."""
    places = ["host", "host, in backward"]
    variants = ["device", *(f"{place}, beside raw copies" for place in places * repeats)]
    runs = run(task_of(variants, folder, steps=120, warmup=5, batch=1), 1)
    rows = []
    for place in places:
        both = [each["page_ins"] for each in runs if each["variant"] == f"{place}, beside raw copies"]
        excess = sorted(spread(page_ins) - spread(raw) for page_ins, raw in both)
        page_ins, raw = ([each for two in both for each in two[i]] for i in (0, 1))
        widest = max(nbytes for nbytes, _ in page_ins)
        middle = [statistics.median(s for nbytes, s in each if nbytes == widest) * 1e3 for each in (page_ins, raw)]
        rows.append(
            (f"state on {place}: jitter of page-ins, less that of raw copies", "at most 0.05",
             f"{spread(page_ins) - spread(raw):+.2f} (runs {excess[0]:+.2f}..{excess[-1]:+.2f})",
             f"{spread(page_ins):.2f} and {spread(raw):.2f}, of {len(page_ins)} and {len(raw)} in {len(both)} runs; of "
             f"{widest / 2**20:.1f} MiB: median {middle[0]:.2f} ms, raw {middle[1]:.2f} ms")
        )  # fmt: skip
    return rows


def spread(copies: Sequence[tuple[int, float]]) -> float:
    """(p95 - p50) / p50 of (bytes, seconds), each over the median of its size."""
    by_size: dict[int, list[float]] = {}
    for size, seconds in copies:
        by_size.setdefault(size, []).append(seconds)
    over = sorted(t / statistics.median(group) for group in by_size.values() for t in group)
    middle = statistics.median(over)
    return (over[int(0.95 * (len(over) - 1))] - middle) / middle


def link(repeats: int, folder: Path) -> list[Row]:
    """Paging over a slow link."""
    places = ["host", "host, in backward"]
    kinds = ["device", *(f"{place}, slow link" for place in places)]
    runs = run(task_of(["device", *kinds * repeats], folder, steps=8), 1)[1:]
    by = {name: [r for r in runs if r["variant"] == name] for name in kinds}
    rows = []
    for place, claimed in zip(places, ("-", "at least 0.8"), strict=True):
        here = by[f"{place}, slow link"]
        shares = sorted(1 - r["exposed_s"] / r["moved_s"] for r in here)
        moved, exposed = (statistics.median(r[key] for r in here) for key in ("moved_s", "exposed_s"))
        rows.append(
            (f"state on {place}, behind a link: paging hidden", claimed,
             f"{statistics.median(shares):.2f} ({shares[0]:.2f}..{shares[-1]:.2f}, {len(shares)} runs)",
             f"{here[0]['host_bytes'] / 2**20:.0f} MiB each way a step at {here[0]['bytes_per_s'] / 1e6:.0f} MB/s: "
             f"{moved * 1e3:.0f} ms, waited {exposed * 1e3:.0f} ms")
        )  # fmt: skip
        pairs = zip(map(median_step, by["device"]), map(median_step, here), strict=True)
        rows.append((f"state on {place}, behind a link / on device: step time", "-", compare(list(pairs)), LINK))
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
    parser.add_argument(
        "--deepspeed-python",
        default=sys.executable,
        help="largest: the Python that has DeepSpeed (default: this one); its first use compiles",
    )
    arguments = parse(parser)
    with tempfile.TemporaryDirectory(prefix="memwall-memory-", dir=arguments.folder) as folder:
        known = {"paging": paging, "jitter": jitter, "link": link, "overhead": overhead, "ranks": ranks}
        known["largest"] = partial(largest, deepspeed_python=arguments.deepspeed_python)
        placed = {name: partial(function, folder=Path(folder)) for name, function in known.items()}
        measure(arguments, placed | {"phases": phases})


if __name__ == "__main__":
    main()
