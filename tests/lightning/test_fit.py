"""A Trainer's life: by name, twice, with and without evaluation, with schedulers, hooks and logging."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memwall_strategy.core.errors import ConfigError, MemwallError
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    TRAINERS,
    Gpt,
    assert_close,
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


def rank_loader(here: Here, kind: str, whole_batches: int, *, seed: int = 2) -> torch.utils.data.DataLoader:
    """``whole_batches`` batches of two samples a rank."""
    return make_loader(kind, whole_batches * 2 * here.world, 2, rank=here.rank, world=here.world, seed=seed)


@on_ranks(2, "lightning", "pytorch_lightning")
def test_by_name_in_both_namespaces(here: Here) -> None:
    """``strategy="memwall"`` trains a plain module, sharded, with the losses of one process."""
    module = make_module("gpt", here.case)
    trainer = make_trainer(2, namespace=here.case)
    trainer.fit(module, rank_loader(here, "gpt", 20))
    assert type(trainer.strategy).__name__ == "MemwallStrategy"
    assert isinstance(trainer.strategy, import_module(f"{TRAINERS[here.case]}.strategies").ModelParallelStrategy)
    assert isinstance(module.net.blocks[0], FSDPModule)
    assert_close(mean_over_ranks(module.losses), train_plain(make_net("gpt"), "gpt", steps=20, micro=4))
    runtime = trainer.strategy.runtime
    assert runtime.steps == 20
    metrics = runtime.metrics()
    assert 0 <= metrics["memwall/overlap/exposed_fraction"] <= 1, metrics


@on_ranks(2)
def test_second_epoch_and_short_last_accumulation(here: Here) -> None:
    module = make_module("gpt")
    trainer = make_trainer(2, accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(module, rank_loader(here, "gpt", 5))
    net = make_net("gpt")
    optimizer = make_optimizer(net.parameters())
    wanted = []
    batches = list(zip(*(tensor.split(4) for tensor in make_data("gpt", 20)), strict=True))
    for _ in range(2):
        for i, batch in enumerate(batches):
            loss = loss_of(net, batch)
            (loss / 2).backward()  # Lightning divides by the same number when the last window is short
            wanted.append(loss.item())
            if i in (1, 3, 4):
                optimizer.step()
                optimizer.zero_grad()
    assert trainer.global_step == 6
    assert_close(mean_over_ranks(module.losses), wanted)


@on_ranks(2)
def test_evaluation_before_between_and_after(here: Here) -> None:
    """validate, test and predict work without, before and after fit, under inference mode, with equal results."""
    module = make_module("gpt")
    loader = rank_loader(here, "gpt", 3, seed=7)
    trainer = make_trainer(2)
    before = trainer.validate(module, loader, verbose=False)[0]["val"]
    net = make_net("gpt")
    whole = list(zip(*(tensor.split(4) for tensor in make_data("gpt", 12, seed=7)), strict=True))
    assert_close([before], [sum(loss_of(net, batch).item() for batch in whole) / 3], 1e-5)
    trainer.fit(module, rank_loader(here, "gpt", 4))
    losses = train_plain(net, "gpt", steps=4, micro=4)
    assert_close(mean_over_ranks(module.losses), losses)
    wanted = sum(loss_of(net, batch).item() for batch in whole) / 3
    assert_close([trainer.validate(module, loader, verbose=False)[0]["val"]], [wanted], 1e-5)
    assert_close([trainer.test(module, loader, verbose=False)[0]["test"]], [wanted], 1e-5)
    predicted = trainer.predict(module, loader)
    inputs = [tensor for tensor, _ in loader]
    for found, batch in zip(predicted, inputs, strict=True):
        torch.testing.assert_close(found, net(batch), rtol=1e-4, atol=1e-5)
    fresh = make_module("gpt")  # a trainer that never fits
    assert len(make_trainer(2).predict(fresh, loader)) == 3
    without_inference_mode = make_trainer(2, inference_mode=False)
    assert_close([without_inference_mode.test(make_module("gpt"), loader, verbose=False)[0]["test"]], [before])


@on_ranks(2)
def test_validation_inside_the_epoch(here: Here) -> None:
    """Sanity check and validation in the middle of an accumulation leave the training as it is."""
    module = make_module("mlp")
    trainer = make_trainer(2, accumulate_grad_batches=4, num_sanity_val_steps=2, val_check_interval=3)
    trainer.fit(module, rank_loader(here, "mlp", 24), rank_loader(here, "mlp", 2, seed=5))
    wanted = train_plain(make_net("mlp"), "mlp", steps=6, micro=4, accumulate=4)
    assert_close(mean_over_ranks(module.losses), wanted)
    assert trainer.callback_metrics["val"].isfinite()


@on_ranks(2)
def test_forward_outside_the_step_methods(here: Here) -> None:
    """Hooks may call the model: before the first step, at the end of validation, after training."""
    seen: list[float] = []

    class Module(module_class("lightning")):
        def _probe(self) -> None:
            tokens = make_data("gpt", 2, seed=9)[0]
            seen.append(self(tokens).detach().float().sum().item())
            with torch.no_grad():
                assert self.net(tokens).sum().item() == seen[-1]

        def on_fit_start(self) -> None:
            self._probe()

        def on_train_start(self) -> None:
            self._probe()

        def on_validation_epoch_end(self) -> None:
            self._probe()

        def on_train_epoch_end(self) -> None:
            self._probe()

    module = Module(make_net("gpt"))
    trainer = make_trainer(2)
    trainer.fit(module, rank_loader(here, "gpt", 3), rank_loader(here, "gpt", 1, seed=5))
    net = make_net("gpt")
    tokens = make_data("gpt", 2, seed=9)[0]
    start = net(tokens).sum().item()
    losses = train_plain(net, "gpt", steps=3, micro=4)
    end = net(tokens).sum().item()
    assert_close(mean_over_ranks(module.losses), losses)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor([start, start, end, end]), rtol=1e-4, atol=1e-4)


@on_ranks(2, "same trainer", "new trainer", "new model", "after predict")
def test_two_fits_in_one_process(here: Here) -> None:
    """A second fit goes on exactly: same trainer, another trainer with the same model, another model."""
    module = make_module("gpt")
    trainer = make_trainer(2)
    if here.case == "after predict":
        make_trainer(2).predict(module, rank_loader(here, "gpt", 1))
    trainer.fit(module, rank_loader(here, "gpt", 4))
    first = mean_over_ranks(module.losses)
    net = make_net("gpt")
    assert_close(first, train_plain(net, "gpt", steps=4, micro=4))
    module.losses.clear()
    if here.case == "same trainer":
        trainer.fit_loop.max_epochs = 2
    else:
        trainer = make_trainer(2)
        if here.case == "new model":
            module, net = make_module("gpt"), make_net("gpt")
    trainer.fit(module, rank_loader(here, "gpt", 3, seed=3))
    assert_close(mean_over_ranks(module.losses), train_plain(net, "gpt", steps=3, micro=4, seed=3))


@on_ranks(2)
def test_schedulers_and_parameter_groups(here: Here) -> None:
    """Per-step and per-epoch schedules and two parameter groups give the plain loop's learning rates and losses."""

    class Module(module_class("lightning")):
        def configure_optimizers(self) -> object:
            optimizer, schedulers = optimizer_and_schedulers(self.net)
            return [optimizer], [
                {"scheduler": schedulers[0], "interval": "step", "frequency": 2},
                {"scheduler": schedulers[1], "interval": "epoch"},
            ]

        def on_train_batch_end(self, *_: object) -> None:
            rates.append([group["lr"] for group in self.optimizers().param_groups])

    def optimizer_and_schedulers(net: nn.Module) -> tuple:
        matrices = [p for p in net.parameters() if p.ndim >= 2]
        vectors = [p for p in net.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.05, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        return optimizer, [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        ]

    rates: list[list[float]] = []
    module = Module(make_net("gpt"))
    trainer = make_trainer(2, max_epochs=2)
    trainer.fit(module, rank_loader(here, "gpt", 5))
    net = make_net("gpt")
    optimizer, schedulers = optimizer_and_schedulers(net)
    wanted_rates, wanted = [], []
    batches = list(zip(*(tensor.split(4) for tensor in make_data("gpt", 20)), strict=True))
    for _ in range(2):
        for index, batch in enumerate(batches):
            loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(loss.item())
            if index % 2:  # Lightning counts the frequency within the epoch
                schedulers[0].step()
            if index == len(batches) - 1:
                schedulers[1].step()  # before the hook after the last batch
            wanted_rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == wanted_rates, (rates, wanted_rates)
    assert_close(mean_over_ranks(module.losses), wanted, 1e-5)  # AdamW divides by small second moments at first


@on_ranks(2)
def test_reduce_on_plateau_follows_the_monitored_metric(here: Here) -> None:
    class Module(module_class("lightning")):
        def configure_optimizers(self) -> dict:
            optimizer = make_optimizer(self.parameters())
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.01)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}

        def on_train_epoch_start(self) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

        def on_validation_epoch_end(self) -> None:
            values.append(self.trainer.callback_metrics["val"].item())

    rates: list[float] = []
    values: list[float] = []
    module = Module(make_net("gpt"))
    make_trainer(2, max_epochs=6).fit(module, rank_loader(here, "gpt", 1), rank_loader(here, "gpt", 3, seed=6))
    optimizer = make_optimizer([nn.Parameter(torch.zeros(1))])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.01)
    wanted = []
    for value in values:
        wanted.append(optimizer.param_groups[0]["lr"])
        plateau.step(value)
    assert rates == wanted and rates[-1] < rates[0], (rates, wanted)


