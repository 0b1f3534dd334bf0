"""A paged optimizer gives the bits of the plain one, wherever its state rests, and is still the same object."""

from __future__ import annotations

import copy
import ctypes
import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.optimizer_parts import probe
from memwall_strategy.pool import store as store_module
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer
from memwall_strategy.pool.state_placement import slot_bytes
from tests.pool.state import MIB, make_net, pooled, step

OPTIMIZERS: dict[str, Any] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "SGD plain": {"lr": 0.05},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW fused": {"lr": 1e-2, "fused": True},
    "AdamW foreach": {"lr": 1e-2, "foreach": True},
    "Adamax": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-2},
    "ASGD": {"lr": 1e-2},
}
PLACES: dict[str, Any] = {
    "device": {},
    "host": {"device": 0.6, "host": MIB},
    "disk": {"device": 0.6, "disk": MIB},
    "all three": {"device": 0.6, "host": 0.2, "disk": MIB},
}
"""Budgets; a float is a share of the whole state."""


def make(name: str, net: torch.nn.Module) -> torch.optim.Optimizer:
    """Two param groups of different options."""
    kind, options = getattr(torch.optim, name.split()[0]), OPTIMIZERS[name]
    weights = [p for p in net.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if p.dim() != 2]
    return kind([{"params": weights}, {"params": others, "lr": options["lr"] / 2}], **options)


def assert_same(a: Any, b: Any, path: str = "") -> None:
    assert type(a) is type(b) or isinstance(a, (int, float)), path
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}.{i}")
    else:
        assert a == b, path


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_the_plain_optimizer(name: str, where: str, tmp_path: Path) -> None:
    """Odd shapes, a tied weight, a frozen one, two groups, a scheduler and clipping."""
    plain_net, net = make_net(), make_net()
    plain, wrapped = make(name, plain_net), make(name, net)
    rates = [torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(each, T_0=3) for each in (plain, wrapped)]
    with pooled(wrapped, net, folder=tmp_path, **PLACES[where]) as (optimizer, pool):
        assert optimizer is wrapped
        for number in range(6):
            losses = step(plain_net, plain, number, rates[0]), step(net, optimizer, number, rates[1])
            assert losses[0] == losses[1], number
            pool.table.check()
        assert_same(plain.state_dict(), optimizer.state_dict())
        state_fields = [f for unit in optimizer.pager.units for f in unit.fields.values()]
        if where != "device" and len(state_fields) > 3:
            assert optimizer.pager.placement.slots == 2 and optimizer.pager.history
            assert any(home is not Tier.DEVICE for home in optimizer.pager.placement.homes.values())
    assert_same(plain_net.state_dict(), net.state_dict())


def test_what_couples_its_parameters_is_recognised() -> None:
    net = make_net()
    for optimizer, why in (
        (torch.optim.LBFGS(net.parameters()), "closure"),
        (torch.optim.SparseAdam(net.parameters()), "dense"),
        (Normed(net.parameters()), "couples"),
        (Counting(net.parameters()), "couples"),
    ):
        parts = probe(optimizer)
        assert not parts.alone and why in parts.reason, parts
        assert not optimizer.state or isinstance(optimizer, torch.optim.LBFGS)


class Normed(torch.optim.Optimizer):
    """Scales by the norm over all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with_grad = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_grad]).norm()
        for p in with_grad:
            p.sub_(0.1 * p.grad / norm)


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group, as some do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / group["steps"] * p.grad)


class Replacing(torch.optim.Optimizer):
    """Makes its state anew at each step, and a second one from its third step on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad * 0.1
                if state["n"] > 2:
                    state["late"] = state.get("late", torch.ones_like(p)) * 0.5 + state["mean"].abs()
                p.sub_(group["lr"] * state["mean"] / state.get("late", torch.ones_like(p)))
        return loss


@pytest.mark.parametrize("where", ["host", "disk", "all three"])
def test_state_that_is_made_anew_or_late(where: str, tmp_path: Path) -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = Replacing(plain_net.parameters()), Replacing(net.parameters())
    with pooled(wrapped, net, folder=tmp_path, **PLACES[where]) as (optimizer, pool):
        for number in range(6):
            assert step(plain_net, plain, number) == step(net, optimizer, number)
        assert_same(plain.state_dict(), optimizer.state_dict())
        pool.table.check()


