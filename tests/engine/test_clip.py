"""Clipping: torch's own result on one mesh, the norm of one long vector whatever the layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.clip import clip_grad_norm, clip_grad_value, scale_gradients, total_norm
from memwall_strategy.engine.fsdp import local_tensor
from tests.engine.lane_cases import MLP, MODELS, gradients, mesh_of, sharded
from tests.lightning.checks import on_ranks

NORMS = {"1": 1.0, "1.5": 1.5, "2": 2.0, "3": 3.0, "inf": math.inf}


def parameter(gradient):
    """A parameter that has this gradient."""
    made = nn.Parameter(torch.zeros_like(gradient))
    made.grad = gradient
    return made


def values(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_one_vector(whole, p):
    return torch.linalg.vector_norm(torch.cat([w.double().flatten() for w in whole]), p)


# -- one process --


@pytest.mark.parametrize("p", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_plain_tensors_are_torchs_to_the_last_bit(p, max_norm):
    ours = [parameter(values(i, 3 + i, 5)) for i in range(4)]
    theirs = [parameter(values(i, 3 + i, 5)) for i in range(4)]
    norm = clip_grad_norm(ours, max_norm, p)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, max_norm, p))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_no_gradient_is_a_norm_of_zero():
    assert total_norm([]) == 0
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0) == 0
    clip_grad_value([nn.Parameter(torch.ones(2))], 1.0)


def test_parameters_may_be_an_iterator_and_some_without_gradient():
    with_gradient = parameter(torch.full((4,), 3.0))
    assert clip_grad_norm(iter([nn.Parameter(torch.ones(2)), with_gradient]), 1.0) == 6
    torch.testing.assert_close(with_gradient.grad, torch.full((4,), 0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(bad):
    def made():
        return [parameter(torch.tensor([bad, 1.0])), parameter(torch.ones(3))]

    with pytest.raises(MemwallError, match=r"total gradient norm is (nan|inf): gradients cannot be clipped to 1.0"):
        clip_grad_norm(made(), 1.0, error_if_nonfinite=True)
    ours, theirs = made(), made()
    clip_grad_norm(ours, 1.0)
    nn.utils.clip_grad_norm_(theirs, 1.0)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad.nan_to_num(7.0), b.grad.nan_to_num(7.0))


def test_values_are_clamped():
    p = parameter(torch.tensor([-3.0, -0.5, 0.0, 2.0, math.inf]))
    clip_grad_value([p], 1.0)
    assert p.grad.tolist() == [-1.0, -0.5, 0.0, 1.0, 1.0]
    clip_grad_value([p], 0.0)
    assert p.grad.eq(0).all()


def test_gradients_are_scaled():
    with_gradient, without = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    with_gradient.grad = torch.tensor([1.0, -2.0, 4.0])
    scale_gradients([with_gradient, without], 0.5)
    assert with_gradient.grad.tolist() == [0.5, -1.0, 2.0] and without.grad is None


def test_a_negative_value_is_refused():
    with pytest.raises(ConfigError, match=r"gradient_clip_val=-1\.0 is negative"):
        clip_grad_value([parameter(torch.ones(1))], -1.0)


# -- ranks --


@on_ranks(4, *(f"{layout} {p}" for layout in ("4", "2x2") for p in NORMS), group="engine")
def test_one_mesh_is_torchs_to_the_last_bit(here):
    """Also with rows that divide by no number of ranks, and ranks that hold no row at all."""
    layout, p = here.case.split()
    with sharded(MODELS["mlp"], mesh_of(here, layout), lanes=False) as (model, _):
        model.loss(model.batch(here.rank)).backward()
        learning = {n: q for n, q in model.named_parameters() if q.grad is not None}
        assert (here.rank > 0) == any(q.grad.to_local().numel() == 0 for q in learning.values()) or layout == "2x2"
        kept = gradients(model)
        if p == "inf":  # torch fails on an empty shard there; the largest value is exact in any order
            theirs = torch.stack([q.grad.full_tensor().abs().max() for q in learning.values()]).max()
            factor = torch.clamp(0.01 / (theirs + 1e-6), max=1.0)
            expected = {n: kept[n] * factor for n in learning}
        else:
            theirs = nn.utils.clip_grad_norm_(model.parameters(), 0.01, NORMS[p]).full_tensor()
            expected = gradients(model)
            for name, q in learning.items():
                local_tensor(q.grad).copy_(kept[name])
        ours = clip_grad_norm(model.parameters(), 0.01, NORMS[p])
        assert torch.equal(ours, theirs)
        found = gradients(model)
        for name in learning:
            assert torch.equal(found[name], expected[name]), name


def mixed(here, dtype=torch.float32):
    """Plain tensors and DTensors of three meshes; the whole gradients beside them."""
    one, two = mesh_of(here, "4"), mesh_of(here, "2x2")
    layouts = [(one, [Shard(0)]), (one, [Shard(1)]), (one, [Replicate()]), (two, [Replicate(), Shard(0)]),
               (two, [Shard(0), Shard(1)])]  # fmt: skip
    whole = [values(i, 8, 12, dtype=dtype) for i in range(len(layouts))]
    parameters = [
        parameter(distribute_tensor(w.clone(), mesh, how)) for w, (mesh, how) in zip(whole, layouts, strict=True)
    ]
    small = values(50, 2, 3, dtype=dtype)  # fewer rows than ranks
    plain = values(51, 7, dtype=dtype)
    parameters += [parameter(distribute_tensor(small, one, [Shard(0)])), parameter(plain.clone())]
    return parameters, [*whole, small, plain]


@on_ranks(4, *NORMS, group="engine")
def test_several_meshes_and_plain_tensors_are_one_vector(here):
    parameters, whole = mixed(here)
    norm = clip_grad_norm(parameters, 0.5, NORMS[here.case])
    expected = as_one_vector(whole, NORMS[here.case])
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    for p, w in zip(parameters, whole, strict=True):
        now = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(now.double(), w.double() * (0.5 / (expected + 1e-6)), rtol=1e-5, atol=1e-8)


@on_ranks(4, group="engine")
def test_several_dtypes_and_empty_shards(here):
    """The dtype of a rank's norms does not depend on which rows it holds."""
    mesh = mesh_of(here, "4")
    whole = [values(0, 1, 4, dtype=torch.bfloat16), values(1, 1, 4), values(2, 9, 2, dtype=torch.bfloat16)]
    parameters = [parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in whole]
    norm = total_norm(parameters)
    torch.testing.assert_close(norm.double(), as_one_vector(whole, 2.0), rtol=0.01, atol=0)
    only = [parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in whole[:1]]
    assert total_norm(only).dtype == torch.bfloat16
    torch.testing.assert_close(total_norm(only).double(), as_one_vector(whole[:1], 2.0), rtol=0.01, atol=0)
    clip_grad_norm(parameters, 0.1)
    assert [p.grad.dtype for p in parameters] == [w.dtype for w in whole]


@on_ranks(4, group="engine")
def test_values_are_clamped_in_every_layout(here):
    parameters, whole = mixed(here)
    clip_grad_value(parameters, 0.3)
    for p, w in zip(parameters, whole, strict=True):
        now = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        assert torch.equal(now, w.clamp(-0.3, 0.3))


@on_ranks(4, group="engine")
def test_a_gradient_that_is_not_reduced_yet_is_refused(here):
    partial = DTensor.from_local(torch.ones(4), mesh_of(here, "4"), [Partial()])
    with pytest.raises(MemwallError, match="still partial"):
        clip_grad_norm([parameter(partial)], 1.0)


@on_ranks(4, group="engine")
def test_a_nan_on_one_rank_is_met_on_every_rank(here):
    with sharded(MLP, mesh_of(here, "4"), lanes=False) as (model, _):
        model.loss(model.batch(here.rank)).backward()
        if here.rank == 2:
            local_tensor(model.start.weight.grad).fill_(math.nan)
        with pytest.raises(MemwallError, match="norm is nan"):
            clip_grad_norm(model.parameters(), 1.0, error_if_nonfinite=True)
