"""Operations of a step, against counts by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memwall_strategy.engine.flops import FlopCount, is_compiled, measured_peak_flops
from tests.engine.lane_cases import GPT, mesh_of, sharded
from tests.lightning.checks import on_ranks


def counted(step):
    with FlopCount() as count:
        step()
    return count.flops


def test_a_linear_layer():
    """Forward 2 N per row; backward as much again for the weight, and for the input where it needs a gradient."""
    layer, x = nn.Linear(5, 7), torch.randn(3, 5)
    once = 2 * 3 * 5 * 7
    assert counted(lambda: layer(x)) == once
    assert counted(lambda: layer(x).sum().backward()) == 2 * once
    assert counted(lambda: layer(x.requires_grad_()).sum().backward()) == 3 * once
    with torch.no_grad():
        assert counted(lambda: layer(x)) == once


def test_a_convolution():
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    once = 2 * 2 * 4 * 6 * 6 * 3 * 3 * 3
    assert counted(lambda: layer(x)) == once
    assert counted(lambda: layer(x).sum().backward()) == 2 * once  # the picture needs no gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_cpu(dtype):
    """Two products of queries and keys' length forward; five backward, the scores' again among them."""
    batch, heads, length, width = 2, 3, 16, 8
    q, k, v = (torch.randn(batch, heads, length, width, dtype=dtype, requires_grad=True) for _ in range(3))
    product = 2 * batch * heads * length * length * width
    assert counted(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)) == 2 * product
    assert counted(lambda: F.scaled_dot_product_attention(q, k, v).float().sum().backward()) == 7 * product


def gpt_step_flops(model, batch, recompute_blocks=0):
    """By hand: 2 per weight and token forward and 4 backward, and the attention's products."""
    tokens = batch * GPT.LENGTH
    width, layers = model.embed.weight.shape[1], len(model.blocks)
    attention = 2 * batch * GPT.LENGTH**2 * width  # one product of all heads
    block = 2 * tokens * (3 + 1 + 2 + 2) * width * width
    head = 2 * tokens * width * GPT.VOCAB
    last = 2 * tokens * 2 * width * width  # recompute stops where nothing more is needed: before a block's last product
    again = block - last + 2 * attention
    return layers * (3 * block + 7 * attention) + 3 * head + recompute_blocks * again


def test_a_step_of_a_gpt():
    model = GPT()
    assert counted(lambda: model.loss(model.batch(0)).backward()) == gpt_step_flops(model, batch=2)


def test_recomputed_operations_count():
    model = GPT()
    model.blocks[1].again = True
    assert counted(lambda: model.loss(model.batch(0)).backward()) == gpt_step_flops(model, 2, recompute_blocks=1)


@on_ranks(2, "lanes", "stock", group="engine")
def test_a_sharded_step_counts_the_same(here):
    """Gathers, reductions and the optimizer on shards are no operations of the model."""
    with sharded(GPT, mesh_of(here, "2"), lanes=here.case == "lanes") as (model, _):
        optimizer = torch.optim.AdamW(model.parameters())
        expected = gpt_step_flops(GPT(), batch=2)
        for _ in range(2):
            with FlopCount() as count:
                model.loss(model.batch(here.rank)).backward()
                optimizer.step()
            assert count.flops == expected


def test_counts_add_up_and_nothing_counts_outside():
    a = torch.randn(4, 4)
    count = FlopCount()
    with count:
        a @ a
    a @ a
    with count:
        a @ a
    assert count.flops == 2 * 2 * 4**3


def test_the_peak_is_a_rate_that_a_product_reached():
    peak = measured_peak_flops(torch.device("cpu"), torch.float32)
    assert 1e7 < peak < 1e15


def test_compiled_modules_are_known():
    layer = nn.Linear(2, 2)
    assert not is_compiled(layer)
    assert is_compiled(torch.compile(layer, backend="eager"))
