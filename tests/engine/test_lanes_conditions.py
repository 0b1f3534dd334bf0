"""Lanes under everything that a training loop may do to a model, against stock FSDP2 and, where stock has no answer,
against the arithmetic by hand."""

from __future__ import annotations

import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from memwall_strategy.core.block import Kind
from memwall_strategy.core.errors import TransferError
from memwall_strategy.engine import lanes as lanes_module
from memwall_strategy.engine.fsdp import local_tensor, state_groups
from memwall_strategy.engine.lanes import FsdpLanes
from memwall_strategy.engine.reset import reset_aborted_step
from memwall_strategy.engine.sharding import set_prefetch, shard_model
from tests.engine.lane_cases import (
    GPT,
    MLP,
    MODELS,
    TIMEOUT_S,
    assert_close,
    assert_same,
    both,
    by_hand,
    finish,
    full_gradients,
    gradients,
    hold,
    mesh_of,
    sgd,
    sharded,
    train,
    weights,
)
from tests.lightning.checks import on_ranks

# -- parameters that are not used --


@on_ranks(2, group="engine")
def test_parameters_used_nowhere_keep_no_gradient(here):
    with sharded(MLP, mesh_of(here, "2")) as (model, _lanes):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        before = weights(model)
        model.loss(model.batch(here.rank)).backward()
        unused = {n for n, p in model.named_parameters() if p.grad is None}
        assert unused == {n for n in before if ".never." in n or ".branch." in n}
        optimizer.step()
        after = weights(model)
        for name in unused:
            assert torch.equal(after[name], before[name]), f"{name} was decayed although it had no gradient"
        assert {id(p) for p in optimizer.state} == {id(p) for n, p in model.named_parameters() if n not in unused}


@on_ranks(2, "0", "1", group="engine")
def test_a_parameter_used_on_one_rank_gets_the_mean(here):
    only = int(here.case)

    def loss(model, rank):
        model.branch = {0, 2} if rank == only else set()
        return model.loss(model.batch(rank))

    with sharded(MLP, mesh_of(here, "2")) as (model, _lanes):
        for _ in range(2):
            loss(model, here.rank).backward()
            assert_close(full_gradients(model), by_hand(MLP, here, lambda m, r: [loss(m, r)]))
            model.zero_grad()


@on_ranks(2, "each", "whole", "held", group="engine")
def test_a_parameter_used_in_one_micro_batch_on_one_rank(here):
    """Branches: 0 on rank 0 in the first micro-batch, 1 on rank 1 in the last; layer 2 is skipped in the last."""

    def loss(model, rank, micro):
        model.branch = {(0, 0): {0}, (1, 1): {1}}.get((rank, micro), set())
        model.skip = {2} if micro == 1 else set()
        return model.loss(model.batch(rank + 10 * micro))

    with sharded(MLP, mesh_of(here, "2")) as (model, lanes):
        for micro in range(2):
            model.set_requires_gradient_sync(here.case != "whole" or micro == 1)
            if here.case == "held" and micro == 0:
                with hold(lanes):
                    loss(model, here.rank, micro).backward()
            else:
                loss(model, here.rank, micro).backward()
        finish(lanes)
        assert_close(full_gradients(model), by_hand(MLP, here, lambda m, r: [loss(m, r, 0), loss(m, r, 1)]))


@on_ranks(2, group="engine")
def test_a_unit_that_is_skipped_everywhere_and_used_later(here):
    """Its forward does not run at all: it is prefetched for nothing, and has no gradient."""

    def run(model, lanes):
        seen = []
        for skip in ({1}, {0, 1, 2}, set(), {2}, set()):
            model.skip = skip
            seen += train(model, 1, seed=here.rank)
        return seen

    both(MLP, mesh_of(here, "2"), run)


