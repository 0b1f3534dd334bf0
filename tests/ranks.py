"""The one helper that starts ranks: bounded in time, every rank's output shown on failure.

A worker is a module-level function of a test module. It runs in processes of its own, with torch limited to one
thread (forked from ``tests.rank_server``), and its return value (JSON) comes back, one for each rank:

    def worker(rank, world, scale):
        with process_group():
            return {"loss": ...}

    def test_it():
        results = run_ranks(worker, 2, scale=3.0)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from tests.rank_server import RankServer

ROOT = pathlib.Path(__file__).resolve().parent.parent
_READ_AT_START = ("MALLOC_", "PYTHON", "TORCH_DEVICE_BACKEND", "OMP_", "MKL_", "LD_", "CUDA_")


class RanksFailed(AssertionError):
    """A rank failed or ran out of time; the message holds every rank's output."""


def run_ranks(
    worker: Callable[..., Any],
    world: int,
    *,
    timeout_s: float = 120.0,
    expect_exit: dict[int, int] | None = None,
    env: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run ``worker(rank, world, **arguments)`` in ``world`` processes and return what each returned.

    Args:
        expect_exit: exit codes of ranks that must not end with 0 (negative: killed by that signal); such a rank's
            result is None.
    """
    expected = dict.fromkeys(range(world), 0) | (expect_exit or {})
    with tempfile.TemporaryDirectory(prefix="memwall-ranks-") as folder:
        base = pathlib.Path(folder)
        processes = []
        port = str(free_port())
        for rank in range(world):
            rank_env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                **(env or {}),
            }
            task = (worker.__module__, worker.__qualname__, json.dumps(arguments), str(base / f"{rank}.json"))
            processes.append(_start(task, str(base / f"{rank}.log"), rank_env, fresh=_needs_fresh(env)))
        deadline = time.monotonic() + timeout_s
        try:
            while any(p.poll() is None for p in processes):
                failed = [r for r, p in enumerate(processes) if p.poll() not in (None, expected[r])]
                if failed:
                    deadline = min(deadline, time.monotonic() + 5)  # the others may still say why
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            hung = [r for r, p in enumerate(processes) if p.poll() is None]
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        codes = {r: p.returncode for r, p in enumerate(processes)}
        if hung or codes != expected:
            logs = "\n".join(f"--- rank {r} ---\n{(base / f'{r}.log').read_text()[-6000:]}" for r in range(world))
            what = f"ranks {hung} were stopped after {timeout_s:.0f} s or after another's failure; " if hung else ""
            raise RanksFailed(f"{what}exit codes {codes}, expected {expected}\n{logs}")
        return [json.loads(path.read_text()) if (path := base / f"{r}.json").exists() else None for r in range(world)]


@contextlib.contextmanager
def process_group(backend: str = "gloo", timeout_s: float = 60.0) -> Iterator[None]:
    """The default process group of a worker, ended when the worker ends."""
    import torch.distributed as dist

    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_worker(module: str, name: str, arguments: str, result: str) -> None:
    """What a rank does."""
    import torch

    torch.set_num_threads(1)
    worker = getattr(importlib.import_module(module), name)
    value = worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), **json.loads(arguments))
    pathlib.Path(result).write_text(json.dumps(value))


_server: RankServer | None = None


def stop_server() -> None:
    """End the rank server of this session, if there is one."""
    global _server
    if _server is not None:
        _server.stop()
        _server = None


def _needs_fresh(env: dict[str, str] | None) -> bool:
    """Whether a variable is read when the process or its libraries start, so that a fork would not see it."""
    return any(name.startswith(_READ_AT_START) for name in env or {})


def _start(task: tuple[str, str, str, str], log: str, env: dict[str, str], *, fresh: bool) -> Any:
    global _server
    if not fresh and sys.platform.startswith("linux"):
        if _server is None:
            command = [sys.executable, "-W", "ignore", "-m", "tests.rank_server"]
            _server = RankServer(command, {**os.environ, "PYTHONPATH": env["PYTHONPATH"]}, str(ROOT))
        return _server.spawn(*task, log, env)
    with open(log, "w") as out:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.ranks", *task],
            stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True,
        )  # fmt: skip


if __name__ == "__main__":
    run_worker(*sys.argv[1:])
