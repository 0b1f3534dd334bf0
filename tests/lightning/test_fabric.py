"""Fabric: the same runtime under a loop of one's own, with the losses of Trainer and of a plain loop."""

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
    Gpt,
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
    train_plain,
)
from tests.lightning.test_parity import Counts


def make_fabric(namespace: str = "lightning.fabric", world: int = 2, strategy: Any = "memwall", **options: Any) -> Any:
    """Fabric on this machine's ranks; imports memwall's strategies."""
    import_module("memwall_strategy.lightning")
    fabric = import_module(namespace).Fabric(accelerator="cpu", devices=world, strategy=strategy, **options)
    fabric.launch()
    return fabric


def train_fabric(
    here: Here,
    fabric: Any,
    kind: str,
    *,
    steps: int,
    accumulate: int = 1,
    apart: bool = False,
    optimizer: str = "sgd",
    clip: dict[str, float] | None = None,
) -> tuple[list[float], nn.Module]:
    """The loop of Fabric's documentation."""
    net = make_net(kind)
    if apart:
        model = fabric.setup_module(net)
        stepper = fabric.setup_optimizers(make_optimizer(model.parameters(), optimizer))
    else:
        model, stepper = fabric.setup(net, make_optimizer(net.parameters(), optimizer))
    losses = []
    loader = make_loader(kind, steps * accumulate * 2 * here.world, 2, rank=here.rank, world=here.world)
    for index, batch in enumerate(fabric.setup_dataloaders(loader, use_distributed_sampler=False)):
        last = index % accumulate == accumulate - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = loss_of(model, batch)
            fabric.backward(loss / accumulate)
        losses.append(loss.item())
        if last:
            if clip is not None:
                fabric.clip_gradients(model, stepper, **clip)
            stepper.step()
            stepper.zero_grad()
    return losses, model


@on_ranks(2, "lightning.fabric", "lightning_fabric")
def test_losses_of_trainer_and_of_a_plain_loop(here: Here) -> None:
    """Steps with accumulation and clipping: as the plain loop, and bit by bit as Trainer."""
    fabric = make_fabric(here.case)
    steps = 20 if here.case == "lightning.fabric" else 4
    losses, model = train_fabric(here, fabric, "gpt", steps=steps, accumulate=4, clip={"max_norm": 0.4})
    assert isinstance(model.module.blocks[0], FSDPModule)
    net = make_net("gpt")
    wanted = train_plain(
        net, "gpt", steps=steps, micro=4, accumulate=4, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.4)
    )
    assert_close(mean_over_ranks(losses), wanted)
    assert_same_weights(full_weights(model.module), net.state_dict())
    module = make_module("gpt")
    trainer = make_trainer(2, accumulate_grad_batches=4, gradient_clip_val=0.4)
    trainer.fit(module, make_loader("gpt", steps * 4 * 4, 2, rank=here.rank, world=2))
    assert module.losses == losses
    runtime = fabric.strategy.runtime
    assert runtime.steps == steps
    assert 0 <= runtime.metrics()["memwall/overlap/exposed_fraction"] <= 1


@on_ranks(2, "apart", "value", "mlp", "conv", "adamw")
def test_ways_to_set_up_and_to_clip(here: Here) -> None:
    case = here.case
    kind = case if case in ("mlp", "conv") else "gpt"
    clip = {"clip_val": 0.01} if case == "value" else None
    optimizer = "adamw" if case == "adamw" else "sgd"
    fabric = make_fabric()
    losses, _ = train_fabric(
        here, fabric, kind, steps=6, accumulate=2, apart=case == "apart", optimizer=optimizer, clip=clip
    )
    if kind == "conv":  # local BatchNorm: two ranks are not one batch
        assert all(map(torch.isfinite, torch.tensor(losses)))
        return

    def plain_clip(parameters: list[nn.Parameter]) -> None:
        if clip is not None:
            nn.utils.clip_grad_value_(parameters, 0.01)

    net = make_net(kind)
    wanted = train_plain(net, kind, steps=6, micro=4, accumulate=2, optimizer=optimizer, clip=plain_clip)
    assert_close(mean_over_ranks(losses), wanted, 1e-6 if optimizer == "sgd" else 1e-5)


