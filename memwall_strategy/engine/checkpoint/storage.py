"""Moving blocks between memory and files, one at a time. The format is DCP's own; only its loops are replaced.

DCP's writer keeps every tensor that it had to copy (from a device, or out of a padded shard) until its file is closed,
which is a second copy of the rank's shards; ``BlockWriter`` drops each block before it takes the next. DCP's reader
holds the last block while it reads the next; ``BlockReader`` does not, and reads each saved block once, in file order.
So writing adds at most one block to what is in memory, and so does reading.

``FileReader`` reads an ordinary single file (torch's or Lightning's) through the same interface, from mapped memory.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata, StorageReader

# Private: the element type of DCP's storage index (file, offset, length), which FileSystemReader reads back. Pinned by
# tests/engine/test_checkpoint_format.py::test_plain_dcp_reads_what_we_write.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

# Private: a bounded view of an open file, as FileSystemReader itself uses it. Pinned by the same test.
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from memwall_strategy.core.errors import CheckpointError

SHARD_FILE = "__{rank}_0.distcp"
"""DCP's name for the file of one rank."""


# What else DCP's index refers to, beside its own metadata classes and torch's dtypes.
_INDEX_NAMES = {
    (_StorageInfo.__module__, _StorageInfo.__name__),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class BlockWriter(FileSystemWriter):
    """DCP's file-system writer, one file a rank, one block at a time, synced."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, overwrite=False)
        self.file_name = SHARD_FILE.format(rank=rank)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; a rank without any writes no file."""
        results: list[WriteResult] = []
        if plan.items:
            with open(Path(self.path) / self.file_name, "wb") as file:
                for item in plan.items:
                    offset = file.tell()
                    torch.save(_packed(planner.resolve_data(item)), file)
                    length = file.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(self.file_name, offset, length)))
                file.flush()
                os.fsync(file.fileno())
        return _done(results)


class BlockReader(FileSystemReader):
    """DCP's file-system reader, one block at a time."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read DCP's index. It is a pickle; only the classes of an index are accepted in it."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                return _IndexUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ImportError) as error:
            raise CheckpointError(f"{path} is not an index of DCP ({error}). Use another checkpoint.") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan into the tensor that the planner gives for it."""
        place = {item: self.storage_data[item.storage_index] for item in plan.items}
        in_order = sorted(plan.items, key=lambda item: (place[item].relative_path, place[item].offset))
        for name, of_file in groupby(in_order, key=lambda item: place[item].relative_path):
            with open(Path(self.path) / name, "rb") as file:
                for index, items in groupby(of_file, key=lambda item: item.storage_index):
                    where = self.storage_data[index]
                    self._read_block(_create_file_view(file, where.offset, where.length), list(items), planner)
        return _done(None)

    def _read_block(self, view: Any, items: list[ReadItem], planner: LoadPlanner) -> None:
        try:
            block = torch.load(view, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError) as error:
            fqn = items[0].storage_index.fqn
            raise CheckpointError(
                f"Checkpoint {self.path}: the block {fqn} cannot be read ({error}). Use another checkpoint."
            ) from error
        for item in items:
            _copy(block, item, planner)


class _IndexUnpickler(pickle.Unpickler):
    """Accepts what DCP writes into an index and nothing that could execute."""

    def find_class(self, module: str, name: str) -> Any:
        of_index = module == ChunkStorageMetadata.__module__ or (module, name) in _INDEX_NAMES
        value = super().find_class(module, name) if of_index or module == "torch" else None
        if value is None or not (of_index or isinstance(value, torch.dtype)):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return value


class FileReader(StorageReader):
    """Tensors of a single torch file, mapped into memory, as if they were a checkpoint of one chunk each."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: the tensors are given."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe every tensor as one chunk."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    tensor.shape,
                    [ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)],
                )
                for key, tensor in self.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every item of the plan."""
        for item in plan.items:
            _copy(self.tensors[item.storage_index.fqn], item, planner)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is never chosen by a path."""
        return False


def _copy(block: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    part = block
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def _packed(block: Any) -> Tensor:
    """The block in host memory with no more storage than its elements (a shard may be a view of a padded buffer)."""
    tensor = block.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
