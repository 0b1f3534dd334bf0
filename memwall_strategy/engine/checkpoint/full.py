"""Lightning's ordinary checkpoint, one file, written and read.

Writing gathers one tensor at a time, on all ranks, and the first rank keeps it: host memory for the whole model and its
optimizer state there, and for one tensor elsewhere.

Reading maps the file into memory; each rank copies the parts of its own shards. The file may come from any strategy
that writes one file: optimizer states are matched by position, as torch does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.contents import Contents, optimizer_name
from memwall_strategy.engine.checkpoint.folder import Partial
from memwall_strategy.engine.checkpoint.load import Source, load_payload
from memwall_strategy.engine.checkpoint.model import collect_model, model_key, names_in
from memwall_strategy.engine.checkpoint.optimizer import NOT_OPTIONS, decode, encode_saved
from memwall_strategy.engine.checkpoint.paged import resident
from memwall_strategy.engine.checkpoint.ranks import Ranks
from memwall_strategy.engine.checkpoint.rng import capture_rng
from memwall_strategy.engine.checkpoint.save import start_partial, write_payload
from memwall_strategy.engine.checkpoint.storage import FileReader
from memwall_strategy.engine.fsdp import local_tensor

OWN_KEY = "memwall"
"""Key of a full file for what Lightning's layout has no place for: step, world size, generators of all ranks."""


def save_full(
    ranks: Ranks, path: str | os.PathLike[str], collect: Callable[[], Contents], extra: Mapping[str, Any], step: int
) -> None:
    """Write one file in Lightning's ordinary layout (``state_dict``, ``optimizer_states``, the trainer's keys)."""
    what = f"Saving checkpoint {os.fspath(path)}"
    partial = start_partial(ranks, path, what, Partial.create_file)
    ranks = ranks.undoing(partial.abandon)
    try:
        contents = ranks.agree(what, collect)
        rng = ranks.exchange(what, capture_rng, lambda states: [states] * len(states))
        held: dict[str, Tensor] = {}
        ranks.agree(what, lambda: gather(contents.blocks, held.__setitem__ if ranks.is_first else None))

        def write() -> None:
            own = own_part(step, ranks.world_size, rng)
            write_payload(partial.path, {**extra, **ordinary(contents.layout, held), OWN_KEY: own})
            partial.publish()

        ranks.first(what, write)
    except BaseException:
        partial.abandon()
        raise


def gather(
    tensors: Mapping[str, Tensor], take: Callable[[str, Tensor], object] | None, *, own: bool = False
) -> None:
    """Gather each tensor on all ranks, one at a time (collective), and give it to ``take``, in host memory.

    A failure of ``take`` is raised when all are gathered: the other ranks are in the same collectives.

    Args:
        take: None on ranks that keep nothing.
        own: what ``take`` gets shares no memory with a live tensor, so that it may be kept while training goes on.
    """
    failed: Exception | None = None
    for key, tensor in tensors.items():
        live = local_tensor(tensor)
        tensor = resident(tensor)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if take is not None and failed is None:
            try:
                whole = whole.detach().cpu()
                take(key, whole.clone() if own and _shares_memory(whole, live) else whole)
            except Exception as error:  # noqa: BLE001 - raised below
                failed = error
        del whole, live
    if failed is not None:
        raise failed


def _shares_memory(tensor: Tensor, live: Tensor) -> bool:
    """On CPU what is not sharded, or on one rank, is gathered without a copy."""
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()


def own_part(step: int, world_size: int, rng: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What stands under ``OWN_KEY``."""
    return {"version": 1, "step": step, "world_size": world_size, "rng": list(rng)}


def ordinary(layout: Mapping[str, Any], held: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rebuild ``state_dict``, tied weights under all their names, and ``optimizer_states`` with numbered parameters."""
    entries: dict[str, Any] = {name: held[model_key(name)] for name in sorted(names_in(held))}
    entries |= {alias: entries[name] for alias, name in layout["aliases"].items()}
    entries |= layout["objects"]
    if layout["optimizers"] is None:
        return {"state_dict": entries}
    return {"state_dict": entries, "optimizer_states": [_numbered(saved, held) for saved in layout["optimizers"]]}


def _numbered(layout: Mapping[str, Any], held: Mapping[str, Tensor]) -> dict[str, Any]:
    def block(spec: Mapping[str, Any]) -> Tensor:
        return held[spec["block"]]

    state: dict[Any, Any] = {key: decode(spec, block) for key, spec in layout["shared"].items()}
    groups: list[dict[str, Any]] = []
    count = 0
    for group in layout["groups"]:
        numbers = list(range(count, count + len(group["params"])))
        count += len(numbers)
        groups.append({**group["options"], "params": numbers})
        for number, name in zip(numbers, group["params"], strict=True):
            if name in layout["state"]:
                state[number] = {key: decode(spec, block) for key, spec in layout["state"][name].items()}
    return {"state": state, "param_groups": groups}


def open_file(path: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, weights_only: bool | None) -> Source:
    """Open a full file: Lightning's ordinary layout, from whichever strategy.

    Raises:
        CheckpointError: it is something else, or an optimizer's groups have other sizes.
    """
    document = load_payload(path, weights_only=weights_only, mmap=True)
    if not isinstance(document, dict) or not isinstance(document.get("state_dict"), Mapping):
        raise CheckpointError(f"{path} is not a checkpoint: it has no dict under 'state_dict'. Check the path.")
    entries = document.pop("state_dict")
    saved_states = document.pop("optimizer_states", None)
    own = document.pop(OWN_KEY, {})
    tensors = {model_key(name): value for name, value in entries.items() if isinstance(value, Tensor)}
    layouts = None
    if saved_states is not None:
        names = collect_model(model).names
        pairs = zip(saved_states, [*optimizers, *[None] * len(saved_states)], strict=False)
        layouts = [_by_name(path, saved, optimizer, i, names, tensors) for i, (saved, optimizer) in enumerate(pairs)]
    layout = {
        "aliases": {},
        "objects": {name: value for name, value in entries.items() if not isinstance(value, Tensor)},
        "optimizers": layouts,
    }
    reader = FileReader(tensors)
    return Source(path, reader, reader.read_metadata(), layout, document, own.get("rng", []))


def _by_name(
    path: Path,
    saved: Mapping[str, Any],
    optimizer: Optimizer | None,
    index: int,
    names: Mapping[int, str],
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """The layout of an ordinary optimizer state; its tensors are added to ``tensors`` under memwall's keys."""
    groups = saved["param_groups"]
    numbers = [group["params"] for group in groups]
    parameters: list[list[str]] = [[] for _ in groups]
    if optimizer is not None:
        parameters = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        if [len(group) for group in numbers] != [len(group) for group in parameters]:
            raise CheckpointError(
                f"Checkpoint {path} does not fit: optimizer {index} has param groups of "
                f"{[len(group) for group in numbers]} parameters there and of {[len(group) for group in parameters]} "
                "here. Build the same optimizer."
            )
    name_of = {
        number: name
        for there, here in zip(numbers, parameters, strict=True)
        for number, name in zip(there, here, strict=False)
    }
    by_parameter = {name_of[number]: values for number, values in saved["state"].items() if number in name_of}
    state = encode_saved(by_parameter, optimizer_name(index))
    tensors.update(state.blocks)
    options = [{key: value for key, value in group.items() if key not in NOT_OPTIONS} for group in groups]
    return {
        "kind": None,
        "groups": [{"params": p, "options": o} for p, o in zip(parameters, options, strict=True)],
        "state": state.layout["state"],
        "shared": {},
    }
