"""Lanes give stock FSDP2's losses and gradients bit by bit: models, meshes, accumulation, prefetch, buffers."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from memwall_strategy.engine.fsdp import fsdp_roots
from memwall_strategy.engine.lanes import FsdpLanes
from memwall_strategy.engine.sharding import set_prefetch
from memwall_strategy.engine.sync_norm import synchronize_batch_norms
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
    rough_lanes,
    sgd,
    sharded,
    train,
)
from tests.lightning.checks import on_ranks

EVERY_MODEL = [f"{layout} {name}" for layout in ("3", "2x2") for name in MODELS]
EVERY_LAYOUT = ["1 gpt", "2 gpt", "4 gpt", "4 tied", "4x1 gpt"]


@on_ranks(4, *EVERY_MODEL, *EVERY_LAYOUT, group="engine")
def test_steps_equal_stock(here):
    layout, name = here.case.split()
    both(MODELS[name], mesh_of(here, layout), lambda model, lanes: train(model, 2, seed=here.rank))


@on_ranks(4, "0 1", "0 4", "1 1", "3 2", "3 4", group="engine")
def test_prefetch_and_buffers_change_nothing(here):
    prefetch, buffers = map(int, here.case.split())
    both(
        MODELS["gpt"],
        mesh_of(here, "4"),
        lambda model, lanes: train(model, 2, seed=here.rank),
        prefetch=prefetch,
        reduce_buffers=buffers,
    )


ACCUMULATION = {
    "each": (True, True),  # reduced over shards and replicas each micro-batch
    "rack": (True, False),  # over replicas once
    "whole": (False, True),  # not at all before the last
}


@on_ranks(4, *(f"{layout} {how}" for layout in ("4", "2x2", "4x1") for how in (*ACCUMULATION, "held")), group="engine")
def test_accumulation_equals_stock(here):
    layout, how = here.case.split()
    sync, all_reduce = ACCUMULATION["rack" if how == "held" else how]

    def run(model, lanes):
        seen = []
        for step in range(2):
            for i in range(4):
                last = i == 3
                model.set_requires_gradient_sync(sync or last)
                model.set_requires_all_reduce(all_reduce or last)
                with hold(lanes) if how == "held" and not last else contextlib.nullcontext():
                    loss = model.loss(model.batch(here.rank + 10 * i + 100 * step))
                    (loss / 4).backward()
                seen.append(loss.detach())
            finish(lanes)
            seen.append(gradients(model))
            model.zero_grad()
        return seen

    both(MODELS["gpt"], mesh_of(here, layout), run)


@on_ranks(4, "gpt", "mlp", group="engine")
def test_replicas_and_shards_give_the_same_gradient(here):
    """One mesh or two, the divide factor is the number of ranks: all ways to lay out four ranks agree."""
    found = {}
    for layout in ("4", "2x2", "4x1"):
        with sharded(MODELS[here.case], mesh_of(here, layout)) as (model, _):
            model.loss(model.batch(here.rank)).backward()
            found[layout] = full_gradients(model)
    for layout in ("2x2", "4x1"):
        assert_close(found[layout], found["4"])


# -- replicas, and what is not used everywhere --


@on_ranks(4, "each", "rack", "whole", "held", group="engine")
def test_a_parameter_used_on_one_rank_in_one_micro_batch(here):
    """Branch 0 on rank 2 in the first micro-batch, branch 1 on rank 1 in the second."""
    sync, all_reduce = ACCUMULATION["rack" if here.case == "held" else here.case]

    def loss(model, rank, micro):
        model.branch = {(2, 0): {0}, (1, 1): {1}}.get((rank, micro), set())
        return model.loss(model.batch(rank + 10 * micro))

    with sharded(MLP, mesh_of(here, "2x2")) as (model, lanes):
        for micro in range(2):
            last = micro == 1
            model.set_requires_gradient_sync(sync or last)
            model.set_requires_all_reduce(all_reduce or last)
            with hold(lanes) if here.case == "held" and not last else contextlib.nullcontext():
                loss(model, here.rank, micro).backward()
        lanes.reducer.finish()
        assert_close(full_gradients(model), by_hand(MLP, here, lambda m, r: [loss(m, r, 0), loss(m, r, 1)]))


class TwoRoots(nn.Module):
    """Two modules that FSDP2 hooks by themselves, as below a LightningModule, whose ``forward`` does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = MLP(), MLP()
        self.uses_other = True

    def training_step(self, x):
        return self.one.loss(x) + (self.other.loss(x) if self.uses_other else 0.0)

    validation_step = test_step = predict_step = loss = training_step

    def batch(self, seed):
        return self.one.batch(seed)


