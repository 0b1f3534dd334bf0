"""Losses and weights equal those of one process on the concatenated batch, through a real Trainer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from memwall_strategy.config import OverlapConfig, PoolConfig, ResilienceConfig
from memwall_strategy.engine.fsdp import fsdp_groups
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
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

STEPS, FEW_STEPS, ACCUMULATE, PER_RANK = 20, 6, 4, 2
CLIP_NORM, CLIP_VALUE = 0.4, 0.01

CLIPS = {
    "none": ({}, None),
    "norm": (
        {"gradient_clip_val": CLIP_NORM},
        lambda parameters: nn.utils.clip_grad_norm_(parameters, CLIP_NORM),
    ),
    "value": (
        {"gradient_clip_val": CLIP_VALUE, "gradient_clip_algorithm": "value"},
        lambda parameters: nn.utils.clip_grad_value_(parameters, CLIP_VALUE),
    ),
}


def compare(
    here: Here,
    kind: str,
    *,
    clip: str,
    strategy: object = "memwall",
    optimizer: str = "sgd",
    steps: int = STEPS,
    accumulate: int = ACCUMULATE,
) -> None:
    """Steps of some micro-batches against the plain loop."""
    options, plain_clip = CLIPS[clip]
    module = make_module(kind, optimizer=optimizer)
    trainer = make_trainer(
        here.world,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        sync_batchnorm=kind == "conv",
        **options,
    )
    micro = PER_RANK * here.world
    trainer.fit(module, make_loader(kind, steps * accumulate * micro, PER_RANK, rank=here.rank, world=here.world))
    assert trainer.global_step == steps
    net = make_net(kind)
    wanted = train_plain(
        net, kind, steps=steps, micro=micro, accumulate=accumulate, optimizer=optimizer, clip=plain_clip
    )
    assert_close(mean_over_ranks(module.losses), wanted)
    assert_same_weights(full_weights(module.net), net.state_dict())


def memwall(**options: object) -> object:
    """``MemwallStrategy`` with options."""
    from memwall_strategy.lightning import MemwallStrategy

    return MemwallStrategy(**options)


OPTIONS = {
    "default": {},
    "whole": {"accumulate": "whole"},
    "no_lanes": {"overlap": OverlapConfig(lanes=False)},
    "off": {"pool": PoolConfig(enabled=False), "overlap": OverlapConfig(enabled=False),
            "resilience": ResilienceConfig(enabled=False)},
    "ahead": {"overlap": OverlapConfig(prefetch=3, reduce_buffers=1)},
    "shared": {"overlap": OverlapConfig(shared_memory=True)},
    "hsdp_shared": {"replicate": 2, "overlap": OverlapConfig(shared_memory=True)},
    "hsdp": {"replicate": 2},
    "hsdp_whole": {"replicate": 2, "accumulate": "whole"},
    "hsdp_no_lanes": {"replicate": 2, "overlap": OverlapConfig(lanes=False)},
}  # fmt: skip


@on_ranks(2, *(f"{kind}-{clip}" for kind in ("gpt", "conv", "mlp") for clip in ("norm", "value")), group="two")
def test_two_ranks(here: Here) -> None:
    kind, clip = here.case.split("-")
    compare(here, kind, clip=clip, steps=STEPS if clip == "norm" else FEW_STEPS)


@on_ranks(2, "whole-gpt", "no_lanes-mlp_alike", "ahead-mlp", "off-conv", "hsdp-gpt", "shared-gpt")
def test_options_on_two_ranks(here: Here) -> None:
    options, kind = here.case.split("-")
    compare(here, kind, clip="norm", strategy=memwall(**OPTIONS[options]), optimizer="adamw", steps=FEW_STEPS)


@on_ranks(4, "default-gpt", "default-conv", "hsdp-mlp", group="four")
def test_four_ranks(here: Here) -> None:
    options, kind = here.case.split("-")
    clip = "value" if kind == "conv" else "norm"
    compare(here, kind, clip=clip, strategy=memwall(**OPTIONS[options]), accumulate=1)


@on_ranks(4, "default-mlp", "hsdp-gpt", "hsdp-conv", "hsdp_whole-mlp", "hsdp_no_lanes-mlp_alike",
          "shared-conv", "hsdp_shared-gpt")  # fmt: skip
def test_options_on_four_ranks(here: Here) -> None:
    options, kind = here.case.split("-")
    compare(here, kind, clip="norm", strategy=memwall(**OPTIONS[options]), steps=FEW_STEPS)


class Counts:
    """Counts the gradients that go through ``torch.distributed.all_reduce`` and its reduce-scatter, by group size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tally: Counter[tuple[str, int]] = Counter()
        scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        monkeypatch.setattr(dist, "all_reduce", partial(self._count, "all_reduce", dist.all_reduce))
        monkeypatch.setattr(dist, scatter, partial(self._count, "reduce_scatter", getattr(dist, scatter)))

    def _count(self, name: str, real: Callable, *args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("tensor", kwargs.get("output"))
        if tensor.dtype == torch.float32 and tensor.numel() > 16:  # gradients, not flags, norms or losses
            self.tally[name, dist.get_world_size(kwargs.get("group"))] += 1
        return real(*args, **kwargs)


@on_ranks(4, "lanes", "no_lanes", "whole")
def test_replicas_meet_once_per_step(here: Here) -> None:
    """Gradients cross replicas once per optimizer step, and racks reduce each micro-batch (or once, ``whole``)."""
    overlap = OverlapConfig(lanes=here.case != "no_lanes", trace=True)
    accumulate = "whole" if here.case == "whole" else "sharded"
    module = make_module("gpt")
    strategy = memwall(replicate=2, overlap=overlap, accumulate=accumulate)
    trainer = make_trainer(here.world, strategy=strategy, accumulate_grad_batches=3)
    steps = 2
    with pytest.MonkeyPatch.context() as monkeypatch:
        counts = Counts(monkeypatch)
        trainer.fit(module, make_loader("gpt", steps * 3 * 8, 2, rank=here.rank, world=4))
    runtime = trainer.strategy.runtime
    units = len(runtime.units)
    assert units == 3, runtime.units
    assert counts.tally["all_reduce", 2] == units * steps, counts.tally
    trace = json.loads(runtime.write_trace(here.folder / f"{here.rank}.json").read_text())["traceEvents"]
    on_lanes = sum(event["name"].startswith("reduce ") for event in trace)
    in_rack = counts.tally["reduce_scatter", 2] if here.case == "no_lanes" else on_lanes
    assert in_rack == units * steps * (1 if here.case == "whole" else 3), (counts.tally, on_lanes)


@on_ranks(4)
def test_no_whole_gradients_rest_between_micro_batches(here: Here) -> None:
    """Deferring the sum over replicas keeps shards, not whole gradients, between micro-batches."""
    module = make_module("gpt")
    held: list[tuple[int, int]] = []

    def look(*_: object) -> None:
        account = module.trainer.strategy.runtime.memory
        held.append((sum(t.numel() * 4 for t in whole_gradients(module)), account.current()["grad"]))

    module.on_train_batch_end = look
    trainer = make_trainer(here.world, strategy=memwall(replicate=2), accumulate_grad_batches=3)
    trainer.fit(module, make_loader("gpt", 6 * 8, 2, rank=here.rank, world=4))
    whole_bytes = 4 * sum(p.numel() for p in make_net("gpt").parameters())
    assert [kept for kept, _ in held] == [0] * 6, held
    assert all(counted <= whole_bytes * 0.6 for _, counted in held), (held, whole_bytes)


def whole_gradients(module: nn.Module) -> list[torch.Tensor]:
    """Unsharded gradients that FSDP2 holds."""
    return [
        gradient
        for group in fsdp_groups(module)
        for param in group.fsdp_params
        for whole in [getattr(param, "_unsharded_param", None)]
        for gradient in (param.unsharded_accumulated_grad, None if whole is None else whole.grad)
        if gradient is not None
    ]


@on_ranks(4, "gpt", "mlp")
def test_same_gradient_on_both_meshes(here: Here) -> None:
    """The gradient that clipping and hooks see is the same on a 1-D and on a 2-D mesh, and that of one batch."""
    kind, seen = here.case, {}
    for replicate in (1, 2, 4):
        module = make_module(kind)

        def note(_: Any, module: Any = module, replicate: int = replicate) -> None:
            seen[replicate] = {n: p.grad.full_tensor() for n, p in module.net.named_parameters() if p.grad is not None}

        module.on_before_optimizer_step = note
        trainer = make_trainer(here.world, strategy=memwall(replicate=replicate), accumulate_grad_batches=2)
        trainer.fit(module, make_loader(kind, 16, 2, rank=here.rank, world=4))
    net = make_net(kind)
    for batch in zip(*(tensor.split(8) for tensor in make_data(kind, 16)), strict=True):
        (loss_of(net, batch) / 2).backward()
    wanted = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    for replicate in (1, 2, 4):
        assert_same_weights(seen[replicate], wanted)


@on_ranks(2)
def test_hooks_fire_once_and_see_finished_gradients(here: Here) -> None:
    """``on_after_backward`` sees the running sum, post-accumulate hooks see the data, the optimizer steps once."""
    module = make_module("mlp")
    after_backward: list[float] = []
    before_step: list[float] = []
    accumulated: Counter[str] = Counter()
    poisoned: list[str] = []

    def norm() -> float:
        squares = [p.grad.full_tensor().square().sum() for p in module.net.parameters() if p.grad is not None]
        return torch.stack(squares).sum().sqrt().item()

    def start() -> None:
        for name, parameter in module.net.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(met, name))

    def met(name: str, parameter: torch.Tensor) -> None:
        accumulated[name] += 1
        if not parameter.grad.to_local().isfinite().all() or parameter.grad.to_local().abs().max() > 100:
            poisoned.append(name)

    module.on_fit_start = start
    module.on_after_backward = lambda: after_backward.append(norm())
    module.on_before_optimizer_step = lambda optimizer: before_step.append(norm())
    steps = Counter()

    def count_steps() -> Any:
        optimizer = make_optimizer(module.parameters())
        optimizer.register_step_post_hook(lambda *_: steps.update(["optimizer"]))
        return optimizer

    module.configure_optimizers = count_steps
    trainer = make_trainer(here.world, accumulate_grad_batches=3)
    with poisoned_memory():
        trainer.fit(module, make_loader("mlp", 3 * 3 * 4, 2, rank=here.rank, world=2))
    net = make_net("mlp")
    optimizer = make_optimizer(net.parameters())
    wanted, wanted_before = [], []
    for i, batch in enumerate(zip(*(tensor.split(4) for tensor in make_data("mlp", 36)), strict=True)):
        (loss_of(net, batch) / 3).backward()
        wanted.append(torch.stack([p.grad.square().sum() for p in net.parameters() if p.grad is not None]).sum().sqrt())
        if i % 3 == 2:
            wanted_before.append(wanted[-1])
            optimizer.step()
            optimizer.zero_grad()
    assert_close(after_backward, [w.item() for w in wanted], 1e-5)
    assert_close(before_step, [w.item() for w in wanted_before], 1e-5)
    assert steps["optimizer"] == 3
    assert not poisoned
    assert accumulated["layers.0.always.weight"] == 9, accumulated
    assert not any("never" in name for name in accumulated), accumulated


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New uninitialized tensors are full of huge values: what is read before it is written shows."""
    real = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = real(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta and type(tensor) is torch.Tensor:
            with torch.no_grad():
                tensor.fill_(1e30)
        return tensor

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = real


@on_ranks(2, "default", "no_lanes")
def test_poisoned_buffers_do_not_leak(here: Here) -> None:
    """Fresh buffers full of garbage change nothing."""
    with poisoned_memory():
        compare(here, "mlp_alike", clip="norm", strategy=memwall(**OPTIONS[here.case]), steps=FEW_STEPS)


def stock_module(kind: str, **options: Any) -> Any:
    """The module with a ``configure_model`` that shards what memwall would."""
    module = make_module(kind, **options)

    def configure_model() -> None:
        if isinstance(module.net, FSDPModule):
            return
        mesh = module.device_mesh["data_parallel"]
        for unit in module.net.blocks if kind == "gpt" else module.net.layers:
            fully_shard(unit, mesh=mesh)
        fully_shard(module.net, mesh=mesh, reshard_after_forward=False)

    # Lightning asks the class whether the method is overridden.
    stock = type("Stock", (type(module),), {"configure_model": lambda self: configure_model()})
    module.__class__ = stock
    return module


@on_ranks(2, "gpt", "mlp_alike", group="stock")
def test_all_off_equals_stock_bit_for_bit(here: Here) -> None:
    """With every pillar off, and with only the pool on, losses and weights are stock Lightning's, to the last bit."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    kind = here.case
    loader = partial(make_loader, kind, 4 * 2 * 4, 2, rank=here.rank, world=2)
    runs = {}
    variants = {
        "stock": (stock_module, lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
        "off": (make_module, lambda: memwall(**OPTIONS["off"])),
        "off, own sharding": (stock_module, lambda: memwall(**OPTIONS["off"])),
        "lanes": (make_module, lambda: memwall()),
        "lanes, own sharding": (stock_module, lambda: memwall()),
    }
    for name, (make, strategy) in variants.items():
        module = make(kind, optimizer="adamw")
        trainer = make_trainer(2, strategy=strategy(), accumulate_grad_batches=2, gradient_clip_val=0.5)
        trainer.fit(module, loader())
        runs[name] = module.losses, full_weights(module.net)
    for name, (losses, weights) in runs.items():
        assert losses == runs["stock"][0], name
        for key, tensor in runs["stock"][1].items():
            assert torch.equal(weights[key], tensor), (name, key)