@on_ranks(4)
def test_replicas_meet_once_per_step(here: Here) -> None:
    """``no_backward_sync`` keeps all but the last micro-batch inside the rack."""
    from memwall_strategy.lightning import MemwallFabricStrategy

    fabric = make_fabric(world=4, strategy=MemwallFabricStrategy(replicate=2))
    with pytest.MonkeyPatch.context() as monkeypatch:
        counts = Counts(monkeypatch)
        losses, _ = train_fabric(here, fabric, "mlp", steps=5, accumulate=4)
    units = len(fabric.strategy.runtime.units)
    assert counts.tally["all_reduce", 2] == 5 * units, (counts.tally, units)
    assert_close(mean_over_ranks(losses), train_plain(make_net("mlp"), "mlp", steps=5, micro=8, accumulate=4))


@on_ranks(2, "bf16-mixed", "16-mixed", "bf16-true")
def test_precision(here: Here) -> None:
    """Computed in the low precision, without autocast; losses near those of fp32; weights in fp32 unless ``true``."""
    wanted_dtype = {"16-mixed": torch.float16}.get(here.case, torch.bfloat16)
    fabric = make_fabric(precision=here.case)
    seen: set[Any] = set()
    real = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen.add((x.dtype, self.weight.dtype, torch.is_autocast_enabled("cpu")))
        return real(self, x)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nn.Linear, "forward", forward)
        losses, model = train_fabric(here, fabric, "gpt", steps=6, accumulate=2, clip={"max_norm": 0.4})
    assert seen == {(wanted_dtype, wanted_dtype, False)}, seen
    kept = torch.bfloat16 if here.case == "bf16-true" else torch.float32
    assert model(make_data("gpt", 2)[0]).dtype == kept, "outputs come back in fp32 unless everything is bf16"
    assert model.module.blocks[0].out.weight.dtype == kept
    wanted = train_plain(
        make_net("gpt"), "gpt", steps=6, micro=4, accumulate=2, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.4)
    )
    assert_close(mean_over_ranks(losses), wanted, 2e-2 if here.case != "bf16-true" else 5e-2)
    if here.case == "16-mixed":
        assert fabric.strategy.precision.scaler.get_scale() == 2.0**16


@on_ranks(2)
def test_inf_on_one_rank_skips_everywhere(here: Here) -> None:
    fabric = make_fabric(precision="16-mixed")
    net = make_net("gpt")
    model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
    inputs, labels = (tensor[here.rank :: 2] for tensor in (make_loader("gpt", 4, 4).dataset.tensors))
    before = full_weights(net)
    fabric.backward(loss_of(model, (inputs, labels)) * (float("inf") if here.rank else 1.0))
    optimizer.step()
    optimizer.zero_grad()
    assert fabric.strategy.precision.scaler.get_scale() == 2.0**15
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(net).items())
    fabric.backward(loss_of(model, (inputs, labels)))
    optimizer.step()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in full_weights(net).items())


@on_ranks(2)
def test_two_models(here: Here) -> None:
    """Each model has its runtime; their steps do not disturb each other, whatever the order of set-up."""
    fabric = make_fabric()
    first, second = make_net("gpt", 1), make_net("mlp", 2)
    one, step_one = fabric.setup(first, make_optimizer(first.parameters()))
    two = fabric.setup_module(second)
    step_two = fabric.setup_optimizers(make_optimizer(two.parameters()))
    losses: dict[str, list[float]] = {"gpt": [], "mlp": []}
    loaders = [make_loader(kind, 10 * 4, 2, rank=here.rank, world=2) for kind in losses]
    for batches in zip(*loaders, strict=True):
        for kind, model, batch in zip(losses, (one, two), batches, strict=True):
            loss = loss_of(model, batch)
            losses[kind].append(loss.item())
            fabric.backward(loss, model=model)
        for stepper in (step_two, step_one):
            stepper.step()
            stepper.zero_grad()
    for kind, seed in (("gpt", 1), ("mlp", 2)):
        assert_close(mean_over_ranks(losses[kind]), train_plain(make_net(kind, seed), kind, steps=10, micro=4))
    runtimes = fabric.strategy.runtimes
    assert [runtime.steps for runtime in runtimes.values()] == [10, 10]
    assert fabric.strategy.runtime is runtimes[second]


