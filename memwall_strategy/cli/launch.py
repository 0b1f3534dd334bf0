"""Where this process stands in the run: which rank, which run folder, which checkpoint; settled before torch comes in.

Lightning starts the other ranks by running this command again, with ``LOCAL_RANK`` set. What the first process chose
(the run folder is named by the time, ``ckpt_path=last`` by what is there) goes to them in one environment variable.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from memwall_strategy.cli.settings import Settings
from memwall_strategy.core.errors import CheckpointError, ConfigError, PeerLost

# Stdlib only, as everything here must be; asked through the runtime it would import torch.
from memwall_strategy.engine.checkpoint.folder import find_last, resolve, verify
from memwall_strategy.engine.processes import die_with_parent, parent_is_gone
from memwall_strategy.telemetry.run_folder import CHECKPOINTS, RunFolder, create_run_folder

_CHOSEN = "MEMWALL_TRAIN_CHOSEN"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
"""Where launchers put the rank: torchrun, Lightning, Slurm."""


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's part.

    Attributes:
        is_first: whether it is rank 0, the only one that prints and writes.
        folder: of the run.
        checkpoint: whole and verified; None for a fresh start.
    """

    is_first: bool
    folder: RunFolder
    checkpoint: Path | None


def rank() -> int:
    """The global rank that a launcher gave this process; 0 for the process that the user started."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def launch(settings: Settings) -> Launch:
    """Settle run folder and checkpoint, or take over what the first process settled.

    Raises:
        ConfigError: an unwritable folder, no such checkpoint, or ranks of an external launcher without a named folder.
    """
    refuse_notebook()
    started_by_us = _CHOSEN in os.environ and os.environ.get("LOCAL_RANK", "0") != "0"
    if started_by_us:
        chosen = json.loads(os.environ[_CHOSEN])
        die_with_parent(True)  # now: a first rank that dies while this one imports would leave it waiting for long
        if parent_is_gone(chosen["pid"]):
            raise PeerLost("the first rank, which started this one, has ended.", (0,))
        checkpoint = chosen["checkpoint"]
        return Launch(False, RunFolder(Path(chosen["folder"])), Path(checkpoint) if checkpoint else None)
    paths, first = settings.paths, rank() == 0
    externally = any(os.environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_NTASKS"))
    if externally and paths.run_folder is None:
        raise ConfigError(
            "These ranks were started by another launcher, and each would name its run folder by its own clock. "
            "Give one for all: paths.run_folder=runs/my_run."
        )
    checkpoint = find_checkpoint(settings)
    folder = (
        create_run_folder(paths.root, settings.run.name, paths.run_folder, resume=checkpoint is not None)
        if first
        else RunFolder(Path(str(paths.run_folder)).expanduser())
    )
    if not externally:
        share_machine(settings)
        os.environ[_CHOSEN] = json.dumps(
            {
                "folder": str(folder.path),
                "checkpoint": str(checkpoint) if checkpoint else None,
                "pid": os.getpid(),
            }
        )
    return Launch(first, folder, checkpoint)


def share_machine(settings: Settings) -> None:
    """Say how many ranks share this machine, as other launchers do: a rank counts on its share of the memory."""
    if isinstance(settings.trainer.devices, int):
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(settings.trainer.devices))


def find_checkpoint(settings: Settings) -> Path | None:
    """The checkpoint that ``ckpt_path`` means, verified; None where the run starts fresh.

    Raises:
        ConfigError: there is none, it is half-written, or something else.
    """
    wanted = settings.run.ckpt_path
    if wanted is None:
        return None
    if wanted == "last":
        if settings.paths.run_folder is not None:
            places = [Path(settings.paths.run_folder).expanduser()]
        else:
            runs = Path(settings.paths.root).expanduser() / settings.run.name
            places = sorted(runs.iterdir()) if runs.is_dir() else []
        found = [last for place in places if (last := find_last(place / CHECKPOINTS)) is not None]
        if not found:
            where = settings.paths.run_folder or f"{settings.paths.root}/{settings.run.name}/*"
            raise ConfigError(
                f"ckpt_path=last: there is no whole checkpoint in {where}/{CHECKPOINTS}. "
                "Leave ckpt_path out to start afresh, or name one: ckpt_path=path/to/checkpoint."
            )
        return _unfinished(max(found, key=lambda path: verify(path).created_s).resolve(), settings)
    try:
        return _unfinished(resolve(Path(wanted).expanduser()).resolve(), settings)
    except CheckpointError as error:
        raise ConfigError(f"ckpt_path={wanted}: {error}") from error


def _unfinished(checkpoint: Path, settings: Settings) -> Path:
    """The checkpoint, if it leaves something to train; one whose steps are not known (one full file) passes."""
    marker, most = verify(checkpoint).marker, settings.trainer.max_steps
    if marker is not None and 0 <= most <= marker.step:
        raise ConfigError(
            f"ckpt_path={settings.run.ckpt_path}: {checkpoint} is at step {marker.step} already and "
            f"trainer.max_steps={most}. Raise trainer.max_steps to train further."
        )
    return checkpoint


def refuse_notebook() -> None:
    """A notebook has no command line that could be run again for the other ranks.

    Raises:
        ConfigError: this is one, or an interactive Python.
    """
    shell = getattr(builtins, "get_ipython", None)
    if shell is not None or hasattr(sys, "ps1"):
        raise ConfigError(
            "memwall-train starts its ranks by running its own command line again, which a notebook or an interactive "
            "Python does not have. Run it as a command: `!memwall-train experiment=gpt_nano` in a cell, or in a "
            "terminal. For training from a notebook's own code use Trainer(strategy='memwall', devices=1)."
        )
