"""What memwall's engine costs and what its lanes gain, beside stock FSDP2 under the same Trainer.

    python -m recipes.bench_engine                     # all figures, about 15 minutes on 2 cores
    python -m recipes.bench_engine off --repeats 3     # one of: off, accounting, telemetry, link, shm

- ``off``: all pillars and lanes off against Lightning's ``ModelParallelStrategy`` with ``fully_shard``: step time from
  runs that alternate inside the same processes, peak resident memory from processes of their own, with glibc's
  thresholds fixed on both sides (by itself the allocator keeps 5 % more or less of what was freed). Loopback.
- ``accounting``: CPU time of the training thread inside the memory account, over the step; beside it the account on
  against off, as above.
- ``telemetry``: time of the training thread inside telemetry (its CPU time and what it waits for) and CPU time of the
  threads that telemetry started, over the step, logging every step; loggers and callbacks as in ``memwall-train``.
- ``shm``: two ranks on this host: the step of stock FSDP2 on gloo, of DDP, and of memwall's lanes without and with
  shared memory, each over the step of two processes that only compute; all five alternate inside the same processes.
- ``link``: lanes on, two ranks in two network namespaces joined by a rate-limited link (root), every run in processes
  of its own, variants alternating.

Each figure is a ratio of medians over pairs of runs next to each other in time; the spread is that of the pairs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..figures import figures_parser, measure, parse
from ..netns import Host, linked_hosts, why_not

MODEL = {"layers": 6, "heads": 8, "hidden": 512, "context": 256, "dropout": 0.0}
"""19 M parameters, like the peers' figures that the limits come from."""
SMALL = {"layers": 4, "heads": 4, "hidden": 256, "context": 128, "dropout": 0.0}
"""3.3 M parameters: its steps are short, so that an overhead per unit would show."""
NANO = {"layers": 4, "heads": 4, "hidden": 256, "context": 256, "dropout": 0.0}
"""The model of ``experiment=gpt_nano``."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Gives freed memory back at once, so that a peak is what was held and not what glibc kept."""
FIGURES = ("off", "accounting", "telemetry", "link", "shm")
RUN_LIMIT_S = 600
"""Longest time that one run may take."""


