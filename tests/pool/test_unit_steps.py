"""Where and on what a unit is stepped: on the host in place or on copies, and on float32 copies of its weights."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine.optimizer_parts import is_elementwise
from memwall_strategy.pool.master_copies import follow_edits
from tests.pool.state import MIB, make_net, pooled, step
from tests.pool.test_pooled_optimizer import OPTIMIZERS, PLACES, assert_same, make

ON_HOST: dict[str, Any] = {
    "part on the device": {"device": 0.4, "host": MIB, "at_home": True},
    "all": {"device": 0.0, "host": MIB, "at_home": True},
    "on copies": {"device": 0.4, "host": MIB, "at_home": True, "split": False, "copies": True},
}


@pytest.mark.parametrize("how", ON_HOST)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stepped_on_the_host_it_gives_the_same_bits(name: str, how: str) -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = make(name, plain_net), make(name, net)
    if how == "on copies" and not is_elementwise(wrapped):
        pytest.skip("it looks at whole parameters; such a one stays on the device")
    with pooled(wrapped, net, **ON_HOST[how]) as (optimizer, pool):
        pager = optimizer.pager
        pages = any(pager.homes.paged)
        assert pages == bool(pager.on_host) and pager.placement.slots == 0
        for number in range(5):
            assert step(plain_net, plain, number) == step(net, optimizer, number), number
            pool.table.check()
        assert_same(plain.state_dict(), optimizer.state_dict())
        assert not pager.history  # nothing came to the device
        assert pages or name in ("SGD plain", "Adafactor")
        if how == "on copies":  # whole units are on one side
            for unit in pager.units:
                assert len({pager.homes.tier_of(b) for b, f in unit.fields.items() if f.nbytes}) <= 1
    assert_same(plain_net.state_dict(), net.state_dict())


def test_what_is_an_elementwise_step() -> None:
    net = make_net()
    matrices = [p for p in net.parameters() if p.dim() == 2]
    assert is_elementwise(make("AdamW", net)) and is_elementwise(make("Adagrad", net))
    assert not is_elementwise(make("Adafactor", net)) and not is_elementwise(torch.optim.Muon(matrices))


def test_copies_move_what_they_must_and_no_more() -> None:
    """Down: weights and gradients. Up: weights. State: never."""
    net = make_net()
    with pooled(make("AdamW", net), net, device=0.0, host=MIB, at_home=True, copies=True) as (optimizer, pool):
        step(net, optimizer, 0)
        for lane in (pool.page_in, pool.page_out):
            lane.take_stats()
        step(net, optimizer, 1)
        weights = sum(p.nbytes for p in net.parameters() if p.grad is not None)
        assert pool.page_out.take_stats().bytes == 2 * weights
        assert pool.page_in.take_stats().bytes == weights


def test_a_step_that_breaks_on_the_host_leaves_its_state_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    with pooled(make("AdamW", net), net, device=0.0, host=MIB, at_home=True) as (optimizer, _):
        step(net, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(optimizer.unit_steps, "_step", raise_os_error)
            with pytest.raises(OSError, match="broken"):
                step(net, optimizer, 1)
        optimizer.pager.forget()
        with pytest.raises(MemwallError, match="cannot be read: its last write failed"):
            optimizer.state_dict()
        optimizer.load_state_dict(saved)  # what is loaded counts again
        step(net, optimizer, 1)


def raise_os_error() -> None:
    raise OSError("broken")


# -- float32 copies of weights --


def coarse(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Every weight coarse but a bias."""
    net = make_net().to(dtype)
    net.layers[0].bias = nn.Parameter(net.layers[0].bias.detach().float())
    net.layers[0].forward = lambda x, one=net.layers[0]: nn.functional.linear(x, one.weight, one.bias.to(x.dtype))
    return net


def gradients(net: nn.Module, number: int) -> None:
    net.zero_grad()
    x = torch.randn(6, 37, generator=torch.Generator().manual_seed(number)).to(net.head.weight.dtype)
    net(x).float().square().mean().backward()


class Explicit:
    """The loop that people write: a float32 list of weights beside the coarse ones."""

    def __init__(self, name: str, net: nn.Module) -> None:
        self.net = net
        self.pairs = [(p, nn.Parameter(p.detach().float())) for p in net.parameters()]
        twin = nn.Module()
        for number, (_, fine) in enumerate(self.pairs):
            twin.register_parameter(str(number), fine)
        self.optimizer = make(name, twin)

    def step(self, number: int) -> None:
        gradients(self.net, number)
        for p, fine in self.pairs:
            fine.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for p, fine in self.pairs:
                p.copy_(fine)


