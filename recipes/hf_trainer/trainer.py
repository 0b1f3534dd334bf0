"""``MemwallTrainer``: ``transformers.Trainer`` whose accelerator is a ``MemwallAccelerator``.

The Trainer makes its own ``Accelerator``; this one takes its settings over into memwall's. What the Trainer would do
with whole weights on one rank (saving, resuming, the best model) goes through the accelerator. A run resumes with the
samples not yet seen, at the same number of ranks: the Trainer counts its steps by them.

It relies on methods that the Trainer has since transformers 5: ``_run_epoch``, ``_save_optimizer_and_scheduler``,
``_load_optimizer_and_scheduler``, ``_load_from_checkpoint`` and ``_load_best_model``. ``push_to_hub`` is not supported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import GradientAccumulationPlugin
from transformers import Trainer

from memwall_strategy import ConfigError
from memwall_strategy.accelerate import MemwallAccelerator, MemwallPlugin

IGNORED_LABEL = -100
"""What losses of transformers leave out."""
SCHEDULER_NAME = "scheduler.pt"

if not hasattr(Trainer, "_run_epoch"):
    raise ImportError("MemwallTrainer needs transformers >= 5: pip install -U transformers")


class MemwallTrainer(Trainer):
    """Takes ``memwall=MemwallPlugin(...)`` beside what ``Trainer`` takes."""

    def __init__(self, *args: Any, memwall: MemwallPlugin | None = None, **options: Any) -> None:
        self.memwall = memwall or MemwallPlugin()
        super().__init__(*args, **options)
        if self.args.push_to_hub:
            raise ConfigError("push_to_hub=True is not supported by MemwallTrainer. Push the output folder afterwards.")

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        made = self.accelerator
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError("deepspeed= and fsdp= shard by themselves. Leave them out of TrainingArguments.")
        self.accelerator = MemwallAccelerator(
            memwall=self.memwall,
            cpu=made.device.type == "cpu",
            mixed_precision=made.mixed_precision,
            dataloader_config=made.dataloader_config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(**made.gradient_state.plugin_kwargs),
            project_config=made.project_configuration,
        )
        self.accelerator.weigh_batches = False  # the Trainer divides by the labels of all ranks
        self.gather_function = self.accelerator.gather_for_metrics

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **options: Any) -> Any:
        return super().get_batch_samples(self._without_repeats(epoch_iterator), *args, **options)

    def _without_repeats(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A sample that is only there to keep the ranks in step has no label that counts."""
        for batch in batches:
            if self.accelerator.batch_weight == 0 and "labels" in batch:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED_LABEL)
            yield batch

    # -- saving and resuming --

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model for ``from_pretrained``; for all ranks together."""
        folder = output_dir or self.args.output_dir
        state = self.accelerator.get_state_dict(self.model)
        if not self.args.should_save:
            return
        os.makedirs(folder, exist_ok=True)
        self.accelerator.unwrap_model(self.model).save_pretrained(folder, state_dict=state)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.save_state(output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: ``_load_optimizer_and_scheduler`` loads the weights too, once they are sharded."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.accelerator.load_state(checkpoint)
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_best_model(self) -> None:
        self.accelerator.load_state(self.state.best_model_checkpoint)

    def _run_epoch(self, **arguments: Any) -> None:
        done = arguments["steps_trained_in_current_epoch"]
        if done and arguments["resume_from_checkpoint"] and arguments["epoch"] == arguments["epochs_trained"]:
            # The loader is at its place already: the Trainer skips nothing and runs what is left of the epoch.
            arguments["steps_in_epoch"] -= done
            arguments["num_update_steps_per_epoch"] -= done // self.args.gradient_accumulation_steps
            arguments["steps_trained_in_current_epoch"] = 0
        super()._run_epoch(**arguments)
