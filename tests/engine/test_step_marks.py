"""Random states and buffers are set back exactly; a large buffer that changed is named."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from memwall_strategy.engine.step_marks import LARGEST_COPY_BYTES, BufferMark, RngMark, modules_with_buffers


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_every_generator_draws_the_same_again() -> None:
    mark = RngMark()
    first = draw(), draw()
    assert draw() != first[0]
    mark.restore()
    assert (draw(), draw()) == first


def test_buffers_are_set_back_in_value_and_identity() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    held = dict(net.named_buffers())
    modules = modules_with_buffers(net)
    assert len(modules) == 2
    mark = BufferMark(modules)
    net(torch.randn(8, 4))
    net[0].running_mean = torch.full((4,), 7.0)  # replaced, not written
    assert mark.changed_for_good() == ""
    mark.restore()
    for name, buffer in net.named_buffers():
        assert buffer is held[name]
        assert torch.equal(buffer, before[name])


def test_a_large_buffer_is_watched_not_copied() -> None:
    net = nn.Linear(1, 1)
    net.register_buffer("table", torch.zeros(LARGEST_COPY_BYTES // 4 + 1))
    mark = BufferMark(modules_with_buffers(net))
    assert mark.changed_for_good() == ""
    net.table.sum()
    assert mark.changed_for_good() == ""
    net.table[0] = 1.0
    assert mark.changed_for_good() == "table"
    net.table = torch.zeros(1)
    assert mark.changed_for_good() == "table"