def run_ranks(
    task: dict[str, Any],
    hosts: Sequence[Host] | None,
    extra_env: Mapping[str, str] | None = None,
    *,
    world: int = 2,
    worker: str = f"{__package__}.worker",
) -> list[dict[str, Any]]:
    """Run ``worker`` on ``world`` ranks, on loopback or one in each host; bounded in time, none left behind."""
    with tempfile.TemporaryDirectory(prefix="memwall-bench-") as folder:
        result = Path(folder) / "result.json"
        port = free_port()
        processes = []
        for rank in range(world):
            env = {
                **os.environ, **(extra_env or {}),
                "RANK": str(rank), "WORLD_SIZE": str(world),
                "LOCAL_RANK": "0" if hosts else str(rank), "LOCAL_WORLD_SIZE": "1" if hosts else str(world),
                "GROUP_RANK": str(rank) if hosts else "0",
                "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "bench", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            if hosts:
                env["GLOO_SOCKET_IFNAME"] = hosts[rank].interface
            command = [sys.executable, "-m", worker, json.dumps({**task, "result": str(result)})]
            with (Path(folder) / f"{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        hosts[rank].command(*command) if hosts else command,
                        env=env,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            codes = [process.wait(RUN_LIMIT_S) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if any(codes):
            logs = "\n".join((Path(folder) / f"{r}.log").read_text()[-3000:] for r in range(world))
            raise SystemExit(f"a bench run failed with exit codes {codes}:\n{logs}")
        return json.loads(result.read_text())


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def median_step(run: dict[str, Any]) -> float:
    """Of one run, from the start of a step to that of the next: nothing can hide between two steps."""
    return statistics.median(run["period_s"])


def compare(pairs: list[tuple[float, float]]) -> str:
    """``ratio (lowest..highest of the pairs)`` of second over first."""
    ratios = sorted(b / a for a, b in pairs)
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}..{ratios[-1]:.3f}, {len(ratios)} pairs)"


def interleaved(base: str, other: str, repeats: int, model: dict[str, Any], batch: int) -> list[tuple[float, float]]:
    """Medians of step times, the two variants alternating inside the same processes, their order alternating too."""
    order = [name for i in range(repeats) for name in ((base, other) if i % 2 == 0 else (other, base))]
    task = {"variants": order, "model": model, "batch": batch, "steps": 20, "warmup": 3, "threads": 1}
    runs = run_ranks(task, None)
    pairs = []
    for i in range(repeats):
        both = {run["variant"]: median_step(run) for run in runs[2 * i : 2 * i + 2]}
        pairs.append((both[base], both[other]))
    return pairs


def off(repeats: int) -> list[tuple[str, str, str, str]]:
    """All off against stock."""
    pairs = interleaved("stock", "off", repeats, SMALL, 4)
    step = statistics.median(a for a, _ in pairs)
    memory = []
    for _ in range(3):
        peaks = {}
        for variant in ("stock", "off"):
            task = {"variants": [variant], "model": MODEL, "batch": 2, "steps": 4, "warmup": 1, "threads": 1}
            peaks[variant] = run_ranks(task, None, MALLOC)[0]["peak_bytes"]
        memory.append((peaks["stock"], peaks["off"]))
    return [
        ("all off / stock: step time", "within 1.02", compare(pairs), f"stock {step * 1e3:.1f} ms a step, loopback"),
        (
            "all off / stock: peak resident bytes",
            "within 1.02",
            compare(memory),
            f"stock {memory[0][0] >> 20} MiB, 19 M parameters, freed memory returned at once",
        ),
    ]


def accounting(repeats: int) -> list[tuple[str, str, str, str]]:
    """The memory account's price."""
    pairs = interleaved("off", "accounting", repeats, SMALL, 4)
    step = statistics.median(a for a, _ in pairs)
    task = {"model": SMALL, "batch": 4, "steps": 30, "warmup": 3, "threads": 1, "time_account": True}
    shares = []
    for run in run_ranks({**task, "variants": ["accounting"] * 3}, None):
        shares += [inside / whole for inside, whole in zip(run["account_s"], run["step_s"], strict=True)]
    shares.sort()
    spread = f"{statistics.median(shares):.4f} ({shares[0]:.4f}..{shares[-1]:.4f}, {len(shares)} steps)"
    return [
        ("accounting: CPU time inside / step", "under 0.01", spread, "3.3 M parameters, 512 tokens a rank, loopback"),
        ("accounting on / off: step time", "-", compare(pairs), f"off {step * 1e3:.1f} ms, loopback"),
    ]


def telemetry(repeats: int) -> list[tuple[str, str, str, str]]:
    """Telemetry's price at gpt_nano's size."""
    task = {"model": NANO, "batch": 4, "steps": 40, "warmup": 4, "threads": 1, "variants": ["memwall"] * repeats}
    rows = []
    for kind, what in (("csv", "metrics.csv, events, progress"), ("wandb", "the same and W&B offline")):
        shares, blocked, steps = [], [], []
        for run in run_ranks({**task, "telemetry": kind}, None):
            step_s = median_step(run)
            steps.append(step_s)
            shares += [
                (thread + others) / step_s
                for thread, others in zip(run["telemetry_s"], run["telemetry_others_s"], strict=True)
            ]
            blocked += [a - b for a, b in zip(run["telemetry_s"], run["telemetry_cpu_s"], strict=True)]
        shares.sort()
        median = statistics.median(shares)
        spread = f"{median:.4f} ({shares[0]:.4f}..{shares[-1]:.4f}, {len(shares)} steps)"
        step = statistics.median(steps)
        how = (
            f"{what}; every step logged, step {step * 1e3:.0f} ms, telemetry {median * step * 1e3:.2f} ms, "
            f"of that blocked {statistics.median(blocked) * 1e3:.2f} ms; 3.3 M parameters, 1024 tokens a rank"
        )
        rows.append((f"telemetry ({kind}): threads' CPU + blocked time / step", "under 0.005", spread, how))
    return rows


def link(repeats: int, rate: str) -> list[tuple[str, str, str, str]]:
    """Lanes over a rate-limited link."""
    if reason := why_not():
        return [("lanes / stock over a link", "at most 0.75", "not measured", reason)]
    pairs, losses, exposed = [], set(), []
    task = {"model": MODEL, "batch": 4, "steps": 4, "warmup": 1, "threads": 1}
    with linked_hosts(2, rate) as hosts:
        for i in range(repeats):
            both = {}
            for variant in ("stock", "memwall") if i % 2 == 0 else ("memwall", "stock"):
                (run,) = run_ranks({**task, "variants": [variant]}, hosts)
                both[variant] = median_step(run)
                losses.add(tuple(run["losses"]))
                exposed += [run["metrics"]["memwall/overlap/exposed_fraction"]] if run["metrics"] else []
            pairs.append((both["stock"], both["memwall"]))
            print(f"  {i + 1}/{repeats}: stock {both['stock']:.2f} s, lanes {both['memwall']:.2f} s", flush=True)
    equal = "equal to the last digit" if len(losses) == 1 else f"{len(losses)} different loss curves"
    how = f"2 ranks, 2 namespaces, {rate}, 19 M parameters, 1024 tokens a rank"
    return [
        ("lanes / stock: step time", "at most 0.75", compare(pairs), how),
        ("lanes / stock: losses of every step", "equal", equal, f"{2 * repeats} runs of {task['steps'] + 1} steps"),
        ("lanes: exposed communication", "-", f"{statistics.median(exposed):.2f} of the step", how),
    ]


SHM_VARIANTS = ("compute", "stock", "ddp", "lanes", "shared")


def shm(repeats: int) -> list[tuple[str, str, str, str]]:
    """Shared memory between the ranks of this host."""
    order = [SHM_VARIANTS[(i + k) % len(SHM_VARIANTS)] for i in range(repeats) for k in range(len(SHM_VARIANTS))]
    task = {"variants": order, "model": MODEL, "batch": 4, "steps": 4, "warmup": 1, "threads": 1}
    runs = run_ranks(task, None)
    rounds = [runs[i : i + len(SHM_VARIANTS)] for i in range(0, len(runs), len(SHM_VARIANTS))]
    steps = [{run["variant"]: median_step(run) for run in same} for same in rounds]
    base = statistics.median(step["compute"] for step in steps)
    how = f"2 ranks, loopback, 19 M parameters, 1024 tokens a rank, compute alone {base:.3f} s"
    rows = [
        (f"{name} / compute alone: step time", claim, compare([(step["compute"], step[name]) for step in steps]), how)
        for name, claim in (("stock", "1.39"), ("ddp", "1.10"), ("lanes", "-"), ("shared", "not above ddp's"))
    ]
    overheads = [{name: step[name] - step["compute"] for name in SHM_VARIANTS} for step in steps]
    medians = {name: statistics.median(each[name] for each in overheads) for name in SHM_VARIANTS}
    cpu = {v: statistics.median(s for r in runs if r["variant"] == v for s in r["process_s"]) for v in SHM_VARIANTS}
    spent = ", ".join(f"{name} {cpu[name] / cpu['compute']:.2f}" for name in SHM_VARIANTS[1:])
    losses = {tuple(run["losses"]) for run in runs if run["variant"] in ("stock", "lanes", "shared")}
    exposed = [run["metrics"]["memwall/overlap/exposed_fraction"] for run in runs if run["variant"] == "shared"]
    shared = next(run["metrics"]["memwall/overlap/shared_bytes"] for run in runs if run["variant"] == "shared")
    return [
        *rows,
        ("shared / stock: time beyond compute", "at most 0.33", f"{medians['shared'] / medians['stock']:.3f}",
         f"medians of {repeats}: {medians['shared']:.3f} s and {medians['stock']:.3f} s; ddp {medians['ddp']:.3f} s"),
        ("CPU time of all threads / compute alone", "-", spent, f"median steps, compute {cpu['compute']:.3f} s"),
        ("shared, lanes, stock: losses of every step", "equal",
         "equal to the last digit" if len(losses) == 1 else f"{len(losses)} different loss curves", f"{repeats} runs"),
        ("shared: exposed communication", "-", f"{statistics.median(exposed):.3f} of the step",
         f"{shared / 2**20:.0f} MiB a step and rank read from the other rank's memory"),
    ]  # fmt: skip


def main() -> None:
    """Measure, then print claimed | measured | how."""
    parser = figures_parser("recipes.bench_engine", __doc__, FIGURES)
    parser.add_argument("--rate", default="400mbit", help="rate of the link, in tc's words (default 400mbit)")
    arguments = parse(parser)
    over_link = partial(link, rate=arguments.rate)
    measure(arguments, {"off": off, "accounting": accounting, "telemetry": telemetry, "link": over_link, "shm": shm})


if __name__ == "__main__":
    main()
