"""The gradient scaler over shards: one decision on all ranks, the same scale, state that survives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.scaler import ShardedGradScaler
from tests.engine.lane_cases import MLP, assert_same, gradients, mesh_of, sharded, weights
from tests.lightning.checks import on_ranks

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def test_the_private_seam_of_torchs_scaler_is_still_there():
    """``unscale_`` must call ``_unscale_grads_`` and ``step`` and ``update`` must read what it returned."""

    class Spy(ShardedGradScaler):
        calls = 0

        def _unscale_grads_(self, *args):
            Spy.calls += 1
            found = super()._unscale_grads_(*args)
            return {device: torch.ones_like(value) for device, value in found.items()}

    scaler = Spy("cpu", init_scale=8.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert Spy.calls == 1
    assert torch.equal(weight, torch.ones(2)), "the step was not skipped although an inf was reported"
    assert scaler.get_scale() == 4.0


def test_gradients_kept_in_fp16_are_refused():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = ShardedGradScaler("cpu")
    scaler.scale(weight.sum().float()).backward()
    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.unscale_(torch.optim.SGD([weight], lr=1.0))


def one_step(model, scaler, optimizer, rank, spoil=False):
    optimizer.zero_grad()
    scaler.scale(model.loss(model.batch(rank))).backward()
    if spoil:
        local_tensor(model.start.weight.grad).view(-1)[0] = math.inf
    scaler.step(optimizer)
    scaler.update()


@on_ranks(2, *OPTIMIZERS, group="engine")
def test_an_inf_on_one_rank_skips_the_step_on_every_rank(here):
    with sharded(MLP, mesh_of(here, "2")) as (model, _):
        optimizer = OPTIMIZERS[here.case](model.parameters())
        scaler = ShardedGradScaler("cpu", init_scale=64.0, growth_interval=2)
        before = weights(model)
        one_step(model, scaler, optimizer, here.rank, spoil=here.rank == 1)
        assert_same(weights(model), before)
        assert scaler.get_scale() == 32.0
        one_step(model, scaler, optimizer, here.rank)
        one_step(model, scaler, optimizer, here.rank)
        after = weights(model)
        used = [n for n, p in model.named_parameters() if p.grad is not None and local_tensor(p).numel()]
        assert used
        assert not any(torch.equal(after[n], before[n]) for n in used)
        assert scaler.get_scale() == 64.0


@on_ranks(2, *OPTIMIZERS, group="engine")
def test_scaled_steps_equal_unscaled_ones(here):
    """A scale that is a power of two costs no bit."""

    def run(scale):
        with sharded(MLP, mesh_of(here, "2")) as (model, _):
            optimizer = OPTIMIZERS[here.case](model.parameters())
            scaler = ShardedGradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
            for _ in range(3):
                one_step(model, scaler, optimizer, here.rank)
            return weights(model)

    assert_same(run(1024.0), run(1.0))


@on_ranks(2, group="engine")
def test_unscaling_first_shows_the_true_gradients(here):
    with sharded(MLP, mesh_of(here, "2")) as (model, _):
        model.loss(model.batch(here.rank)).backward()
        expected = gradients(model)
        model.zero_grad()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scaler = ShardedGradScaler("cpu", init_scale=512.0)
        scaler.scale(model.loss(model.batch(here.rank))).backward()
        scaler.unscale_(optimizer)
        assert_same(gradients(model), expected)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)


@on_ranks(2, group="engine")
def test_a_rank_without_any_gradient_takes_part(here):
    """Its shards may all be empty, or its parameters unused: the agreement still needs it."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    mesh_of(here, "2")
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    loss = scaler.scale(weight.sum())
    if here.rank == 0:
        loss.backward()
        weight.grad[0] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones(3))
    assert scaler.get_scale() == 2.0


@on_ranks(2, group="engine")
def test_state_goes_round(here):
    with sharded(MLP, mesh_of(here, "2")) as (model, _):
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scaler = ShardedGradScaler("cpu", init_scale=64.0, growth_interval=3)
        one_step(model, scaler, optimizer, here.rank, spoil=here.rank == 0)
        one_step(model, scaler, optimizer, here.rank)
        again = ShardedGradScaler("cpu")
        again.load_state_dict(scaler.state_dict())
        assert again.state_dict() == scaler.state_dict()
        for _ in range(2):
            one_step(model, again, optimizer, here.rank)
        assert again.get_scale() == 64.0  # the third step without an inf, counted across the restart
