"""``save_state``, ``load_state``, ``get_state_dict`` and ``save_model`` over ``runtime.checkpoint.Checkpointer``.

``save_state(folder)`` writes one checkpoint, ``folder/memwall`` (``folder/memwall.ckpt`` with ``checkpoint="full"``):
whole or not there, loadable at another number of ranks. It holds models, optimizers, schedulers, scaler, every rank's
random state, each loader's position and registered objects. Other files in the folder are left alone.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import convert_file_size_to_int
from torch import Tensor, nn

from memwall_strategy.accelerate.loader import PreparedLoader
from memwall_strategy.core.errors import CheckpointError, ConfigError
from memwall_strategy.engine.accelerate_bridge import (
    call_load_hooks,
    call_save_hooks,
    compiled_from,
    prepared_by,
    unwrap_optimizer,
)
from memwall_strategy.engine.checkpoint.full import gather
from memwall_strategy.engine.checkpoint.model import collect_model
from memwall_strategy.runtime.checkpoint import Checkpointer, verify

SHARDED_NAME, FULL_NAME = "memwall", "memwall.ckpt"
STATE_KEY = "accelerate"
"""Key of the accelerator's own state in a checkpoint; what other front ends wrote has none."""
WEIGHTS_NAME = "model.safetensors"
_AUTOMATIC = "project_config=ProjectConfiguration(automatic_checkpoint_naming=True)"


