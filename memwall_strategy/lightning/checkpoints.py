"""Saving and loading, for both strategies: Lightning's hooks onto ``runtime.checkpoint.Checkpointer``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memwall_strategy.core.errors import CheckpointError, MemwallError
from memwall_strategy.engine.lightning_bridge import unwrap_module, unwrap_optimizer
from memwall_strategy.runtime.checkpoint import Checkpointer, model_state, optimizer_state

RUNTIME_KEY = "memwall"
"""Key of the runtime's state in a trainer's checkpoint."""
SIGTERM_NAME = "last.ckpt"
"""What ``ckpt_path="last"`` finds."""


class CheckpointMethods:
    """The checkpoint hooks of the Trainer's strategy.

    A checkpoint is a folder with one file per rank, loadable at another world size, or one file with
    ``checkpoint="full"``. It also holds the random number generators of every rank and the runtime's state.
    """

    _checkpointer: Checkpointer | None = None
    _rng_pending = False
    _loaded_options: Sequence[Sequence[Mapping[str, Any]]] = ()

    def start_checkpoints(self) -> None:
        """Make the checkpointer; model and optimizers exist."""
        self._checkpointer = Checkpointer(
            self.model,
            self.raw_optimizers(),
            asynchronous=self.config.async_checkpoint,
            timeout_s=self.config.timeout_s,
            events=self.runtime.events,
        )

    def stop_checkpoints(self, *, failed: bool) -> None:
        """Wait for a save in the background. After a failure its own error is only told: the first one matters."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is None:
            return
        try:
            checkpointer.close()
        except MemwallError as error:
            if not failed:
                raise
            warnings.warn(f"the checkpoint that was being written is not whole: {error}", stacklevel=2)

    def restore_rng_once(self) -> None:
        """Just before the first batch after a resume: set-up and sanity checks drew random numbers meanwhile."""
        if self._rng_pending:
            self._rng_pending = False
            self._checkpointer.restore_rng()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return model_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = unwrap_optimizer(optimizer)
        index = next(i for i, own in enumerate(self.raw_optimizers()) if own is plain)
        return optimizer_state(self.lightning_module, plain, f"optimizer_{index}")

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: ``load_checkpoint`` loaded the weights in place."""

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning is to call ``load_optimizer_state_dict``, which it does after the callbacks' ``on_fit_start``."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """``load_checkpoint`` loaded the states in place; a callback may have made the groups anew since."""
        for optimizer, options in zip(self.raw_optimizers(), self._loaded_options, strict=True):
            for group, saved in zip(optimizer.param_groups, options, strict=True):
                group.update(saved)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        _refuse_storage_options(storage_options)
        path = Path(self.broadcast(filepath))
        checkpoint = dict(checkpoint)
        state = checkpoint.pop("state_dict")
        with_optimizers = checkpoint.pop("optimizer_states", None) is not None  # absent with save_weights_only
        checkpoint[RUNTIME_KEY] = self.runtime.state_dict()
        save = self._checkpoints().save_full if self.config.checkpoint == "full" else self._checkpoints().save
        save(
            path,
            checkpoint,
            int(checkpoint.get("global_step", 0)),
            state_dict=state,
            with_optimizers=with_optimizers,
        )

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        checkpointer = self._checkpoints()
        loaded = checkpointer.load(path, strict=self.lightning_module.strict_loading, weights_only=weights_only)
        runtime_state = loaded.pop(RUNTIME_KEY, None)
        if checkpointer.optimizers:
            self._rng_pending = True
            loaded.setdefault("optimizer_states", [])  # Lightning looks for the key before it calls the method above
            groups = [optimizer.param_groups for optimizer in self.raw_optimizers()]
            self._loaded_options = [[{k: v for k, v in g.items() if k != "params"} for g in each] for each in groups]
            if runtime_state is not None:
                self.runtime.load_state_dict(runtime_state)
        return loaded

    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._checkpoints().remove(filepath)

    def save_on_sigterm(self, trainer: Any) -> None:
        """Save where ``ckpt_path="last"`` looks, or in the default folder when the trainer keeps no checkpoints."""
        callback = trainer.checkpoint_callback
        folder = getattr(callback, "dirpath", None) or Path(trainer.default_root_dir) / "checkpoints"
        path = Path(folder) / SIGTERM_NAME
        trainer.save_checkpoint(path)
        self._checkpoints().wait()
        if self.is_global_zero:
            print(f"memwall: stopped by SIGTERM; step {trainer.global_step} is saved in {path}", flush=True)

    def _checkpoints(self) -> Checkpointer:
        if self._checkpointer is None:
            raise CheckpointError(
                "there is no running trainer to save or load with. Call trainer.save_checkpoint from a hook while the "
                "trainer runs, or pass ckpt_path= to trainer.fit, validate, test or predict."
            )
        return self._checkpointer


class FabricCheckpointMethods:
    """``fabric.save`` and ``fabric.load`` of a state with one model, its optimizers and anything else."""

    _checkpointers: dict[int, Checkpointer]

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, nn.Module | Optimizer | Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        _refuse_storage_options(storage_options)
        if filter is not None:
            raise CheckpointError("fabric.save(filter=...) is not supported: pass only what is to be saved in state.")
        module, optimizers, names, rest = _parts(state)
        checkpointer = self._checkpointer_of(module, optimizers)
        rest[RUNTIME_KEY] = {"order": names, "runtime": self.runtimes[module].state_dict()}
        rest[RUNTIME_KEY]["precision"] = self.precision.state_dict()
        save = checkpointer.save_full if self.config.checkpoint == "full" else checkpointer.save
        save(Path(self.broadcast(path)), rest, self.runtimes[module].steps)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, nn.Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if not state or isinstance(state, Optimizer):
            raise CheckpointError("fabric.load needs a model to load into: fabric.load(path, {'model': model, ...}).")
        given = {"model": state} if isinstance(state, nn.Module) else state
        module, optimizers, _, rest = _parts(given)
        loaded = self._checkpointer_of(module, optimizers).load(
            Path(self.broadcast(path)), strict=strict, weights_only=weights_only
        )
        ours = loaded.pop(RUNTIME_KEY, None)
        if ours is not None and optimizers:
            self.runtimes[module].load_state_dict(ours["runtime"])
            self.precision.load_state_dict(ours["precision"])
        if not isinstance(state, nn.Module):
            for key in rest.keys() & loaded.keys():
                value = loaded.pop(key)
                if hasattr(state[key], "load_state_dict"):
                    state[key].load_state_dict(value)
                else:
                    state[key] = value
        return loaded

    def close_checkpointers(self) -> None:
        """Wait for saves in the background."""
        for checkpointer in getattr(self, "_checkpointers", {}).values():
            checkpointer.close()
        self._checkpointers = {}

    def _checkpointer_of(self, module: nn.Module, optimizers: list[Optimizer]) -> Checkpointer:
        if module not in self.runtimes:
            raise CheckpointError("the state's model was not set up by this Fabric. Call fabric.setup(model) first.")
        held = self.__dict__.setdefault("_checkpointers", {})
        checkpointer = held.get(id(module))
        if checkpointer is None:
            checkpointer = held[id(module)] = Checkpointer(
                module,
                asynchronous=self.config.async_checkpoint,
                timeout_s=self.config.timeout_s,
                events=self.runtimes[module].events,
            )
        checkpointer.optimizers = optimizers
        return checkpointer


def _parts(state: Mapping[str, Any]) -> tuple[nn.Module, list[Optimizer], list[str], dict[str, Any]]:
    """Split a Fabric state into its model, its optimizers with their keys, and the rest as plain state."""
    modules = {key: unwrap_module(value) for key, value in state.items() if isinstance(value, nn.Module)}
    if len(modules) != 1:
        raise CheckpointError(
            f"the state holds {len(modules)} models ({', '.join(modules) or 'none'}); save and load one at a time."
        )
    names = [key for key, value in state.items() if isinstance(value, Optimizer)]
    optimizers = [unwrap_optimizer(state[key]) for key in names]
    rest = {
        key: value.state_dict() if hasattr(value, "state_dict") and not isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if key not in modules and key not in names
    }
    return next(iter(modules.values())), optimizers, names, rest


def _refuse_storage_options(storage_options: Any) -> None:
    if storage_options is not None:
        raise CheckpointError(
            "storage_options are not used: a checkpoint is written to a mounted folder."
        )
