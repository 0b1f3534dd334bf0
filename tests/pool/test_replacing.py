"""State placed anew between steps: in another room, and for parameters that join."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memwall_strategy.core.block import Block, Tier
from memwall_strategy.core.errors import ConfigError, PoolFull
from memwall_strategy.engine.optimizer_parts import Parts, probe
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer
from memwall_strategy.pool.state_fields import unit_states
from memwall_strategy.pool.state_placement import Room, StatePlacement, place_state
from tests.pool.state import MIB, make_net, pooled, step, unit_of_net
from tests.pool.test_pooled_optimizer import PLACES, assert_same, make

ROOMS: dict[str, tuple[float, float, int]] = {
    "device": (1.5, 0, 0),
    "host": (0.6, 1.5, 0),
    "disk": (0.6, 0, MIB),
    "all three": (0.6, 0.2, MIB),
}
"""Device, host (shares of the state) and disk."""


def place(optimizer: PooledOptimizer, net: nn.Module, room: str, **options: Any) -> StatePlacement:
    units = unit_states(optimizer, parts_of(optimizer), unit_of_net(net))
    sizes = [unit.sizes() for unit in units]
    total = sum(sum(each.values()) for each in sizes)
    device, host, disk = ROOMS[room]
    placement = place_state(sizes, Room(int(device * total), int(host * total), disk), slots=2)
    optimizer.replace_state(units, placement, **options)
    return placement


def parts_of(optimizer: PooledOptimizer) -> Parts:
    """Also while its state is on disk."""
    parts = probe(optimizer)
    assert parts.alone, parts.reason
    return parts


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_from_any_room_to_any_other_between_steps(name: str, tmp_path: Path) -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = make(name, plain_net), make(name, net)
    rates = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (plain, wrapped)]
    tour = ["host", *itertools.chain.from_iterable(itertools.permutations(ROOMS, 2)), "host"]
    with pooled(wrapped, net, host=MIB, disk=MIB, folder=tmp_path) as (optimizer, pool):
        for number, room in enumerate(tour):
            optimizer.prefetch()  # on its way when the order comes
            placement = place(optimizer, net, room)
            pool.table.check()
            for unit in optimizer.pager.units:
                for block in unit.fields:
                    if block in pool.table and pool.table.locate(block).generation:
                        assert pool.table.locate(block).tier is placement.homes[block]
            assert step(plain_net, plain, number, rates[0]) == step(net, optimizer, number, rates[1]), (number, room)
            pool.table.check()
        assert_same(plain.state_dict(), optimizer.state_dict())
    assert_same(plain_net.state_dict(), net.state_dict())


def test_no_block_is_ever_there_twice_but_one(tmp_path: Path) -> None:
    """What moves out leaves the device before the next block moves."""
    net = make_net(layers=8)
    with pooled(make("AdamW", net), net, host=MIB) as (optimizer, pool):
        step(net, optimizer, 0)
        homes, host = optimizer.pager.homes, pool.stores[Tier.HOST]
        whole = on_device(optimizer, host)
        seen = []
        copy_out = homes.copy_out
        homes.copy_out = lambda pairs, after: (copy_out(pairs, after), seen.append(on_device(optimizer, host)))
        place(optimizer, net, "host")
        assert seen and seen[-1] < 0.7 * whole
        assert all(later <= earlier for earlier, later in itertools.pairwise(seen))


def on_device(optimizer: PooledOptimizer, host: Any) -> int:
    """Bytes of state in torch's own memory."""
    ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in host.storages()]
    tensors = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    return sum(t.nbytes for t in tensors if not any(a <= t.data_ptr() < b for a, b in ranges))


def test_where_room_is_missing_everything_rests_where_it_did(tmp_path: Path) -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = make("AdamW", plain_net), make("AdamW", net)
    with pooled(wrapped, net, folder=tmp_path, **PLACES["all three"]) as (optimizer, pool):
        for number in range(2):
            step(plain_net, plain, number)
            step(net, optimizer, number)
        before = dict(optimizer.pager.placement.homes)
        fill = fill_up(pool)
        with pytest.raises(PoolFull, match=r"host tier.*no room"):
            place(optimizer, net, "host")
        assert optimizer.pager.placement.homes == before
        with pytest.raises(ConfigError, match="no more here"):
            place(optimizer, net, "host", make_room=refuse)
        pool.table.check()
        for block in fill:
            pool.table.drop(block)
        for number in (2, 3):
            assert step(plain_net, plain, number) == step(net, optimizer, number)
        assert_same(plain.state_dict(), optimizer.state_dict())


