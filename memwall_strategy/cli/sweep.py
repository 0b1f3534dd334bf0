"""``memwall-train -m``: one run after the other, each in processes of its own.

Hydra's own launcher would run the jobs inside this process, whose ranks Lightning starts by running the command line
again: every rank would walk through the whole sweep in lockstep, and one failing job would leave the others waiting.
Here a job is a command of its own. All jobs are composed and checked first: a mistake shows before anything starts,
and the jobs without one run all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from memwall_strategy.core.errors import ConfigError

SWEEP_JSON = "sweep.json"
EXIT_SOME_FAILED = 1
_STOP_WAIT_S = 60.0
"""How long a job that is told to stop may take to save and end."""
_FIGURES = (("loss", "train/loss_last", "{:.3f}"), ("s/step", "memwall/step_s", "{:.3f}"))


@dataclass(slots=True)
class Job:
    """One run of a sweep.

    Attributes:
        overrides: of its command line; differs: those that only some jobs have.
        folder: its run folder; None where it was refused.
        result: ``waiting``, ``ok``, ``refused`` (not started), ``failed (exit code)`` or ``stopped``.
        seconds: that it took.
        error: why it was refused.
    """

    number: int
    overrides: list[str]
    differs: list[str]
    folder: str | None = None
    result: str = "waiting"
    seconds: float = 0.0
    error: str | None = None


def sweep(overrides: Sequence[str], config_dir: Path | None, config_name: str) -> int:
    """Run a sweep's jobs and print what came of each; return the exit code: 0 where all ended well.

    Raises:
        ConfigError: an argument that cannot be read, or not a single job that could run.
    """
    from memwall_strategy.cli.launch import rank

    if rank() or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("A sweep (-m) starts its jobs itself. Start it as one command, without a launcher.")
    jobs = [Job(number, job, differs) for number, (job, differs) in enumerate(_expand(overrides))]
    folder = _check(jobs, config_dir, config_name)
    if folder is None:
        raise ConfigError(f"No job of this sweep can run. Job 0: {jobs[0].error}")
    for job in jobs:
        if job.error:
            said = f"memwall-train: job {job.number} ({_shown(job)}) is refused: {job.error}"
            print(said, file=sys.stderr, flush=True)
    folder = _make(folder)
    config = [*(["--config-dir", str(config_dir)] if config_dir else []), "--config-name", config_name]
    with _sigterm_ends_the_sweep():
        try:
            for job in jobs:
                if not job.error:
                    job.folder = str(folder / str(job.number))
                    _run(job, config)
                _save(folder, jobs)
        finally:
            _save(folder, jobs)
            print(_table(jobs), f"\nsweep folder: {folder}", flush=True)
    return 0 if all(job.result == "ok" for job in jobs) else EXIT_SOME_FAILED


def _expand(overrides: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Overrides of each job, and those of them that come from a sweep: the product of all choices, in Hydra's order."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    from memwall_strategy.cli.compose import parse

    parsed = parse(overrides)
    for override in parsed:
        if override.key_or_group in ("hydra/launcher", "hydra/sweeper"):
            raise ConfigError(
                f"{override.input_line} cannot be used: memwall-train runs a sweep's jobs itself, one after the other, "
                "each in processes of its own. Leave it out."
            )
    varies = {each.get_key_element(): each.is_sweep_override() for each in parsed}  # the last of a key counts
    for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None):
        for job in batch:
            yield list(job), [one for one in job if varies.get(one.partition("=")[0])]


def _check(jobs: list[Job], config_dir: Path | None, config_name: str) -> Path | None:
    """Note what is wrong with which job, and return the sweep's folder; None where every job is refused."""
    from memwall_strategy.cli.compose import CONFIG_FOLDER, compose_run, sweep_folder
    from memwall_strategy.cli.settings import check

    folder = None
    source = {"folder": config_dir or CONFIG_FOLDER, "name": config_name}
    for job in jobs:
        try:
            check(compose_run(job.overrides, **source))
            folder = folder or sweep_folder(job.overrides, **source)
        except ConfigError as error:
            job.result, job.error = "refused", str(error)
    return folder


def _make(folder: Path) -> Path:
    """The sweep's folder, made by this sweep alone."""
    for number in range(1, 100):
        path = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"paths.root: the sweep's folder {path} cannot be made ({error.strerror}). "
                "Name another place: paths.root=/path/that/can/be/written."
            ) from error
        return path.resolve()
    raise ConfigError(f"{folder} and 98 more of that name exist. Name another: hydra.sweep.dir=...")


def _run(job: Job, config: list[str]) -> None:
    print(f"--- job {job.number}: {_shown(job)}", flush=True)
    folder = str(job.folder).replace("\\", "\\\\").replace("'", "\\'")
    command = [sys.executable, "-m", "memwall_strategy.cli.train", *config, *job.overrides]
    start = time.monotonic()
    job.result = "stopped"
    process = subprocess.Popen([*command, f"paths.run_folder='{folder}'"])
    try:
        code = process.wait()
        job.result = "ok" if code == 0 else f"failed ({code})"
    finally:
        job.seconds = round(time.monotonic() - start, 1)
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind: a run saves on SIGTERM, and takes its ranks with it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _sigterm_ends_the_sweep() -> Iterator[None]:
    def stop(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _save(folder: Path, jobs: Sequence[Job]) -> None:
    beside = folder / f"{SWEEP_JSON}.new"
    beside.write_text(json.dumps([asdict(job) for job in jobs], indent=1) + "\n")
    os.replace(beside, folder / SWEEP_JSON)


def _table(jobs: Sequence[Job]) -> str:
    from memwall_strategy.planner.plans import align

    rows = [["job", "result", *(name for name, _, _ in _FIGURES), "wall s", "overrides"]]
    for job in jobs:
        figures = _figures(job)
        shown = [shape.format(figures[key]) if key in figures else "-" for _, key, shape in _FIGURES]
        rows.append([str(job.number), job.result, *shown, f"{job.seconds:.1f}", _shown(job)])
    ok = sum(job.result == "ok" for job in jobs)
    return "\n".join(["", *align(rows), f"{ok} of {len(jobs)} jobs ended well"])


def _figures(job: Job) -> dict[str, float]:
    if job.result != "ok" or job.folder is None:
        return {}
    return json.loads((Path(job.folder) / "summary.json").read_text())["figures"]


def _shown(job: Job) -> str:
    return " ".join(job.differs or job.overrides) or "as configured"
