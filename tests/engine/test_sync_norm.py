"""BatchNorm over ranks: what one process computes on the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memwall_strategy.engine.sync_norm import CrossRankBatchNorm, synchronize_batch_norms
from tests.engine.lane_cases import Conv, assert_same, full_gradients, mesh_of, sharded
from tests.lightning.checks import on_ranks

SIZES = (3, 1)
"""Samples of each rank: unequal, and one that torch's own BatchNorm would refuse."""


def parts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 4, 5, generator=generator) * 2 + 1 for size in SIZES]


KINDS = {
    "plain": {},
    "momentum": {"momentum": 0.3},
    "cumulative": {"momentum": None},
    "no weights": {"affine": False},
    "no statistics": {"track_running_stats": False},
    "eps": {"eps": 0.1},
}


@on_ranks(2, *KINDS, group="engine")
def test_two_ranks_equal_one_process_on_the_whole_batch(here):
    mesh_of(here, "2")
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(4, **KINDS[here.case])
    ours = synchronize_batch_norms(nn.BatchNorm1d(4, **KINDS[here.case]), "cpu")
    assert isinstance(ours, CrossRankBatchNorm)
    ours.load_state_dict(plain.state_dict())
    whole = torch.cat(parts()).requires_grad_()
    mine = parts()[here.rank].requires_grad_()
    rows = slice(0, SIZES[0]) if here.rank == 0 else slice(SIZES[0], None)
    weight = torch.linspace(-1, 2, whole.numel()).view_as(whole)
    for _ in range(2):
        expected, found = plain(whole), ours(mine)
        torch.testing.assert_close(found, expected[rows], rtol=1e-5, atol=1e-6)
    (expected * weight).sum().backward()
    (found * weight[rows]).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[rows], rtol=1e-4, atol=1e-5)
    if plain.affine:
        for a, b in ((ours.weight.grad, plain.weight.grad), (ours.bias.grad, plain.bias.grad)):
            total = a.clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(total, b, rtol=1e-5, atol=1e-5)
    for (name, a), (_, b) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    plain.eval()
    ours.eval()
    if plain.track_running_stats:
        torch.testing.assert_close(ours(mine), plain(whole)[rows], rtol=1e-5, atol=1e-6)


@on_ranks(2, "32-true", "bf16-mixed", group="engine")
def test_a_sharded_model_with_it_gives_the_gradient_of_the_whole_batch(here):
    def make():
        return synchronize_batch_norms(Conv(), "cpu")

    batches = [Conv().batch(rank) for rank in range(2)]
    torch.manual_seed(11)
    plain = Conv()
    plain.loss(tuple(map(torch.cat, zip(*batches, strict=True)))).backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    with sharded(make, mesh_of(here, "2"), precision=here.case) as (model, _):
        model.loss(batches[here.rank]).backward()
        found = full_gradients(model)
        assert model.blocks[0].norm.running_var.dtype == torch.float32
    if here.case == "32-true":
        for name in expected:  # a bias before a batch norm has a gradient of zero: rounding alone
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    else:
        for name in expected:
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], expected[name], rtol=0.2, atol=0.05)


def test_alone_it_is_torchs_own():
    x = torch.randn(6, 4, 3)
    ours, plain = synchronize_batch_norms(nn.BatchNorm1d(4), "cpu"), nn.BatchNorm1d(4)
    assert_same([ours(x).detach(), ours.running_var], [plain(x).detach(), plain.running_var])


def test_every_batch_norm_is_replaced_once_with_its_own_tensors():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Conv()
            self.norms = nn.ModuleList([nn.BatchNorm1d(2), nn.LayerNorm(2), nn.BatchNorm3d(2, affine=False)])
            self.shared = self.norms[0]

    model = Model().eval()
    tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
    names = [n for n, _ in model.named_parameters()]
    assert synchronize_batch_norms(model, "cpu") is model
    kinds = [type(m) for m in model.modules() if "Norm" in type(m).__name__]
    assert kinds.count(CrossRankBatchNorm) == 4
    assert nn.LayerNorm in kinds
    assert {id(t) for t in (*model.parameters(), *model.buffers())} == tensors
    assert [n for n, _ in model.named_parameters()] == names
    assert model.shared is model.norms[0], "a shared norm must stay shared"
    assert not any(m.training for m in model.modules())
    before = list(model.modules())
    synchronize_batch_norms(model, "cpu")
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_options_survive():
    norm = synchronize_batch_norms(nn.BatchNorm2d(5, eps=0.1, momentum=None, affine=False), "cpu")
    assert (norm.num_features, norm.eps, norm.momentum, norm.affine) == (5, 0.1, None, False)
    assert norm.weight is None
    assert norm.running_mean.shape == (5,)


def test_an_input_without_channels_is_refused():
    with pytest.raises(ValueError, match="at least 2 dimensions, got 1"):
        CrossRankBatchNorm(3)(torch.ones(3))


def test_on_cuda_torchs_own_is_used():
    assert isinstance(synchronize_batch_norms(nn.BatchNorm1d(2), "cuda"), nn.SyncBatchNorm)
    assert F.batch_norm is torch.nn.functional.batch_norm
