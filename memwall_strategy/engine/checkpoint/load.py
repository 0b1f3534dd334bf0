"""Loading: compare names and shapes first, then read every block straight into the model and the optimizers.

Nothing is changed before everything is known to fit. Sharded or plain, at whatever world size: each rank reads the
parts that its own shards cover. What the model does not hold as a parameter or buffer (extra state, metrics) goes
through ``model.load_state_dict``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.contents import EXTRA_FILE, LAYOUT_FILE, RNG_FILE, optimizer_name
from memwall_strategy.engine.checkpoint.model import (
    ModelState,
    collect_model,
    find_name,
    load_entries,
    model_key,
    names_in,
)
from memwall_strategy.engine.checkpoint.planner import read_into
from memwall_strategy.engine.checkpoint.room import OptimizerRoom
from memwall_strategy.engine.checkpoint.storage import BlockReader
from memwall_strategy.engine.optimizer_step import plain_class

_NAMES_SHOWN = 8  # of each kind, in an error


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint.

    Attributes:
        path: where it is, for errors.
        reader: gives the blocks.
        metadata: describes the blocks.
        layout: as in ``Contents``.
        extra: the trainer's dict.
        rng: each saved rank's generators; empty where the file holds none.
    """

    path: Path
    reader: StorageReader
    metadata: Metadata
    layout: Mapping[str, Any]
    extra: Any
    rng: list[dict[str, Any]]


def open_folder(path: Path, *, weights_only: bool | None) -> Source:
    """Open a sharded checkpoint that ``folder.verify`` found whole.

    Args:
        weights_only: as ``torch.load`` takes it, for the trainer's dict and the optimizers' options.
    """
    reader = BlockReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    return Source(
        path,
        reader,
        metadata,
        load_payload(path / LAYOUT_FILE, weights_only=weights_only),
        load_payload(path / EXTRA_FILE, weights_only=weights_only),
        load_payload(path / RNG_FILE, weights_only=True),
    )


def load_payload(path: Path, *, weights_only: bool | None, mmap: bool = False) -> Any:
    """``torch.load`` onto the CPU, with an error that says what to do when it finds a class it does not trust."""
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except UnpicklingError as error:
        # torch's text has many lines; the one with GLOBAL names the class
        culprit = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), "no torch file.")
        raise CheckpointError(
            f"{path} holds what is not loaded by default: {culprit} If you trust the file, pass weights_only=False, or "
            "allow the class with torch.serialization.add_safe_globals."
        ) from error


def load_state(source: Source, model: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool = True) -> str | None:
    """Read a checkpoint into a model and its optimizers, in place.

    Args:
        optimizers: none to load weights alone.
        strict: names must be the same on both sides. Otherwise what fits is loaded. Shapes must always agree.

    Returns:
        With ``strict=False``, what was left out, in words; None when everything fitted.

    Raises:
        CheckpointError: the checkpoint does not fit; every difference is named.
    """
    state = collect_model(model)
    difference = _Difference(source.path)
    match = _match_model(source, state, difference)
    by_id = {id(parameter): parameter for parameter in model.parameters()}
    parameters = {name: by_id[key] for key, name in state.names.items() if key in by_id}
    rooms = _match_optimizers(source, state, optimizers, difference, parameters)
    difference.check(strict)
    for room in rooms:
        room.join()

    shapes = {
        key: (entry.size, entry.properties.dtype)
        for key, entry in source.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with torch.no_grad():
        for room in rooms:
            if not room.is_paged:
                room.make_room(shapes)
                match.passes[0].update(room.blocks)
        for targets in match.passes:
            read_into(source.reader, source.metadata, targets)
        for room in rooms:
            if room.is_paged:
                for part in room.parts():
                    room.make_room(shapes, part)
                    read_into(source.reader, source.metadata, room.blocks)
                    room.install()
            room.commit()
    load_entries(model, state, match.entries)
    return difference.text()


class _Match:
    """Where the model's part goes.

    Attributes:
        passes: key -> tensor to read into; a second pass where two tensors take the same block (weights untied since).
        entries: name -> value for ``model.load_state_dict``.
    """

    def __init__(self) -> None:
        self.passes: list[dict[str, Tensor]] = [{}]
        self.entries: dict[str, Any] = {}

    def add(self, key: str, target: Tensor) -> None:
        for targets in self.passes:
            if key not in targets:
                targets[key] = target
                return
        self.passes.append({key: target})


def _match_model(source: Source, state: ModelState, difference: _Difference) -> _Match:
    match = _Match()
    there = names_in(source.metadata.state_dict_metadata)
    aliases_there, objects = source.layout["aliases"], source.layout["objects"]
    used: set[str] = set()
    for name, tensor in state.tensors.items():
        saved_name = find_name(name, there, state.aliases, aliases_there)
        if saved_name is None:
            difference.missing.append(name)
            continue
        used.add(saved_name)
        shape = source.metadata.state_dict_metadata[model_key(saved_name)].size
        if shape != tensor.shape:
            difference.shapes.append(f"{name} is {tuple(shape)} there and {tuple(tensor.shape)} here")
            continue
        target = torch.empty_like(tensor) if name in state.derived else tensor
        if name in state.derived:
            match.entries[name] = target
        match.add(model_key(saved_name), target)
    difference.unexpected += sorted(there - used - state.aliases.keys())
    difference.missing += sorted(state.objects.keys() - objects.keys())
    difference.unexpected += sorted(objects.keys() - state.objects.keys())
    match.entries.update({name: objects[name] for name in state.objects.keys() & objects.keys()})
    return match


def _match_optimizers(
    source: Source,
    state: ModelState,
    optimizers: Sequence[Optimizer],
    difference: _Difference,
    parameters: Mapping[str, Tensor],
) -> list[OptimizerRoom]:
    layouts = source.layout["optimizers"]
    if not optimizers:
        return []
    if layouts is None:
        difference.other.append("it holds weights alone, no optimizer state")
        return []
    if len(layouts) != len(optimizers):
        difference.other.append(f"it holds {len(layouts)} optimizers, here are {len(optimizers)}")
    rooms = []
    for index, (optimizer, layout) in enumerate(zip(optimizers, layouts, strict=False)):
        name = optimizer_name(index)
        if layout["kind"] not in (None, plain_class(optimizer).__name__):
            here = plain_class(optimizer).__name__
            difference.other.append(f"{name} was a {layout['kind']} there and is a {here} here")
        room = OptimizerRoom.match(optimizer, name, state, layout, source.layout["aliases"], parameters)
        difference.missing += [f"{name}: {parameter}" for parameter in room.missing]
        difference.unexpected += [f"{name}: {parameter}" for parameter in room.unexpected]
        if room.regrouped:
            pair = " and ".join(room.regrouped[:2])
            difference.other.append(f"{name}: {pair} share a param group here and had unlike settings there")
        rooms.append(room)
    return rooms


class _Difference:
    """What does not fit between a checkpoint and a model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.shapes: list[str] = []
        self.other: list[str] = []

    def check(self, strict: bool) -> None:
        if self.shapes or (strict and self.text()):
            remedy = "" if self.shapes else ", or load with strict=False to take what fits"
            raise CheckpointError(
                f"Checkpoint {os.fspath(self.path)} does not fit: {self.text()}. Build the same model and "
                f"optimizers{remedy}."
            )

    def text(self) -> str | None:
        parts = [
            ("missing in the checkpoint: ", self.missing),
            ("only in the checkpoint: ", self.unexpected),
            ("other shapes: ", self.shapes),
            ("", self.other),
        ]
        return "; ".join(head + _shown(names) for head, names in parts if names) or None


def _shown(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
