"""Gathered weights that stay: fewer gathers, exact books, and the losses of a run that gathers every time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from memwall_strategy.config import MemwallConfig, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine import agreement
from memwall_strategy.engine.fsdp import fsdp_groups
from memwall_strategy.pool.escalation import FIRST_STEPS
from memwall_strategy.pool.relief import Relief
from memwall_strategy.pool.retention import UnitRoom, share_room
from memwall_strategy.runtime import Runtime
from memwall_strategy.telemetry.events import EventKind
from tests.engine.lane_cases import GPT, MODELS, assert_same, mesh_of, rough_lanes, weights
from tests.lightning.checks import Here, on_ranks, rank_results

__all__ = ["rank_results"]

STEPS, ACCUMULATE = 4, 3


@contextlib.contextmanager
def running(
    here: Here,
    make: Callable[[], nn.Module] = GPT,
    *,
    layout: str | None = None,
    lanes: bool = True,
    precision: str = "32-true",
    accumulate: str = "sharded",
    shared: bool | str = "auto",
    **pool: Any,
) -> Iterator[tuple[Runtime, torch.optim.Optimizer]]:
    torch.manual_seed(3)
    model = make()
    pool = {"activations": "keep"} | pool  # which no budget here counts
    mesh = mesh_of(here, layout or f"{here.world}")
    replicate = mesh.shape[0] if mesh.ndim == 2 else 1
    config = MemwallConfig(
        pool=PoolConfig(**pool), replicate=replicate, accumulate=accumulate,
        # Bytes are counted by the step, hence no gathers of the next one.
        overlap=OverlapConfig(enabled=lanes, next_iteration_early=False, shared_memory=shared),
    )  # fmt: skip
    runtime = Runtime(config, mesh=mesh, precision=precision)
    with rough_lanes(here.rank):
        runtime.setup(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        runtime.add_optimizers([optimizer])
        try:
            yield runtime, optimizer
        finally:
            runtime.close()


class Gathers:
    """Names of the units whose weights were gathered."""

    def __init__(self) -> None:
        self.units: list[str] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        inner = _fsdp_param_group.foreach_all_gather

        def count(params: list[Any], *args: Any, **named: Any) -> Any:
            self.units.append(params[0]._module_info.module.__class__.__name__)
            return inner(params, *args, **named)

        with mock.patch.object(_fsdp_param_group, "foreach_all_gather", count):
            yield

    def take(self) -> int:
        count = len(self.units)
        self.units.clear()
        return count


def batches(model: nn.Module, here: Here, step: int, accumulate: int) -> list[Any]:
    return [model.batch(1000 * step + 10 * i + here.rank) for i in range(accumulate)]


def train(
    here: Here,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    accumulate: int = ACCUMULATE,
    before: Callable[[int], None] = lambda step: None,
    between: Callable[[int, int], None] = lambda step, i: None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    model = runtime.model
    for step in range(steps):
        before(step)
        seen = iter(range(accumulate))

        def loss_of(batch: Any, step: int = step, seen: Iterator[int] = seen) -> torch.Tensor:
            between(step, next(seen))
            return model.loss(batch)

        losses.append(runtime.step(batches(model, here, step, accumulate), loss_of, optimizer).item())
        runtime.pool.table.check()
        assert runtime.pool.table.used_bytes(Tier.DEVICE, kind=Kind.GATHERED) == 0, "the weights have changed"
    return losses, weights(model)


def changing(runtime: Runtime, seed: int) -> Callable[[int], None]:
    """Other units every step, the same on all ranks."""
    choice = random.Random(seed)

    def choose(step: int) -> None:
        names = runtime.pool.retention.units
        runtime.pool.retention.set(choice.sample(names, choice.randint(0, len(names))))

    return choose


# -- losses and gathers --


@on_ranks(2, "gpt", "tied", "frozen", "conv", "mlp", group="equal")
def test_losses_are_equal_whatever_is_retained(here):
    make = MODELS[here.case]
    every = ({}, {"lanes": False}, {"precision": "bf16-mixed"})
    for options in every if here.case == "gpt" else every[:1]:
        with running(here, make, retain="none", **options) as (runtime, optimizer):
            expected = train(here, runtime, optimizer)
        with running(here, make, retain="all", **options) as (runtime, optimizer):
            assert_same(train(here, runtime, optimizer), expected)
        with running(here, make, retain="none", **options) as (runtime, optimizer):
            assert_same(train(here, runtime, optimizer, before=changing(runtime, 7)), expected)


@on_ranks(3, group="three")
def test_losses_are_equal_on_three_ranks(here):
    """Sizes that three does not divide."""
    with running(here, retain="none") as (runtime, optimizer):
        expected = train(here, runtime, optimizer)
    with running(here, retain="all") as (runtime, optimizer):
        assert_same(train(here, runtime, optimizer), expected)
    with running(here, layout="3x1", retain="none") as (runtime, optimizer):
        expected = train(here, runtime, optimizer)
    with running(here, layout="3x1", retain="all") as (runtime, optimizer):
        assert_same(train(here, runtime, optimizer), expected)


@on_ranks(1, group="one")
def test_one_rank_has_nothing_to_gather(here):
    for precision in ("32-true", "bf16-mixed"):
        with running(here, retain="none", precision=precision) as (runtime, optimizer):
            expected = train(here, runtime, optimizer)
        with running(here, retain="all", precision=precision) as (runtime, optimizer):
            assert_same(train(here, runtime, optimizer), expected)


@on_ranks(2, "lanes", "stock", group="gathers")
def test_a_retained_unit_is_gathered_once_a_step(here):
    gathers = Gathers()
    with running(here, lanes=here.case == "lanes", retain="none") as (runtime, optimizer), gathers.counted():
        retention = runtime.pool.retention
        blocks = [name for name in retention.units if name.startswith("blocks")]
        counted = []

        def before(step: int) -> None:
            counted.append(gathers.take())
            retention.set([(), blocks[1:2], blocks, retention.units][step])

        train(here, runtime, optimizer, before=before)
        counted.append(gathers.take())
        each = 2 * ACCUMULATE * len(blocks) + ACCUMULATE
        saved = 2 * ACCUMULATE - 1
        assert counted[1:] == [each, each - saved, each - saved * len(blocks), len(blocks) + 1]


@on_ranks(2, group="gathers")
def test_bytes_on_the_lane_fall_as_gathers_do(here):
    found = {}
    for retain in ("none", "all"):
        with running(here, retain=retain) as (runtime, optimizer):
            lane, moved = runtime.lanes["gather"], []
            take = lane.take_stats

            def keep(take: Any = take, moved: list[int] = moved) -> Any:
                stats = take()
                moved.append(stats.bytes)
                return stats

            with mock.patch.object(lane, "take_stats", keep):
                train(here, runtime, optimizer)
            found[retain] = max(moved)
            sizes = [unit.gathered_bytes // 2 for unit in retention_units(runtime)]
            if retain == "all":
                assert found["all"] == sum(sizes)
                root = next(u.gathered_bytes // 2 for u in retention_units(runtime) if u.unit.name == "root")
                assert found["none"] == ACCUMULATE * (2 * sum(sizes) - root)


def retention_units(runtime: Runtime) -> list[Any]:
    return runtime.pool.retention._retainer.units


# -- books --


@on_ranks(2, "32-true", "bf16-mixed", group="books")
def test_booked_bytes_are_held_bytes_at_every_moment(here):
    """Of retained units; what the account counts of them and what the table books, and their addresses."""
    with running(here, retain="all", precision=here.case) as (runtime, optimizer):
        seen = []

        def look(*_: Any) -> None:
            table = runtime.pool.table
            booked = {
                block: place for block, place in table if block.kind == Kind.GATHERED and place.tier is Tier.DEVICE
            }
            held = runtime.memory.current()[Kind.GATHERED]
            assert sum(place.bytes for place in booked.values()) == held
            assert held == sum(
                tensor.untyped_storage().nbytes()
                for group in fsdp_groups(runtime.model)
                for param in group.fsdp_params
                for tensor in param.all_gather_outputs
            )
            addresses = {
                tensor.untyped_storage().data_ptr()
                for group in fsdp_groups(runtime.model)
                for param in group.fsdp_params
                for tensor in param.all_gather_outputs
                if tensor.untyped_storage().nbytes()
            }
            assert {place.offset for place in booked.values()} == addresses
            table.check()
            seen.append(held)

        for module in runtime.model.modules():
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
        train(here, runtime, optimizer, between=lambda step, i: look())
        assert max(seen) == sum(unit.gathered_bytes for unit in retention_units(runtime))
        metrics = runtime.metrics()
        assert metrics["memwall/pool/retained_bytes"] == max(seen)
        assert metrics["memwall/pool/device_peak_bytes"] >= max(seen)


# -- edits, evaluation, failures --


def edit_one_rank(here: Here) -> Callable[[Runtime, int, int], None]:
    def edit(runtime: Runtime, step: int, i: int) -> None:
        if i and here.rank == step % here.world:
            list(runtime.model.parameters())[step].to_local().data.mul_(1.5)

    return edit


def nothing_but_nan(runtime: Runtime, step: int, i: int) -> None:
    """The bits do not change."""
    weight = runtime.model.blocks[1].norm1.bias.to_local()
    if i and weight.numel() and step == 0:
        weight.data[0] = -0.0 if weight[0] == 0 else weight[0]


def load(runtime: Runtime, step: int, i: int) -> None:
    if i == 1:
        runtime.model.load_state_dict({k: v * 1.01 for k, v in runtime.model.state_dict().items()})


def evaluate(runtime: Runtime, step: int, i: int) -> None:
    context = (torch.no_grad, torch.inference_mode)[step % 2]
    with context():
        runtime.model.loss(runtime.model.batch(5))
    assert not any(group.is_unsharded for group in fsdp_groups(runtime.model))


def forward_only(runtime: Runtime, step: int, i: int) -> None:
    """A forward whose backward never comes."""
    runtime.model.loss(runtime.model.batch(6))


def gather_by_hand(runtime: Runtime, step: int, i: int) -> None:
    runtime.model.blocks[0].unshard()
    runtime.model.blocks[0].reshard()
    runtime.model.blocks[1].unshard()


@on_ranks(2, "edit", "bits", "load", "evaluate", "forward", "unshard", group="users")
def test_whatever_a_user_does_between_micro_batches(here):
    do = {
        "edit": edit_one_rank(here), "bits": nothing_but_nan, "load": load, "evaluate": evaluate,
        "forward": forward_only, "unshard": gather_by_hand,
    }[here.case]  # fmt: skip
    found = []
    for retain in ("none", "all"):
        with running(here, retain=retain) as (runtime, optimizer):
            parameters = list(runtime.model.parameters())

            def between(step: int, i: int, runtime: Runtime = runtime, own: list[Any] = parameters) -> None:
                if i or here.case != "unshard":
                    do(runtime, step, i)
                if here.case != "unshard":
                    now = list(runtime.model.parameters())
                    if here.case != "forward":  # which leaves the root's whole, as FSDP2 does
                        assert all(a is b for a, b in zip(now, own, strict=True))
                        assert all(isinstance(p, DTensor) for p in now)

            found.append(train(here, runtime, optimizer, between=between))
    assert_same(found[1], found[0])


@on_ranks(2, group="users")
def test_an_aborted_step_leaves_nothing(here):
    """Broken before, between and after micro-batches whose weights were kept."""
    found = []
    for retain in ("none", "all"):
        with running(here, retain=retain) as (runtime, optimizer):
            model = runtime.model
            for broken in range(3):
                seen = iter(range(10))

                def loss_of(batch: Any, broken: int = broken, seen: Iterator[int] = seen) -> torch.Tensor:
                    if next(seen) == broken:
                        raise KeyError("broken on purpose")
                    return runtime.model.loss(batch)

                with pytest.raises(KeyError):
                    runtime.step(batches(model, here, 50, 3), loss_of, optimizer)
                assert runtime.pool.table.used_bytes(Tier.DEVICE, kind=Kind.GATHERED) == 0
                assert runtime.memory.current()[Kind.GATHERED] == 0
            found.append(train(here, runtime, optimizer))
    assert_same(found[1], found[0])


@on_ranks(2, group="users")
def test_a_window_that_no_step_ends(here):
    """Micro-batches whose gradients nobody steps with: nothing stays when the optimizer steps."""
    with running(here, retain="all") as (runtime, optimizer):
        model = runtime.model
        runtime.begin_step()
        with runtime.micro_batch(last=False):
            model.loss(model.batch(here.rank)).backward()
        assert runtime.pool.table.used_bytes(Tier.DEVICE, kind=Kind.GATHERED) > 0
        assert all(isinstance(p, DTensor) for p in model.parameters())
        runtime.gradients_ready()
        assert runtime.pool.table.used_bytes(Tier.DEVICE, kind=Kind.GATHERED) == 0
        optimizer.step()
        runtime.end_step()
        with runtime.micro_batch(last=False):
            model.loss(model.batch(here.rank)).backward()
        runtime.close()
        assert not any(
            tensor.untyped_storage().nbytes()
            for group in fsdp_groups(model)
            for param in group.fsdp_params
            for tensor in param.all_gather_outputs
        ), "freed with the runtime"
        assert [group.post_forward_mesh_info is None for group in fsdp_groups(model)].count(True) == 1, "the root's"


# -- asking, room, relief --


@on_ranks(2, group="asking")
def test_refusals(here):
    with running(here, retain="none", device_budget="64KiB") as (runtime, _):
        retention = runtime.pool.retention
        with pytest.raises(ConfigError, match=r"no unit.*Did you mean 'blocks.1'"):
            retention.set(["block.1"])
        with pytest.raises(ConfigError, match="takes a collection"):
            retention.set("blocks.1")
        with pytest.raises(ConfigError, match="same units on every rank"):
            retention.set([f"blocks.{here.rank}"])
        with pytest.raises(ConfigError, match=r"leaves .* raise pool.device_budget"):
            retention.set(retention.units)
        retention.set(["blocks.1"])
    with (
        pytest.raises(ConfigError, match=r"pool\.retain"),
        running(here, retain="all", device_budget="40KiB") as (runtime, _),
    ):
        pass


@on_ranks(2, group="asking")
def test_auto_takes_the_room_of_the_poorest_rank_and_gives_it_back(here):
    budget = 72 * 1024 if here.rank else 64 * 1024
    with running(here, retain="auto", device_budget=budget, shared=False) as (runtime, optimizer):
        retention: Relief = runtime.pool.retention
        told = []
        runtime.events.subscribe(told.append)
        asked = iter([*[None] * (FIRST_STEPS + 1), "relieve", "relieve", "restore"])
        seen = []

        def before(step: int) -> None:
            match next(asked):
                case "relieve":
                    assert retention.relieve(1) > 0
                case "restore":
                    assert retention.restore(10**9) > 0
                    assert retention.restore(10**9) == 0

        look = {"before": before, "between": lambda step, i: i or seen.append(retention.retained)}
        train(here, runtime, optimizer, steps=FIRST_STEPS + 4, **look)
        assert seen[:FIRST_STEPS] == [()] * FIRST_STEPS, "first see what a step leaves"
        first, second, third, last = seen[FIRST_STEPS:]
        assert first == last
        assert set(third) < set(second) < set(first)
        assert first[-1] == "blocks.2", "the last unit first"
        assert first == ("blocks.0", "blocks.1", "blocks.2")[-len(first) :]
        kinds = [event.kind for event in told]
        assert kinds.count(EventKind.RETENTION_CHANGED) == 4
        assert runtime.memory.peak_bytes <= budget
        assert [each.name for each in runtime.pool.escalation.reliefs][-2:] == [retention.name, "second buffers"]
    with running(here, retain="auto") as (runtime, optimizer):
        train(here, runtime, optimizer, steps=FIRST_STEPS + 2)
        assert runtime.pool.retention.retained == (), "no budget: as ever"


@on_ranks(2, "lanes", "stock", group="whole")
def test_whole_gradients_are_reduced_once_a_step(here):
    """By units, as room allows. With room for all it is ``accumulate="whole"``, to the last bit."""
    options = {"lanes": here.case == "lanes", "retain": "none", "phases": False, "shared": False}
    with running(here, **options) as (runtime, optimizer):
        sharded = train(here, runtime, optimizer)
    with running(here, accumulate="whole", **options) as (runtime, optimizer):
        whole = train(here, runtime, optimizer)
    for budget in ("60KiB", "1MiB"):
        with running(here, device_budget=budget, **options) as (runtime, optimizer):
            retention, unreduced, model = runtime.pool.retention, [], runtime.model
            retention.accumulate(True)
            retention._watched = FIRST_STEPS
            retention._room_bytes = agreement.smallest(runtime.mesh, retention._planned())

            def between(step: int, i: int, model: nn.Module = model, found: list[set[str]] = unreduced) -> None:
                found.append({name for name, p in model.named_parameters() if p.grad is None})

            found = train(here, runtime, optimizer, between=between)
            names = {p for u in runtime.units if u.name in retention.whole for p in u.parameters}
            share = len(retention.whole) / len(retention.units)
            assert names and names <= unreduced[1] & unreduced[2], "they rest whole"
            assert runtime.memory.peak_bytes <= runtime.budget_bytes
            runtime.begin_step()
            with runtime.micro_batch(last=False, observed=True):
                model.loss(model.batch(here.rank)).backward()
            assert all(p.grad is not None for p in model.parameters()), "who looks at gradients finds them"
        if budget == "1MiB":
            assert share == 1
            assert_same(found, whole)
        else:
            assert 0 < share < 1
            assert_same(found[0], sharded[0], rtol=1e-4)


UNITS = [UnitRoom("root", 5, 5, stays=True), *(UnitRoom(f"b{i}", 10, 20) for i in range(4)), UnitRoom("frozen", 10, 0)]


@pytest.mark.parametrize(
    ("room", "retained", "whole"),
    [
        (0, (), ()),
        (-7, (), ()),
        (9, ("root",), ()),
        (10, ("frozen",), ()),
        (25, ("root", "b3", "frozen"), ()),
        (55, ("root", "b0", "b1", "b2", "b3", "frozen"), ()),
        (80, ("root", "b0", "b1", "b2", "b3", "frozen"), ("root", "b3")),
        (999, ("root", "b0", "b1", "b2", "b3", "frozen"), ("root", "b0", "b1", "b2", "b3")),
    ],
)
def test_room_goes_to_the_last_units_first_and_to_gradients_last(room, retained, whole):
    shares = share_room(UNITS, room, accumulate=True)
    assert (shares.retained, shares.whole) == (retained, whole)
    assert share_room(UNITS, room).retained == retained and share_room(UNITS, room).whole == ()


def test_what_was_asked_for_comes_out_of_the_room():
    shares = share_room(UNITS, 30, retained=["b0"], accumulate=True)
    assert shares.retained == ("b0",) and shares.whole == ("b3",)
