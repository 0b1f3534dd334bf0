"""A small model with units, and pools for its optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memwall_strategy.engine.optimizer_parts import probe
from memwall_strategy.pool.device import DeviceStore
from memwall_strategy.pool.disk import DiskStore
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer, pool_optimizer
from memwall_strategy.pool.state_fields import unit_states
from memwall_strategy.pool.state_pager import StatePager
from memwall_strategy.pool.state_placement import Room, place_state
from memwall_strategy.pool.table import AddressTable

MIB = 2**20


class Net(nn.Module):
    """Layers of odd sizes, one weight shared by two of them, one frozen."""

    def __init__(self, layers: int = 5, width: int = 37) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 3, bias=False)
        self.layers[3].weight = self.layers[1].weight
        self.head.requires_grad_(True)
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def make_net(**options: Any) -> Net:
    torch.manual_seed(5)
    return Net(**options)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int, scheduler: Any = None) -> float:
    """One step on a batch that depends on ``number`` only; returns the loss. Gradients are clipped."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(6, net.layers[0].in_features, generator=generator)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean() + 0.1 * net(x).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        return loss

    loss = optimizer.step(closure)
    if scheduler is not None:
        scheduler.step()
    return loss.item()


def unit_of_net(net: nn.Module) -> Any:
    names = {parameter: name for name, parameter in net.named_parameters()}
    return lambda p: (".".join(names[p].split(".")[:2]) if names[p].startswith("layers") else "root", names[p])


@contextmanager
def pooled(
    optimizer: torch.optim.Optimizer,
    net: nn.Module,
    *,
    device: int | float = 8 * MIB,
    host: int | float = 0,
    disk: int = 0,
    folder: Path | None = None,
    slots: int = 2,
    at_home: bool = False,
    split: bool = True,
    **options: Any,
) -> Iterator[tuple[PooledOptimizer, Pool]]:
    """Page ``optimizer``'s state under these budgets (a float: share of the state); all is closed at the end.

    Args:
        at_home: state on the host is stepped there; ``split``: see ``place_state``.
        options: for ``pool_optimizer``.
    """
    parts = probe(optimizer, master=options.get("master", False))
    assert parts.alone, parts.reason
    units = unit_states(optimizer, parts, unit_of_net(net))
    total = sum(sum(unit.sizes().values()) for unit in units)
    device, host = (int(each * total) if isinstance(each, float) else each for each in (device, host))
    table = AddressTable()
    stores: list[Any] = [DeviceStore(table, device + MIB)]  # the placement, and not the store, gets the exact budget
    if host or disk:
        stores.append(HostStore(table, host + 8 * MIB))
    if disk:
        stores.append(DiskStore(table, disk, folder, host=stores[-1]))
    pool = Pool(table, stores, timeout_s=20.0)
    there = range(len(units)) if at_home else ()
    sizes = [unit.sizes() for unit in units]
    placement = place_state(sizes, Room(device, host, disk), slots=slots, at_home=there, split=split)
    pager = StatePager(
        optimizer, units, placement, table=table, stores=pool.stores, page_in=pool.page_in, page_out=pool.page_out,
        at_home=[units[index].name for index in there],
    )  # fmt: skip
    made = pool_optimizer(optimizer, pager, **options)
    try:
        yield made, pool
        table.check()
    finally:
        if isinstance(made, PooledOptimizer):
            made.unpool(keep=False)
        pool.close()
