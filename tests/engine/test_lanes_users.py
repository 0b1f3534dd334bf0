"""Lanes under what users set on FSDP2 modules, against stock FSDP2 under the same settings."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.lanes import FsdpLanes
from tests.engine.lane_cases import (
    GPT,
    MLP,
    TIMEOUT_S,
    assert_close,
    assert_same,
    both,
    by_hand,
    by_user,
    full_gradients,
    gradients,
    mesh_of,
    sgd,
    sharded,
    train,
    weights,
)
from tests.lightning.checks import on_ranks


@on_ranks(2, "sum", "factor 3", "one rank", group="engine")
def test_divide_factors(here):
    """``force_sum`` with a factor, on two ranks and on one: the sum over ranks, divided once."""
    factor = {"sum": 1.0, "factor 3": 3.0, "one rank": 4.0}[here.case]
    mesh = mesh_of(here, "1" if here.case == "one rank" else "2")
    if mesh is None:
        return
    with sharded(GPT, mesh) as (model, _lanes):
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(factor)
        model.loss(model.batch(here.rank)).backward()
        found = full_gradients(model)
    if mesh.size() == 1:
        torch.manual_seed(11)
        plain = GPT()
        (plain.loss(plain.batch(here.rank)) / factor).backward()
        expected = {n: p.grad for n, p in plain.named_parameters()}
    else:
        expected = by_hand(GPT, here, lambda m, r: [m.loss(m.batch(r)) * here.world / factor])
    assert_close(found, expected)


@on_ranks(2, "2", "2x1", group="engine")
def test_a_user_who_reduces_in_fp16(here):
    """fp16 is divided before and after the sum, whichever collective sums."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float16)

    def sharded_by_user(lanes):
        torch.manual_seed(11)
        model = MLP()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh_of(here, here.case), mp_policy=policy)
        fully_shard(model, mesh=mesh_of(here, here.case), mp_policy=policy)
        found = FsdpLanes(model, prefetch=0, reduce_buffers=2, timeout_s=TIMEOUT_S) if lanes else None
        try:
            model.loss(model.batch(here.rank)).backward()
            return gradients(model)
        finally:
            if found is not None:
                found.close()

    assert_same(sharded_by_user(True), sharded_by_user(False))


@on_ranks(2, group="engine")
def test_shards_on_another_dim(here):
    """A user's ``shard_placement_fn``: columns instead of rows."""

    def sharded_by_user(lanes):
        torch.manual_seed(11)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(3)))
        mesh = mesh_of(here, "2")
        for block in model:
            fully_shard(block, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
        fully_shard(model, mesh=mesh)
        found = FsdpLanes(model, prefetch=1, reduce_buffers=2, timeout_s=TIMEOUT_S) if lanes else None
        try:
            seen = []
            for _step in range(2):
                model(torch.randn(3, 4, generator=torch.Generator().manual_seed(here.rank))).square().mean().backward()
                seen.append(gradients(model))
                sgd(model)
            return seen
        finally:
            if found is not None:
                found.close()

    assert_same(sharded_by_user(True), sharded_by_user(False))


@on_ranks(2, "1", "3", group="engine")
def test_post_accumulate_hooks_see_the_final_gradient_once(here):
    micro_batches = int(here.case)

    def run(model, lanes):
        seen = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((name, local_tensor(p.grad).clone(), threading.get_ident()))
            )
        for micro in range(micro_batches):
            seen.clear()
            model.loss(model.batch(here.rank + 10 * micro)).backward()
            assert {thread for *_, thread in seen} == {threading.get_ident()}, "hooks belong on the training thread"
            names = [name for name, *_ in seen]
            assert sorted(names) == sorted(n for n, _ in model.named_parameters())
            now = gradients(model)
            for name, gradient, _ in seen:
                assert torch.equal(gradient, now[name]), f"the hook of {name} ran before its gradient was there"
        return dict(sorted((name, gradient) for name, gradient, _ in seen))

    both(GPT, mesh_of(here, "2"), run)


@on_ranks(2, group="engine")
def test_an_optimizer_in_the_hooks(here):
    """Each parameter is stepped and its gradient freed as soon as it is there."""

    def run(model, lanes):
        optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        losses = []
        for i in range(3):
            loss = model.loss(model.batch(here.rank + 100 * i))
            loss.backward()
            losses.append(loss.detach())
        assert all(p.grad is None for p in model.parameters())
        return losses, weights(model)

    both(GPT, mesh_of(here, "2"), run)


@on_ranks(2, group="engine")
def test_an_all_reduce_hook_sees_and_changes_the_reduced_shards(here):
    def run(model, lanes):
        def double(flat):
            assert flat.dtype == torch.float32
            assert not flat.isnan().any()
            flat.mul_(2)

        for module in model.modules():
            if hasattr(module, "set_all_reduce_hook"):
                module.set_all_reduce_hook(double)
        return train(model, 2, seed=here.rank)

    both(GPT, mesh_of(here, "2"), run)


@on_ranks(2, "last backward", "kept after backward", "kept after forward", "child alone", group="engine")
def test_what_users_set_on_modules(here):
    def run(model, lanes):
        seen = []
        if here.case == "kept after forward":
            model.set_reshard_after_forward(False)
        for micro in range(3):
            if here.case == "last backward":
                model.set_is_last_backward(micro == 2)
            if here.case == "kept after backward":
                model.set_reshard_after_backward(micro == 2)
                model.set_requires_gradient_sync(micro == 2)
            if here.case == "child alone" and micro == 1:
                model.blocks[1](torch.ones(1, model.LENGTH, 10)).sum().backward()
            else:
                model.loss(model.batch(here.rank + 10 * micro)).backward()
            seen.append(gradients(model))
        return seen

    both(GPT, mesh_of(here, "2"), run)


@on_ranks(2, group="engine")
def test_modules_that_a_user_groups(here):
    def prepare(model, mesh):
        fully_shard([model.norm, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)

    assert_same(by_user(here, True, prepare), by_user(here, False, prepare))
