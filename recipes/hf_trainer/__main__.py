"""A tiny GPT-2 with random weights, built here, trained on numbers that count up: nothing is downloaded.

    torchrun --nproc-per-node 2 -m recipes.hf_trainer --steps 20 --output runs/hf_trainer

It prints the losses on the first rank, and how much of the model this rank holds.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from memwall_strategy import PoolConfig
from memwall_strategy.accelerate import MemwallPlugin

from .trainer import MemwallTrainer

VOCABULARY, LENGTH = 64, 16


class Counting(Dataset):
    """Sequences that count up by one, from any start: easy to learn."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + LENGTH) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def tiny_gpt2() -> GPT2LMHeadModel:
    """A GPT-2 of two blocks with random weights."""
    torch.manual_seed(1)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes))


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--output", default="runs/hf_trainer", help="folder for checkpoints and the model")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU that is there")
    given = parser.parse_args()
    model = tiny_gpt2()
    whole = sum(parameter.numel() for parameter in model.parameters())
    trainer = MemwallTrainer(
        model=model,
        args=TrainingArguments(
            given.output,
            max_steps=given.steps,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=5,
            save_steps=10,
            use_cpu=given.cpu or not torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=Counting(1000),
        memwall=MemwallPlugin(pool=PoolConfig(device_budget="256MiB")),
    )
    trainer.train(resume_from_checkpoint=given.resume or None)
    trainer.save_model()
    runtime = trainer.accelerator.memwall.runtime
    held = sum(parameter.to_local().numel() for parameter in runtime.model.parameters())
    if trainer.is_world_process_zero():
        losses = [round(row["loss"], 3) for row in trainer.state.log_history if "loss" in row]
        print(f"losses {losses}; this rank holds {held} of {whole} parameters", flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
