"""The folder of a run: configuration, plan, metrics, events, summary, checkpoints.

Rank 0 writes it; other ranks append their alerts to ``events.jsonl`` and their shards to checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.telemetry.events import Event

METRICS_CSV = "metrics.csv"
EVENTS_JSONL = "events.jsonl"
SUMMARY_JSON = "summary.json"
PLAN_JSON = "plan.json"
CONFIG_YAML = "config.yaml"
PROFILE_JSON = "profile.json"
CHECKPOINTS = "checkpoints"
_MOST_RUNS_A_SECOND = 100


class RunFolder:
    """A run's files.

    Args:
        path: the folder.
        lock: an open descriptor that locks it.
    """

    def __init__(self, path: Path, *, lock: int | None = None) -> None:
        self.path = path.resolve()
        if lock is not None:
            weakref.finalize(self, os.close, lock)  # held as long as somebody writes here

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFolder) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        """The metrics' file."""
        return self.path / METRICS_CSV

    def write_config(self, yaml: str) -> None:
        """Keep the composed configuration."""
        self._replace(CONFIG_YAML, yaml)

    def write_plan(self, plan_json: str) -> None:
        """Keep the plan."""
        self._replace(PLAN_JSON, plan_json)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary."""
        self._replace(SUMMARY_JSON, json.dumps(summary, indent=1) + "\n")

    def make(self) -> None:
        """Make the folder where it is not there yet.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The run folder {self.path} cannot be made ({error.strerror or error}). Name another folder."
            ) from error

    def write_event(self, event: Event) -> None:
        """Append one event; of other ranks than the first, alerts alone.

        One write of one line at the end of the file, so that lines of several processes do not mix.
        """
        if event.rank != 0 and not event.is_alert:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(self.path / EVENTS_JSONL, flags, 0o666)
        try:
            os.write(file, f"{event.to_json()}\n".encode())
        finally:
            os.close(file)

    def remove_if_empty(self) -> None:
        """Leave no folder behind for a run that was refused."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _replace(self, name: str, text: str) -> None:
        beside = self.path / f"{name}.new"
        beside.write_text(text)
        os.replace(beside, self.path / name)


def _lock(option: str, path: Path) -> int | None:
    """Lock a folder that the user named against a second run; None where its file system has no locks.

    Raises:
        ConfigError: another run holds it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{option} is in use by a run that has not ended. Name another folder.") from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def create_run_folder(root: str, name: str, run_folder: str | None, *, resume: bool) -> RunFolder:
    """Make the run's folder, and make sure that it can be written.

    Args:
        root: folder of all runs.
        name: of the run's parent; the run's own is named by the time, and made by nobody else.
        run_folder: the folder itself, where the user names it.
        resume: whether a named folder may hold a run already.

    Raises:
        ConfigError: the folder cannot be made or written, or holds another run.
    """
    if run_folder is not None:
        option, path = f"paths.run_folder={run_folder}", Path(run_folder).expanduser()
        if (path / METRICS_CSV).exists() and not resume:
            raise ConfigError(f"{option} already holds a run. Go on with it by ckpt_path=last, or name another folder.")
        made = _make(option, path, exist_ok=True)
        return RunFolder(made, lock=_lock(option, made))
    else:
        option, parent = f"paths.root={root}", Path(root).expanduser() / name
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        candidates = [parent / (stamp if n == 1 else f"{stamp}_{n}") for n in range(1, _MOST_RUNS_A_SECOND)]
        made = None
        for path in candidates:
            with contextlib.suppress(FileExistsError):
                made = _make(option, path, exist_ok=False)
                break
        if made is None:
            raise ConfigError(f"{option}: {_MOST_RUNS_A_SECOND} runs began in this second. Name one: paths.run_folder=")
    return RunFolder(made)


def _make(option: str, path: Path, *, exist_ok: bool) -> Path:
    probe = path / f".probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
        probe.write_bytes(b"")
        probe.unlink()
    except FileExistsError:
        if not exist_ok:
            raise
        raise ConfigError(
            f"{option} is not a folder. Name another: paths.run_folder=/path/that/can/be/written."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{option}: the run folder {path} cannot be written ({error.strerror or error}). "
            "Name another: paths.run_folder=/path/that/can/be/written."
        ) from error
    return path