@on_ranks(4, "a unit rack", "a root rack", "a unit whole", "a root whole", group="engine")
def test_what_the_last_micro_batch_skips_is_reduced(here):
    """What earlier micro-batches left of it is sent, not kept for the next step."""
    part, how = here.case.rsplit(" ", 1)
    make = TwoRoots if part == "a root" else MLP

    def loss(model, rank, micro):
        model.skip, model.uses_other = ({1} if micro == 1 else set()), micro == 0
        return model.loss(model.batch(rank + 10 * micro))

    with sharded(make, mesh_of(here, "2x2"), split=part == "a root") as (model, lanes):
        roots = fsdp_roots(model)
        assert (len(roots) > 1) == (part == "a root")
        for _ in range(2):
            for micro in range(2):
                for root in roots:
                    root.set_requires_gradient_sync(how == "rack" or micro == 1)
                    root.set_requires_all_reduce(micro == 1)
                loss(model, here.rank, micro).backward()
            lanes.reducer.finish()
            assert_close(full_gradients(model), by_hand(make, here, lambda m, r: [loss(m, r, 0), loss(m, r, 1)]))
            model.zero_grad()


class Detours(MLP):
    """Layers in ``around`` pass their input on: they run, but none of their weights has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.around: set[int] = set()
        for i, layer in enumerate(self.layers):
            layer.forward = functools.partial(self._maybe, i, layer.forward)

    def _maybe(self, i, inner, x, branch):
        return x * 2 if i in self.around else inner(x, branch)


@on_ranks(4, "each", "rack", "whole", group="engine")
def test_a_unit_without_any_gradient_on_some_ranks(here):
    """The others must not wait for those ranks, also where the last micro-batch skips the unit everywhere."""
    sync, all_reduce = ACCUMULATION[here.case]

    def loss(model, rank, micro):
        model.around = {1, 2} if rank in (0, 3) else set()
        model.skip = {1} if micro == 1 else set()
        return model.loss(model.batch(rank + 10 * micro))

    with sharded(Detours, mesh_of(here, "2x2")) as (model, lanes):
        for micro in range(2):
            model.set_requires_gradient_sync(sync or micro == 1)
            model.set_requires_all_reduce(all_reduce or micro == 1)
            loss(model, here.rank, micro).backward()
        lanes.reducer.finish()
        assert_close(full_gradients(model), by_hand(Detours, here, lambda m, r: [loss(m, r, 0), loss(m, r, 1)]))


# -- models that their owner sharded --


def compare_own_sharding(here, make, shard, run, prefetch=1, shards=2):
    """``shard(model)`` is the user's; the lanes come on top. More than two shards are not summed in stock's order."""
    found = []
    for lanes in (True, False):
        torch.manual_seed(11)
        model = make()
        shard(model)
        with contextlib.ExitStack() as stack:
            if lanes:
                set_prefetch(model, prefetch)
                stack.enter_context(rough_lanes(here.rank))
                stack.callback(FsdpLanes(model, prefetch=prefetch, reduce_buffers=2, timeout_s=TIMEOUT_S).close)
            found.append(run(model))
    assert_same(*found, **({"rtol": 1e-4, "atol": 2e-7} if shards > 2 else {}))
    return found[0]


@on_ranks(4, group="engine")
def test_units_on_different_meshes(here):
    """One unit on replicas, the others over all ranks: each is reduced, and counted, on its own groups."""
    one, two = mesh_of(here, "4"), mesh_of(here, "2x2")

    def shard(model):
        for i, unit in enumerate(getattr(model, "layers", None) or model.blocks):
            fully_shard(unit, mesh=two if i == 1 else one)
        fully_shard(model, mesh=one)

    compare_own_sharding(here, GPT, shard, lambda model: train(model, 2, seed=here.rank), shards=4)
    torch.manual_seed(11)
    model = MLP()
    shard(model)
    lanes = FsdpLanes(model, prefetch=0, reduce_buffers=1, timeout_s=TIMEOUT_S)

    def loss(model, rank):
        model.branch = {0, 1} if rank == 3 else set()
        return model.loss(model.batch(rank))

    loss(model, here.rank).backward()
    lanes.close()
    assert_close(full_gradients(model), by_hand(MLP, here, lambda m, r: [loss(m, r)]))


@on_ranks(4, group="engine")
def test_weights_that_are_resharded_over_fewer_ranks_after_forward(here):
    def shard(model):
        for block in model.blocks:
            fully_shard(block, mesh=mesh_of(here, "4"), reshard_after_forward=2)
        fully_shard(model, mesh=mesh_of(here, "4"))

    compare_own_sharding(here, GPT, shard, lambda model: train(model, 2, seed=here.rank), shards=4)


@on_ranks(4, group="engine")
def test_tensor_parallel_under_data_parallel(here):
    """Weights that are DTensors already; one of them unused, so that zeros stand in for its gradient."""
    mesh = here.kept.setdefault("dp x tp", init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    replica = here.rank // 2  # tensor-parallel ranks share a batch

    def shard(model):
        for layer in model.layers:
            columns = {"linear": ColwiseParallel(output_layouts=Replicate()), "never": ColwiseParallel()}
            parallelize_module(layer, mesh["tp"], columns)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    def run(model):
        seen = []
        for step in range(2):
            loss = model.loss(model.batch(replica + 10 * step))
            loss.backward()
            seen.append((loss.detach(), gradients(model)))
            sgd(model)
        return seen

    seen = compare_own_sharding(here, lambda: MLP(width=6), shard, run)
    assert seen[0][1]["layers.0.linear.weight"] is not None
    assert seen[0][1]["layers.0.never.weight"] is None


# -- parity with one process on the whole batch --

PARITY_STEPS = 20
PARITY_TOLERANCE = 1e-6


def twenty_adamw_steps(here, name):
    """fp32, the batches of all ranks as one batch; batch norms with the statistics of all ranks."""

    def whole(model, step):
        parts = [model.batch(1000 * step + rank) for rank in range(here.world)]
        return tuple(map(torch.cat, zip(*parts, strict=True))) if isinstance(parts[0], tuple) else torch.cat(parts)

    mesh = mesh_of(here, str(here.world))
    torch.manual_seed(11)
    plain = MODELS[name]()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=True)
    expected = []
    for step in range(PARITY_STEPS):
        loss = plain.loss(whole(plain, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    with sharded(lambda: synchronize_batch_norms(MODELS[name](), "cpu"), mesh, longest_delay_s=0.0) as (model, _):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        for step in range(PARITY_STEPS):
            loss = model.loss(model.batch(1000 * step + here.rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach() / here.world
            dist.all_reduce(mean)
            assert abs(mean.item() / expected[step] - 1) < PARITY_TOLERANCE, f"step {step}"


@on_ranks(2, "gpt", "conv", "mlp", group="engine")
def test_twenty_adamw_steps_on_two_ranks_equal_one_process(here):
    twenty_adamw_steps(here, here.case)


@on_ranks(4, "gpt", "conv", "mlp", group="engine")
def test_twenty_adamw_steps_on_four_ranks_equal_one_process(here):
    twenty_adamw_steps(here, here.case)