WITH_MASTER = {**PLACES, **ON_HOST}


@pytest.mark.parametrize("where", WITH_MASTER)
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD", "SGD plain", "Adafactor", "RMSprop"])
def test_master_copies_are_the_explicit_loop_to_the_last_bit(name: str, where: str, tmp_path: Path) -> None:
    explicit, net = Explicit(name, coarse()), coarse()
    wrapped = make(name, net)
    if where == "on copies" and not is_elementwise(wrapped):
        pytest.skip("stays on the device")
    with pooled(wrapped, net, folder=tmp_path, master=True, **WITH_MASTER[where]) as (optimizer, pool):
        for number in range(5):
            explicit.step(number)
            gradients(net, number)
            optimizer.step()
            pool.table.check()
            assert_same(dict(explicit.net.named_parameters()), dict(net.named_parameters()))
        for p, fine in zip(net.parameters(), (fine for _, fine in explicit.pairs), strict=True):
            if p.dtype is torch.bfloat16 and p.grad is not None:
                each = optimizer.pager.field_of(p, "master")
                assert torch.equal(optimizer.pager.fetch(each), fine)
            assert (optimizer.pager.field_of(p, "master") is None) == (p.dtype is torch.float32)
        assert {b.kind for b, _ in pool.table} >= {Kind.MASTER}


def test_updates_below_the_resolution_add_up() -> None:
    moved = {}
    for master in (False, True):
        net = nn.Module()
        net.layers, net.head = nn.ModuleList(), nn.Linear(64, 1, bias=False)
        nn.init.ones_(net.head.weight)
        net.to(torch.bfloat16)
        with pooled(torch.optim.SGD(net.parameters(), lr=1e-4), net, master=master) as (optimizer, _):
            for _ in range(50):
                net.head.weight.grad = torch.ones_like(net.head.weight)
                optimizer.step()
        moved[master] = float(net.head.weight.detach().float().mean())
    assert moved[False] == 1.0 and abs(moved[True] - 0.995) < 2**-8


@pytest.mark.parametrize("where", ["device", "host", "all"])
def test_edited_and_loaded_weights_count(where: str) -> None:
    net = coarse()
    with pooled(make("AdamW", net), net, master=True, **WITH_MASTER[where]) as (optimizer, _):
        for number in range(3):
            gradients(net, number)
            optimizer.step()
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        wanted = after(net, optimizer)
        for weight in net.parameters():
            weight.data.mul_(0.5)
        gradients(net, 9)
        before = net.head.weight.detach().clone()
        optimizer.step()
        assert (net.head.weight - before).abs().max() < 0.1  # from the halved weight on, not from the copy
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        assert all(s["exp_avg"].dtype is torch.float32 for s in optimizer.state.values())
        assert_same(after(net, optimizer), wanted)


def after(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for number in (3, 4):
        gradients(net, number)
        optimizer.step()
    return copy.deepcopy(dict(net.named_parameters()))


def test_state_of_the_coarse_type_is_taken_over() -> None:
    """Made before there were copies: by a plain run of the same optimizer."""
    net = coarse()
    plain = make("AdamW", net)
    gradients(net, 0)
    plain.step()
    with pooled(plain, net, master=True, **PLACES["host"]) as (optimizer, pool):
        gradients(net, 1)
        optimizer.step()
        assert all(s["exp_avg"].dtype is torch.float32 for s in optimizer.state.values())
        pool.table.check()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2**20 + 1,), (3, 5)])
def test_edits_are_found_whatever_the_shape(shape: tuple[int, ...]) -> None:
    master = torch.rand(shape) + 1e-4
    weight, kept = master.bfloat16(), master.clone()
    follow_edits(master, weight)
    assert torch.equal(master, kept)
    if weight.numel():
        weight.view(-1)[-1] += 1
        follow_edits(master, weight)
        assert torch.equal(master, weight.float())


