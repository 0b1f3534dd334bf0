"""Single files from a sharded checkpoint, in one process, without a process group.

A safetensors file needs host memory for one tensor, a full file for all of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.folder import Marker, Partial, resolve, verify
from memwall_strategy.engine.checkpoint.full import OWN_KEY, ordinary, own_part
from memwall_strategy.engine.checkpoint.load import Source, open_folder
from memwall_strategy.engine.checkpoint.model import model_key, names_in
from memwall_strategy.engine.checkpoint.planner import read_into
from memwall_strategy.engine.checkpoint.ranks import Ranks
from memwall_strategy.engine.checkpoint.save import start_partial, write_payload
from memwall_strategy.engine.checkpoint.weights import SafetensorsStream, file_order

SAFETENSORS_SUFFIX = ".safetensors"


def consolidate(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], *, weights_only: bool | None = None
) -> None:
    """Turn a sharded checkpoint into one file: safetensors when ``out`` ends so, else Lightning's ordinary layout.

    Args:
        weights_only: as ``torch.load`` takes it, for the trainer's dict.

    Raises:
        CheckpointError: ``folder`` is no whole sharded checkpoint, or the file cannot be written.
    """
    whole = verify(resolve(folder))
    if whole.marker is None:
        raise CheckpointError(f"{folder} is one file already. Give a sharded checkpoint, that is a folder.")
    source = open_folder(whole.path, weights_only=weights_only)
    alone = Ranks(None, 0.0)
    what = f"Writing {os.fspath(out)}"
    partial = start_partial(alone, out, what, Partial.create_file)
    as_weights = Path(out).suffix == SAFETENSORS_SUFFIX
    marker = whole.marker
    try:
        alone.first(what, lambda: _weights(source, partial) if as_weights else _full(source, marker, partial))
    except BaseException:
        partial.abandon()
        raise


def _weights(source: Source, partial: Partial) -> None:
    shapes = {name: _shape(source, model_key(name)) for name in names_in(source.metadata.state_dict_metadata)}
    stream = SafetensorsStream(partial.path, shapes, source.layout["aliases"])
    try:
        for name in file_order(shapes):
            stream.write(name, _read(source, model_key(name)))
        stream.finish()
    finally:
        stream.close()
    partial.publish()


def _full(source: Source, marker: Marker, partial: Partial) -> None:
    held = {key: _read(source, key) for key in source.metadata.state_dict_metadata}
    own = own_part(marker.step, marker.world_size, source.rng)
    write_payload(partial.path, {**source.extra, **ordinary(source.layout, held), OWN_KEY: own})
    partial.publish()


def _read(source: Source, key: str) -> Tensor:
    shape, dtype = _shape(source, key)
    tensor = torch.empty(shape, dtype=dtype)
    read_into(source.reader, source.metadata, {key: tensor})
    return tensor


def _shape(source: Source, key: str) -> tuple[torch.Size, torch.dtype]:
    entry = source.metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.size, entry.properties.dtype