@on_ranks(2)
def test_a_compiled_model_keeps_its_own_runtime(here: Here) -> None:
    """Fabric wraps the compiled module anew; micro-batches and steps still reach the runtime of that model."""
    fabric = make_fabric()
    torch._dynamo.reset()
    compiled, other = torch.compile(make_net("gpt"), backend="eager"), make_net("mlp")
    model, optimizer = fabric.setup(compiled, make_optimizer(compiled.parameters()))
    fabric.setup(other, make_optimizer(other.parameters()))
    losses = []
    for index, batch in enumerate(make_loader("gpt", 6 * 4, 2, rank=here.rank, world=2)):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = loss_of(model, batch)
            fabric.backward(loss / 2, model=model)
        losses.append(loss.item())
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    wanted = train_plain(make_net("gpt"), "gpt", steps=3, micro=4, accumulate=2)
    assert_close(mean_over_ranks(losses), wanted, 1e-5)
    first, second = fabric.strategy.runtimes.values()
    assert (first.steps, second.steps) == (3, 0)
    assert second.metrics() == {}


@on_ranks(2, "LightningModule", "marked")
def test_methods_other_than_forward(here: Here) -> None:
    """``training_step`` of a LightningModule, or marked as a forward method, finds its weights gathered."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net("gpt")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return loss_of(self.net, batch)

    fabric = make_fabric()
    module = make_module("gpt") if here.case == "LightningModule" else Marked()
    model, optimizer = fabric.setup(module, make_optimizer(module.parameters()))
    if here.case == "marked":
        model.mark_forward_method("training_step")
    losses = []
    for index, batch in enumerate(make_loader("gpt", 5 * 4, 2, rank=here.rank, world=2)):
        loss = model.training_step(batch, index)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(mean_over_ranks(losses), train_plain(make_net("gpt"), "gpt", steps=5, micro=4))


@on_ranks(2)
def test_model_from_the_meta_device(here: Here) -> None:
    fabric = make_fabric()
    with fabric.init_module(empty_init=True):
        net = Gpt()
    assert net.token.weight.is_meta
    torch.manual_seed(11 + here.rank)
    model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
    losses = []
    for batch in make_loader("gpt", 5 * 4, 2, rank=here.rank, world=2):
        loss = loss_of(model, batch)
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(11)
    assert_close(mean_over_ranks(losses), train_plain(Gpt(), "gpt", steps=5, micro=4))


@on_ranks(2)
def test_evaluation_between_steps(here: Here) -> None:
    """Under ``no_grad`` and ``inference_mode``, before training and between a backward and its step."""
    fabric = make_fabric()
    net = make_net("gpt")
    model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
    tokens, labels = (tensor[here.rank :: 2] for tensor in make_loader("gpt", 4, 4).dataset.tensors)
    plain = make_net("gpt")
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
    fabric.backward(loss_of(model, (tokens, labels)))
    with torch.inference_mode():
        model(tokens)
    optimizer.step()
    losses = train_plain(plain, "gpt", steps=1, micro=4)
    assert losses
    assert_same_weights(full_weights(net), plain.state_dict())


@on_ranks(2)
def test_reductions_and_gathers_of_the_user(here: Here) -> None:
    fabric = make_fabric()
    assert fabric.all_reduce(torch.tensor(float(here.rank)), reduce_op="mean").item() == 0.5
    assert fabric.all_reduce(torch.tensor(here.rank * 4), reduce_op="mean").item() == 2
    assert fabric.all_reduce(torch.tensor(here.rank), reduce_op="sum").item() == 1
    assert fabric.all_gather(torch.tensor(here.rank)).tolist() == [0, 1]
    assert fabric.broadcast({"rank": here.rank}) == {"rank": 0}
    fabric.barrier()


@on_ranks(2)
def test_misuse_is_named(here: Here) -> None:
    fabric = make_fabric()
    with pytest.raises(MemwallError, match=r"before fabric\.setup"):
        fabric.strategy.backward(torch.ones(1, requires_grad=True).sum(), None)
    other = make_net("mlp")
    with pytest.raises(ConfigError, match="no parameter of a model that was set up"):
        fabric.setup_optimizers(make_optimizer(other.parameters()))
    net = make_net("mlp")
    with pytest.raises(ConfigError, match="not in the model"):
        fabric.setup(net, make_optimizer(other.parameters()))
    stepped = make_net("mlp")
    optimizer = make_optimizer(stepped.parameters())
    stepped(torch.zeros(2, 7)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="has stepped before"):
        fabric.setup(stepped, optimizer)
    dist.barrier()