@on_ranks(2)
def test_frozen_parameters_stay_and_train_nothing(here: Here) -> None:
    """Frozen weights in a unit, a wholly frozen unit, and a frozen root parameter."""

    def freeze(net: nn.Module) -> nn.Module:
        for parameter in (*net.blocks[0].parameters(), net.blocks[1].qkv.weight, net.token.weight):
            parameter.requires_grad_(False)
        return net

    module = module_class("lightning")(freeze(make_net("gpt")))
    trainer = make_trainer(2, gradient_clip_val=0.5, accumulate_grad_batches=2)
    trainer.fit(module, rank_loader(here, "gpt", 10))
    net = freeze(make_net("gpt"))
    wanted = train_plain(
        net, "gpt", steps=5, micro=4, accumulate=2, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.5)
    )
    assert_close(mean_over_ranks(module.losses), wanted)
    assert torch.equal(full_weights(module.net)["token.weight"], net.token.weight)


@on_ranks(2)
def test_parameters_directly_on_the_module(here: Here) -> None:
    """Automatic optimization works with parameters that are the LightningModule's own."""

    class Module(module_class("lightning")):
        def __init__(self) -> None:
            super().__init__(make_net("gpt"))
            self.scale = nn.Parameter(torch.ones(1))
            self.shift = nn.Parameter(torch.zeros(31))

        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            inputs, labels = batch
            logits = self.net(inputs) * self.scale + self.shift
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            self.losses.append(loss.item())
            return loss

        validation_step = training_step

    module = Module()
    loader = rank_loader(here, "gpt", 8)
    make_trainer(2, accumulate_grad_batches=2).fit(module, loader, rank_loader(here, "gpt", 1))
    del module.losses[-1]
    plain = Module()
    optimizer = make_optimizer(plain.parameters())
    for i, batch in enumerate(zip(*(tensor.split(4) for tensor in make_data("gpt", 32)), strict=True)):
        (plain.training_step(batch, i) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(mean_over_ranks(module.losses), plain.losses)


@on_ranks(2)
def test_lbfgs_is_refused_by_name(here: Here) -> None:
    """It flattens all parameters into one vector, which shards cannot be."""

    class Module(module_class("lightning")):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match=r"LBFGS.*such as AdamW"):
        make_trainer(2).fit(Module(make_net("gpt")), rank_loader(here, "gpt", 1))


