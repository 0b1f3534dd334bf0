"""Sharding a plain model: equal starts, meta, dtypes, roots, prefetch, and what is said about units."""

from __future__ import annotations

import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.fsdp import fsdp_roots, fsdp_state, local_tensor
from memwall_strategy.engine.sharding import (
    data_parallel_mesh,
    describe_units,
    is_sharded,
    set_prefetch,
    shard_model,
)
from tests.engine.lane_cases import GPT, Block, Conv, assert_close, full_gradients, mesh_of, sharded
from tests.lightning.checks import on_ranks


def whole(model):
    """Whole weights and buffers, the same on every rank."""
    weights = {n: p.full_tensor() for n, p in model.named_parameters()}
    return weights | dict(model.named_buffers())


# -- meshes --


@pytest.mark.parametrize(("world", "replicate", "divisors"), [(4, 3, "1, 2, 4"), (6, 4, "1, 2, 3, 6"), (2, 8, "1, 2")])
def test_replicas_that_do_not_divide_the_ranks_are_refused(world, replicate, divisors):
    with pytest.raises(ConfigError, match=f"replicate={replicate} does not divide the {world} .* one of {divisors}"):
        data_parallel_mesh("cpu", world, replicate)


@on_ranks(2, group="engine")
def test_mesh_names(here):
    mesh_of(here, "2")
    assert data_parallel_mesh("cpu", 2, 1).mesh_dim_names == ("shard",)
    two = data_parallel_mesh("cpu", 2, 2)
    assert (two.mesh_dim_names, two.shape) == (("replicate", "shard"), (2, 1))


# -- equal starts --


class Start(nn.Module):
    """Weights and buffers of several dtypes and shapes, in a unit, nested, and in the root."""

    def __init__(self):
        super().__init__()
        self.conv = Conv()
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.scalar = nn.Parameter(torch.randn(1))
        self.half = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.register_buffer("count", torch.randint(0, 1000, ()))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("empty", torch.zeros(0))


@on_ranks(2, "rank", "same", group="engine")
def test_ranks_start_equal_whatever_their_seeds(here):
    mesh = mesh_of(here, "2")
    torch.manual_seed(here.rank if here.case == "rank" else 0)
    model = Start()
    torch.manual_seed(0)
    first = Start()
    broadcasts = []
    broadcast = dist.broadcast
    with mock.patch.object(dist, "broadcast", lambda *a, **k: (broadcasts.append(1), broadcast(*a, **k))):
        shard_model(model, mesh, precision="32-true")
    assert bool(broadcasts) == (here.case == "rank")  # equal weights cost no broadcast
    expected = dict(first.named_parameters()) | dict(first.named_buffers())
    found = whole(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@on_ranks(2, "1", "2", group="engine")
def test_meta_equals_a_plain_start_under_one_seed(here):
    mesh = mesh_of(here, here.case)
    if mesh is None:
        return

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(29, 10)
            self.blocks = nn.ModuleList([Block(10), nn.BatchNorm1d(10), Block(10)])
            self.head = nn.Linear(10, 29)

    torch.manual_seed(5)
    plain = Model()
    with torch.device("meta"):
        model = Model()
    torch.manual_seed(5)
    shard_model(model, mesh, precision="32-true")
    found = whole(model)
    for name, tensor in (dict(plain.named_parameters()) | dict(plain.named_buffers())).items():
        assert torch.equal(found[name], tensor), name
    assert not any(local_tensor(t).is_meta for t in (*model.parameters(), *model.buffers()))


@on_ranks(2, group="engine")
def test_tied_weights_on_meta_stay_tied_and_frozen_ones_frozen(here):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
        model[2].weight = model[0].weight
        model[3].requires_grad_(False)
    shard_model(model, mesh_of(here, "2"), precision="32-true")
    assert model[0].weight is model[2].weight
    assert [p.requires_grad for p in model.parameters()] == [True, False, False]


@on_ranks(2, group="engine")
def test_from_meta_no_more_than_one_whole_unit_is_alive(here):
    """Whole weights go as soon as their unit is sharded, without the garbage collector's help."""
    made, alive = [], []

    class Layer(nn.Linear):
        def reset_parameters(self):
            if not self.weight.is_meta:
                made.append(weakref.ref(self.weight))
                alive.append(sum(ref() is not None for ref in made))
            super().reset_parameters()

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(Layer(8, 8), nn.ReLU()) for _ in range(5)))
    gc.collect()
    gc.disable()
    try:
        shard_model(model, mesh_of(here, "2"), precision="32-true", unit_classes=("Layer",))
        assert alive == [1] * 5, alive
        assert not any(ref() is not None for ref in made)
    finally:
        gc.enable()


