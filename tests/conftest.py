"""What every test runs under: quiet offline libraries, one thread a process, skips with a reason, no process left."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from recipes.netns import why_not
from tests.ranks import stop_server

_SESSION_VARIABLE = "MEMWALL_TEST_SESSION"
"""In the environment of every process that the tests start, so that one that lost its parent is still found."""

_LEFT_GRACE_S = 5.0
"""How long a process that was told to end may take to be gone."""

_ENDS_WITH_US = ("resource_tracker", "forkserver", "compile_worker", "wandb-core")
"""Helpers that a library starts once a process and ends when that process exits; each child of a live one is fine."""

os.environ |= {
    _SESSION_VARIABLE: uuid.uuid4().hex,
    "OMP_NUM_THREADS": "1",  # ranks share a few cores; torch reads it at import
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HYDRA_FULL_ERROR": "1",
    "COLUMNS": "120",
}
# What the caller's own launcher or experiment left behind must not reach the tests.
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
    os.environ.pop(_name, None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why."""
    if item.get_closest_marker("requires_netns") and (reason := why_not()):
        pytest.skip(reason)
    cuda = item.get_closest_marker("requires_cuda")
    if cuda and (reason := _why_no_cuda(*cuda.args)):
        pytest.skip(reason)


def _why_no_cuda(count: int = 1) -> str:
    import torch

    found = torch.cuda.device_count()
    return "" if found >= count else f"needs {count} CUDA device(s), {found} found"


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """At the end of the session nothing that a test started is alive, whoever its parent is by then."""
    yield
    stop_server()
    deadline = time.monotonic() + _LEFT_GRACE_S
    while (left := _left_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        pytest.fail("processes outlived the tests:\n" + "\n".join(left), pytrace=False)


def _left_processes() -> list[str]:
    """One line for each process of this session that is neither this one nor a helper that ends with it."""
    descendants = psutil.Process().children(recursive=True)
    lost = [process for process in psutil.process_iter() if process not in descendants and _is_ours(process)]
    return [
        f"pid {process.pid}: {command[:200]}"
        for process in descendants + lost
        if (command := _command(process))
        and not (process in descendants and any(helper in command for helper in _ENDS_WITH_US))
    ]


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(_SESSION_VARIABLE) == os.environ[_SESSION_VARIABLE]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _command(process: psutil.Process) -> str:
    """The command line; empty once the process has ended (a zombie included)."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
