"""A loop under ``MemwallAccelerator``: the losses and weights of a plain single-process loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import GradScalerKwargs
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

from memwall_strategy.accelerate import MemwallPlugin
from tests.accelerate.helpers import make_accelerator, whole_loader
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    assert_close,
    assert_same_weights,
    full_weights,
    loss_of,
    make_data,
    make_net,
    make_optimizer,
    mean_over_ranks,
    train_plain,
)
from tests.lightning.test_parity import Counts


def train(
    acc: Any, kind: str, *, steps: int, optimizer: str = "sgd", clip: str = "none", world: int = 2
) -> tuple[list[float], nn.Module]:
    """The loop of Accelerate's documentation."""
    net = make_net(kind)
    accumulate = acc.gradient_accumulation_steps
    loader = whole_loader(kind, steps * accumulate * 2 * world, 2)
    loader, model, stepper = acc.prepare(loader, net, make_optimizer(net.parameters(), optimizer))
    losses = []
    for batch in loader:
        with acc.accumulate(model):
            loss = loss_of(model, batch)
            acc.backward(loss)
            if acc.sync_gradients and clip == "norm":
                acc.clip_grad_norm_(model.parameters(), 0.4)
            if acc.sync_gradients and clip == "value":
                acc.clip_grad_value_(model.parameters(), 0.01)
            stepper.step()
            stepper.zero_grad()
        losses.append(loss.item())
    return losses, model


PLAIN_CLIPS = {
    "none": None,
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.4),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
}


@on_ranks(2, "gpt-norm-sgd", "gpt-value-adamw", "mlp-norm-sgd", "gpt-none-whole", "gpt-norm-off")
def test_losses_of_a_plain_loop(here: Here) -> None:
    kind, clip, how = here.case.split("-")
    optimizer = "adamw" if how == "adamw" else "sgd"
    off = {"pool": {"enabled": False}, "overlap": {"enabled": False}, "resilience": {"enabled": False}}
    options = {"whole": {"accumulate": "whole"}, "off": off}.get(how, {})
    acc = make_accelerator(MemwallPlugin(**options), gradient_accumulation_steps=4)
    losses, model = train(acc, kind, steps=6, optimizer=optimizer, clip=clip)
    net = make_net(kind)
    wanted = train_plain(
        net, kind, steps=6, micro=4, accumulate=4, optimizer=optimizer, clip=PLAIN_CLIPS[clip]
    )
    assert_close(mean_over_ranks(losses), wanted, 1e-6 if optimizer == "sgd" else 1e-5)
    assert_same_weights(full_weights(model), net.state_dict(), 1e-5 if optimizer == "sgd" else 1e-4)
    assert isinstance(model, FSDPModule)
    runtime = acc.memwall.runtime
    assert runtime.steps == 6
    assert how == "off" or 0 <= runtime.metrics()["memwall/overlap/exposed_fraction"] <= 1
    acc.free_memory()


@on_ranks(2)
def test_replicas_meet_once_per_step(here: Here) -> None:
    """``accumulate`` defers the sum over replicas to the last micro-batch."""
    acc = make_accelerator(MemwallPlugin(replicate=2), gradient_accumulation_steps=3)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counts = Counts(monkeypatch)
        losses, _ = train(acc, "mlp", steps=4)
    assert counts.tally["all_reduce", 2] == 4 * len(acc.memwall.runtime.units), counts.tally
    assert_close(mean_over_ranks(losses), train_plain(make_net("mlp"), "mlp", steps=4, micro=4, accumulate=3))
    acc.free_memory()


@on_ranks(2)
def test_accumulation_ends_with_the_loader(here: Here) -> None:
    """Five micro-batches by twos: the optimizer steps three times, and a second pass starts a new count."""
    acc = make_accelerator(gradient_accumulation_steps=2)
    net = make_net("mlp")
    model, stepper, loader = acc.prepare(net, make_optimizer(net.parameters()), whole_loader("mlp", 20, 2))
    synced = []
    for _ in range(2):
        for batch in loader:
            with acc.accumulate(model):
                acc.backward(loss_of(model, batch))
                synced.append(acc.sync_gradients)
                stepper.step()
                stepper.zero_grad()
    assert synced == [False, True, False, True, True] * 2
    assert acc.memwall.runtime.steps == 6
    acc.free_memory()


