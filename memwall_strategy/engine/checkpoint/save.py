"""One sharded save: prepared on the training thread, finished there or on another.

``prepare`` does everything that must see the state as it is now: it makes the new folder, agrees on who writes what,
notes the random number generators of all ranks and, for a save in the background, copies blocks and payloads. From
then on training may change anything. ``finish`` writes each rank's file, and when all ranks have written and synced
theirs the first rank adds DCP's index and the payloads, then the marker, and puts the folder in place.

Whatever fails on whichever rank, every rank raises the same error, the new folder is removed, and what stood under the
name before still stands.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.contents import EXTRA_FILE, LAYOUT_FILE, RNG_FILE, Contents
from memwall_strategy.engine.checkpoint.folder import Partial, tidy, write_synced
from memwall_strategy.engine.checkpoint.planner import BlockSavePlanner
from memwall_strategy.engine.checkpoint.ranks import Ranks
from memwall_strategy.engine.checkpoint.rng import capture_rng
from memwall_strategy.engine.checkpoint.storage import BlockWriter

_Local = tuple[SavePlan, str, dict[str, Any]]


class ShardedSave:
    """A save of one checkpoint folder by all ranks together.

    Args:
        path: final name; the first rank's counts.
        step: optimizer steps taken.

    Attributes:
        staged_bytes: host memory held by ``prepare(stage=True)`` until the blocks are written.
    """

    def __init__(self, ranks: Ranks, path: str | os.PathLike[str], step: int) -> None:
        self.step, self.staged_bytes = step, 0
        self.what = f"Saving checkpoint {os.fspath(path)}"
        self._partial = start_partial(ranks, path, self.what, Partial.create_folder)
        self.ranks = ranks.undoing(self._partial.abandon)
        self._writer = BlockWriter(self._partial.path, ranks.rank)
        self._planner = BlockSavePlanner({})
        self._metadata: Metadata | None = None
        self._payloads: dict[str, Any] = {}

    def prepare(self, collect: Callable[[], Contents], extra: Any, *, stage: bool) -> None:
        """Take up the state.

        Args:
            collect: gives this rank's contents; may raise.
            extra: any object, the first rank's counts; saved with ``torch.save``.
            stage: copy what will be written, so that ``finish`` may run while training goes on.
        """
        try:
            self._planner.plan = self.ranks.exchange(self.what, lambda: self._plan(collect, extra), self._plan_all)
            if stage:
                self.ranks.agree(self.what, self._stage)
        except BaseException:
            self._partial.abandon()
            raise

    def finish(self) -> None:
        """Write, commit and publish."""
        try:
            self.ranks.exchange(self.what, self._write, self._commit)
        except BaseException:
            self._partial.abandon()
            raise

    # -- every rank --

    def _plan(self, collect: Callable[[], Contents], extra: Any) -> _Local:
        if not self._partial.path.is_dir():
            raise CheckpointError(
                f"this rank does not see {self._partial.path}, which the first rank made. A sharded checkpoint needs "
                "a folder that all ranks share; use a shared file system, or checkpoint='full'."
            )
        contents = collect()
        self._planner = BlockSavePlanner(contents.paths)
        self._planner.set_up_planner(contents.blocks, is_coordinator=self.ranks.is_first)
        self._writer.set_up_storage_writer(self.ranks.is_first, rank=self.ranks.rank, use_collectives=True)
        if self.ranks.is_first:
            self._payloads = {LAYOUT_FILE: contents.layout, EXTRA_FILE: extra}
        return self._planner.create_local_plan(), contents.digest(), capture_rng()

    def _stage(self) -> None:
        self.staged_bytes = self._planner.stage()
        self._payloads = {name: _pickled(payload) for name, payload in self._payloads.items()}

    def _write(self) -> list[WriteResult]:
        return self._writer.write_data(self._planner.plan, self._planner).value()

    # -- the first rank --

    def _plan_all(self, locals_: list[_Local]) -> list[SavePlan]:
        plans, digests, rng = zip(*locals_, strict=True)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise CheckpointError(
                f"rank {other} holds tensors of other names than rank 0. All ranks must have built the same model and "
                "optimizers, and taken the same steps."
            )
        self._payloads[RNG_FILE] = list(rng)
        final_plans, self._metadata = self._planner.create_global_plan(list(plans))
        return self._writer.prepare_global_plan(final_plans)

    def _commit(self, results: list[list[WriteResult]]) -> list[None]:
        assert self._metadata is not None
        folder = self._partial.path
        for rank, written in enumerate(results):
            _check_seen(folder, rank, written)
        self._writer.finish(self._metadata, results)
        for name, payload in self._payloads.items():
            write_payload(folder / name, payload)
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
        self._partial.commit(
            step=self.step, world_size=self.ranks.world_size, torch_version=torch.__version__, files=files
        )
        self._partial.publish()
        return [None] * len(results)


def start_partial(ranks: Ranks, path: str | os.PathLike[str], what: str, create: Callable[[Partial], None]) -> Partial:
    """Tidy up after dead runs and make the place for a new checkpoint, on the first rank; all learn where it is."""
    made: list[Partial] = []

    def make() -> tuple[str, str]:
        if "://" in os.fspath(path):
            raise CheckpointError(f"{path} is a URL. Give a path on a file system that all ranks have mounted.")
        final = Path(os.path.abspath(path))
        tidy(final.parent)
        made.append(Partial(final, Partial.new_id()))
        create(made[0])
        return str(final), made[0].id

    final, id_ = ranks.first(what, make)
    return made[0] if made else Partial(Path(final), id_)


def write_payload(path: Path, payload: Any) -> None:
    """Write an object with ``torch.save``, or bytes that are one already, and sync the file."""
    if isinstance(payload, bytes):
        write_synced(path, payload)
        return
    with path.open("wb") as file:
        torch.save(payload, file)
        file.flush()
        os.fsync(file.fileno())


def _check_seen(folder: Path, rank: int, written: list[WriteResult]) -> None:
    if not written:
        return
    name = written[-1].storage_data.relative_path
    size_bytes = sum(result.size_in_bytes for result in written)
    path = folder / name
    if not path.exists() or path.stat().st_size != size_bytes:
        raise CheckpointError(
            f"rank {rank} wrote {size_bytes} bytes to {path}, but they are not seen here. The folder must be on a file "
            "system that all ranks share."
        )


def _pickled(payload: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return buffer.getvalue()
