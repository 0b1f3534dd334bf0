"""Weights alone, as one safetensors file, written one tensor at a time.

The library's ``save_file`` wants all tensors at once and a copy of each; the format is a JSON header and raw bytes, so
it is written here as a stream: host memory for one tensor, on every rank. Tied weights are stored once; the metadata
names the others, as ``safetensors.torch.save_model`` does, so that ``load_model`` finds them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.folder import Partial
from memwall_strategy.engine.checkpoint.full import gather
from memwall_strategy.engine.checkpoint.model import collect_model
from memwall_strategy.engine.checkpoint.ranks import Ranks
from memwall_strategy.engine.checkpoint.save import start_partial

# The names of types in the header (https://github.com/huggingface/safetensors, section "Format").
_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HEADER_LENGTH_BYTES = 8
_HEADER_ALIGNMENT_BYTES = 8

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


class SafetensorsStream:
    """A safetensors file in the making: ``write`` takes the tensors in ``file_order``, ``finish`` syncs the file."""

    def __init__(self, path: Path, shapes: Shapes, aliases: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
        offset = 0
        for name in file_order(shapes):
            shape, dtype = shapes[name]
            if dtype not in _TYPE_NAMES:
                raise CheckpointError(f"{name} has type {dtype}, which safetensors cannot hold. Write a full file.")
            end = offset + shape.numel() * dtype.itemsize
            header[name] = {"dtype": _TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append one tensor's bytes."""
        self._file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))

    def finish(self) -> None:
        """Wait until the file is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()


def export_safetensors(ranks: Ranks, path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write the weights (persistent buffers included) as one safetensors file. Collective."""
    what = f"Exporting {os.fspath(path)}"
    partial = start_partial(ranks, path, what, Partial.create_file)
    ranks = ranks.undoing(partial.abandon)
    stream: SafetensorsStream | None = None
    try:
        state = ranks.agree(what, lambda: collect_model(model))
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors.items()}

        def begin() -> SafetensorsStream | None:
            return SafetensorsStream(partial.path, shapes, state.aliases) if ranks.is_first else None

        def end() -> None:
            assert stream is not None
            stream.finish()
            partial.publish()

        stream = ranks.agree(what, begin)
        tensors = {name: state.tensors[name] for name in file_order(shapes)}
        ranks.agree(what, lambda: gather(tensors, None if stream is None else stream.write))
        ranks.first(what, end)
    except BaseException:
        partial.abandon()
        raise
    finally:
        if stream is not None:
            stream.close()


def file_order(shapes: Shapes) -> list[str]:
    """Names in the order of the file: wide types first, so that each tensor starts at a multiple of its item size."""
    return sorted(shapes, key=lambda name: (-shapes[name][1].itemsize, name))