def test_unpooled_without_its_state_it_starts_afresh(tmp_path: Path) -> None:
    net = make_net()
    optimizer = make("AdamW", net)
    with pooled(optimizer, net, folder=tmp_path, **PLACES["disk"]) as (made, pool):
        step(net, made, 0)
        paged = {id(f.parameter) for u in made.pager.units for f in u.fields.values() if made.pager.is_paged(f.block)}
        made.unpool(keep=False)
        assert type(optimizer) is torch.optim.AdamW and not pool.table.used_bytes(Tier.DISK)
        assert paged and not any(id(p) in paged for p in optimizer.state)
        step(net, optimizer, 1)
        assert {float(s["step"]) for p, s in optimizer.state.items() if id(p) in paged} == {1.0}


def test_closure_and_hooks_run_once_and_the_object_stays_what_it_is(tmp_path: Path) -> None:
    net = make_net()
    optimizer = make("AdamW", net)
    groups = optimizer.param_groups
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    with pooled(optimizer, net, **PLACES["host"]) as (made, _):
        made.register_step_post_hook(lambda *_: calls.append("post"))
        assert isinstance(made, torch.optim.AdamW) and isinstance(made, PooledOptimizer)
        assert made.param_groups is groups
        with torch.autograd.profiler.profile() as profile:
            step(net, made, 0)
        assert calls == ["pre", "post"]
        assert sum("Optimizer.step#" in event.name for event in profile.function_events) == 1


@pytest.mark.parametrize("where", ["host", "disk"])
def test_load_state_dict_before_and_between_steps(where: str, tmp_path: Path) -> None:
    source_net = make_net()
    source = make("AdamW", source_net)
    for number in range(3):
        step(source_net, source, number)
    saved = copy.deepcopy((source_net.state_dict(), source.state_dict()))
    wanted = [step(source_net, source, number) for number in (3, 4)]
    for steps_before in (0, 2):
        net = make_net()
        with pooled(make("AdamW", net), net, folder=tmp_path, **PLACES[where]) as (optimizer, pool):
            for number in range(steps_before):
                step(net, optimizer, number)
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch takes the tensors themselves
            pool.table.check()
            assert optimizer.param_groups[0]["initial_lr"] if "initial_lr" in saved[1]["param_groups"][0] else True
            assert [step(net, optimizer, number) for number in (3, 4)] == wanted


def test_state_dict_does_not_change_with_later_steps() -> None:
    net = make_net()
    with pooled(make("AdamW", net), net, **PLACES["host"]) as (optimizer, _):
        step(net, optimizer, 0)
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved)
        step(net, optimizer, 1)
        paged = [f for unit in optimizer.pager.units for f in unit.fields.values() if optimizer.pager.is_paged(f.block)]
        numbers = {id(p): n for n, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        assert paged
        for each in paged:
            number = numbers[id(each.parameter)]
            if number in saved["state"]:
                assert torch.equal(saved["state"][number][each.key], before["state"][number][each.key])


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "unpool"])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_it_leaves_as_an_ordinary_optimizer(where: str, how: str, tmp_path: Path) -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = make("AdamW", plain_net), make("AdamW", net)
    rates = torch.optim.lr_scheduler.StepLR(wrapped, 1)
    with pooled(wrapped, net, folder=tmp_path, **PLACES[where]) as (optimizer, pool):
        for number in range(3):
            step(plain_net, plain, number)
            step(net, optimizer, number)
        if how == "unpool":
            left = optimizer.unpool()
            assert left is wrapped and "slot" not in str(pool.table.to_records())
            step(plain_net, plain, 3)
            step(net, left, 3)
            assert rates.optimizer._opt_called
        elif how == "pickle":
            left = pickle.loads(pickle.dumps(optimizer))
        else:
            left = copy.deepcopy(optimizer)
        assert type(left) is torch.optim.AdamW
        assert_same(plain.state_dict()["state"], left.state_dict()["state"])
    torch.save(left.state_dict(), io.BytesIO())