@on_ranks(2)
def test_closures_run_once(here: Here) -> None:
    """The optimizer calls the closure inside its step, as Lightning hands it over: once a step."""
    calls: list[int] = []

    class Module(module_class("lightning")):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            def closure() -> Any:
                calls.append(batch_idx)
                return optimizer_closure()

            optimizer.step(closure=closure)

    module = Module(make_net("gpt"))
    make_trainer(2, accumulate_grad_batches=2).fit(module, rank_loader(here, "gpt", 6))
    assert calls == [1, 3, 5]
    assert_close(
        mean_over_ranks(module.losses), train_plain(make_net("gpt"), "gpt", steps=3, micro=4, accumulate=2)
    )


@on_ranks(2)
def test_tokens_of_a_dictionary_are_counted(here: Here) -> None:
    class Module(module_class("lightning")):
        def training_step(self, batch: object, batch_idx: int) -> dict:
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            self.log("train", loss, sync_dist=True, on_step=True, on_epoch=True)
            return {"loss": loss, "tokens": batch[1].numel()}

    module = Module(make_net("gpt"))
    trainer = make_trainer(2, accumulate_grad_batches=2)
    trainer.fit(module, rank_loader(here, "gpt", 6))
    metrics = trainer.strategy.runtime.metrics()
    step_s = metrics["memwall/step_s"]
    assert metrics["memwall/tokens_per_s"] == pytest.approx(2 * 2 * 6 * 2 / step_s)  # 2 micro x 2 samples x 6 x 2 ranks
    assert 0 < metrics["memwall/mfu"] < 1, metrics
    assert_close([trainer.callback_metrics["train_epoch"].item()], [sum(mean_over_ranks(module.losses)) / 6])


