"""The model, its training module and the schedules, in one process."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.recipes.gpt.model import GPT, INIT_STD, residual_std
from memwall_strategy.recipes.gpt.module import GPTModule, gpt
from memwall_strategy.recipes.gpt.options import GPTOptions
from memwall_strategy.recipes.schedule import Constant, Cosine, constant, cosine
from memwall_strategy.recipes.text.data import TextData
from memwall_strategy.recipes.text.options import PADDING, TextOptions
from tests.recipes.test_text import FEW

SMALL = GPTOptions(layers=2, heads=2, hidden=32, context=16)


def small_module(**options: object) -> GPTModule:
    return gpt(
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
        scheduler=functools.partial(cosine, warmup_steps=2, final_factor=0.1),
        **{"layers": 2, "heads": 2, "hidden": 32, "context": 32, **options},
    )


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    a = torch.randint(0, 257, (2, 16))
    b = a.clone()
    b[:, 9:] = (b[:, 9:] + 1) % 257
    seen_a, seen_b = model(a), model(b)
    assert torch.equal(seen_a[:, :9], seen_b[:, :9])
    assert not torch.allclose(seen_a[:, 9:], seen_b[:, 9:])
    assert seen_a.shape == (2, 16, 257)


def test_loss_starts_at_chance_and_a_batch_can_be_learnt() -> None:
    torch.manual_seed(0)
    module = small_module()
    batch = torch.randint(0, 257, (4, 33))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = module._loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(257)) < 0.1
    assert losses[-1] < 0.3 * losses[0]


def test_attention_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    attention = GPT(SMALL).blocks[0].attention
    x = torch.randn(1, 5, 32)
    q, k, v = attention.qkv(x).chunk(3, dim=-1)
    heads = []
    for part in range(2):
        at = slice(part * 16, (part + 1) * 16)
        scores = q[0, :, at] @ k[0, :, at].T / math.sqrt(16)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v[0, :, at])
    torch.testing.assert_close(attention(x)[0], attention.out(torch.cat(heads, dim=-1)))


@pytest.mark.parametrize("tied", [True, False])
def test_meta_construction_then_to_empty_gives_trainable_weights(tied: bool) -> None:
    options = GPTOptions(layers=2, heads=2, hidden=64, context=16, tied_head=tied)
    with torch.device("meta"):
        model = GPT(options)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, float("nan"))  # what is not initialised must show
    torch.manual_seed(0)
    model.init_weights()
    assert all(p.isfinite().all() for p in model.parameters())
    assert abs(model.embed.weight.std() - INIT_STD) < 0.1 * INIT_STD
    assert abs(model.blocks[0].mlp.down.weight.std() - residual_std(options)) < 0.1 * residual_std(options)
    tokens = torch.randint(0, 257, (1, 16))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert ("head.weight" in dict(model.named_parameters())) is not tied


def test_the_same_seed_gives_the_same_weights() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(GPT(SMALL))
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden": 30, "heads": 4}, r"model\.hidden=30 is not divisible by model\.heads=4.*model\.heads=[35]"),
        ({"layers": 0}, r"model\.layers=0"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0"),
        ({"vocab": 2.5}, r"model\.vocab=2\.5"),
    ],
)
def test_sizes_that_cannot_be(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTOptions(**values)


def test_schedules() -> None:
    rise = Cosine(warmup_steps=4, total_steps=24, final_factor=0.1)
    assert [rise(s) for s in range(4)] == [pytest.approx((s + 1) / 5) for s in range(4)]
    assert rise(4) == pytest.approx(1.0) and rise(14) == pytest.approx(0.55)
    assert rise(24) == pytest.approx(0.1) == rise(1000)
    assert all(rise(s) >= rise(s + 1) for s in range(4, 24))
    flat = Constant(warmup_steps=1)
    assert [flat(s) for s in range(3)] == [0.5, 1.0, 1.0]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = constant(optimizer, warmup_steps=1, total_steps=10)
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert all(not isinstance(v, Cosine) for v in schedule.state_dict().values()), "checkpoints hold no code"


def test_module_trains_in_a_plain_trainer_on_real_text(tmp_path: Path) -> None:
    L.seed_everything(1, verbose=False)
    data = TextData(TextOptions(files=FEW, seq_len=32, batch_size=8, val_fraction=0.5, cache_dir=str(tmp_path)))
    module = small_module()
    seen: list[dict[str, float]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen.append({"loss": float(outputs["loss"]), "tokens": outputs["tokens"], "lr": rates(trainer)[0]})

    def rates(trainer: L.Trainer) -> list[float]:
        return [group["lr"] for group in trainer.optimizers[0].param_groups]

    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=30, max_epochs=-1, limit_val_batches=2, val_check_interval=15,
        check_val_every_n_epoch=None, callbacks=[Watch()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert seen[0]["tokens"] == 8 * 32
    assert sum(s["loss"] for s in seen[-5:]) / 5 < 0.8 * seen[0]["loss"]
    # The rate of the step that follows, from the schedule over the trainer's own number of steps.
    assert seen[14]["lr"] == pytest.approx(3e-3 * Cosine(2, 30, 0.1)(15))
    assert trainer.callback_metrics["val/bits_per_byte"] == pytest.approx(
        float(trainer.callback_metrics["val/loss"]) / math.log(2)
    )
    decay = [group["weight_decay"] for group in trainer.optimizers[0].param_groups]
    assert decay == [0.1, 0.0]
    assert all(p.ndim < 2 for p in trainer.optimizers[0].param_groups[1]["params"])


def test_every_token_of_all_ranks_counts_the_same_where_documents_are_padded() -> None:
    """Two ranks with micro-batches of unequal numbers of tokens: the mean of their losses is that of one batch."""
    torch.manual_seed(0)
    batches = [torch.randint(0, 257, (2, 17)), torch.randint(0, 257, (3, 17))]
    batches[0][0, 5:], batches[0][1, 9:], batches[1][2, 3:] = PADDING, PADDING, PADDING
    targets = [int((batch[:, 1:] != PADDING).sum()) for batch in batches]
    module = small_module()
    module.log = lambda *_, **__: None

    class Strategy:
        def reduce(self, tokens: torch.Tensor, reduce_op: str) -> torch.Tensor:
            assert reduce_op == "mean"
            return torch.tensor(sum(targets) / 2)

    class Data:
        padded, bytes_per_token = True, 1.0

    module._trainer = type("Trainer", (), {"strategy": Strategy(), "datamodule": Data()})()
    module.setup("fit")
    outputs = [module.training_step(batch, 0) for batch in batches]
    assert [output["tokens"] for output in outputs] == targets == [12, 34]
    whole = module._loss(torch.cat(batches))
    torch.testing.assert_close(sum(output["loss"] for output in outputs) / 2, whole)
    logits = module(batches[0][:1, :4])  # the document alone, without its padding
    alone = F.cross_entropy(logits[0].float(), batches[0][0, 1:5])
    torch.testing.assert_close(module._loss(batches[0][:1]), alone)
