"""The entrance to checkpoints on disk: one ``Checkpointer`` for a training run.

A sharded checkpoint is a folder with one file a rank, in torch's distributed checkpoint format, loadable at any world
size, plus the trainer's own dict, the generators of every rank and a commit marker that is written last; how it stays
whole is told in ``engine.checkpoint.folder``. Saving adds one block to what is in memory, loading one block; a save in
the background adds the rank's own shards in host memory, once, until they are written.

How a trainer uses it so that nothing is copied twice (Lightning's names; others alike)::

    lightning_module_state_dict()  ->  model_state(module)                 # references
    optimizer_state(optimizer)     ->  optimizer_state(module, optimizer, "optimizer_0")   # references, no step
    save_checkpoint(ckpt, path):
        state = ckpt.pop("state_dict")                                     # as the callbacks left it
        with_optimizers = ckpt.pop("optimizer_states", None) is not None   # absent with save_weights_only
        checkpointer.save(path, ckpt, step, state_dict=state, with_optimizers=with_optimizers)
    load_checkpoint(path)          ->  checkpointer.load(path, strict=module.strict_loading)  # model and optimizers too
    load_model_state_dict, load_optimizer_state_dict: do nothing, all is loaded
    remove_checkpoint(path)        ->  checkpointer.remove(path)
    just before the first training step after a load: checkpointer.restore_rng()   # set-up drew random numbers
    before the process group ends: checkpointer.close()

``save``, ``save_full``, ``export_safetensors``, ``load``, ``wait`` and ``close`` are for all ranks together; an error
raises the same ``CheckpointError`` on all of them. Gathers in flight (prefetched weights) must be dropped after a load.

It does not write to object stores (give a mounted path), and the ranks of a sharded checkpoint must share the folder.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.core.lane import DEFAULT_TIMEOUT_S, Lane
from memwall_strategy.engine.checkpoint.contents import Contents, collect
from memwall_strategy.engine.checkpoint.convert import consolidate
from memwall_strategy.engine.checkpoint.folder import discard, find_last, resolve, tidy, verify
from memwall_strategy.engine.checkpoint.full import open_file, save_full
from memwall_strategy.engine.checkpoint.load import load_state, open_folder
from memwall_strategy.engine.checkpoint.model import model_state
from memwall_strategy.engine.checkpoint.optimizer import optimizer_state
from memwall_strategy.engine.checkpoint.ranks import Ranks, message_group
from memwall_strategy.engine.checkpoint.rng import restore_rng
from memwall_strategy.engine.checkpoint.save import ShardedSave
from memwall_strategy.engine.checkpoint.weights import export_safetensors
from memwall_strategy.telemetry.events import EventKind, Events

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Checkpointer",
    "consolidate",
    "find_last",
    "model_state",
    "optimizer_state",
    "resolve",
    "tidy",
    "verify",
]


class Checkpointer:
    """Saves and loads a model with its optimizers.

    Args:
        model: sharded by FSDP2, partly sharded, or plain. May be exchanged later (attribute).
        optimizers: in the order in which a checkpoint numbers them. May be exchanged later (attribute).
        process_group: a group with a CPU backend that nothing else uses; default: a gloo group of its own over all
            ranks, made at the first save or load.
        asynchronous: ``save`` returns when blocks are copied; the rest runs in the background, one save at a time.
        timeout_s: longest wait for other ranks, and for a save in the background.
        events: where saves, whole or failed, are told; None: nowhere.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        process_group: ProcessGroup | None = None,
        asynchronous: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        events: Events | None = None,
    ) -> None:
        self._events = Events() if events is None else events
        self.model, self.optimizers, self.timeout_s = model, list(optimizers), timeout_s
        self.asynchronous = asynchronous
        self._given_group = process_group
        self._ranks: Ranks | None = None
        self._lane = Lane("checkpoint", capacity=1, timeout_s=timeout_s) if asynchronous else None
        self._rng: list[dict[str, Any]] = []
        self._closed = False
        # guards the two below, which the background thread shares
        self._mutex = threading.Lock()
        self._in_flight = False
        self._to_remove: list[Path] = []

    # -- saving --

    def save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        step: int = 0,
        *,
        state_dict: Mapping[str, Any] | None = None,
        with_optimizers: bool = True,
    ) -> None:
        """Save a sharded checkpoint, replacing what has that name only when the new one is whole.

        In the background (``asynchronous``) it first waits for the save before, and raises what that one met.

        Args:
            path: the folder; the first rank's counts.
            extra: the trainer's dict, saved with ``torch.save``; the first rank's counts.
            step: optimizer steps taken; goes into the marker.
            state_dict: what to save of the model, where a callback changed what ``model_state`` gave; default: all.
            with_optimizers: False saves weights alone.

        Raises:
            CheckpointError: on every rank, with the rank and the cause named; what was there before still stands.
        """
        self.wait()
        start_s, staged = time.perf_counter(), self._lane is not None
        with self._telling_failure(path):
            job = ShardedSave(self._together(), path, step)
            job.prepare(lambda: self._collect(state_dict, with_optimizers), dict(extra or {}), stage=staged)
            if self._lane is None:
                job.finish()
        if self._lane is None:
            self._tell_saved(path, start_s)
            return
        with self._mutex:
            self._in_flight = True
        self._lane.submit(
            lambda: self._finish(job, path, start_s), transfer="save", unit=os.fspath(path), nbytes=job.staged_bytes
        )

    def save_full(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        step: int = 0,
        *,
        state_dict: Mapping[str, Any] | None = None,
        with_optimizers: bool = True,
    ) -> None:
        """Save one file in Lightning's ordinary layout; arguments and errors as ``save``, never in the background.

        The first rank's host memory holds the whole model and optimizer state meanwhile.
        """
        self.wait()
        start_s = time.perf_counter()
        with self._telling_failure(path):
            save_full(
                self._together(), path, lambda: self._collect(state_dict, with_optimizers), dict(extra or {}), step
            )
        self._tell_saved(path, start_s)

    def export_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as one safetensors file, one tensor in memory at a time."""
        self.wait()
        export_safetensors(self._together(), path, self.model)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint (effective on the first rank).

        While a save is in the background this waits for its commit, so that the older checkpoint stands until the
        newer one is whole; if that save fails, until the next that does not.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_rank(self._given_group) != 0:
            return
        where = Path(os.path.abspath(path))
        with self._mutex:
            if self._in_flight:
                self._to_remove.append(where)
                return
        if os.path.lexists(where):
            discard(where)

    # -- loading --

    def load(
        self, path: str | os.PathLike[str], strict: bool = True, *, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a sharded or a full checkpoint into model and optimizers, in place, and return the trainer's dict.

        Also restores the generators of this rank (see ``engine.checkpoint.rng`` for other world sizes). With no
        optimizers the weights alone are loaded.

        Args:
            strict: names must be the same on both sides; otherwise what fits is loaded and the rest is warned about.
            weights_only: as ``torch.load`` takes it, for the trainer's dict; None is torch's default.

        Raises:
            CheckpointError: there is no whole checkpoint of that name, or it does not fit; differences are named.
        """
        self.wait()
        ranks, what = self._together(), f"Loading checkpoint {os.fspath(path)}"
        where = Path(ranks.first(what, lambda: str(resolve(os.path.abspath(path)))))
        extra, difference = ranks.agree(what, lambda: self._read(where, strict, weights_only))
        if difference and ranks.is_first:
            warnings.warn(f"Checkpoint {where} was loaded in part: {difference}.", stacklevel=2)
        self.restore_rng()
        return extra

    def restore_rng(self) -> None:
        """Set this rank's generators as the checkpoint loaded last has them. Does nothing before a load."""
        if self._rng:
            restore_rng(self._rng, self._together().rank)

    # -- the background --

    def wait(self) -> None:
        """Wait for the save in the background; raise what it met, once."""
        if self._lane is None:
            return
        try:
            self._lane.drain()
        except CheckpointError:
            self._lane.reset()  # told; the next save may go well
            raise

    def close(self) -> None:
        """Wait for the save in the background, then free thread and group. Idempotent; raises what that save met."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            if self._lane is not None:
                self._lane.close()
            ranks, self._ranks = self._ranks, None
            if ranks is not None and ranks.group is not None and self._given_group is None and dist.is_initialized():
                dist.destroy_process_group(ranks.group)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _together(self) -> Ranks:
        if self._closed:
            raise CheckpointError("The checkpointer is closed. Make a new one.")
        if self._ranks is None:
            group = self._given_group
            self._ranks = Ranks(message_group(self.timeout_s) if group is None else group, self.timeout_s)
        return self._ranks

    def _collect(self, state_dict: Mapping[str, Any] | None, with_optimizers: bool) -> Contents:
        return collect(self.model, self.optimizers if with_optimizers else None, state_dict)

    def _read(self, path: Path, strict: bool, weights_only: bool | None) -> tuple[dict[str, Any], str | None]:
        if path.is_dir():
            source = open_folder(path, weights_only=weights_only)
        else:
            source = open_file(path, self.model, self.optimizers, weights_only=weights_only)
        difference = load_state(source, self.model, self.optimizers, strict=strict)
        self._rng = source.rng
        return source.extra, difference

    @contextmanager
    def _telling_failure(self, path: str | os.PathLike[str]) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._events.emit(EventKind.CHECKPOINT_FAILED, path=os.fspath(path), message=str(error))
            raise

    def _tell_saved(self, path: str | os.PathLike[str], start_s: float) -> None:
        self._events.emit(
            EventKind.CHECKPOINT_SAVED, path=os.fspath(path), duration_s=round(time.perf_counter() - start_s, 6),
            background=self._lane is not None,
        )  # fmt: skip

    def _finish(self, job: ShardedSave, path: str | os.PathLike[str], start_s: float) -> None:
        try:
            with self._telling_failure(path):
                job.finish()
        except BaseException:
            with self._mutex:
                self._in_flight = False
            raise
        with self._mutex:
            self._in_flight = False
            gone, self._to_remove = self._to_remove, []
        self._tell_saved(path, start_s)
        for path in gone:
            if os.path.lexists(path):
                discard(path)