@on_ranks(2, group="engine")
def test_a_parameter_used_first_in_the_last_of_several_unreduced_micro_batches(here):
    """In mixed precision its gradient is bf16 beside others that were added up in fp32."""
    with sharded(MLP, mesh_of(here, "2"), precision="bf16-mixed") as (model, _):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model.branch = {1} if micro == 1 else set()
            model.loss(model.batch(here.rank + 10 * micro)).backward()
        mixed = full_gradients(model)
    with sharded(MLP, mesh_of(here, "2")) as (model, _lanes):
        for micro in range(2):
            model.branch = {1} if micro == 1 else set()
            model.loss(model.batch(here.rank + 10 * micro)).backward()
        for name, expected in full_gradients(model).items():
            assert (mixed[name] is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(mixed[name], expected, rtol=0.1, atol=0.02)  # bf16 arithmetic


# -- gradients that were there, and several backwards --


@on_ranks(2, group="engine")
def test_an_existing_gradient_is_added_to(here):
    def run(model, lanes):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        model.loss(model.batch(here.rank)).backward()
        first = gradients(model)
        model.loss(model.batch(here.rank + 5)).backward()
        return first, gradients(model)

    both(GPT, mesh_of(here, "2"), run)


@on_ranks(2, group="engine")
def test_zeroed_gradients_are_added_to(here):
    def run(model, lanes):
        model.loss(model.batch(here.rank)).backward()
        kept = model.head.weight.grad
        model.zero_grad(set_to_none=False)
        model.loss(model.batch(here.rank + 5)).backward()
        assert model.head.weight.grad is kept
        return gradients(model)

    both(GPT, mesh_of(here, "2"), run)


@on_ranks(2, "retain", "two losses", "two forwards", "interleaved", "twice in one forward", group="engine")
def test_several_backwards(here):
    def run(model, lanes):
        one, two = model.batch(here.rank), model.batch(here.rank + 7)
        if here.case == "retain":
            loss = model.loss(one)
            loss.backward(retain_graph=True)
            first = gradients(model)
            loss.backward()
            return first, gradients(model)
        if here.case == "two losses":
            out = model(one)
            out.square().mean().backward(retain_graph=True)
            first = gradients(model)
            out.abs().mean().backward()
            return first, gradients(model)
        if here.case == "two forwards":
            (model.loss(one) + 2 * model.loss(two)).backward()
            return gradients(model)
        if here.case == "interleaved":
            first, second = model.loss(one), model.loss(two)
            first.backward()
            between = gradients(model)
            second.backward()
            return between, gradients(model)
        model.order = [0, 1, 0, 2, 1]
        model.loss(one).backward()
        return gradients(model)

    both(GPT, mesh_of(here, "2"), run)


@on_ranks(2, "inside", "around", "both", group="engine")
def test_recompute(here):
    def run(model, lanes):
        for block in model.blocks:
            block.again = here.case != "around"
        model.around = here.case != "inside"
        return train(model, 2, seed=here.rank)

    plain = both(GPT, mesh_of(here, "2"), lambda model, lanes: train(model, 2, seed=here.rank))
    assert_same(both(GPT, mesh_of(here, "2"), run), plain)


@on_ranks(2, group="engine")
def test_a_gradient_of_a_gradient(here):
    """A penalty on the input's gradient: autograd runs a backward that leaves no gradient on any weight.

    FSDP2 needs to be told to keep the weights for the second backward.
    """

    def run(model, lanes):
        seen = []
        for step in range(2):
            x = model.batch(here.rank + step).requires_grad_()
            model.set_reshard_after_backward(False)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            model.set_reshard_after_backward(True)
            ((slope.norm(dim=1) - 1) ** 2).mean().backward()
            seen.append((slope.detach(), gradients(model)))
            assert seen[-1][1]["end.weight"] is not None
            sgd(model)
        return seen

    both(MLP, mesh_of(here, "2"), run)


# -- dtypes --


@on_ranks(2, "bf16-mixed", "16-mixed", "bf16-true", group="engine")
def test_mixed_precision_equals_stock(here):
    def run(model, lanes):
        seen = train(model, 2, seed=here.rank, lr=0.01)
        dtype = torch.bfloat16 if here.case == "bf16-true" else torch.float32
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert {g.dtype for _, grads in seen[:-1] for g in grads.values()} == {dtype}
        return seen

    both(GPT, mesh_of(here, "2"), run, precision=here.case)


@on_ranks(2, group="engine")
def test_unreduced_micro_batches_add_up_in_fp32(here):
    def run(model, lanes):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model.loss(model.batch(here.rank + 10 * micro)).backward()
        return gradients(model)

    both(GPT, mesh_of(here, "2"), run, precision="bf16-mixed")


@on_ranks(2, group="engine")
def test_a_module_of_another_dtype_is_reduced_by_itself(here):
    class Mixed(MLP):
        def __init__(self):
            super().__init__()
            self.layers[1].branch.to(torch.bfloat16)

        def forward(self, x):
            x = self.start(x)
            for i, layer in enumerate(self.layers):
                x = layer(x, False)
                if i == 1:
                    x = x + layer.branch(x.to(torch.bfloat16)).float()
            return self.end(x)

    def run(model, lanes):
        seen = train(model, 2, seed=here.rank)
        assert seen[0][1]["layers.1.branch.weight"].dtype == torch.bfloat16
        assert seen[0][1]["layers.1.linear.weight"].dtype == torch.float32
        return seen

    both(Mixed, mesh_of(here, "2"), run)


# -- what users set on FSDP2 modules --


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


def by_user(here, lanes, prepare):
    """Two steps of a GPT that its owner sharded."""
    torch.manual_seed(11)
    model, mesh = GPT(), mesh_of(here, "2")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    prepare(model, mesh)
    found = FsdpLanes(model, prefetch=1, reduce_buffers=2, timeout_s=TIMEOUT_S) if lanes else None
    try:
        return train(model, 2, seed=here.rank)
    finally:
        if found is not None:
            found.close()


@on_ranks(2, group="engine")
def test_modules_that_a_user_groups(here):
    def prepare(model, mesh):
        fully_shard([model.norm, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)

    assert_same(by_user(here, True, prepare), by_user(here, False, prepare))


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


# -- time --


@on_ranks(2, group="engine")
def test_long_random_delays_change_nothing(here):
    both(MODELS["tied"], mesh_of(here, "2"), lambda model, lanes: train(model, 2, seed=here.rank), longest_delay_s=0.02)


@on_ranks(2, "1", "3", group="engine")
def test_units_in_another_order_each_step(here):
    def run(model, lanes):
        seen = []
        for order in ([0, 1, 2], [2, 0, 1], [2, 1, 0], [1, 1, 0], [0, 2]):
            model.order = order
            seen += train(model, 1, seed=here.rank)
        return seen

    both(GPT, mesh_of(here, "2"), run, prefetch=int(here.case))


@on_ranks(2, "unit", "whole", group="engine")
def test_compiled(here):
    def run(model, lanes):
        for module in model.blocks if here.case == "unit" else [model]:
            module.compile(backend="aot_eager")
        return train(model, 2, seed=here.rank)

    both(GPT, mesh_of(here, "2"), run)
    torch._dynamo.reset()


class Buffers:
    """An account that watches how many flat gradients live at a time."""

    def __init__(self):
        self.alive, self.most = 0, 0

    def track(self, tensor, kind):
        if kind != Kind.COMM:
            return
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._gone)

    def _gone(self):
        self.alive -= 1


@on_ranks(2, "1", "2", "4", group="engine")
def test_no_more_gradients_in_flight_than_buffers(here):
    """And none once the backward has returned, though gradients of one rank are sums in place."""
    buffers, account = int(here.case), Buffers()
    with sharded(lambda: GPT(layers=6), mesh_of(here, "2"), reduce_buffers=buffers, account=account) as (model, _):
        for _ in range(2):
            model.loss(model.batch(here.rank)).backward()
            assert account.alive == 0
        assert 1 <= account.most <= buffers + 1  # the one being filled waits for room first, or is the first


# -- between steps --


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


@on_ranks(2, group="engine")
def test_freezing_and_thawing(here):
    def run(model, lanes):
        seen = []
        for frozen in (True, False, True):
            model.blocks[1].requires_grad_(not frozen)
            seen += train(model, 1, seed=here.rank)
        return seen

    both(MODELS["frozen"], mesh_of(here, "2"), run)


# -- set-up and end --


@on_ranks(2, group="engine")
def test_two_models_in_one_process(here):
    """A generator and a critic, trained in turn: their lanes do not meet."""

    def run_pair(lanes):
        seen = []
        mesh = mesh_of(here, "2")
        with sharded(GPT, mesh, lanes=lanes) as (one, _), sharded(MLP, mesh, lanes=lanes) as (two, _):
            for step in range(2):
                a, b = one.loss(one.batch(here.rank + step)), two.loss(two.batch(here.rank + step))
                (a + b).backward()
                seen.append((a.detach(), b.detach(), gradients(one), gradients(two)))
                sgd(one)
                sgd(two)
        return seen

    assert_same(run_pair(True), run_pair(False))


@on_ranks(2, group="engine")
def test_lanes_then_plain_then_lanes_again(here):
    expected = []
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
        for fit in range(3):
            expected.append(train(model, 1, seed=here.rank + fit))
    with sharded(GPT, mesh_of(here, "2")) as (model, _lanes):
        first = train(model, 1, seed=here.rank)
    before = threading.active_count()
    second = train(model, 1, seed=here.rank + 1)
    set_prefetch(model, 1)
    again = FsdpLanes(model, prefetch=1, reduce_buffers=1, timeout_s=TIMEOUT_S)
    third = train(model, 1, seed=here.rank + 2)
    again.close()
    assert_same([first, second, third], expected)
    assert threading.active_count() == before
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            for group in state_groups(module._get_fsdp_state()):
                assert "post_backward" not in vars(group)


@on_ranks(2, group="engine")
def test_members_of_different_numbers_of_groups(here):
    """Process groups of other people, on one rank only, must not keep the lanes' groups from meeting."""
    if here.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    leased = [FsdpLanes(m, prefetch=0, reduce_buffers=1, timeout_s=TIMEOUT_S) for m in _several(here, 3)]
    for lanes in leased:
        lanes.close()
    made = dist.distributed_c10d._world.pg_map
    count = len(made)
    for lanes in [FsdpLanes(m, prefetch=0, reduce_buffers=1, timeout_s=TIMEOUT_S) for m in _several(here, 3)]:
        lanes.close()
    assert len(made) == count, "the groups of models that are gone are used again"


def _several(here, count):
    for _ in range(count):
        with sharded(MLP, mesh_of(here, "2"), lanes=False) as (model, _):
            yield model


@on_ranks(2, group="engine")
def test_a_failing_gather_is_named(here):
    with sharded(GPT, mesh_of(here, "2"), prefetch=1) as (model, lanes):
        expected = model.loss(model.batch(here.rank)).detach()
        gather, calls = lanes_module.all_gather_single, []

        def unplugged(*args, **named):
            calls.append(1)
            if len(calls) == 3:  # the root's, that of blocks.0, then this
                raise OSError("unplugged")
            return gather(*args, **named)

        with mock.patch.object(lanes_module, "all_gather_single", unplugged):
            named = r"lane 'gather': all-gather of unit 'blocks\.1' failed: OSError: unplugged"
            with pytest.raises(TransferError, match=named):
                model.loss(model.batch(here.rank))
        reset_aborted_step(model, lanes)
        lanes.gather.drain()
        assert_same(model.loss(model.batch(here.rank)).detach(), expected)


@on_ranks(2, group="engine-hang")
def test_a_hanging_peer_is_named_in_time(here):
    """Nobody waits for ever, neither for the gather nor for the end of the lanes."""
    torch.manual_seed(11)
    model = GPT()
    shard_model(model, mesh_of(here, "2"), precision="32-true")
    lanes = FsdpLanes(model, prefetch=0, reduce_buffers=1, timeout_s=TIMEOUT_S)
    model.loss(model.batch(here.rank)).backward()
    dist.barrier()
    lanes.gather.timeout_s = lanes.reduce.timeout_s = 0.5
    if here.rank == 0:
        with pytest.raises(TransferError, match=r"lane 'gather': all-gather of unit 'root' did not end within"):
            model.loss(model.batch(here.rank))
        lanes.close()
    (here.folder / str(here.rank)).touch()
    while not (here.folder / "0").exists():  # the other rank stays alive, and silent
        time.sleep(0.02)


@on_ranks(2, group="engine-again")
def test_lanes_over_a_default_group_made_anew(here):
    """As in a notebook: the groups of the old default group are gone with it."""
    found = []
    for i in range(2):
        dist.init_process_group("gloo", init_method=f"file://{here.folder}/store-{i}", rank=here.rank, world_size=2)
        with sharded(GPT, mesh_of(here, "2")) as (model, _):
            found.append(train(model, 1, seed=here.rank))
        dist.destroy_process_group()
        here.kept.clear()
    assert_same(*found)


@on_ranks(2, group="engine-again")
def test_a_user_who_gives_reductions_a_group_of_their_own(here):
    if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        return  # torch before 2.13

    def prepare(model, mesh):
        fully_shard(model, mesh=mesh)
        model.set_separate_reduce_scatter_group()

    assert_same(by_user(here, True, prepare), by_user(here, False, prepare))