class Helpless(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) * self.weight


@on_ranks(2, group="engine")
def test_meta_without_reset_parameters_is_refused_and_nothing_is_touched(here):
    with torch.device("meta"):
        model = nn.Sequential(Helpless(), Helpless())
    with pytest.raises(
        ConfigError, match=r"no reset_parameters\(\) to initialize themselves: Helpless\. Add that method"
    ):
        shard_model(model, mesh_of(here, "2"), precision="32-true")
    assert all(p.is_meta for p in model.parameters())
    assert not is_sharded(model)


# -- what is said about units --


@on_ranks(2, group="engine")
def test_units_are_described(here):
    model = GPT(layers=2, width=10)
    model.blocks[0].up.requires_grad_(False)
    plain = {n: p.numel() for n, p in model.named_parameters()}
    assert not is_sharded(model)
    shard_model(model, mesh_of(here, "2"), precision="32-true")
    assert is_sharded(model)
    units = describe_units(model)
    assert [u.index for u in units] == [0, 1, 2]
    assert {u.name for u in units} == {"root", "blocks.0", "blocks.1"}
    by_name = {u.name: u for u in units}
    assert sorted(n for u in units for n in u.parameters) == sorted(plain)
    for unit in units:
        assert unit.numel == sum(plain[n] for n in unit.parameters)
        held = sum(-(-p.shape[0] // 2) * p[0].numel() for n, p in GPT(2, 10).named_parameters() if n in unit.parameters)
        assert unit.sharded_numel == held
    frozen = plain["blocks.0.up.weight"] + plain["blocks.0.up.bias"]
    assert by_name["blocks.0"].trainable_numel == by_name["blocks.0"].numel - frozen
    assert by_name["blocks.1"].trainable_numel == by_name["blocks.1"].numel
    assert set(by_name["root"].parameters) == {"embed.weight", "position", "norm.weight", "norm.bias", "head.weight"}


@on_ranks(2, group="engine")
def test_a_model_gathered_whole_is_warned_about(here):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_model(nn.Linear(4, 4), mesh_of(here, "2"), precision="32-true")
    assert any("Linear has no repeated block: the whole model is one unit" in str(w.message) for w in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard_model(GPT(), mesh_of(here, "2"), precision="32-true")


# -- precision --


@on_ranks(2, "32-true", "bf16-true", "bf16-mixed", "16-mixed", group="engine")
def test_weights_rest_in_their_dtype(here):
    model = Conv()
    shard_model(model, mesh_of(here, "2"), precision=here.case)
    kept = torch.bfloat16 if here.case == "bf16-true" else torch.float32
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if ".norm." in name else kept), name
    for name, buffer in model.named_buffers():
        assert buffer.dtype == (torch.int64 if "num_batches" in name else torch.float32), name


@on_ranks(2, "bf16-true", "bf16-mixed", group="engine")
def test_running_statistics_are_computed_in_fp32(here):
    seen = {}

    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            y = super().forward(x)
            seen["in"], seen["out"], seen["input"] = x.dtype, y.dtype, x.detach().clone()
            return y

    with sharded(lambda: Conv(norm=Norm), mesh_of(here, "2"), precision=here.case) as (model, _):
        norm = model.blocks[1].norm
        after = []
        norm.register_forward_hook(lambda module, args, out: after.append(out.dtype))
        model.loss(model.batch(here.rank, size=4)).backward()
        assert (seen["in"], seen["out"]) == (torch.float32, torch.float32)
        assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
        mean = seen["input"].mean((0, 2, 3))
        torch.testing.assert_close(norm.running_mean, 0.1 * mean, rtol=1e-5, atol=1e-7)
        assert norm.weight.grad.dtype == torch.float32
        assert model.blocks[1].conv.weight.grad.dtype == model.blocks[1].conv.weight.dtype


@on_ranks(2, group="engine")
def test_statistics_without_weights_stay_in_fp32(here):
    for precision in ("bf16-true", "bf16-mixed"):
        with sharded(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)),
            mesh_of(here, "2"),
            precision=precision,
        ) as (model, _):
            model(torch.randn(6, 4)).sum().backward()
            assert model[1].running_mean.dtype == torch.float32
            assert not model[1].running_mean.eq(0).all()
            assert all(p.grad is not None for p in model.parameters())