def test_an_edit_of_state_between_steps_counts() -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = make("AdamW", plain_net), make("AdamW", net)
    with pooled(wrapped, net, **PLACES["host"]) as (optimizer, _):
        for number in range(4):
            step(plain_net, plain, number)
            step(net, optimizer, number)
            optimizer.pager.prefetch([])
            for each in (plain, optimizer):
                for state in each.state.values():
                    state["exp_avg"].mul_(0.5)
        assert_same(plain.state_dict(), optimizer.state_dict())
    assert_same(plain_net.state_dict(), net.state_dict())


def test_what_is_held_on_the_device_is_what_was_booked(tmp_path: Path) -> None:
    """At the first step too: slots and what stays, never more than one unit's new state beside them."""
    net = make_net(layers=8)
    with pooled(make("AdamW", net), net, device=0.5, disk=MIB, folder=tmp_path, slots=2) as (optimizer, pool):
        kept = sum(
            f.nbytes
            for unit in optimizer.pager.units
            for block, f in unit.fields.items()
            if optimizer.pager.placement.homes[block] is Tier.DEVICE
        )
        total = sum(f.nbytes for unit in optimizer.pager.units for f in unit.fields.values())
        for number in range(3):
            step(net, optimizer, number)
            optimizer.pager.rest()
            for unit in optimizer.pager.units:
                for each in unit.fields.values():
                    value = optimizer.state.get(each.parameter, {}).get(each.key)
                    if value is not None and optimizer.pager.is_paged(each.block):
                        assert value.numel() == 0  # nothing of it is left on the device
            booked = pool.table.balance(tier=Tier.DEVICE).bytes
            steps = pool.table.balance(tier=Tier.DEVICE, kind="step").bytes
            slots = pool.table.balance(tier=Tier.DEVICE, kind=Kind.STAGING).bytes
            assert slots == optimizer.pager.placement.staging_bytes
            frozen = 2 * 4 * net.layers[2].bias.numel()  # planned, never made
            assert booked in (kept + slots + steps, kept + slots + steps - frozen)
            assert booked - steps <= total / 2


def test_a_failed_page_in_is_named_and_loses_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    with pooled(make("AdamW", net), net, folder=tmp_path, **PLACES["disk"]) as (optimizer, pool):
        step(net, optimizer, 0)
        optimizer.pager.rest()
        before = [len(group["params"]) for group in optimizer.param_groups]
        with monkeypatch.context() as patch:
            patch.setattr(pool.stores[Tier.DISK], "read", raise_os_error)
            with pytest.raises(MemwallError, match=r"page-in.*layers\.0.*broken"):
                step(net, optimizer, 1)
        assert [len(group["params"]) for group in optimizer.param_groups] == before
        pool.page_in.reset()
        optimizer.pager.forget()


def raise_os_error(*_: object) -> None:
    raise OSError("broken")


def test_the_scaler_decides_for_all_units(tmp_path: Path) -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = make("AdamW", plain_net), make("AdamW", net)
    with pooled(wrapped, net, **PLACES["host"]) as (optimizer, _):
        for its_net, its in ((plain_net, plain), (net, optimizer)):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            for number in range(5):
                its.zero_grad()
                scaler.scale(its_net(torch.full((2, 37), 0.1 * number)).square().mean()).backward()
                if number == 2:
                    its_net.head.weight.grad[0, 0] = float("inf")
                scaler.step(its)
                scaler.update()
        assert_same(plain.state_dict(), optimizer.state_dict())
    assert_same(plain_net.state_dict(), net.state_dict())


def test_bad_use_is_named() -> None:
    net = make_net()
    with pooled(make("AdamW", net), net, **PLACES["host"]) as (optimizer, _):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ConfigError, match="given parameters after"):
            optimizer.step()
        optimizer.param_groups.pop()
    patched = make("AdamW", net)
    patched.step = lambda closure=None: None
    with pytest.raises(ConfigError, match="was replaced on the object"), pooled(patched, net):
        raise AssertionError("unreachable")
    assert type(patched) is torch.optim.AdamW and "step" in vars(patched)


def test_every_optimizer_of_torch_is_listed() -> None:
    """A new one in torch.optim must get its case, or be recognised as one that cannot be stepped in parts."""
    known = {name.split()[0] for name in OPTIMIZERS} | {"LBFGS", "SparseAdam", "Muon", "Optimizer"}
    there = {n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type)}
    assert there <= known, there - known