def fill_up(pool: Any) -> list[Block]:
    """Take what is free on the host."""
    made: list[Block] = []
    nbytes = pool.table.free_bytes(Tier.HOST)
    while nbytes:
        block = Block("filler", str(len(made)), "snapshot")
        try:
            pool.table.allocate(block, nbytes, Tier.HOST)
            made.append(block)
        except PoolFull:
            nbytes //= 2
    return made


def refuse(tier: Tier, nbytes: int) -> None:
    raise ConfigError("no more here")


@pytest.mark.parametrize("where", [*PLACES, "stepped on host", "on copies"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_parameters_that_join_are_placed_before_the_next_step(name: str, where: str, tmp_path: Path) -> None:
    """Frozen, then unfrozen and added in a group of their own, as Lightning's BaseFinetuning does."""
    options = dict(PLACES.get(where, {"device": 0.2, "host": MIB, "at_home": True, "split": where != "on copies",
                                      "copies": where == "on copies"}))  # fmt: skip
    plain_net, net = make_net(layers=8), make_net(layers=8)
    found = []
    for its_net in (plain_net, net):
        late = [*its_net.layers[0].parameters(), its_net.head.weight]
        for p in late:
            p.requires_grad_(False)
        rest = [p for p in its_net.parameters() if all(p is not q for q in late)]
        optimizer = getattr(torch.optim, name)(rest, lr=0.01)
        found.append((its_net, optimizer, late, torch.optim.lr_scheduler.StepLR(optimizer, 2)))
    (_, plain, plain_late, plain_rate), (_, wrapped, late, rate) = found

    def follow() -> None:
        units = unit_states(wrapped, parts_of(wrapped), unit_of_net(net))
        sizes = [unit.sizes() for unit in units]
        total = sum(sum(each.values()) for each in sizes)
        there = range(len(units)) if options.get("at_home") else ()
        share = options.get("device", 2.0)
        room = Room(int(share * total), options.get("host", 0) and MIB, options.get("disk", 0))
        placement = place_state(sizes, room, slots=2, at_home=there, split=options.get("split", True))
        wrapped.replace_state(units, placement, at_home=[units[index].name for index in there])

    with pooled(wrapped, net, folder=tmp_path, follow_groups=follow, **options) as (optimizer, pool):
        for number in range(6):
            if number == 3:
                for its, its_late in ((plain, plain_late), (optimizer, late)):
                    for p in its_late:
                        p.requires_grad_(True)
                    its.add_param_group({"params": its_late[:1], "lr": 0.005, "initial_lr": 0.01})
            if number == 4:  # between backward and step
                for its, its_late in ((plain, plain_late), (optimizer, late)):
                    its.register_step_pre_hook(add_once(its_late[1:]))
            assert step(plain_net, plain, number, plain_rate) == step(net, optimizer, number, rate), number
            pool.table.check()
        assert_same(plain.state_dict(), optimizer.state_dict())
        names = {n for unit in optimizer.pager.units for n in unit.names}
        assert {"layers.0.weight", "head.weight"} <= names
        optimizer.load_state_dict(optimizer.state_dict())
        assert step(plain_net, plain, 9) == step(net, optimizer, 9)
    assert_same(plain_net.state_dict(), net.state_dict())


def add_once(params: list[Any]) -> Any:
    waiting = [params]

    def hook(optimizer: Any, *_: Any) -> None:
        if waiting:
            optimizer.add_param_group({"params": waiting.pop(), "lr": 0.005, "initial_lr": 0.01})

    return hook


def test_parameters_that_leave_take_their_state_along(tmp_path: Path) -> None:
    net = make_net()
    with pooled(make("AdamW", net), net, host=MIB, device=0.6) as (optimizer, pool):
        step(net, optimizer, 0)
        gone = optimizer.param_groups.pop()
        optimizer.follow_groups = lambda: place(optimizer, net, "host")
        step(net, optimizer, 1)
        pool.table.check()
        biases = {n for n, p in net.named_parameters() if any(p is q for q in gone["params"])}
        assert not any(block.parameter in biases for block, _ in pool.table)
        assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in gone["params"] if p in optimizer.state)
