"""The input lane under Lightning's Trainer: when its batches may be on the device before the trainer moves them."""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from typing import Any

import torch

from memwall_strategy.config import MemwallConfig
from memwall_strategy.engine.lightning_bridge import trainer_package_of
from memwall_strategy.runtime.input_clock import InputClock
from memwall_strategy.runtime.input_lane import InputLane, lane_for

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks with which a LightningModule or LightningDataModule has a say in how batches get to the device."""


def input_lane(trainer: Any, device: torch.device, config: MemwallConfig, clock: InputClock) -> InputLane | None:
    """The lane of a fit; None where there is nothing to copy to, or where the user's code sees batches on the host.

    Args:
        trainer: whose model and data module are set.
        device: of this rank.
        config: of the run.
        clock: gets the lane's figures.
    """
    package, module = trainer_package_of(trainer), trainer.lightning_module
    core = import_module(f"{package}.core")
    by_hand = _has_own(module, core.LightningModule) or "dataloader_iter" in _arguments(module.training_step)
    if by_hand or (trainer.datamodule is not None and _has_own(trainer.datamodule, core.LightningDataModule)):
        return None
    move = partial(import_module(f"{package}.strategies.strategy").move_data_to_device, device=device)
    return lane_for(device, move, overlap=config.overlap, timeout_s=config.timeout_s, clock=clock)


def _has_own(item: object, base: type) -> bool:
    return any(hook in vars(item) or getattr(type(item), hook) is not getattr(base, hook) for hook in TRANSFERS)


def _arguments(function: Any) -> Any:
    return inspect.signature(function).parameters