def test_the_first_step_holds_no_more_than_one_units_state_twice() -> None:
    net = make_net(layers=8).bfloat16()
    with pooled(make("AdamW", net), net, device=0.5, host=MIB, master=True) as (optimizer, pool):
        sizes = [sum(unit.sizes().values()) for unit in optimizer.pager.units]
        seen = []
        plain_step = optimizer.unit_steps._step

        def watched() -> None:
            plain_step()
            seen.append(sum(loose(optimizer, pool)))

        optimizer.unit_steps._step = watched
        for number in range(2):
            gradients(net, number)
            optimizer.step()
        kept = sum(n for u in optimizer.pager.units for b, n in u.sizes().items()
                   if optimizer.pager.homes.tier_of(b) is Tier.DEVICE)  # fmt: skip
        assert max(seen) <= kept + max(sizes)


def loose(optimizer: Any, pool: Any) -> list[int]:
    """State tensors that are in torch's own memory."""
    ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for store in pool.stores.values() for s in store.storages()]
    tensors = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, torch.Tensor)]
    return [t.nbytes for t in tensors if t.dim() and not any(a <= t.data_ptr() < b for a, b in ranges)]


# -- together with the rest --


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("how", ["host", "all", "on copies"])
def test_steps_inside_the_backward(how: str, master: bool) -> None:
    nets = make_net(), make_net()
    for each in nets:  # one gradient a backward for every weight
        each.layers[3].weight = nn.Parameter(each.layers[3].weight.detach().clone())
        each.to(torch.bfloat16 if master else torch.float32)
    plain, wrapped = make("AdamW", nets[0]), make("AdamW", nets[1])

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            x = torch.randn(6, 37, generator=torch.Generator().manual_seed(number)).to(net.head.weight.dtype)
            loss = net(x).float().square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    with (
        pooled(plain, nets[0], master=master) as (after_it, _),
        pooled(wrapped, nets[1], in_backward=True, master=master, **WITH_MASTER[how]) as (inside, pool),
    ):
        for number in range(4):
            assert train(nets[0], after_it, number) == train(nets[1], inside, number), number
            pool.table.check()
    assert_same(nets[0].state_dict(), nets[1].state_dict())


@pytest.mark.parametrize("copies", [False, True])
def test_units_and_weights_without_a_gradient_on_the_host(copies: bool) -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = make("AdamW", plain_net), make("AdamW", net)
    with pooled(wrapped, net, **ON_HOST["all"], copies=copies) as (optimizer, _):
        for number, skip in itertools.product(range(3), (0, 4, None)):
            for its_net, its in ((plain_net, plain), (net, optimizer)):
                its.zero_grad()
                x = torch.full((2, 37), 0.1 + number)
                for i, layer in enumerate(its_net.layers):
                    x = x if i == skip else torch.tanh(layer(x))
                its_net.head(x).square().mean().backward()
                if number == 1:
                    its_net.layers[1].bias.grad = None
                its.step()
        assert_same(plain.state_dict(), optimizer.state_dict())
    assert_same(plain_net.state_dict(), net.state_dict())


def test_a_copy_that_fails_is_named_and_training_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    with pooled(make("AdamW", net), net, **ON_HOST["on copies"]) as (optimizer, pool):
        step(net, optimizer, 0)
        with monkeypatch.context() as patch:
            patch.setattr(pool.stores[Tier.HOST].copier, "copy", lambda *_: raise_os_error())
            with pytest.raises(MemwallError, match=r"gradients to host.*broken"):
                step(net, optimizer, 1)
        pool.reset()
        optimizer.unit_steps.forget()
        optimizer.pager.forget()
        step(net, optimizer, 2)
        pool.table.check()


def test_copies_leave_with_the_optimizer_and_come_back_with_it() -> None:
    """Pickled and unpooled, its state keeps float32 and the copies; pooled again it goes on from them."""
    explicit, net = Explicit("AdamW", coarse()), coarse()
    wrapped = make("AdamW", net)
    for number in range(4):
        with pooled(wrapped, net, **PLACES["host"], master=True) as (optimizer, pool):
            explicit.step(number)
            gradients(net, number)
            optimizer.step()
            left = pickle.loads(pickle.dumps(optimizer))
            assert any("master" in entries and entries["master"].numel() for entries in left.state.values())
            optimizer.unpool(keep=True)
            assert all(block.kind == Kind.STAGING for block, _ in pool.table)
            assert_same(dict(explicit.net.named_parameters()), dict(net.named_parameters()))
