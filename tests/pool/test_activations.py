"""Activations kept, offloaded and recomputed: the same losses and weights to the last bit, and fewer bytes."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from memwall_strategy.config import MemwallConfig, PoolConfig
from memwall_strategy.core.block import Kind, Phase, Tier
from memwall_strategy.core.errors import ConfigError, MemwallError, PoolFull
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.engine.unit_forward import UnitForward
from memwall_strategy.pool.activation_pager import ActivationPager
from memwall_strategy.pool.activations import Mode, sqrt_plan
from memwall_strategy.pool.pool import Pool
from memwall_strategy.runtime import Runtime
from memwall_strategy.telemetry.events import EventKind

WIDTH, VOCABULARY, CONTEXT = 16, 23, 12
Plan = Callable[[Runtime, int], None]


class Unit(nn.Module):
    """Attention and an MLP with dropout in both, and a normalization with running statistics."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop, self.statistics = nn.Dropout(0.2), nn.BatchNorm1d(width)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).unbind(-3)
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask, dropout_p=dropout)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        x = self.statistics(x.transpose(1, 2)).transpose(1, 2)
        return x + self.drop(self.mlp(x))


class Mixer(nn.Module):
    """A unit that every compiler takes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.drop = nn.Sequential(nn.Linear(WIDTH, 99), nn.GELU(), nn.Linear(99, WIDTH)), nn.Dropout(0.1)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + self.drop(self.mlp(x))


class Net(nn.Module):
    """Units in a row; ``rounds`` calls each that often, ``between`` is the model's own code between two units."""

    def __init__(
        self,
        units: int = 5,
        *,
        kind: type[nn.Module] = Unit,
        rounds: int = 1,
        between: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.units = nn.ModuleList(kind() for _ in range(units))
        self.rounds, self.between = rounds, between

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.embed(tokens), torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
        for _ in range(self.rounds):
            for unit in self.units:
                x = unit(x, mask=mask)
                if self.between is not None:
                    x = self.between(x)
        return self.head(x)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """FSDP2 on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[..., Runtime]:
    def make_runtime(net: nn.Module, **options: Any) -> Runtime:
        pool = PoolConfig(**({"host_budget": "16MiB", "deep_accounting": True} | options))
        runtime = Runtime(MemwallConfig(pool=pool), mesh=data_parallel_mesh("cpu", 1, 1))
        request.addfinalizer(runtime.close)
        runtime.setup(net)
        runtime.add_optimizers([torch.optim.AdamW(net.parameters(), lr=1e-2)])
        return runtime

    return make_runtime


def tokens_of(step: int, micro: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCABULARY, (4, CONTEXT), generator=generator) for _ in range(micro)]


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def step(runtime: Runtime, number: int, micro: int = 2) -> float:
    batch = tokens_of(number, micro)
    return runtime.step(batch, lambda t: loss_of(runtime.model, t), runtime.optimizers[0]).item()


def left(runtime: Runtime) -> int:
    """Bytes of activations in the pool, once what was still leaving has left."""
    if (pool := runtime.pool._pool) is not None:
        pool.drain()
    runtime.pool.activations.take_figures()
    return runtime.pool.table.balance(kind=Kind.ACTIVATION).held_bytes


def train(
    make: Callable[..., Runtime], plan: Plan, *, steps: int = 3, units: int = 5, **net: Any
) -> tuple[list[float], dict[str, Tensor], Runtime]:
    """Losses, final weights and buffers, and the runtime; ``plan`` is called before each step."""
    torch.manual_seed(3)
    runtime = make(Net(units, **net))
    losses = []
    for number in range(steps):
        plan(runtime, number)
        losses.append(step(runtime, number))
        runtime.pool.table.check()
        assert left(runtime) == 0
    weights = {k: getattr(v, "full_tensor", v.clone)() for k, v in runtime.model.state_dict().items()}
    return losses, weights, runtime


def assert_same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert [name for name in found[1] if not torch.equal(found[1][name], wanted[1][name])] == []


def keep(runtime: Runtime, number: int) -> None:
    assert set(runtime.pool.activations.modes.values()) <= {Mode.KEEP}


def everywhere(mode: str) -> Plan:
    return lambda runtime, _: runtime.pool.set_activations(dict.fromkeys(runtime.pool.activations.units, mode))


def together(runtime: Runtime, _: int) -> None:
    runtime.pool.set_activations(together=sqrt_plan(runtime.pool.activations.units))


def changing(runtime: Runtime, number: int) -> None:
    """Another mix in each step, one of them unit by unit."""
    units = runtime.pool.activations.units
    mixes = (
        lambda: runtime.pool.set_activations({units[0]: "offload", units[1]: "recompute", units[2]: "selective"}),
        lambda: runtime.pool.set_activations({n: list(Mode)[i % 4].value for i, n in enumerate(units)}),
        lambda: runtime.pool.set_activations({units[-1]: "offload"}, together=[units[:2], units[2:4]]),
        lambda: runtime.pool.set_activations({units[0]: "keep"}),
    )
    mixes[number % len(mixes)]()


PLANS: dict[str, Plan] = {m.value: everywhere(m) for m in Mode if m is not Mode.KEEP} | {
    "together": together, "changing": changing,
}  # fmt: skip


# -- the plan --


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9, 10, 24, 96, 97])
def test_sqrt_plan_is_balanced_and_whole(count: int) -> None:
    names = [f"u{i}" for i in range(count)]
    plan = sqrt_plan(names)
    assert [name for segment in plan for name in segment] == names
    assert len(plan) == math.ceil(math.sqrt(count))
    lengths = {len(segment) for segment in plan}
    assert not lengths or (max(lengths) - min(lengths) <= 1 and max(lengths) <= math.ceil(math.sqrt(count)))


# -- exact --


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("net", [{}, {"rounds": 2}, {"between": lambda x: x * 0.5}], ids=["row", "twice", "between"])
def test_bit_equal_to_keep(make: Callable[..., Runtime], name: str, net: dict[str, Any]) -> None:
    """Dropout, running statistics, two micro-batches a step, AdamW."""
    steps = 4 if name == "changing" else 2
    wanted = train(make, keep, steps=steps, **net)
    found = train(make, PLANS[name], steps=steps, **net)
    assert_same(found, wanted)
    metrics = found[2].metrics()  # as they were at the end of the last step
    if name == "offload":
        assert metrics["memwall/pool/offloaded_bytes"] > 0 and metrics["memwall/pool/page_in_s"] > 0
    if name in ("recompute", "selective", "together"):
        assert metrics["memwall/pool/recomputed_units"] == 2 * 5 * net.get("rounds", 1)
    assert "memwall/pool/offloaded_bytes" not in wanted[2].metrics()


@pytest.mark.parametrize("name", ["offload", "recompute", "selective", "together"])
def test_two_losses_and_a_graph_used_twice(make: Callable[..., Runtime], name: str) -> None:
    """Selective recomputation differentiates a graph once: torch's own limit, which its error names."""

    def gradients(plan: Plan, twice: bool) -> list[Tensor]:
        torch.manual_seed(3)
        runtime = make(Net())
        plan(runtime, 0)
        runtime.begin_step()
        first, second = (loss_of(runtime.model, t) for t in tokens_of(0, 2))
        first.backward()
        second.backward(retain_graph=True)
        if twice:
            second.backward()
        return [p.grad.full_tensor().clone() for p in runtime.model.parameters()]

    twice = name != "selective"
    for found, wanted in zip(gradients(PLANS[name], twice), gradients(keep, twice), strict=True):
        assert torch.equal(found, wanted)
    if not twice:
        with pytest.raises(RuntimeError, match="only allowed to backward once"):
            gradients(PLANS[name], True)


def test_a_change_takes_effect_with_the_next_step(make: Callable[..., Runtime]) -> None:
    torch.manual_seed(3)
    runtime = make(Net())
    told = []
    runtime.events.subscribe(told.append)
    runtime.begin_step()
    everywhere("offload")(runtime, 0)
    loss_of(runtime.model, tokens_of(0, 1)[0]).backward()
    assert set(runtime.pool.activations.modes.values()) == {Mode.KEEP} and Tier.HOST not in runtime.pool.stores
    runtime.end_step()
    step(runtime, 1)
    step(runtime, 2)
    assert set(runtime.pool.activations.modes.values()) == {Mode.OFFLOAD}
    changed = [event for event in told if event.kind is EventKind.ACTIVATIONS_CHANGED]
    assert [event.fields["units"] for event in changed] == [{f"units.{i}": "offload" for i in range(5)}]
    everywhere("keep")(runtime, 3)
    step(runtime, 3)
    assert runtime.metrics()["memwall/pool/offloaded_bytes"] == 0


# -- bytes --


def peak(make: Callable[..., Runtime], plan: Plan, units: int) -> dict[Phase, int]:
    runtime = train(make, plan, steps=2, units=units)[2]
    return {phase: kinds[Kind.ACTIVATION] for phase, kinds in runtime.kind_peaks.items()}


def test_live_bytes_fall_as_promised(make: Callable[..., Runtime]) -> None:
    kept, other = peak(make, keep, 12), {name: peak(make, PLANS[name], 12) for name in PLANS if name != "changing"}
    a_unit = kept[Phase.BACKWARD] - peak(make, keep, 11)[Phase.BACKWARD]
    argument = 4 * CONTEXT * WIDTH * 4
    tail = kept[Phase.BACKWARD] - 12 * a_unit
    assert tail < a_unit
    assert other["recompute"][Phase.BACKWARD] <= 12 * argument + a_unit + tail + 4096
    assert other["recompute"][Phase.BACKWARD] < other["selective"][Phase.BACKWARD] < 0.9 * kept[Phase.BACKWARD]
    # One unit at work, UNITS_IN_FLIGHT leaving, one that waits for a turn; coming: one at work, and the one before it.
    assert other["offload"][Phase.FORWARD] <= 4 * a_unit + tail
    assert other["offload"][Phase.BACKWARD] <= 4 * a_unit + tail
    assert other["together"][Phase.FORWARD] <= 4 * argument + tail + 4096
    assert other["together"][Phase.BACKWARD] <= 3 * a_unit + 4 * argument + tail + 4096


def test_together_grows_with_the_root(make: Callable[..., Runtime]) -> None:
    few, many = (peak(make, together, units)[Phase.BACKWARD] for units in (4, 16))
    assert many / few < 2.2
    assert peak(make, keep, 16)[Phase.BACKWARD] / peak(make, keep, 4)[Phase.BACKWARD] > 3.5


def test_no_cost_without_gradients(make: Callable[..., Runtime]) -> None:
    torch.manual_seed(3)
    runtime = make(Net())
    for name in PLANS:
        PLANS[name](runtime, 0)
        runtime.pool.before_step(runtime)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                loss_of(runtime.model.eval(), tokens_of(0, 1)[0])
        runtime.model.train()
        figures = runtime.pool.activations.take_figures()
        assert figures.get("memwall/pool/offloaded_bytes", 0) == figures.get("memwall/pool/recomputed_units", 0) == 0
        assert runtime.pool.table.balance(kind=Kind.ACTIVATION).held_bytes == 0


def test_nothing_stays_when_backward_never_comes(make: Callable[..., Runtime]) -> None:
    torch.manual_seed(3)
    net = Net()
    runtime = make(net)
    everywhere("offload")(runtime, 0)
    step(runtime, 0)
    runtime.begin_step()
    loss = loss_of(net, tokens_of(1, 1)[0])
    assert runtime.pool.table.balance(kind=Kind.ACTIVATION).held_bytes > 0
    del loss  # the graph dies
    gc.collect()
    handle = net.units[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, tokens_of(1, 1)[0])
    handle.remove()
    gc.collect()
    runtime.abort_step(RuntimeError("as a front end would"))
    assert left(runtime) == 0
    step(runtime, 2)
    kept = loss_of(net, tokens_of(3, 1)[0])
    runtime.close()
    assert len(runtime.pool.table) == 0 and "forward" not in vars(net.units[0])
    with pytest.raises(MemwallError, match="the pool was closed before their backward"):
        kept.backward()


# -- the pager by itself --


class Plain(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.weight = body, nn.Parameter(torch.ones(64, 64))
        self.register_buffer("table", torch.ones(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def fail(unit: str, error: PoolFull) -> None:
    raise error


@pytest.mark.parametrize(
    ("body", "bytes_sent"),
    [
        (lambda m, x: x @ m.weight, 0),  # x needs no gradient of its own and lives outside; the weight stays
        (lambda m, x: (x @ m.weight).exp() * m.table, 64 * 64 * 4),
        (lambda m, x: (y := (x @ m.weight).exp()) * y.t() * y[:, :1], 2 * 64 * 64 * 4),  # y and y * y.t()
        (lambda m, x: (y := (x @ m.weight).sin()) * y.cos(), 3 * 64 * 64 * 4),
        (lambda m, x: (m.weight[:4, :4] * x[:4, :4]).exp(), 0),  # small
    ],
    ids=["arguments", "buffers", "views", "several", "small"],
)
def test_what_moves(pool: Pool, body: Callable[..., Tensor], bytes_sent: int) -> None:
    x, module = torch.randn(64, 64), Plain(body)
    body(module, x).sum().backward()
    wanted, module.weight.grad = module.weight.grad, None
    pager = ActivationPager(pool, full=fail)
    output = pager.run(UnitForward("unit", module), (x,), {})
    assert pager.take_sent_bytes() == bytes_sent
    assert pool.table.balance(Tier.HOST, kind=Kind.ACTIVATION).bytes == bytes_sent
    pool.drain()
    output.sum().backward()
    assert torch.equal(module.weight.grad, wanted)
    del output
    pager.drop_dead(wait=True)
    assert pool.table.balance(kind=Kind.ACTIVATION).held_bytes == 0


def test_a_tensor_changed_after_it_was_saved_is_named(pool: Pool) -> None:
    pager, go = ActivationPager(pool, full=fail), threading.Event()
    pool.page_out.submit(lambda: go.wait(30), transfer="something slow", unit="another")
    output = pager.run(UnitForward("unit", Plain(lambda m, x: (x @ m.weight).exp())), (torch.randn(64, 64),), {})
    output.add_(1)  # exp saved its output, which is still on its way
    go.set()
    with pytest.raises(MemwallError, match="backward of unit 'unit' needs was changed in place"):
        output.sum().backward()


def test_a_full_host_is_an_error_by_name_or_kept(make: Callable[..., Runtime]) -> None:
    torch.manual_seed(3)
    runtime = make(Net(), host_budget="64KiB", activations="offload")
    with pytest.raises(PoolFull, match=r"activations of unit 'units\.\d' do not fit .*pool\.host_budget.*recompute"):
        step(runtime, 0)
    torch.manual_seed(3)
    wanted = train(make, keep, steps=2)
    told = []

    def offload(runtime: Runtime, number: int) -> None:
        if number == 0:
            runtime.events.subscribe(told.append)
            everywhere("offload")(runtime, number)

    torch.manual_seed(3)
    found = train(lambda net: make(net, host_budget="192KiB"), offload, steps=2)
    assert_same(found, wanted)
    assert [event.kind for event in told].count(EventKind.ACTIVATIONS_KEPT) == 1
    assert found[2].metrics()["memwall/pool/offloaded_bytes"] > 0


# -- refused --


@pytest.mark.parametrize(
    ("modes", "segments", "text"),
    [
        ({"units.9": "keep"}, (), r"'units\.9' is no unit\. Did you mean 'units\.\d'"),
        ({"units.1": "of"}, (), "cannot be 'of', only keep, offload"),
        ({"units.1": "recompute"}, (("units.0", "units.1"),), r"units\.1 is named twice"),
        ({}, (("units.0", "units.1"), ("units.1",)), r"units\.1 is named twice"),
        ({"units.1": "offload"}, (), r"Set pool\.host_budget"),
    ],
)
def test_wrong_requests_are_named(
    make: Callable[..., Runtime], modes: dict[str, str], segments: tuple[tuple[str, ...], ...], text: str
) -> None:
    runtime = make(Net(), host_budget=None)
    with pytest.raises(ConfigError, match=text):
        runtime.pool.set_activations(modes, together=segments)
    assert set(runtime.pool.activations.modes.values()) == {Mode.KEEP}


def test_wrong_options_are_named(make: Callable[..., Runtime]) -> None:
    with pytest.raises(ConfigError, match=r"'recomput' is not one of .* Did you mean 'recompute'"):
        PoolConfig(activations="recomput")
    with pytest.raises(ConfigError, match=r"Set pool\.host_budget"):
        PoolConfig(activations="offload")
    with pytest.raises(ConfigError, match="has no unit"):
        make(nn.Sequential(nn.Linear(3, 3)), activations="recompute")
    net = Net()
    net.gradient_checkpointing = True  # as a Hugging Face model says it
    with pytest.raises(ConfigError, match="recomputes them by itself"):
        make(net, activations="recompute")


class Cache:
    """Looks like a key-value cache."""

    def get_seq_length(self) -> int:
        return 0


@pytest.mark.parametrize("plan", ["recompute", "together"])
def test_what_cannot_be_run_again_is_named(make: Callable[..., Runtime], plan: str) -> None:
    torch.manual_seed(3)
    net = Net(between=None)
    runtime = make(net)
    PLANS[plan](runtime, 0)
    runtime.begin_step()
    x = torch.randn(2, CONTEXT, WIDTH)
    with pytest.raises(ConfigError, match="key-value cache"):
        net.units[1](x, mask=Cache())
    net.units[2].register_buffer("calls", torch.zeros(1))
    net.units[2].drop.register_forward_hook(lambda *_: net.units[2].calls.add_(1) and None)
    with pytest.raises(ConfigError, match="changes its buffer 'calls'"):
        net.units[2](x)


# -- compiled --


def compiled_net(where: str) -> nn.Module:
    torch.manual_seed(3)
    net = Net(3, kind=Mixer)
    for index, unit in enumerate(net.units):
        if where == "unit":
            net.units[index] = torch.compile(unit, backend="aot_eager")
        elif where == "inside":
            unit.mlp = torch.compile(unit.mlp, backend="aot_eager")
        elif where == "in place":
            unit.compile(backend="aot_eager")
    if where == "whole":
        net.compile(backend="aot_eager")
    return net


@pytest.mark.parametrize(
    ("where", "mode"),
    [("unit", "offload"), ("unit", "recompute")] + [("inside", m) for m in ("offload", "recompute", "selective")],
)
def test_compiled_units_are_exact(make: Callable[..., Runtime], where: str, mode: str) -> None:
    losses = []
    for plan in (keep, everywhere(mode)):
        runtime = make(compiled_net(where))
        assert runtime.pool.activations.units == ("units.0", "units.1", "units.2")
        plan(runtime, 0)
        losses.append([step(runtime, number) for number in range(2)])
        metrics = runtime.metrics()
        runtime.close()
    name = "offloaded_bytes" if mode == "offload" else "recomputed_units"
    assert metrics[f"memwall/pool/{name}"] > 0
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("where", "mode"), [("in place", "recompute"), ("whole", "offload"), ("unit", "selective")])
def test_compiled_regions_around_the_switch_are_refused(make: Callable[..., Runtime], where: str, mode: str) -> None:
    runtime = make(compiled_net(where))
    with pytest.raises(ConfigError, match="compile"):
        everywhere(mode)(runtime, 0)


def test_a_failed_transfer_ends_the_step_and_the_next_one_is_right(make: Callable[..., Runtime]) -> None:
    torch.manual_seed(3)
    runtime = make(Net())
    everywhere("offload")(runtime, 0)
    first = step(runtime, 0)
    host = runtime.pool.stores[Tier.HOST]
    calls = []

    def write(*_: Any) -> None:
        calls.append(1)
        raise OSError("the medium is gone")

    host.write = write
    state = torch.get_rng_state()
    with pytest.raises(MemwallError, match="the medium is gone"):
        step(runtime, 1)
    del host.write
    gc.collect()
    assert calls
    torch.set_rng_state(state)
    assert step(runtime, 1) != first
    runtime.pool.table.check()
    assert left(runtime) == 0
