"""Communication in the shadow of compute: claimed | stock FSDP2 | memwall.

    python -m recipes.overlap                           # all figures, about 10 minutes on 2 quiet cores
    python -m recipes.overlap link --repeats 1          # one of: link, fast, host, early
    python -m recipes.overlap link --rate 200mbit

A GPT of 19 M parameters is trained by the same Trainer on two ranks in three ways, which alternate inside the same
processes: ``stock`` (Lightning's ``ModelParallelStrategy`` with ``fully_shard``), ``memwall``, and ``compute``: the
whole model on each rank at once, without communication. What a step takes longer than ``compute`` is communication,
seen from outside. Beside it stands what memwall says of itself: time in which the training thread waited for lanes, had
no core, or copied in and out of buffers. The sum leaves out arithmetic that shares caches and memory with lanes.

- ``link``: two network namespaces joined by a rate-limited link (root; on loopback otherwise, which is then said);
- ``fast``: the same over a faster link, where arithmetic takes longer than transfers;
- ``host``: the same on loopback;
- ``early``: the next iteration's first gathers early, against not, over the link of ``link``.

Each figure is a median over repeats; a ratio is the median of those of the runs next to each other, with their range.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..bench_engine.__main__ import MODEL, compare, median_step, run_ranks
from ..figures import Row, figures_parser, measure, parse
from ..netns import Host, linked_hosts, why_not

FIGURES = ("link", "fast", "host", "early")
TASK = {"model": MODEL, "batch": 4, "steps": 4, "warmup": 1, "threads": 1}
KINDS = ("stock", "memwall", "compute")
TOKENS = 4 * MODEL["context"]
CLAIMED_SHARES = "28 % -> 9 %"
"""Of the iteration that communication takes, before and after."""
Runs = dict[str, list[dict[str, Any]]]


@contextlib.contextmanager
def link_of(rate: str | None) -> Iterator[tuple[list[Host] | None, str]]:
    """Hosts joined by a link of this rate, and its description; loopback where none is asked for, or none can be."""
    if rate is None:
        yield None, "loopback"
    elif reason := why_not():
        yield None, f"loopback and no link of {rate}, because {reason}"
    else:
        with linked_hosts(2, rate) as hosts:
            yield hosts, f"2 namespaces, {rate}"


def alternate(names: Sequence[str], repeats: int, hosts: list[Host] | None, **task: Any) -> Runs:
    """Runs of each variant, all in the same processes, next to each other, their order turning around each time."""
    order = [name for i in range(repeats) for name in (names if i % 2 == 0 else reversed(names))]
    runs: Runs = {name: [] for name in names}
    for run in run_ranks({**TASK, **task, "variants": order}, hosts):
        runs[run["variant"]].append(run)
    return runs


def steps_of(runs: Runs, name: str) -> list[float]:
    return [median_step(run) for run in runs[name]]


def inside(runs: Runs, figure: str) -> float:
    """Median over all of memwall's steps of what it says of itself."""
    return statistics.median(step[figure] for run in runs["memwall"] for step in run["lanes"])


def moved_bytes(runs: Runs) -> float:
    """Bytes that a rank receives in a step."""
    return sum(inside(runs, f"lane_bytes/{lane}") for lane in ("gather", "reduce"))


def saturation(runs: Runs) -> str:
    """Of each lane that used a link."""
    told = [step for run in runs["memwall"] for step in run["lanes"]]
    lanes = [lane for lane in ("gather", "reduce") if all(f"lane_saturation/{lane}" in step for step in told)]
    return ", ".join(f"{lane} {inside(runs, f'lane_saturation/{lane}'):.2f}" for lane in lanes) or "no link was used"


def median_of(runs: Runs, name: str, series: str) -> float:
    """Over all steps of all runs of a variant."""
    return statistics.median(value for run in runs[name] for value in run[series])


def coreless_s(runs: Runs) -> float:
    """Time of a step in which the training thread had no core though nothing was communicated."""
    return statistics.median(
        step - cpu for run in runs["compute"] for step, cpu in zip(run["step_s"], run["cpu_s"], strict=True)
    )


def share(runs: Runs, name: str) -> float:
    """Of the step, what takes longer than in the run without communication."""
    pairs = zip(steps_of(runs, name), steps_of(runs, "compute"), strict=True)
    return statistics.median(max(0.0, 1 - compute / step) for step, compute in pairs)


