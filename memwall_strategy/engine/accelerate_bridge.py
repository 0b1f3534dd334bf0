"""The private names of Accelerate that memwall relies on, gathered in one place.

``tests/engine/test_accelerate_bridge.py`` fails when one of them changes.

memwall needs no trick with Accelerate's ``distributed_type`` (on CPU it ignores every FSDP plugin and wraps the model
in DDP instead): ``MemwallAccelerator`` prepares models itself, so that Accelerate's own ``prepare_model`` never sees
one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from torch import nn
from torch.utils.data import DataLoader

from memwall_strategy.engine.scaler import ShardedGradScaler


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an Accelerator has prepared, in order; the lists are its own.

    Relies on ``Accelerator._models``, ``_optimizers``, ``_schedulers``, ``_dataloaders``, which its own ``save_state``,
    ``prepare_scheduler`` and ``free_memory`` read and replace, and on ``_custom_objects``, which
    ``register_for_checkpointing`` fills.
    """

    models: list[nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[Any]
    loaders: list[Any]
    objects: list[Any]


def prepared_by(accelerator: Accelerator) -> Prepared:
    """What ``accelerator`` holds now."""
    return Prepared(
        accelerator._models,
        accelerator._optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator._custom_objects,
    )


def is_prepared(item: Any) -> bool:
    """Whether an Accelerator has prepared ``item``. Relies on the mark that ``Accelerator.prepare`` leaves."""
    return getattr(item, "_is_accelerate_prepared", False)


def mark_prepared(item: Any) -> None:
    """Leave that mark, by which ``Accelerator.prepare_*`` know that there is nothing left to do."""
    item._is_accelerate_prepared = True


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The user's optimizer."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def compiled_from(model: nn.Module) -> nn.Module:
    """The module inside a ``torch.compile``d one, else the module itself. Relies on ``OptimizedModule._orig_mod``."""
    return getattr(model, "_orig_mod", model)


def call_save_hooks(accelerator: Accelerator, folder: str) -> None:
    """Run what ``register_save_state_pre_hook`` registered; weights are saved by memwall, so the list is empty.

    Relies on ``Accelerator._save_model_state_pre_hook`` (id -> hook(models, weights, folder)).
    """
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, [], folder)


def call_load_hooks(accelerator: Accelerator, folder: str) -> None:
    """Run what ``register_load_state_pre_hook`` registered. Relies on ``Accelerator._load_model_state_pre_hook``."""
    for hook in accelerator._load_model_state_pre_hook.values():
        hook([], folder)


class SteppingOptimizer(AcceleratedOptimizer):
    """``AcceleratedOptimizer`` that tells memwall around each real step, and lets several share one scaler.

    Accelerate updates the scaler after each optimizer's step, so that a second optimizer that clipping has unscaled is
    unscaled again. Here the scaler is updated after the last of them.

    Relies on ``AcceleratedOptimizer.step`` doing nothing outside ``gradient_state.sync_gradients``, and on
    ``_is_overflow`` behind ``step_was_skipped``.

    Args:
        around: a context to enter around a step; gets the user's optimizer.
        sharing: gives all prepared optimizers, which share the scaler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: ShardedGradScaler | None,
        around: Callable[[torch.optim.Optimizer], AbstractContextManager[None]],
        sharing: Callable[[], list[torch.optim.Optimizer]],
    ) -> None:
        # Its own device placement loads the optimizer's state anew, which replaces the param groups; shards are where
        # they belong. The scaler stays out of its sight, because it would patch the optimizer's step.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.grad_scaler = scaler
        self.around, self.sharing = around, sharing

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if not self.gradient_state.sync_gradients:
            return
        with self.around(self.optimizer):
            if self.grad_scaler is None:
                self.optimizer.step(closure)
                return
            stepped: list[bool] = []
            handle = self.optimizer.register_step_post_hook(lambda *_: stepped.append(True))
            try:
                others = [unwrap_optimizer(optimizer) for optimizer in self.sharing()]
                self.grad_scaler.step_one_of(self.optimizer, others, *(() if closure is None else (closure,)))
            finally:
                handle.remove()
            self._is_overflow = not stepped


class PassState(DataLoader, DataLoaderStateMixin):
    """What a loader must be to Accelerate while a pass is under way: the one whose end ``accumulate`` looks at.

    A ``DataLoader`` by type only: its own ``__init__`` is not run and everything but the passes is ``inner``'s.

    Relies on ``GradientState._add_dataloader`` and ``_remove_dataloader``, and on ``end_of_dataloader`` and
    ``remainder`` being read from the loader that was added last.
    """

    def __init__(self, inner: Any) -> None:
        self.__dict__.update(inner=inner, gradient_state=GradientState(), end_of_dataloader=False, remainder=0)

    def enter_pass(self) -> None:
        """A pass begins."""
        self.end_of_dataloader = False
        if self.gradient_state.active_dataloader is not self:
            self.gradient_state._add_dataloader(self)

    def leave_pass(self) -> None:
        """It has ended, or nobody goes on with it."""
        self.gradient_state._remove_dataloader(self)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def active_loader(accelerator: Accelerator) -> Any:
    """The loader whose pass is under way, or None."""
    return accelerator.gradient_state.active_dataloader