# -- modules whose forward does not run --


class Task(nn.Module):
    """Stands for a LightningModule."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def training_step(self, x):
        y = x
        for child in self.children():
            for block in child if isinstance(child, nn.ModuleList) else [child]:
                y = block(y)
        if hasattr(self, "scale"):
            y = y * self.scale
        return y.square().mean()

    validation_step = test_step = predict_step = training_step


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def scaled():
    task = Task(one=Wide(), two=Wide())
    task.scale = nn.Parameter(torch.full((1,), 0.5))
    return task


TASKS = {
    "children": (lambda: Task(one=nn.Sequential(Wide(), Wide()), two=Wide()), ["one", "two"]),
    "crown": (lambda: Task(stem=nn.Linear(5, 5), blocks=nn.ModuleList(Wide() for _ in range(3))), [""]),
    "own parameters": (scaled, [""]),
}


@on_ranks(2, *TASKS, group="engine")
def test_a_module_whose_training_step_runs(here):
    make, expected_roots = TASKS[here.case]
    x = [torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    torch.manual_seed(11)
    plain = make()
    for part in x:
        (plain.training_step(part) / 2).backward()
    for lanes in (False, True):
        with sharded(make, mesh_of(here, "2"), lanes=lanes, split=True) as (model, _):
            names = {module: name for name, module in model.named_modules()}
            assert [names[root] for root in fsdp_roots(model)] == expected_roots
            for _ in range(2):
                with torch.no_grad():  # evaluation first: no child may take itself for the root
                    first = next(iter(model.children()))
                    if not isinstance(first, nn.ModuleList) and expected_roots != [""]:
                        first(x[here.rank])
                    model.validation_step(x[here.rank])
                model.training_step(x[here.rank]).backward()
                assert_close(full_gradients(model), {n: p.grad for n, p in plain.named_parameters()})
                model.zero_grad()


@on_ranks(2, group="engine")
def test_a_child_that_runs_before_the_first_step_is_not_the_root(here):
    task = Task(one=nn.Sequential(Wide(), Wide()), two=Wide())
    task.scale = nn.Parameter(torch.ones(1))
    shard_model(task, mesh_of(here, "2"), precision="32-true", split=True)
    with torch.no_grad():
        task.one(torch.randn(2, 5))
    assert fsdp_state(task)._is_root
    assert not fsdp_state(task.one[0])._is_root
    task.training_step(torch.randn(2, 5)).backward()


# -- prefetch --


@on_ranks(2, "0", "1", "2", group="engine")
def test_prefetch_lists_follow_the_modules(here):
    ahead = int(here.case)
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
        set_prefetch(model, ahead)
        chain = [model, *model.blocks]
        for i, module in enumerate(chain):
            state = fsdp_state(module)
            forward = [s._modules[0] for s in state._states_to_forward_prefetch]
            assert forward == chain[i + 1 : i + 1 + ahead]
            backward = [s._modules[0] for s in state._states_to_backward_prefetch]
            behind = list(reversed(chain[1:] if i == 0 else chain[1:i]))[:ahead]
            # None: FSDP2's own, one unit by the order that really ran. Itself: nothing, since it is gathered by then.
            assert backward == {0: [module], 1: [], 2: behind}[ahead]
