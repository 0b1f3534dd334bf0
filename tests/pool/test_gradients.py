"""Gradients that rest on the host between micro-batches: the same bits, and the device free of them meanwhile."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch

from memwall_strategy.config import MemwallConfig, OverlapConfig, PoolConfig
from memwall_strategy.core.block import Kind, Phase, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.backward_end import BackwardEnd
from memwall_strategy.engine.clip import clip_grad_norm
from memwall_strategy.engine.fsdp import fsdp_states, local_tensor
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.engine.zero_grad import ZeroGradWatch
from memwall_strategy.planner import ClusterSpec, plan
from memwall_strategy.planner.memory_plan import schedule_of
from memwall_strategy.runtime import Runtime
from tests.lightning.checks import Here, on_ranks, rank_results
from tests.lightning.models import Gpt, full_weights, loss_of, make_data, make_net, make_optimizer

__all__ = ["rank_results"]  # pytest finds the fixture here

HOST = PoolConfig(gradients="host", host_budget="16MiB")


def make_runtime(
    here: Here, kind: str, pool: PoolConfig, *, precision: str = "32-true", optimizer: str = "adamw", **options: Any
) -> tuple[Runtime, torch.optim.Optimizer]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    config = MemwallConfig(pool=pool, **options)
    runtime = Runtime(config, mesh=data_parallel_mesh("cpu", here.world, 1), precision=precision)
    torch.manual_seed(1)
    net = Gpt(12) if kind == "deep" else make_net(kind)
    runtime.setup(net)
    stepper = make_optimizer(net.parameters(), optimizer)
    runtime.add_optimizers([stepper])
    return runtime, stepper


def batches_of(here: Here, kind: str, count: int) -> list[Any]:
    mine = [tensor[here.rank :: here.world].split(2) for tensor in make_data(kind, count * 2 * here.world)]
    return list(zip(*mine, strict=True))


def train(runtime: Runtime, optimizer: Any, batches: list[Any], accumulate: int, **clip: float) -> list[float]:
    losses = []
    for first in range(0, len(batches), accumulate):
        window = batches[first : first + accumulate]
        losses.append(runtime.step(window, lambda batch: loss_of(runtime.model, batch), optimizer, **clip).item())
    return losses


def assert_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


CASES = {
    "gpt-norm": ("gpt", {"clip_norm": 0.1}, {}),
    "gpt-value": ("gpt", {"clip_value": 0.001}, {}),
    "mlp-norm": ("mlp", {"clip_norm": 0.1}, {}),  # parameters that some ranks use in some micro-batches, or never
    "gpt-bf16-true": ("gpt", {"clip_norm": 0.1}, {"precision": "bf16-true"}),
    "gpt-bf16-mixed": ("gpt", {}, {"precision": "bf16-mixed"}),
    "mlp_alike-engine": ("mlp_alike", {"clip_norm": 0.1}, {"overlap": OverlapConfig(enabled=False)}),
}


def same_bits(here: Here) -> None:
    kind, clip, options = CASES[here.case]
    found = {}
    for where, pool in (("device", PoolConfig()), ("host", HOST)):
        runtime, optimizer = make_runtime(here, kind, pool, **options)
        losses = train(runtime, optimizer, batches_of(here, kind, 17), 4, **clip)  # the last step has one micro-batch
        found[where] = losses, full_weights(runtime.model)
        runtime.pool.table.check()
        runtime.close()
        assert len(runtime.pool.table) == 0
    assert found["host"][0] == found["device"][0]
    assert_same_bits(found["host"][1], found["device"][1])


@on_ranks(2, *CASES)
def test_bits_of_plain_accumulation(here: Here) -> None:
    same_bits(here)


@on_ranks(3, "gpt-norm", "mlp-norm")
def test_bits_on_three_ranks(here: Here) -> None:
    same_bits(here)


@on_ranks(1, "gpt-norm")
def test_bits_on_one_rank(here: Here) -> None:
    same_bits(here)


@on_ranks(2, "lanes", "engine")
def test_the_device_holds_none_between_micro_batches(here: Here) -> None:
    """Bytes by the account and by the table, at each moment of a step."""
    overlap = OverlapConfig(enabled=here.case == "lanes")
    runtime, optimizer = make_runtime(here, "deep", HOST, overlap=overlap)
    model, table = runtime.model, runtime.pool.table
    made = plan(
        runtime.model_spec, ClusterSpec(world=2), accumulate=4, optimizer="adamw", gradients="host",
        gradients_in_forward=False, **schedule_of(overlap, "cpu"),
    )  # fmt: skip
    exact = sum(local_tensor(p).nbytes for p in model.parameters())
    assert table.used_bytes(Tier.HOST, kind=Kind.GRAD) >= exact == table.balance(Tier.HOST, kind=Kind.GRAD).bytes
    batches = batches_of(here, "gpt", 8)
    for first in (0, 4):
        runtime.begin_step()
        for i, batch in enumerate(batches[first : first + 4]):
            with runtime.micro_batch(last=i == 3):
                with runtime.phase(Phase.FORWARD):
                    loss = loss_of(model, batch) / 4
                if i in (1, 2, 3):
                    runtime.pool._pool.drain()
                    assert runtime.memory.current()[Kind.GRAD] == 0
                    assert all(p.grad is None for p in model.parameters())
                with runtime.phase(Phase.BACKWARD):
                    loss.backward()
            assert i == 3 or runtime.memory.kind_peaks()[Phase.BACKWARD][Kind.GRAD] < exact
        peak = runtime.memory.kind_peaks()
        assert peak[Phase.FORWARD][Kind.GRAD] <= made.kind_peaks[Phase.FORWARD][Kind.GRAD] < exact
        assert peak[Phase.BACKWARD][Kind.GRAD] <= made.kind_peaks[Phase.BACKWARD][Kind.GRAD]
        assert runtime.memory.peak_bytes <= made.peak_bytes
        assert runtime.memory.current()[Kind.GRAD] == sum(unit.sharded_numel for unit in runtime.units) * 4  # padded
        runtime.gradients_ready()
        norm = clip_grad_norm(model.parameters(), 0.1)
        assert norm > 0
        runtime.before_optimizer()
        optimizer.step()
        optimizer.zero_grad()
        runtime.end_step()
        assert runtime.memory.current()[Kind.GRAD] == 0
    table.check()
    assert runtime.metrics()["memwall/pool/host_bytes"] >= exact
    runtime.close()


def accumulate(runtime: Runtime, batches: list[Any], *, last: bool) -> None:
    for i, batch in enumerate(batches):
        with runtime.micro_batch(last=last and i == len(batches) - 1):
            loss_of(runtime.model, batch).backward()


def gradients(runtime: Runtime) -> list[torch.Tensor | None]:
    return [None if p.grad is None else local_tensor(p.grad).clone() for p in runtime.model.parameters()]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@on_ranks(2)
def test_whoever_asks_gets_the_sum(here: Here) -> None:
    """A step without a last micro-batch, several backwards of one, gradients that were there, sums dropped half way."""
    batches = batches_of(here, "mlp", 6)
    found = []
    for pool in (PoolConfig(), HOST):
        runtime, optimizer = make_runtime(here, "mlp", pool)
        seen = []
        accumulate(runtime, batches[:3], last=False)
        runtime.gradients_ready()
        seen.append(gradients(runtime))
        accumulate(runtime, batches[3:5], last=True)  # on top of what is there
        seen.append(gradients(runtime))
        runtime.model.zero_grad()
        accumulate(runtime, batches[:2], last=False)
        optimizer.zero_grad()  # never mind those two
        accumulate(runtime, batches[2:4], last=False)
        runtime.model.zero_grad()
        with runtime.micro_batch(last=False):
            for _ in range(2):
                loss = loss_of(runtime.model, batches[4])
                loss.backward(retain_graph=True)
                loss.backward()
        accumulate(runtime, batches[5:], last=False)
        optimizer.step()  # nobody told that the last micro-batch was the last
        seen.append(list(full_weights(runtime.model).values()))
        optimizer.zero_grad()
        with runtime.micro_batch(last=False):
            loss_of(runtime.model, batches[0]).backward()
        with runtime.micro_batch(last=True):
            net, (inputs, _) = runtime.model, batches[1]
            # Units that run three times in one backward land three times.
            (net(net.layers[0](net.layers[0](inputs)).detach()).square().mean() + net(inputs).mean()).backward()
        seen.append(gradients(runtime))
        runtime.close()
        found.append(seen)
    assert all(same(*pair) for pair in zip(*found, strict=True))


@on_ranks(2)
def test_a_broken_step_leaves_nothing(here: Here) -> None:
    """A step that fails after some micro-batches is as if it had not been; so is a dropped one."""
    batches = batches_of(here, "gpt", 8)
    found = []
    for pool in (PoolConfig(), HOST):
        runtime, optimizer = make_runtime(here, "gpt", pool)
        calls = 0

        def failing(batch: Any, runtime: Runtime = runtime) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ZeroDivisionError
            return loss_of(runtime.model, batch)

        losses = train(runtime, optimizer, batches[:4], 2)
        with pytest.raises(ZeroDivisionError):
            runtime.step(batches[:4], failing, optimizer)
        losses += train(runtime, optimizer, batches[4:], 2)
        runtime.begin_step()
        accumulate(runtime, batches[:2], last=False)
        runtime.drop_step()
        assert all(p.grad is None for p in runtime.model.parameters())
        losses += train(runtime, optimizer, batches[4:], 4)
        runtime.close()
        found.append((losses, full_weights(runtime.model)))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])


@on_ranks(2)
def test_beside_paged_state_and_frozen_weights(here: Here) -> None:
    """A budget that pages optimizer state, too; weights that start to learn later get room; closing keeps sums."""
    found = []
    batches = batches_of(here, "gpt", 10)
    for gradients_on, budget in (("device", 89_000), ("host", 75_500)):  # less is enough
        pool = PoolConfig(
            device_budget=budget, optimizer_on="device", host_budget="16MiB", gradients=gradients_on
        )
        runtime, optimizer = make_runtime(here, "gpt", pool, overlap=OverlapConfig(shared_memory=False))
        assert runtime.pool.pagers[0].placement.slots > 0
        frozen = [p for name, p in runtime.model.named_parameters() if "blocks.0" in name]
        for parameter in frozen:
            parameter.requires_grad_(False)
        losses = train(runtime, optimizer, batches[:4], 2, clip_norm=0.1)
        for parameter in frozen:
            parameter.requires_grad_(True)
        losses += train(runtime, optimizer, batches[4:8], 2, clip_norm=0.1)
        runtime.pool.table.check()
        accumulate(runtime, batches[8:], last=False)
        runtime.close()
        found.append((losses, full_weights(runtime.model), [local_tensor(p.grad) for p in runtime.model.parameters()]))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])
    assert same(found[0][2], found[1][2])


@on_ranks(1)
def test_weights_that_start_to_learn_get_room(here: Here) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    found = []
    batches = batches_of(here, "gpt", 8)
    for pool in (PoolConfig(), HOST):
        runtime = Runtime(MemwallConfig(pool=pool), mesh=data_parallel_mesh("cpu", 1, 1))
        net = make_net("gpt")
        net.head.requires_grad_(False)
        runtime.setup(net)
        optimizer = make_optimizer([p for p in net.parameters() if p.requires_grad])
        runtime.add_optimizers([optimizer])
        losses = train(runtime, optimizer, batches[:4], 2)
        net.head.requires_grad_(True)
        optimizer.add_param_group({"params": list(net.head.parameters())})
        losses += train(runtime, optimizer, batches[4:], 2)
        if pool is HOST:
            names = {block.parameter for block, _ in runtime.pool.table if block.kind == Kind.GRAD}
            assert names == {name for name, _ in net.named_parameters()}
            runtime.pool.table.check()
        found.append((losses, full_weights(net)))
        runtime.close()
    assert found[0][0] == found[1][0]
    assert_same_bits(found[1][1], found[0][1])


@on_ranks(1)
def test_no_room_is_refused_by_name(here: Here) -> None:
    with pytest.raises(ConfigError, match=r"pool.gradients='host' takes .* of host memory"):
        make_runtime(here, "gpt", PoolConfig(gradients="host", host_budget="8KiB"))


@on_ranks(1)
def test_what_is_relied_on_of_the_engine(here: Here) -> None:
    """The end of a backward is looked up on the instance, and given back."""
    runtime, _ = make_runtime(here, "gpt", HOST)
    name = "_root_post_backward_final_callback"
    assert all(name in state.__dict__ for state in fsdp_states(runtime.model))
    ended: list[list[Any]] = []
    watch = BackwardEnd(runtime.model, lambda: ended.append(gradients(runtime)))
    loss_of(runtime.model, batches_of(here, "gpt", 1)[0]).backward()
    assert len(ended) == 1 and same(ended[0], gradients(runtime)) and all(g is not None for g in ended[0])
    watch.remove()
    runtime.close()
    assert all(name not in state.__dict__ for state in fsdp_states(runtime.model))


def test_combinations_that_cannot_be() -> None:
    for options, word in (
        ({"accumulate": "whole"}, "accumulate='whole'"),
        ({"replicate": 2}, "replicate=2"),
        ({"overlap": OverlapConfig(optimizer_in_backward=True)}, "optimizer_in_backward"),
    ):
        with pytest.raises(ConfigError, match=word):
            MemwallConfig(pool=HOST, **options)
    with pytest.raises(ConfigError, match="device, host"):
        PoolConfig(gradients="hots")
    with pytest.raises(ConfigError, match="needs the pool"):
        PoolConfig(gradients="host", enabled=False)


def test_zero_grad_is_heard_and_copies_are_free() -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    heard: list[str] = []
    watches = [ZeroGradWatch(each, partial(heard.append, type(each).__name__)) for each in (net, optimizer)]
    net(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert heard == ["SGD"] and not net.weight.grad.any()
    copied = copy.deepcopy(net)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copied, torch.load(buffer, weights_only=False)):
        other(torch.ones(1, 2)).sum().backward()
        other.zero_grad()
        assert other.weight.grad is None
    assert heard == ["SGD"] and net.weight.grad is not None
    net.zero_grad()
    assert heard == ["SGD", "Linear"] and net.weight.grad is None
    for watch in watches:
        watch.remove()
    net.zero_grad()
    optimizer.zero_grad()
    assert len(heard) == 2 and "zero_grad" not in net.__dict__ and "zero_grad" not in optimizer.__dict__
