"""LightningModules as people write them: layers on the module itself, ties, several nets, one rank, thawed layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    CONTEXT,
    VOCABULARY,
    WIDTH,
    Block,
    assert_close,
    assert_same_weights,
    full_weights,
    loss_of,
    make_data,
    make_loader,
    make_module,
    make_net,
    make_optimizer,
    make_trainer,
    mean_over_ranks,
    module_class,
    train_plain,
)


class Direct(module_class("lightning")):
    """The GPT's layers are the LightningModule's own children; ``training_step`` calls ``self``."""

    def __init__(self, tied: bool = False, loose: bool = False) -> None:
        super().__init__(None)
        torch.manual_seed(4)
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight
        self.scale = nn.Parameter(torch.ones(WIDTH)) if loose else 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", loss_of(self, batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def train_module(module: Any, *, steps: int, accumulate: int = 1, kind: str = "gpt", micro: int = 4) -> list[float]:
    """The plain loop with the module's own ``training_step``, in one process."""
    optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
    module.losses.clear()
    inputs, labels = make_data(kind, steps * accumulate * micro)
    for index, batch in enumerate(zip(inputs.split(micro), labels.split(micro), strict=True)):
        (module.training_step(batch, index) / accumulate).backward()
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return module.losses


DIRECT: dict[str, Callable[[], Direct]] = {
    "layers": Direct,
    "tied": lambda: Direct(tied=True),
    "loose parameter": lambda: Direct(loose=True),
    "tied and loose": lambda: Direct(tied=True, loose=True),
}


@on_ranks(2, *DIRECT)
def test_layers_on_the_module_itself(here: Here) -> None:
    """Training, validation in between, prediction, and a call from a hook."""
    module = DIRECT[here.case]()
    seen: list[Tensor] = []
    tokens = make_data("gpt", 2, seed=9)[0]
    module.on_train_start = lambda: seen.append(module(tokens).detach())
    trainer = make_trainer(2, accumulate_grad_batches=2, num_sanity_val_steps=1, gradient_clip_val=100.0)
    loader = make_loader("gpt", 5 * 2 * 4, 2, rank=here.rank, world=2)
    trainer.fit(module, loader, make_loader("gpt", 4, 2, rank=here.rank, world=2))
    plain = DIRECT[here.case]()
    torch.testing.assert_close(seen[0], plain(tokens), rtol=1e-4, atol=1e-5)
    assert_close(mean_over_ranks(module.losses), train_module(plain, steps=5, accumulate=2))
    assert_same_weights(full_weights(module), plain.state_dict())
    predicted = trainer.predict(module, loader)
    torch.testing.assert_close(predicted[0], plain(next(iter(loader))[0]), rtol=1e-4, atol=1e-5)
    units = {unit.name for unit in trainer.strategy.runtime.units}
    assert {"blocks.0", "blocks.1"} <= units, units


@on_ranks(2, "bf16-mixed", "16-mixed")
def test_layers_on_the_module_itself_in_low_precision(here: Here) -> None:
    module = Direct(loose=True)
    make_trainer(2, precision=here.case).fit(module, make_loader("gpt", 6 * 4, 2, rank=here.rank, world=2))
    assert_close(mean_over_ranks(module.losses), train_module(Direct(loose=True), steps=6), 2e-2)


class Contrast(module_class("lightning")):
    """Two towers, each used twice; a teacher that never learns, called without gradients; a loss with a parameter."""

    def __init__(self) -> None:
        torch.manual_seed(6)
        super().__init__(make_net("mlp_alike"))
        self.other = make_net("mlp_alike", seed=8)
        self.teacher = make_net("mlp_alike", seed=9).requires_grad_(False)
        self.loss = nn.Bilinear(3, 3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        with torch.no_grad():
            wanted = self.teacher(x)
            before = self.net(x)  # a look without gradients before the real one
        a, b = self.net(x), self.other(x + 0.5)
        again = self.net(x * 0.5)
        loss = F.mse_loss(a, wanted) + self.loss(b, again).square().mean() + F.cross_entropy(b, labels)
        loss = loss + 0.1 * F.mse_loss(again, before)
        self.losses.append(loss.item())
        return loss


@on_ranks(2)
def test_several_nets_used_several_times(here: Here) -> None:
    module = Contrast()
    trainer = make_trainer(2, accumulate_grad_batches=2)
    trainer.fit(module, make_loader("mlp", 5 * 2 * 4, 2, rank=here.rank, world=2))
    plain = Contrast()
    assert_close(mean_over_ranks(module.losses), train_module(plain, steps=5, accumulate=2, kind="mlp"))
    assert_same_weights(full_weights(module), plain.state_dict())


@on_ranks(2)
def test_layers_thawed_in_the_second_epoch(here: Here) -> None:
    """As a fine-tuning callback does: a block that was frozen learns from the second epoch on."""

    class Thawing(module_class("lightning")):
        def on_train_epoch_start(self) -> None:
            if self.trainer.current_epoch == 1:
                self.net.blocks[0].requires_grad_(True)
                self.optimizers().add_param_group({"params": list(self.net.blocks[0].parameters())})

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer([p for p in self.parameters() if p.requires_grad])

    net = make_net("gpt")
    net.blocks[0].requires_grad_(False)
    module = Thawing(net)
    trainer = make_trainer(2, max_epochs=2)
    trainer.fit(module, make_loader("gpt", 4 * 4, 2, rank=here.rank, world=2))
    plain = make_net("gpt")
    plain.blocks[0].requires_grad_(False)
    optimizer = make_optimizer([p for p in plain.parameters() if p.requires_grad])
    wanted = []
    for epoch in range(2):
        if epoch == 1:
            plain.blocks[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(plain.blocks[0].parameters())})
        for batch in zip(*(tensor.split(4) for tensor in make_data("gpt", 16)), strict=True):
            loss = loss_of(plain, batch)
            loss.backward()
            wanted.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert_close(mean_over_ranks(module.losses), wanted)