@on_ranks(2)
def test_none_from_training_step_is_refused_alike(here: Here) -> None:
    """Lightning refuses to skip a step with several ranks; every rank gets that error and a later fit is sound."""

    class Module(module_class("lightning")):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor | None:
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    module = Module(make_net("gpt"))
    with pytest.raises(RuntimeError, match="returning None in distributed training"):
        make_trainer(2, accumulate_grad_batches=4).fit(module, rank_loader(here, "gpt", 4))
    assert all(p.grad is None for p in module.net.parameters())
    dist.barrier()
    again = module_class("lightning")(module.net)
    net = make_net("gpt")
    make_trainer(2).fit(again, rank_loader(here, "gpt", 4))
    assert_close(mean_over_ranks(again.losses), train_plain(net, "gpt", steps=4, micro=4))


@on_ranks(2)
def test_an_error_on_every_rank_leaves_the_model_usable(here: Here) -> None:
    """The step that raised in its backward leaves no gradient: training goes on exactly."""

    class Broken(module_class("lightning")):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return Boom.apply(loss) if batch_idx == 3 else loss

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("boom")

    module = Broken(make_net("gpt"))
    with pytest.raises(ValueError, match="boom"):
        make_trainer(2, accumulate_grad_batches=2).fit(module, rank_loader(here, "gpt", 6))
    net = make_net("gpt")
    train_plain(net, "gpt", steps=1, micro=4, accumulate=2)
    again = module_class("lightning")(module.net)
    make_trainer(2).fit(again, rank_loader(here, "gpt", 4, seed=4))
    assert_close(mean_over_ranks(again.losses), train_plain(net, "gpt", steps=4, micro=4, seed=4))


@on_ranks(2)
def test_weights_used_outside_their_module_are_named(here: Here) -> None:
    class Module(module_class("lightning")):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            return nn.functional.linear(torch.ones(2, 16), self.net.blocks[0].out.weight).sum()

    with pytest.raises(MemwallError, match="outside its module's forward"):
        make_trainer(2).fit(Module(make_net("gpt")), rank_loader(here, "gpt", 1))


@on_ranks(2)
def test_ranks_start_with_rank_zeros_weights(here: Here) -> None:
    """Ranks that built different weights train on those of rank 0."""
    torch.manual_seed(here.rank + 1)
    module = module_class("lightning")(Gpt())
    make_trainer(2).fit(module, rank_loader(here, "gpt", 3))
    torch.manual_seed(1)
    assert_close(mean_over_ranks(module.losses), train_plain(Gpt(), "gpt", steps=3, micro=4))


@on_ranks(2)
def test_lightnings_own_sampler(here: Here) -> None:
    """With Lightning's distributed sampler every sample is seen once an epoch, by one rank."""
    seen: list[int] = []

    class Module(module_class("lightning")):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            seen.extend(batch[0][:, 0].int().tolist())
            return self.net(batch[0]).mean()

    data = torch.arange(16.0)[:, None].expand(16, 7).contiguous()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=2)
    make_trainer(2, use_distributed_sampler=True).fit(Module(make_net("mlp_alike")), loader)
    everywhere: list[list[int]] = [[], []]
    dist.all_gather_object(everywhere, seen)
    assert sorted(everywhere[0] + everywhere[1]) == list(range(16)), everywhere


@on_ranks(2, "StochasticWeightAveraging", "EMAWeightAveraging")
def test_callbacks_that_average_whole_models_are_refused(here: Here) -> None:
    from lightning.pytorch import callbacks

    options = {"swa_lrs": 0.1} if here.case.startswith("Stochastic") else {}
    callback = getattr(callbacks, here.case)(**options)
    with pytest.raises(ConfigError, match=rf"callbacks=\[{here.case}.*Take it out"):
        make_trainer(2, callbacks=[callback]).fit(make_module("gpt"), rank_loader(here, "gpt", 1))