@on_ranks(2, "bf16", "fp16")
def test_precision(here: Here) -> None:
    """Computed in the low precision without autocast; outputs and weights in fp32; clipping unscales."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[here.case]
    acc = make_accelerator(mixed_precision=here.case, gradient_accumulation_steps=2)
    seen: set[Any] = set()
    real = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen.add((x.dtype, self.weight.dtype, torch.is_autocast_enabled("cpu")))
        return real(self, x)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nn.Linear, "forward", forward)
        losses, model = train(acc, "gpt", steps=6, clip="norm")
    assert seen == {(low, low, False)}, seen
    assert model.blocks[0].out.weight.dtype == torch.float32
    with acc.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == low, "the user's own arithmetic does autocast"
        assert model(make_data("gpt", 2)[0]).dtype == torch.float32
    wanted = train_plain(make_net("gpt"), "gpt", steps=6, micro=4, accumulate=2, clip=PLAIN_CLIPS["norm"])
    assert_close(mean_over_ranks(losses), wanted, 2e-2)
    assert (acc.scaler is not None) == (here.case == "fp16")
    acc.free_memory()


@on_ranks(2)
def test_inf_on_one_rank_skips_everywhere(here: Here) -> None:
    acc = make_accelerator(mixed_precision="fp16")
    net = make_net("gpt")
    optimizer = make_optimizer(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, stepper, scheduler = acc.prepare(net, optimizer, scheduler)
    batch = tuple(tensor[here.rank :: 2] for tensor in make_data("gpt", 4))
    before = full_weights(model)
    acc.backward(loss_of(model, batch) * (float("inf") if here.rank else 1.0))
    stepper.step()
    scheduler.step()
    stepper.zero_grad()
    assert acc.optimizer_step_was_skipped
    assert acc.scaler.get_scale() == 2.0**15
    assert scheduler.get_last_lr() == [0.1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(model).items())
    acc.backward(loss_of(model, batch))
    stepper.step()
    assert not acc.optimizer_step_was_skipped
    assert any(not torch.equal(tensor, before[name]) for name, tensor in full_weights(model).items())
    acc.free_memory()


@on_ranks(2, "no", "fp16")
def test_two_models_and_two_optimizers_each(here: Here) -> None:
    """Prepared in one call in a mixed order; clipping one model's gradients leaves the other's scaled."""
    # A scale at which these nets do not overflow, so that no step is skipped.
    acc = make_accelerator(mixed_precision=here.case, kwargs_handlers=[GradScalerKwargs(init_scale=2.0**8)])
    nets = {"gpt": make_net("gpt", 1), "mlp_alike": make_net("mlp_alike", 2)}
    steppers = {
        kind: [make_optimizer(list(net.parameters())[i::2]) for i in range(2)] for kind, net in nets.items()
    }
    groups = [stepper.param_groups[0] for each in steppers.values() for stepper in each]
    first, last = steppers["mlp_alike"]
    prepared = acc.prepare(first, nets["mlp_alike"], *steppers["gpt"], nets["gpt"], last)
    steppers = {"mlp_alike": [prepared[0], prepared[5]], "gpt": [prepared[2], prepared[3]]}
    assert prepared[1] is nets["mlp_alike"] and prepared[4] is nets["gpt"]
    found = [stepper.param_groups[0] for each in ("gpt", "mlp_alike") for stepper in steppers[each]]
    assert all(a is b for a, b in zip(found, groups, strict=True)), "groups keep their identity"
    loaders = {kind: acc.prepare(whole_loader(kind, 8 * 4, 2)) for kind in nets}
    losses: dict[str, list[float]] = {"gpt": [], "mlp_alike": []}
    for batches in zip(*loaders.values(), strict=True):
        for kind, batch in zip(nets, batches, strict=True):
            loss = loss_of(nets[kind], batch)
            losses[kind].append(loss.item())
            acc.backward(loss)
        for kind, net in nets.items():
            acc.clip_grad_norm_(net.parameters(), 0.4)
            acc.clip_grad_value_(net.parameters(), 0.4)  # changes nothing more
            for stepper in steppers[kind]:
                stepper.step()
                stepper.zero_grad()
    for kind, seed in (("gpt", 1), ("mlp_alike", 2)):
        wanted = train_plain(make_net(kind, seed), kind, steps=8, micro=4, clip=PLAIN_CLIPS["norm"])
        assert_close(mean_over_ranks(losses[kind]), wanted, 1e-6 if here.case == "no" else 2e-2)
    assert acc.scaler is None or acc.scaler.get_scale() == 2.0**8
    runtimes = acc.memwall.runtimes
    assert [runtime.steps for runtime in runtimes.values()] == [16, 16]
    assert acc.memwall.runtime is list(runtimes.values())[-1]
    acc.free_memory()
    assert acc.memwall.runtime is None


@on_ranks(2, "1-default", "2-default", "2-whole", "2-replicas")
def test_unequal_label_counts_are_exact(here: Here) -> None:
    """Ranks and micro-batches with other numbers of labels, none on some: the step is that of one big batch."""
    accumulate, how = int(here.case[0]), here.case[2:]
    options = {"default": {}, "whole": {"accumulate": "whole"}, "replicas": {"replicate": 2}}[how]
    acc = make_accelerator(MemwallPlugin(**options), gradient_accumulation_steps=accumulate)
    net = make_net("gpt")
    tokens, labels = make_data("gpt", 5 * accumulate * 4)
    random = torch.Generator().manual_seed(4)
    labels = labels.masked_fill(torch.rand(labels.shape, generator=random) < 0.5, -100)
    labels[2:4] = -100  # rank 1's first micro-batch has no label at all
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=2)
    model, stepper, loader = acc.prepare(net, make_optimizer(net.parameters()), loader)
    for inputs, wanted in loader:
        with acc.accumulate(model):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten(), ignore_index=-100)
            acc.backward(loss, tokens=(wanted != -100).sum())
            norm = acc.clip_grad_norm_(model.parameters(), 0.4) if acc.sync_gradients else None
            stepper.step()
            stepper.zero_grad()
    plain = make_net("gpt")
    optimizer = make_optimizer(plain.parameters())
    size = accumulate * 4
    for inputs, wanted in zip(tokens.split(size), labels.split(size), strict=True):
        F.cross_entropy(plain(inputs).flatten(0, 1), wanted.flatten(), ignore_index=-100).backward()
        plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
    assert_close([norm.item()], [plain_norm.item()], 1e-5)
    assert_same_weights(full_weights(model), plain.state_dict())
    acc.free_memory()


class Broken(Exception):
    pass


@on_ranks(2, "forward", "between", "second_forward", "step", "backward")
def test_an_exception_leaves_no_stale_gradient(here: Here) -> None:
    """A step that breaks in its middle, on all ranks, changes nothing of the steps after it."""
    acc = make_accelerator(gradient_accumulation_steps=2)
    net = make_net("mlp_alike")
    model, stepper, loader = acc.prepare(net, make_optimizer(net.parameters()), whole_loader("mlp", 6 * 2 * 4, 2))
    batches = list(loader)

    def fail(*_: Any) -> None:
        raise Broken

    broken = {
        "forward": (0, lambda: model.layers[1].register_forward_pre_hook(fail)),
        "second_forward": (1, lambda: model.layers[1].register_forward_pre_hook(fail)),
        "backward": (0, lambda: None),
        "step": (1, lambda: stepper.optimizer.register_step_pre_hook(fail)),
        "between": (0, lambda: None),
    }
    at, plant = broken[here.case]
    with pytest.raises(Broken):
        for i, batch in enumerate(batches[:2]):
            handle = plant() if i == at else None
            with acc.accumulate(model):
                try:
                    loss = loss_of(model, batch)
                    if here.case == "backward":
                        loss.register_hook(fail)
                    acc.backward(loss)
                    if here.case == "between":
                        raise Broken
                    stepper.step()
                    stepper.zero_grad()
                finally:
                    if handle is not None:
                        handle.remove()
    assert all(parameter.grad is None for parameter in model.parameters())
    acc.step = 0
    losses = []
    for batch in batches:
        with acc.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            acc.backward(loss)
            stepper.step()
            stepper.zero_grad()
    wanted = train_plain(make_net("mlp_alike"), "mlp", steps=6, micro=4, accumulate=2)
    assert_close(mean_over_ranks(losses), wanted)
    acc.free_memory()


@on_ranks(2)
def test_evaluation_and_the_end(here: Here) -> None:
    """Evaluation between two micro-batches; ``free_memory`` gives the model back; another model can follow."""
    acc = make_accelerator(gradient_accumulation_steps=2)
    losses, model = train(acc, "gpt", steps=2)
    inputs, labels = make_data("gpt", 4)
    part = slice(2 * here.rank, 2 * here.rank + 2)
    acc.step = 0
    with acc.accumulate(model):
        acc.backward(loss_of(model, (inputs[part], labels[part])))
    model.eval()
    with torch.inference_mode():
        model(inputs)
    model.train()
    gradient = full_gradients(model)
    plain = make_net("gpt")
    plain.load_state_dict(full_weights(model))
    (loss_of(plain, (inputs, labels)) / 2).backward()
    assert_same_weights(gradient, {name: p.grad for name, p in plain.named_parameters()})
    acc.free_memory()
    assert model(inputs).shape == (4, 6, 31), "a plain FSDP2 model"
    losses, _ = train(acc, "mlp", steps=3)
    assert_close(mean_over_ranks(losses), train_plain(make_net("mlp"), "mlp", steps=3, micro=4, accumulate=2))
    acc.free_memory()
    dist.barrier()


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient, whole, on every rank."""
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