class CheckpointMethods:
    """Mixed into ``MemwallAccelerator``."""

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Save everything that training depends on; for all ranks together.

        Args:
            output_dir: the folder; None with ``ProjectConfiguration(automatic_checkpoint_naming=True)``.
            safe_serialization: not used, the format is torch's distributed checkpoint.

        Returns:
            The folder.

        Raises:
            CheckpointError: on every rank, with the rank and the cause named; what was there before still stands.
            ConfigError: no folder, or options that memwall does not know.
        """
        if options:
            raise ConfigError(f"save_state: memwall knows no {', '.join(sorted(options))}. Leave it out.")
        automatic = self.project_configuration.automatic_checkpoint_naming
        if automatic:
            output_dir = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
            if os.path.exists(output_dir):
                raise ConfigError(
                    f"{output_dir} exists already. Set acc.project_configuration.iteration to the number to go on with."
                )
            self.wait_for_everyone()  # before a faster rank makes it
        if output_dir is None:
            raise ConfigError(f"save_state needs output_dir=, or {_AUTOMATIC}.")
        folder = os.fspath(output_dir)
        os.makedirs(folder, exist_ok=True)
        call_save_hooks(self, folder)
        checkpointer = self._checkpointer()
        full = self.memwall.config.checkpoint == "full"
        save = checkpointer.save_full if full else checkpointer.save
        step = max((runtime.steps for runtime in self.memwall.runtimes.values()), default=0)
        save(os.path.join(folder, FULL_NAME if full else SHARDED_NAME), self._own_state(), step)
        if automatic:
            self._remove_oldest(checkpointer)
        self.project_configuration.iteration += 1
        return folder

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        strict: bool = True,
        **options: Any,
    ) -> None:
        """Load what ``save_state`` saved, at any number of ranks; loaders go on with the samples not yet seen.

        Args:
            input_dir: the folder, or a checkpoint that another front end of memwall wrote (weights and optimizers).
                None: the last whole one under automatic naming.
            load_kwargs: ``weights_only`` as ``torch.load`` takes it, for schedulers' and loaders' states.
            strict: names must be the same on both sides.

        Raises:
            CheckpointError: there is no whole checkpoint, or it does not fit.
        """
        options.pop("map_location", None)
        if options:
            raise ConfigError(f"load_state: memwall knows no {', '.join(sorted(options))}. Leave it out.")
        folder = self._last_automatic() if input_dir is None else os.path.expanduser(os.fspath(input_dir))
        call_load_hooks(self, folder)
        checkpointer = self._checkpointer()
        self.drop_step()
        weights_only = (load_kwargs or {}).get("weights_only")
        extra = checkpointer.load(_inside(folder), strict=strict, weights_only=weights_only)
        if STATE_KEY in extra:
            self._take_up(extra[STATE_KEY])
        else:
            warnings.warn(
                f"{folder} was not written by acc.save_state: weights, optimizers and random state alone are loaded.",
                stacklevel=2,
            )
        checkpointer.restore_rng()

    def _own_state(self) -> dict[str, Any]:
        held = prepared_by(self)
        states = [_loader_state(loader) for loader in held.loaders]
        buffer = io.BytesIO()
        torch.save([each.state_dict() for each in held.objects], buffer)
        own = {
            "step": self.step,
            "runtimes": [runtime.state_dict() for runtime in self.memwall.runtimes.values()],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in held.schedulers],
            "loaders": states,
            "objects": torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8) if held.objects else None,
            "object_count": len(held.objects),
        }
        return {STATE_KEY: own}

    def _take_up(self, own: Mapping[str, Any]) -> None:
        held = prepared_by(self)
        here = {"schedulers": len(held.schedulers), "objects": len(held.objects), "models": len(held.models)}
        there = {"schedulers": len(own["schedulers"]), "objects": own["object_count"], "models": len(own["runtimes"])}
        if here != there:
            raise CheckpointError(
                f"the checkpoint holds {_listed(there)} and this accelerator has {_listed(here)}. Prepare and register "
                "the same before load_state."
            )
        self.step = own["step"]
        for runtime, state in zip(self.memwall.runtimes.values(), own["runtimes"], strict=True):
            runtime.load_state_dict(state)
        if self.scaler is not None and own["scaler"] is not None:
            self.scaler.load_state_dict(own["scaler"])
        for scheduler, state in zip(held.schedulers, own["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if len(held.loaders) != len(own["loaders"]):
            warnings.warn(
                f"the checkpoint holds the positions of {len(own['loaders'])} loaders and {len(held.loaders)} are "
                "prepared: they are matched in order of preparation.",
                stacklevel=3,
            )
        for loader, state in zip(held.loaders, own["loaders"], strict=False):
            if state is not None:
                loader.load_state_dict(state)
        if own["objects"] is not None:
            # As Accelerate does: what users register is theirs to trust.
            states = torch.load(io.BytesIO(own["objects"].numpy().tobytes()), map_location="cpu", weights_only=False)
            for each, state in zip(held.objects, states, strict=True):
                each.load_state_dict(state)

    # -- weights --

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A copy of the whole state dict in the first rank's host memory, which later steps do not change; empty on the
        others. For all ranks together."""
        state = collect_model(compiled_from(model))
        whole: dict[str, Any] = {}
        gather(state.tensors, whole.__setitem__ if self.is_main_process else None, own=True)
        if self.is_main_process:
            whole |= {alias: whole[name] for alias, name in state.aliases.items()} | state.objects
        return whole

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as safetensors, one tensor in memory at a time; for all ranks together.

        Above ``max_shard_size``, or with ``safe_serialization=False``, Accelerate writes from the first rank's memory.
        """
        state = collect_model(compiled_from(model))
        size_bytes = sum(_whole_bytes(tensor) for tensor in state.tensors.values())
        if not safe_serialization or state.objects or size_bytes > convert_file_size_to_int(max_shard_size):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            self.wait_for_everyone()
            return
        os.makedirs(save_directory, exist_ok=True)
        checkpointer = self._checkpointer()
        whole, checkpointer.model = checkpointer.model, compiled_from(model)
        try:
            checkpointer.export_safetensors(os.path.join(save_directory, WEIGHTS_NAME))
        finally:
            checkpointer.model = whole

    # -- the checkpointer --

    def _checkpointers(self) -> dict[str, Checkpointer]:
        return self.__dict__.setdefault("held_checkpointers", {})

    def _checkpointer(self) -> Checkpointer:
        models = [compiled_from(model) for model in prepared_by(self).models]
        if not models:
            raise CheckpointError("there is no prepared model to save or load. Call acc.prepare(model, ...) first.")
        held = self._checkpointers()
        config = self.memwall.config
        if "one" not in held:
            held["one"] = Checkpointer(
                models[0],
                asynchronous=config.async_checkpoint,
                timeout_s=config.timeout_s,
                events=self.memwall.events,
            )
        checkpointer = held["one"]
        # One model keeps its names, so that other front ends can load the checkpoint; several are numbered.
        checkpointer.model = models[0] if len(models) == 1 else nn.ModuleList(models)
        checkpointer.optimizers = [unwrap_optimizer(optimizer) for optimizer in prepared_by(self).optimizers]
        return checkpointer

    def _automatic(self) -> list[Path]:
        """Folders under automatic naming, oldest first."""
        base = Path(self.project_dir, "checkpoints")
        found = [(int(m[1]), p) for p in base.glob("checkpoint_*") if (m := re.fullmatch(r"checkpoint_(\d+)", p.name))]
        return [path for _, path in sorted(found)]

    def _remove_oldest(self, checkpointer: Checkpointer) -> None:
        limit = self.project_configuration.total_limit
        if limit is None or len(self._automatic()) <= limit:
            return
        checkpointer.wait()  # the newer one is whole before an older one goes
        self.wait_for_everyone()
        if self.is_main_process:
            for folder in self._automatic()[:-limit]:
                shutil.rmtree(folder)

    def _last_automatic(self) -> str:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError(f"load_state needs input_dir=, or {_AUTOMATIC}.")
        box: list[str | None] = [None]
        if self.is_main_process:
            box[0] = next((os.fspath(each) for each in reversed(self._automatic()) if _is_whole(each)), None)
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            raise CheckpointError(f"there is no whole checkpoint under {self.project_dir}/checkpoints.")
        return box[0]


def _inside(folder: str) -> str:
    for name in (SHARDED_NAME, FULL_NAME):
        if os.path.exists(path := os.path.join(folder, name)):
            return path
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        verify(_inside(os.fspath(folder)))
    except CheckpointError:
        return False
    return True


def _loader_state(loader: Any) -> dict[str, Any] | None:
    if isinstance(loader, PreparedLoader) or getattr(loader, "use_stateful_dataloader", False):
        return loader.state_dict()
    warnings.warn(
        f"the position in {type(loader.dataset).__name__} cannot be saved: Accelerate's own loader reads it. Use a "
        "map-style dataset, or DataLoaderConfiguration(use_stateful_dataloader=True).",
        stacklevel=4,
    )
    return None


def _whole_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