def test_muon_on_matrices(tmp_path: Path) -> None:
    """It takes matrices only; their state pages like any other's."""
    plain_net, net = make_net(), make_net()
    plain, wrapped = (torch.optim.Muon([p for p in n.parameters() if p.dim() == 2]) for n in (plain_net, net))
    with pooled(wrapped, net, device=0.6, host=MIB) as (optimizer, _):
        assert optimizer.pager.placement.slots == 2
        for number in range(3):
            assert step(plain_net, plain, number) == step(net, optimizer, number)
    assert_same(plain_net.state_dict(), net.state_dict())


def test_units_without_a_gradient_are_left_out(tmp_path: Path) -> None:
    plain_net, net = make_net(), make_net()
    plain, wrapped = make("AdamW", plain_net), make("AdamW", net)
    with pooled(wrapped, net, folder=tmp_path, **PLACES["disk"]) as (optimizer, _):
        for number, skip in itertools.product(range(3), (0, 4, None)):
            for its_net, its in ((plain_net, plain), (net, optimizer)):
                its.zero_grad()
                x = torch.full((2, 37), 0.1 + number)
                for i, layer in enumerate(its_net.layers):
                    x = x if i == skip else torch.tanh(layer(x))
                its_net.head(x).square().mean().backward()
                its.step()
        assert_same(plain.state_dict(), optimizer.state_dict())


RATES: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda n: 0.7),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),  # cycles the betas too
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, anneal_epochs=3),
}


@pytest.mark.parametrize("name", RATES)
def test_every_scheduler_drives_it(name: str, tmp_path: Path) -> None:
    """CASES 4: made after the optimizer was wrapped, with the plain optimizer's rates, weights and ``initial_lr``."""
    plain_net, net = make_net(), make_net()
    plain, wrapped = make("AdamW", plain_net), make("AdamW", net)
    with pooled(wrapped, net, device=0.6, host=MIB, folder=tmp_path) as (optimizer, _):
        rates = [RATES[name](each) for each in (plain, optimizer)]
        assert rates[1].optimizer is wrapped if name != "ChainedScheduler" else True
        seen = []
        for number in range(6):
            losses = step(plain_net, plain, number), step(net, optimizer, number)
            assert losses[0] == losses[1], number
            for rate, loss in zip(rates, losses, strict=True):
                rate.step(loss) if name == "ReduceLROnPlateau" else rate.step()
            for group, other in zip(plain.param_groups, wrapped.param_groups, strict=True):
                assert {**group, "params": 0} == {**other, "params": 0}
            seen.append(wrapped.param_groups[0]["lr"])
        assert len(set(seen)) > 1
        assert ("initial_lr" in wrapped.param_groups[0]) == (name != "ReduceLROnPlateau")
        assert optimizer.pager.history, "state was paged"
    assert_same(plain_net.state_dict(), net.state_dict())
    missing = {n for n, c in vars(torch.optim.lr_scheduler).items()
               if isinstance(c, type) and issubclass(c, torch.optim.lr_scheduler.LRScheduler)} - RATES.keys()
    assert missing <= {"LRScheduler", "_LRScheduler"}, missing


def test_large_and_small_state_of_a_unit_travel_as_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net(layers=4, width=256)  # weights that are large blocks of whole pages, biases that are small ones
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    slot = slot_bytes([256 * 256 * 4, 256 * 4] * 2)
    with pooled(optimizer, net, device=2 * slot, host=16 * MIB) as (paged, pool):
        for number in range(2):  # the first step makes the state
            step(net, paged, number)
        pool.drain()
        copies: list[int] = []
        real = ctypes.memmove
        monkeypatch.setattr(store_module.ctypes, "memmove", lambda to, at, n: copies.append(n) or real(to, at, n))
        step(net, paged, 2)
        pool.drain()
        units = 5  # of which one has no weight of its own, and one no bias that trains
        assert units <= len(copies) <= 2 * units, "one each way, less those that are there already"
        assert max(copies) == 2 * (256 * 256 * 4 + 256 * 4), "moments of weights and biases together"
