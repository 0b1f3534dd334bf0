"""No forward uses weights gathered for an earlier one, and keeping them fresh costs no gather in training."""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from memwall_strategy.engine import lanes as lanes_module
from memwall_strategy.engine.fresh import keep_fresh
from memwall_strategy.engine.fsdp import fsdp_groups
from memwall_strategy.engine.lanes import FsdpLanes
from memwall_strategy.engine.sharding import shard_model
from tests.engine.lane_cases import GPT, MLP, MODELS, TIMEOUT_S, both, mesh_of, sharded, train
from tests.lightning.checks import on_ranks


@on_ranks(2, "trained", "evaluated", "reordered", "skipped", "with gradient", group="engine")
def test_an_edit_of_the_weights_is_seen_by_the_next_forward(here):
    """Even through ``.data``, and whatever forward ran before: nothing gathered earlier may be used."""

    def make():
        return MLP() if here.case == "skipped" else GPT()

    with sharded(make, mesh_of(here, "2")) as (model, _lanes):
        parameters = list(model.parameters())  # what an optimizer or an averaging callback holds
        batch = model.batch(here.rank)
        model.loss(batch).backward()
        if here.case == "reordered":
            model.order = [2, 1, 0]
        if here.case == "skipped":
            model.skip = {1, 2}
        if here.case != "trained":
            with torch.set_grad_enabled(here.case == "with gradient"):
                model.loss(batch)
        if here.case == "skipped":
            model.skip = set()
        if here.case != "with gradient":  # there, FSDP2 shows whole weights from a forward to its backward
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        for p in parameters:
            p.data.mul_(1.5)
        with torch.no_grad():
            found = model.loss(batch)
        torch.manual_seed(11)
        plain = make()
        plain.order, plain.skip = getattr(model, "order", None), getattr(model, "skip", None)
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(1.5)
            torch.testing.assert_close(found, plain.loss(batch), rtol=1e-6, atol=0)


@on_ranks(2, "no_grad", "inference", "sanity check", group="engine")
def test_evaluation_between_steps(here):
    """Also before the first step, and also in inference mode."""
    mode = torch.no_grad if here.case == "no_grad" else torch.inference_mode

    def run(model, lanes):
        seen = []
        for step in range(2):
            if step or here.case == "sanity check":
                with mode():
                    seen.append(model.loss(model.batch(here.rank + 50)).clone())
            seen += train(model, 1, seed=here.rank + step)
        return [torch.as_tensor(x) if isinstance(x, torch.Tensor) else x for x in seen]

    both(GPT, mesh_of(here, "2"), run)


@on_ranks(2, "0", "1", "3", group="engine")
def test_a_step_gathers_each_unit_twice_and_the_root_once(here):
    """Prefetch, and keeping gathers fresh, cost no gather more."""
    gathered = []
    gather = lanes_module.LaneAllGather.__call__

    def count(*args, **named):
        gathered.append(1)
        return gather(*args, **named)

    with sharded(GPT, mesh_of(here, "2"), prefetch=int(here.case)) as (model, lanes):
        model.loss(model.batch(0)).backward()
        with mock.patch.object(lanes_module.LaneAllGather, "__call__", count):
            for _ in range(3):
                gathered.clear()
                model.loss(model.batch(0)).backward()
                lanes.gather.drain()
                assert len(gathered) == 2 * len(model.blocks) + 1
            gathered.clear()
            with torch.no_grad():
                model.loss(model.batch(0))
            lanes.gather.drain()
            assert len(gathered) == len(model.blocks) + 1


@on_ranks(2, group="engine")
def test_what_the_user_gathered_stays_gathered(here):
    """``module.unshard()`` around a method that FSDP2 does not hook, and weights kept over micro-batches."""
    with sharded(GPT, mesh_of(here, "2")) as (model, _):
        model.loss(model.batch(0)).backward()
        model.unshard()
        with torch.no_grad():
            model.blocks[0](torch.randn(1, 6, 10))  # a forward of a child alone starts an iteration
        assert model.head.weight.shape == (29, 10)
        assert not hasattr(model.head.weight, "device_mesh"), "the root's weights were resharded under the user's hands"
        model.reshard()
    with sharded(GPT, mesh_of(here, "2")) as (model, _):
        model.set_reshard_after_backward(False)
        model.loss(model.batch(0)).backward()
        model.loss(model.batch(1)).backward()
        assert all(group.is_unsharded for group in fsdp_groups(model))


@on_ranks(2, group="engine")
def test_a_unit_that_was_frozen_as_a_whole_thaws_in_mixed_precision(here):
    """FSDP2 itself looks at dtypes once, when nothing of it needed a gradient."""
    make = MODELS["frozen"]
    found = []
    for precision in ("bf16-mixed", "32-true"):
        with sharded(make, mesh_of(here, "2"), precision=precision) as (model, _):
            model.loss(model.batch(here.rank)).backward()
            assert model.blocks[0].up.weight.grad is None
            model.zero_grad()
            model.blocks[0].requires_grad_(True)
            model.loss(model.batch(here.rank)).backward()
            found.append(model.blocks[0].up.weight.grad.full_tensor())
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(*found, rtol=0.1, atol=0.01)  # bf16 arithmetic


@on_ranks(2, group="engine")
def test_a_user_shards_on_after_us(here):
    """A wrapper around a sharded model, sharded itself: no part of it expects ours everywhere."""
    inner = MLP()
    shard_model(inner, mesh_of(here, "2"), precision="32-true")
    outer = nn.Sequential(inner, nn.Linear(3, 3))
    fully_shard(outer, mesh=mesh_of(here, "2"))
    lanes = FsdpLanes(outer, prefetch=1, reduce_buffers=2, timeout_s=TIMEOUT_S)
    outer(inner.batch(here.rank)).sum().backward()
    lanes.close()
    assert outer[1].weight.grad is not None
    assert inner.end.weight.grad is not None


@on_ranks(2, group="engine")
def test_a_model_that_its_owner_sharded_can_be_kept_fresh_too(here):
    """And twice is once."""
    torch.manual_seed(11)
    model, mesh = GPT(), mesh_of(here, "2")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    keep_fresh(model)
    overrides = [dict(vars(group)) for group in fsdp_groups(model)]
    keep_fresh(model)
    for before, group in zip(overrides, fsdp_groups(model), strict=True):
        assert vars(group)["unshard"] is before["unshard"]
    parameters = list(model.parameters())
    with torch.no_grad():
        model.loss(model.batch(here.rank))
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        first = model.loss(model.batch(here.rank))
        for p in parameters:
            p.data.mul_(0.5)
        assert not torch.equal(model.loss(model.batch(here.rank)), first)
