"""Manual optimization: several optimizers, accumulation by hand, several backwards in one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall_strategy.core.errors import ConfigError
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    assert_close,
    assert_same_weights,
    full_weights,
    make_data,
    make_loader,
    make_trainer,
    mean_over_ranks,
    module_class,
)
from tests.lightning.test_fit import rank_loader

CASES = ("plain", "toggle", "toggle_model", "accumulate", "accumulate unsynced", "several backwards")


def make_part(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, outputs))


class Gan(module_class("lightning")):
    """Two nets against each other; ``case`` is the way in which they take turns."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(5)
        super().__init__(make_part(7, 4))
        self.judge = make_part(4, 1)
        self.case = case
        self.automatic_optimization = False

    def configure_optimizers(self) -> tuple:
        return (
            torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9),
            torch.optim.SGD(self.judge.parameters(), lr=0.05, momentum=0.9),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses += gan_step(self.net, self.judge, *self.optimizers(), batch[0], batch_idx, self.case, self)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.judge(self.net(batch[0])).mean(), sync_dist=True)


@contextmanager
def only(optimizer: Any, other: Any, way: str, module: Any, *, sync: bool = True) -> Iterator[None]:
    """Gradients for the parameters of ``optimizer`` alone: Lightning's ways, or by hand without a module."""
    if way == "none":
        yield
    elif module is None:
        parameters = [p for group in other.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
        for parameter in parameters:
            parameter.requires_grad_(True)
    elif way == "toggle":
        module.toggle_optimizer(optimizer)
        yield
        module.untoggle_optimizer(optimizer)
    else:
        with optimizer.toggle_model(sync_grad=sync):
            yield


def gan_step(
    maker: nn.Module,
    judge: nn.Module,
    first: Any,
    second: Any,
    noise: Tensor,
    index: int,
    case: str,
    module: Any = None,
) -> list[float]:
    """One training step; in plain torch without ``module``."""
    backward = module.manual_backward if module is not None else torch.Tensor.backward
    real = noise[:, :4] * 0.5 + 1.0

    def maker_loss() -> Tensor:
        return F.softplus(-judge(maker(noise))).mean()

    def judge_loss() -> Tensor:
        return F.softplus(judge(maker(noise).detach())).mean() + F.softplus(-judge(real)).mean()

    if case == "several backwards":
        first.zero_grad()
        second.zero_grad()
        losses = [maker_loss(), judge_loss()]
        for loss in losses:
            backward(loss)
        first.step()
        second.step()
        return [loss.item() for loss in losses]
    way = {"plain": "none", "toggle": "toggle"}.get(case, "toggle_model")
    every = 2 if case.startswith("accumulate") else 1
    last = index % every == every - 1
    losses = []
    for optimizer, other, make_loss in ((first, second, maker_loss), (second, first, judge_loss)):
        with only(optimizer, other, way, module, sync=last or case != "accumulate unsynced"):
            loss = make_loss()
            if index % every == 0:
                optimizer.zero_grad()
            backward(loss / every)
        if last:
            optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(2, *CASES)
def test_two_optimizers(here: Here) -> None:
    """Losses and weights are those of one process, whatever way the two take turns."""
    case = here.case
    module = Gan(case)
    trainer = make_trainer(2)
    trainer.fit(module, rank_loader(here, "mlp", 8), rank_loader(here, "mlp", 1, seed=8))
    plain = Gan(case)
    optimizers = plain.configure_optimizers()
    wanted: list[float] = []
    for index, noise in enumerate(make_data("mlp", 32)[0].split(4)):
        wanted += gan_step(plain.net, plain.judge, *optimizers, noise, index, case)
    assert_close(mean_over_ranks(module.losses), wanted)
    assert_same_weights(full_weights(module), plain.state_dict())
    runtime = trainer.strategy.runtime
    assert runtime.steps == trainer.global_step == (8 if case.startswith("accumulate") else 16)


@on_ranks(4, "plain", "accumulate unsynced")
def test_two_optimizers_with_replicas(here: Here) -> None:
    """The same on a 2 x 2 mesh, where the sum over replicas waits for the last micro-batch."""
    from memwall_strategy.lightning import MemwallStrategy

    module = Gan(here.case)
    loader = make_loader("mlp", 6 * 8, 2, rank=here.rank, world=4)
    make_trainer(4, strategy=MemwallStrategy(replicate=2)).fit(module, loader)
    plain = Gan(here.case)
    optimizers = plain.configure_optimizers()
    wanted: list[float] = []
    for index, noise in enumerate(make_data("mlp", 48)[0].split(8)):
        wanted += gan_step(plain.net, plain.judge, *optimizers, noise, index, here.case)
    assert_close(mean_over_ranks(module.losses), wanted)


@on_ranks(2)
def test_gradients_may_be_looked_at_right_after_an_unsynced_backward(here: Here) -> None:
    """In manual optimization user code follows the backward at once: the reduced gradient is there."""
    seen: list[float] = []

    class Module(module_class("lightning")):
        def __init__(self) -> None:
            torch.manual_seed(5)
            super().__init__(make_part(7, 4))
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.net(batch[0]).square().mean())
                seen.append(self.net[0].weight.grad.full_tensor().norm().item())
            optimizer.step()
            optimizer.zero_grad()

    make_trainer(2).fit(Module(), rank_loader(here, "mlp", 1))
    net = Module().net
    net(make_data("mlp", 4)[0]).square().mean().backward()
    assert_close(seen, [net[0].weight.grad.norm().item()])


@on_ranks(2)
def test_parameters_directly_on_the_module_are_refused(here: Here) -> None:
    class Module(module_class("lightning")):
        def __init__(self) -> None:
            super().__init__(make_part(7, 4))
            self.temperature = nn.Parameter(torch.ones(1))
            self.automatic_optimization = False

    with pytest.raises(ConfigError, match=r"manual optimization.*temperature.*Move them into a child module"):
        make_trainer(2).fit(Module(), rank_loader(here, "mlp", 1))
    predicted = make_trainer(2).predict(Module(), rank_loader(here, "mlp", 1))  # nothing trains: nothing to refuse
    assert predicted[0].shape == (2, 4)
