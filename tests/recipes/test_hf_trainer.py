"""``MemwallTrainer``: sharded on two ranks, the losses and weights of the stock Trainer in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.lightning.models import assert_close
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers", minversion="5")

SAMPLES, LENGTH = 37, 8
"""Not a multiple of a step's 8 samples: the last step of an epoch has 5."""


class Sequences(Dataset):
    """Random tokens; the first ones of some samples have no label."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.tokens = torch.randint(0, 64, (samples, LENGTH), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def make_trainer(kind: str, folder: str, samples: int = SAMPLES, dropout: float = 0.0, **options: Any) -> Any:
    """The stock Trainer, or memwall's, around a tiny GPT-2."""
    import transformers

    from recipes.hf_trainer import MemwallTrainer

    torch.manual_seed(1)
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": LENGTH, "vocab_size": 64}
    config = transformers.GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0)
    defaults = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 1e-2,
        "train_sampling_strategy": "sequential",
    }
    trainer = {"stock": transformers.Trainer, "memwall": MemwallTrainer}[kind]
    return trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(folder, **(defaults | options)),
        train_dataset=Sequences(samples),
        eval_dataset=Sequences(7),
    )


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def compare_worker(rank: int, world: int, kind: str, folder: str) -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule

    trainer = make_trainer(kind, folder, per_device_train_batch_size=8 // world, per_device_eval_batch_size=4)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    if kind == "memwall":
        assert isinstance(trainer.model.transformer.h[0], FSDPModule)
        runtime = trainer.accelerator.memwall.runtime
        assert runtime.steps == trainer.state.global_step == 6
        held = sum(p.to_local().numel() for p in trainer.model.parameters())
        assert held <= 0.6 * sum(p.numel() for p in trainer.model.parameters())
    trainer.save_model()
    logits = trainer.predict(Sequences(7)).predictions
    found = {"before": before, "after": after, "losses": losses_of(trainer), "shape": list(logits.shape)}
    trainer.accelerator.end_training()
    return found


def test_the_losses_of_the_stock_trainer(tmp_path: Path) -> None:
    """Unequal label counts, accumulation, an uneven end of the epoch, evaluation: as one process on whole batches."""
    from transformers import GPT2LMHeadModel

    (stock,) = run_ranks(compare_worker, 1, kind="stock", folder=str(tmp_path / "stock"))
    ours = run_ranks(compare_worker, 2, kind="memwall", folder=str(tmp_path / "memwall"))
    assert ours[0]["shape"] == ours[1]["shape"] == stock["shape"] == [7, LENGTH, 64]
    for key in ("before", "after"):
        assert math.isclose(ours[0][key], stock[key], rel_tol=0.05), "means over other batches"
    assert ours[0]["after"] < ours[0]["before"]
    assert len(stock["losses"]) == 6
    assert_close(ours[0]["losses"], stock["losses"], 1e-3)  # logged with four digits
    models = [GPT2LMHeadModel.from_pretrained(tmp_path / kind) for kind in ("memwall", "stock")]
    assert models[0].config.architectures == ["GPT2LMHeadModel"]
    weights = [model.state_dict() for model in models]
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-3, atol=1e-4)


def resume_worker(rank: int, world: int, folder: str) -> bool:
    """Whole run against one that resumes in the middle of the first epoch, with shuffling and dropout."""
    options = {"per_device_train_batch_size": 2, "train_sampling_strategy": "random", "dropout": 0.1}
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = make_trainer("memwall", folder, **options, **saving)
    whole.train()
    wanted = {name: p.to_local().clone() for name, p in whole.model.named_parameters()}
    second = make_trainer("memwall", folder, **options)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert second.state.global_step == whole.state.global_step
    assert losses_of(second)[2:] == losses_of(whole)[2:]
    found = {name: p.to_local() for name, p in second.model.named_parameters()}
    same = all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    second.accelerator.end_training()
    return same


def test_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    assert run_ranks(resume_worker, 2, folder=str(tmp_path)) == [True, True]
