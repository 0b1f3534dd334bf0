"""Specs: what is read from modules and optimizers, and how FSDP2 cuts a parameter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import ClusterSpec, ModelSpec, OptimizerSpec, ParameterSpec, PrecisionSpec


@given(rows=st.integers(1, 40), columns=st.integers(1, 3), ranks=st.integers(1, 9))
def test_pieces_are_those_of_torch_chunk(rows, columns, ranks):
    spec = ParameterSpec("w", (rows, columns))
    chunks = torch.empty(rows, columns, device="meta").chunk(ranks)  # FSDP2 adds empty pieces and pads to the first
    for rank in range(ranks):
        assert spec.local_numel(ranks, rank) == (chunks[rank].numel() if rank < len(chunks) else 0)
    assert spec.padded_numel(ranks) == chunks[0].numel()
    assert sum(spec.local_numel(ranks, rank) for rank in range(ranks)) == spec.numel


class Model(nn.Module):
    """Table, two blocks with a norm that tracks statistics, a head; the table may be tied in two ways."""

    def __init__(self, head: str = "own") -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        if head != "read":
            self.head = nn.Linear(4, 11, bias=False)
        if head == "tied":
            self.head.weight = self.table.weight


def around(model: nn.Module) -> tuple[list[str], list[str]]:
    root = ModelSpec.from_module(model, ["blocks.0", "blocks.1"]).root
    before = [p.name for p in root.parameters if p.used_before]
    return before, [p.name for p in root.parameters if p.used_after]


def test_root_parameters_before_and_after_the_units():
    norm = ["norm.weight", "norm.bias"]
    assert around(Model()) == (["table.weight"], [*norm, "head.weight"])
    assert around(Model("tied")) == (["table.weight"], ["table.weight", *norm])
    assert around(Model("read")) == (["table.weight"], ["table.weight", *norm])  # nothing else can make the logits


def test_a_module_on_meta_is_read_in_full():
    with torch.device("meta"):
        model = Model("tied")
    model.norm.bias.requires_grad_(False)
    spec = ModelSpec.from_module(model, ["blocks.0", "blocks.1"])
    assert [unit.name for unit in spec.units] == ["blocks.0", "blocks.1"]
    assert spec.numel == sum(p.numel() for p in model.parameters())
    assert {p.name for p in spec.parameters if not p.trainable} == {"norm.bias"}
    kept = {p.name for p in spec.parameters if p.keeps_dtype}
    assert kept == {f"blocks.{i}.1.{name}" for i in range(2) for name in ("weight", "bias")}
    assert [b.name for b in spec.buffers if b.dtype == "int64"] == [f"blocks.{i}.1.num_batches_tracked" for i in (0, 1)]


def test_nested_units_keep_their_own():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), nn.Linear(3, 1))
    spec = ModelSpec.from_module(model, ["0", "0.1"])
    assert [[p.name for p in unit.parameters] for unit in spec.units] == [
        ["0.0.weight", "0.0.bias"],
        ["0.1.weight", "0.1.bias"],
    ]
    assert [p.name for p in spec.root.parameters] == ["1.weight", "1.bias"]


def test_a_unit_that_is_not_there():
    with pytest.raises(ConfigError, match=r"unit 'block.0' is no module of Model. Did you mean 'blocks.0'"):
        ModelSpec.from_module(Model(), ["block.0"])


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adadelta, {}),
    ],
)
def test_optimizer_state_as_a_real_step_makes_it(factory, options):
    weight = nn.Parameter(torch.ones(5, 3))
    optimizer = factory([weight], **options)
    spec = OptimizerSpec.from_optimizer(optimizer)
    assert not optimizer.state and weight.grad is None  # not touched
    weight.grad = torch.ones(5, 3)
    optimizer.step()
    tensors = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
    assert len(spec.like) * weight.nbytes + spec.scalar_bytes == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize(
    ("name", "factory", "options"),
    [
        ("adamw", torch.optim.AdamW, {}),
        ("adam", torch.optim.Adam, {"amsgrad": True}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9}),
        ("sgd", torch.optim.SGD, {}),
        ("adagrad", torch.optim.Adagrad, {}),
        ("rmsprop", torch.optim.RMSprop, {"momentum": 0.5}),
        ("adamax", torch.optim.Adamax, {}),
    ],
)
def test_named_optimizers_are_what_is_read_from_the_object(name, factory, options):
    named = OptimizerSpec.named(name, **options)
    read = OptimizerSpec.from_optimizer(factory([nn.Parameter(torch.zeros(1))], lr=0.1, **options))
    assert (dict(named.like), named.scalar_bytes) == (dict(read.like), read.scalar_bytes)


def test_state_of_another_shape_is_refused():
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ConfigError, match="neither the parameter's nor constant"):
        OptimizerSpec.from_optimizer(optimizer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerSpec.named("adammw"), "Did you mean 'adamw'"),
        (lambda: PrecisionSpec.named("bf16"), "is not one of 32-true"),
        (lambda: ClusterSpec(6, replicate=4), "replicate=4 must divide the 6 ranks"),
    ],
)
def test_values_that_cannot_be_used(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_planner_does_not_import_torch():
    code = "import sys, memwall_strategy.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