@on_ranks(1, "32-true", "16-mixed", group="alone")
def test_one_rank(here: Here) -> None:
    """``devices=1`` is an ordinary run: nothing to reduce, everything else the same."""
    module = make_module("mlp")
    trainer = make_trainer(1, precision=here.case, accumulate_grad_batches=2, gradient_clip_val=0.4)
    trainer.fit(module, make_loader("mlp", 20 * 2 * 2, 2))
    wanted = train_plain(
        make_net("mlp"), "mlp", steps=20, micro=2, accumulate=2, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.4)
    )
    assert_close(module.losses, wanted, 1e-6 if here.case == "32-true" else 2e-2)
    assert len(trainer.predict(module, make_loader("mlp", 4, 2))) == 2


@on_ranks(2, "fast_dev_run", "max_steps", "limit", "barebones", "overfit", "stop")
def test_trainer_options(here: Here) -> None:
    """Ways to end early, and the bare trainer: each ends cleanly and a further run works."""
    options: dict[str, dict[str, Any]] = {
        "fast_dev_run": {"fast_dev_run": 2}, "max_steps": {"max_steps": 3, "max_epochs": -1},
        "limit": {"limit_train_batches": 3, "limit_val_batches": 1}, "barebones": {"barebones": True},
        "overfit": {"overfit_batches": 2}, "stop": {},
    }  # fmt: skip

    class Stopping(module_class("lightning")):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if here.case == "stop" and batch_idx == 2:
                self.trainer.should_stop = True

    module = Stopping(make_net("gpt"))
    chosen = {"max_epochs": 1} | options[here.case]
    if here.case == "barebones":
        from lightning.pytorch import Trainer

        trainer = Trainer(accelerator="cpu", devices=2, strategy="memwall", use_distributed_sampler=False, **chosen)
    else:
        trainer = make_trainer(2, **chosen)
    loader = make_loader("gpt", 4 * 4, 2, rank=here.rank, world=2)
    trainer.fit(module, loader, make_loader("gpt", 4, 2, rank=here.rank, world=2))
    steps = {"fast_dev_run": 2, "max_steps": 3, "limit": 3, "barebones": 4, "overfit": 2, "stop": 3}[here.case]
    assert trainer.global_step == len(module.losses) == steps
    assert_close(
        mean_over_ranks(module.losses), train_plain(make_net("gpt"), "gpt", steps=4, micro=4)[:steps]
    )


@on_ranks(2)
def test_units_chosen_by_class(here: Here) -> None:
    from memwall_strategy.lightning import MemwallStrategy

    module = make_module("gpt")
    trainer = make_trainer(2, strategy=MemwallStrategy(unit_classes=("Linear", nn.Embedding)))
    trainer.fit(module, make_loader("gpt", 5 * 4, 2, rank=here.rank, world=2))
    names = {unit.name for unit in trainer.strategy.runtime.units}
    assert {"net.token", "net.head", "net.blocks.0.qkv", "net.blocks.1.mlp.2"} <= names, names
    assert_close(mean_over_ranks(module.losses), train_plain(make_net("gpt"), "gpt", steps=5, micro=4))


@on_ranks(2)
def test_a_model_without_repetition_warns_and_trains(here: Here) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    lone = module_class("lightning")(nn.Sequential(net))
    with pytest.warns(UserWarning):
        make_trainer(2).fit(
            module_class("lightning")(nn.Linear(7, 3)), make_loader("mlp", 2 * 4, 2, rank=here.rank, world=2)
        )
    make_trainer(2).fit(lone, make_loader("mlp", 5 * 4, 2, rank=here.rank, world=2))
    assert_close(mean_over_ranks(lone.losses), train_plain(plain, "mlp", steps=5, micro=4))
