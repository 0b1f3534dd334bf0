"""Lanes under everything that a training loop may do to a model, against stock FSDP2 and, where stock has no answer,
against the arithmetic by hand."""

from __future__ import annotations

import torch

from tests.engine.lane_cases import (
    GPT,
    MLP,
    MODELS,
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


@on_ranks(2, group="engine")
def test_freezing_and_thawing(here):
    def run(model, lanes):
        seen = []
        for frozen in (True, False, True):
            model.blocks[1].requires_grad_(not frozen)
            seen += train(model, 1, seed=here.rank)
        return seen

    both(MODELS["frozen"], mesh_of(here, "2"), run)