@on_ranks(2)
def test_lightnings_callbacks(here: Here) -> None:
    """Callbacks that touch accumulation, time, stopping, gradients and summaries."""
    from lightning.pytorch.callbacks import (
        EarlyStopping,
        GradientAccumulationScheduler,
        LambdaCallback,
        ModelSummary,
        Timer,
    )

    seen: list[float] = []

    def look(trainer: Any, module: Any) -> None:
        seen.append(module.net.head.weight.grad.full_tensor().norm().item())

    callbacks = [
        GradientAccumulationScheduler({0: 1, 1: 2}), Timer(), ModelSummary(max_depth=2),
        EarlyStopping("val", patience=5), LambdaCallback(on_after_backward=look),
    ]  # fmt: skip
    module = make_module("gpt")
    trainer = make_trainer(2, max_epochs=2, callbacks=callbacks, enable_model_summary=True, detect_anomaly=True)
    trainer.fit(module, rank_loader(here, "gpt", 4), rank_loader(here, "gpt", 1))
    assert trainer.global_step == 4 + 2
    net = make_net("gpt")
    optimizer = make_optimizer(net.parameters())
    wanted, norms = [], []
    for epoch in range(2):
        for index, batch in enumerate(zip(*(tensor.split(4) for tensor in make_data("gpt", 16)), strict=True)):
            loss = loss_of(net, batch)
            (loss / (1 + epoch)).backward()
            wanted.append(loss.item())
            norms.append(net.head.weight.grad.norm().item())
            if not epoch or index % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_close(mean_over_ranks(module.losses), wanted)
    assert_close(seen, norms, 1e-5)


@on_ranks(2)
def test_gathers_of_the_user_carry_gradients(here: Here) -> None:
    """``self.all_gather(..., sync_grads=True)``, as contrastive losses over the whole batch use it."""

    class Module(module_class("lightning")):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            embedded = self.net(batch[0])
            everyone = self.all_gather(embedded, sync_grads=True).flatten(0, 1)
            loss = contrast(everyone)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.all_gather(self.net(batch[0])).shape == (2, 2, 3)

    def contrast(x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.normalize(x, dim=1)
        return torch.logsumexp(x @ x.T, 1).mean()

    module = Module(make_net("mlp_alike"))
    make_trainer(2).fit(module, rank_loader(here, "mlp", 5), rank_loader(here, "mlp", 1))
    net = make_net("mlp_alike")
    optimizer = make_optimizer(net.parameters())
    wanted = []
    for inputs in make_data("mlp", 20)[0].split(4):
        loss = contrast(net(torch.cat([inputs[0::2], inputs[1::2]])))
        wanted.append(loss.item())
        loss.backward()
        # The gather's backward sums what all ranks ask for, then FSDP takes the mean: each rank's whole loss counts.
        optimizer.step()
        optimizer.zero_grad()
    assert_close(module.losses, wanted, 1e-5)


@on_ranks(2)
def test_data_module_is_prepared_once(here: Here) -> None:
    from lightning.pytorch import LightningDataModule

    class Data(LightningDataModule):
        def prepare_data(self) -> None:
            (here.folder / f"prepared-{here.rank}").touch()

        def setup(self, stage: str) -> None:
            assert (here.folder / "prepared-0").exists(), "not prepared before set-up"

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            return rank_loader(here, "gpt", 3)

    module = make_module("gpt")
    make_trainer(2).fit(module, datamodule=Data())
    assert_close(mean_over_ranks(module.losses), train_plain(make_net("gpt"), "gpt", steps=3, micro=4))


@on_ranks(2)
def test_hooks_that_take_over_the_step(here: Here) -> None:
    """``optimizer_step`` that runs the closure by itself every other batch, and a clipping of one's own."""

    class Module(module_class("lightning")):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()  # training step and backward, no step

        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, **_: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

    module = Module(make_net("gpt"))
    trainer = make_trainer(2)
    trainer.fit(module, rank_loader(here, "gpt", 6))
    net = make_net("gpt")
    optimizer = make_optimizer(net.parameters())
    wanted = []
    for index, batch in enumerate(zip(*(tensor.split(4) for tensor in make_data("gpt", 24)), strict=True)):
        loss = loss_of(net, batch)
        loss.backward()
        wanted.append(loss.item())
        if index % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(mean_over_ranks(module.losses), wanted)
    assert trainer.strategy.runtime.steps == 3