def bytes_per_s(rate: str) -> float:
    """A rate in tc's words, such as ``400mbit`` or ``1.5gbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if match is None:
        raise SystemExit(f"--rate={rate} is not understood. Write it like 400mbit or 1gbit.")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def against_stock(repeats: int, rate: str | None, claimed: Mapping[str, str]) -> list[Row]:
    """The rows that ``link``, ``fast`` and ``host`` have in common; ``claimed`` by figure, ``-`` for others."""
    with link_of(rate) as (hosts, where):
        runs = alternate(KINDS, repeats, hosts)
    stock, ours, compute = (statistics.median(steps_of(runs, name)) for name in KINDS)
    pairs = list(zip(steps_of(runs, "stock"), steps_of(runs, "memwall"), strict=True))
    losses = {tuple(run["losses"]) for name in ("stock", "memwall") for run in runs[name]}
    exposed, contention, copies = (inside(runs, name) for name in ("exposed_s", "contention_s", "copy_s"))
    contention -= coreless_s(runs)  # what it met without any lane: other processes on this machine
    slower = median_of(runs, "memwall", "cpu_s") - copies - median_of(runs, "compute", "cpu_s")
    outside, stock_outside = ours - compute, stock - compute
    within = median_of(runs, "memwall", "step_s") - median_of(runs, "compute", "step_s")
    told = exposed + contention + copies  # not `slower`, which only the run beside this one tells
    took = f"stock {stock:.2f} s, memwall {ours:.2f} s, compute only {compute:.2f} s"
    found = {
        "memwall / stock: step time":
            (compare(pairs), f"{where}; steps: {took}"),
        "communication / step, stock -> memwall":
            (f"{share(runs, 'stock'):.0%} -> {share(runs, 'memwall'):.0%}", "what a step takes beyond compute only"),
        "communication, memwall / stock":
            (f"{max(0.0, outside) / stock_outside:.2f}" if stock_outside > 0 else "stock has none",
             f"{outside:.2f} s and {stock_outside:.2f} s a step"),
        "compute utilisation (MFU), memwall / stock":
            (f"{stock / ours - 1:+.0%}", f"the same arithmetic a step; {TOKENS} tokens a rank"),
        "exposed communication / step":
            (f"{exposed / ours:.0%}", "time that the training thread waited for lanes"),
        "said inside / seen from outside":
            (f"{told / within:.2f}" if within > 0 else "nothing to see",
             f"exposed {exposed:.2f} + no core {contention:.2f} + copies {copies:.2f} s; outside {within:.2f} s, "
             f"{slower:.2f} s of it CPU time that the same arithmetic took more beside the lanes"),
        "lane saturation":
            (saturation(runs), "bytes over what the link moves in a step, as measured"),
        "losses of every step":
            ("equal to the last digit" if len(losses) == 1 else f"{len(losses)} different loss curves",
             f"{2 * repeats} runs of {TASK['steps'] + TASK['warmup']} steps"),
    }  # fmt: skip
    rows = [(name, claimed.get(name, "-"), measured, how) for name, (measured, how) in found.items()]
    return rows if hosts is None else [*rows, shadow(runs, rate, ours, compute)]


def shadow(runs: Runs, rate: str, step_s: float, compute_s: float) -> Row:
    """The step beside the longer of its two parts."""
    transfer_s = moved_bytes(runs) / bytes_per_s(rate)
    return (
        "memwall: step / max(compute, transfer)", "within 1.10", f"{step_s / max(compute_s, transfer_s):.2f}",
        f"compute {compute_s:.2f} s, transfer {transfer_s:.2f} s: {moved_bytes(runs) / 1e6:.0f} MB at {rate}",
    )  # fmt: skip


ALWAYS = {"said inside / seen from outside": "0.90..1.10", "losses of every step": "equal"}


def link(repeats: int, rate: str) -> list[Row]:
    """Over a slow link."""
    claimed = {
        "memwall / stock: step time": "at most 0.65",
        "communication / step, stock -> memwall": CLAIMED_SHARES,
        "compute utilisation (MFU), memwall / stock": "+ ~20 %",
    }
    return against_stock(repeats, rate, ALWAYS | claimed)


def fast(repeats: int, rate: str) -> list[Row]:
    """Over a link that is faster than the arithmetic."""
    claimed = {
        "communication / step, stock -> memwall": CLAIMED_SHARES,
        "exposed communication / step": "at most 9 %",
    }
    return _named("faster than compute", against_stock(repeats, rate, ALWAYS | claimed))


def host(repeats: int) -> list[Row]:
    """On one host: the overhead over compute only, beside stock's."""
    rows = against_stock(repeats, None, ALWAYS | {"communication, memwall / stock": "at most 0.33"})
    return _named("one host", rows)


def _named(where: str, rows: list[Row]) -> list[Row]:
    return [(f"{where}: {name}", *others) for name, *others in rows]


def early(repeats: int, rate: str) -> list[Row]:
    """Gathers of the next iteration early, against not."""
    pairs = []
    with link_of(rate) as (hosts, where):
        for i in range(repeats):
            took = {}
            for on in (False, True) if i % 2 == 0 else (True, False):
                (run,) = run_ranks({**TASK, "variants": ["memwall"], "overlap": {"next_iteration_early": on}}, hosts)
                took[on] = median_step(run)
            pairs.append((took[False], took[True]))
    return [("next iteration early / not: step time", "-", compare(pairs), f"{where}; {pairs[0][0]:.2f} s without")]


def main() -> None:
    """Measure, then print claimed | measured | how."""
    parser = figures_parser("recipes.overlap", __doc__, FIGURES)
    parser.add_argument("--rate", default="400mbit", help="the slow link, in tc's words (default 400mbit)")
    parser.add_argument("--fast-rate", default="1gbit", help="the fast link (default 1gbit)")
    arguments = parse(parser)
    for rate in (arguments.rate, arguments.fast_rate):
        bytes_per_s(rate)
    figures: dict[str, Callable[[int], list[Row]]] = {
        "link": partial(link, rate=arguments.rate),
        "fast": partial(fast, rate=arguments.fast_rate),
        "host": host,
        "early": partial(early, rate=arguments.rate),
    }
    measure(arguments, figures)


if __name__ == "__main__":
    main()
