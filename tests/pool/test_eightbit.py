"""Quantised optimizer state pages part by part (torchao's optimizers, the extra ``eightbit``)."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memwall_strategy.core.block import Tier
from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.optimizer import optimizer_state
from memwall_strategy.engine.optimizer_parts import probe
from memwall_strategy.engine.quantised import is_quantised, parts_of
from tests.pool.state import MIB, pooled

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchao_optim = pytest.importorskip("torchao.optim", reason="no torchao: pip install memwall[eightbit]")

WIDTH = 64
"""A square of it is what torchao quantises; the odd layer stays in float32."""


@pytest.fixture(autouse=True)
def eager() -> Any:
    """torchao compiles its step; the bits are the matter here, and not half a minute of compiling."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def wide() -> Wide:
    torch.manual_seed(3)
    return Wide()


def one_step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    optimizer.zero_grad()
    loss = net(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """By way of a file: torchao's tensors cannot be cloned."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def inner(value: torch.Tensor) -> list[torch.Tensor]:
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]] if is_quantised(value) else [value]


@pytest.mark.parametrize("where", ["device", "host", "disk", "all three", "stepped on host"])
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam4bit", "AdamWFp8"])
def test_bits_of_the_plain_optimizer(name: str, where: str, tmp_path: Path) -> None:
    kind = getattr(torchao_optim, name)
    places: dict[str, Any] = {
        "device": {}, "host": {"device": 0.7, "host": MIB}, "disk": {"device": 0.7, "disk": MIB},
        "all three": {"device": 0.7, "host": 0.2, "disk": MIB},
        "stepped on host": {"device": 0.3, "host": MIB, "at_home": True},
    }  # fmt: skip
    plain_net, net = wide(), wide()
    plain, wrapped = kind(plain_net.parameters(), lr=1e-2), kind(net.parameters(), lr=1e-2)
    with pooled(wrapped, net, folder=tmp_path, **places[where]) as (optimizer, pool):
        for number in range(5):
            assert one_step(plain_net, plain, number) == one_step(net, optimizer, number)
            pool.table.check()
        paged = {b.kind for b, p in pool.table if p.tier in (Tier.HOST, Tier.DISK) and b.unit != "pool"}
        assert where == "device" or any("." in kind for kind in paged), paged
        if where == "disk":
            assert optimizer.pager.history
        expected, found = plain.state_dict()["state"], optimizer.state_dict()["state"]
        for number, entries in expected.items():
            for key, value in entries.items():
                other = found[number][key]
                assert type(value) is type(other)
                assert all(torch.equal(a, b) for a, b in zip(inner(value), inner(other), strict=True)), key
        optimizer.load_state_dict(copied(plain.state_dict()))
        assert one_step(plain_net, plain, 7) == one_step(net, optimizer, 7)
        pool.table.check()
        if where == "device":
            with pytest.raises(CheckpointError, match="quantised in blocks"):
                optimizer_state(net, optimizer, "optimizer_0")
    for a, b in zip(plain_net.parameters(), net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_layout_follows_the_size_of_the_parameter() -> None:
    net = wide()
    optimizer = torchao_optim.AdamW8bit(net.parameters())
    assert probe(optimizer).alone
    parts = parts_of(optimizer, net.layers[0].weight)
    assert parts == {"codes": (torch.uint8, torch.Size([64, 64])), "scale": (torch.float32, torch.Size([16]))}
    assert parts_of(optimizer, net.head.weight) == {}
    assert parts_of(torch.optim.AdamW(net.parameters()), net.layers[0].weight) == {}


def test_what_is_laid_out_otherwise_is_refused_by_name() -> None:
    class Lookalike(torch.optim.AdamW):
        __module__ = "bitsandbytes.optim.adamw"

    found = probe(Lookalike([nn.Parameter(torch.zeros(3))]))
    assert not found.alone and "bitsandbytes" in found.reason and "torchao" in found.reason


def test_with_float32_copies_of_the_weights() -> None:
    plain_net, net = wide(), wide().bfloat16()
    for p, q in zip(plain_net.parameters(), net.parameters(), strict=True):
        p.data.copy_(q.data)
    plain, wrapped = torchao_optim.AdamW8bit(plain_net.parameters()), torchao_optim.AdamW8bit(net.parameters())
    with pooled(wrapped, net, device=0.5, host=MIB, master=True) as (optimizer, _):
        for number in range(3):
            for p, q in zip(plain_net.parameters(), net.parameters(), strict=True):
                q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
                p.grad = q.grad.float()
            plain.step()
            optimizer.step()
        for p, q in zip(plain_net.parameters(), net.parameters(), strict=True):
            assert torch.equal(optimizer.pager.fetch(optimizer.pager.field_of(q, "master")), p)
