"""A rank runs out of memory, or fails otherwise, in the middle of a step: restarted exactly, or one named error."""

from __future__ import annotations

import functools
import resource
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memwall_strategy.config import MemwallConfig, OverlapConfig, PoolConfig
from memwall_strategy.core.errors import CollectiveError, MemwallError, RankOutOfMemory
from memwall_strategy.engine import reducer, swap_group
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.runtime import Runtime
from memwall_strategy.telemetry.events import EventKind
from tests.ranks import run_ranks

MICRO, STEPS, WIDTH = 3, 4, 16
SHORT = "CUDA out of memory. Tried to allocate 2.00 GiB. (made up by a test)"


class Block(nn.Module):
    """Random, and with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Late(torch.autograd.Function):
    """Does something in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Any) -> Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return gradient, None


class Plan:
    """Which allocations fail: at the n-th passage of a place on this rank, as many times as asked."""

    def __init__(self, place: str, at: int, times: int = 1, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.place, self.at, self.left, self.error, self.passed = place, at, times, error, 0

    def passes(self, place: str) -> None:
        if place != self.place:
            return
        self.passed += 1
        if self.passed >= self.at and self.left:
            self.left -= 1
            if self.error is MemoryError:
                allocate_too_much()
            raise self.error(SHORT)


def allocate_too_much() -> None:
    """A real shortage on CPU: 256 MiB under a limit of this process that leaves 32."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**25, hard))
    try:
        torch.empty(2**28, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def train(rank: int, world: int, plan: Plan | None, escalate: Any = None, **options: Any) -> dict[str, Any]:
    """Some steps of accumulated micro-batches; what they left, and which events they told."""
    torch.manual_seed(1)
    net = Net()
    config = MemwallConfig(**{"overlap": OverlapConfig(shared_memory=True)} | options)
    runtime = Runtime(config, mesh=data_parallel_mesh("cpu", world, config.replicate))
    events: list[Any] = []
    runtime.events.subscribe(events.append)
    if plan is not None:
        net.blocks[1].register_forward_pre_hook(lambda *_: plan.passes("forward"))
        net.blocks[1].register_forward_hook(lambda m, a, out: Late.apply(out, lambda: plan.passes("backward")))
    runtime.setup(net)
    good = {name: getattr(reducer, name) for name in ("reduce_scatter", "reduce_scatter_shared")}
    reduced: list[list[Any]] = []

    def watched(name: str, reduce: Any, *args: Any) -> None:
        if plan is not None:
            plan.passes("lane")
        reduce(*args)
        reduced.append([name, args[-1].epoch])

    for name, reduce in good.items():
        setattr(reducer, name, functools.partial(watched, name, reduce))
    if escalate is not None:
        runtime.pool.escalate = escalate
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    if plan is not None:
        optimizer.register_step_pre_hook(lambda *_: plan.passes("optimizer"))
    runtime.add_optimizers([optimizer])
    torch.manual_seed(100 + rank)
    losses, error = [], None
    data = torch.Generator().manual_seed(rank)
    try:
        for _ in range(STEPS):
            batches = [torch.randn(4, WIDTH, generator=data) for _ in range(MICRO)]
            losses.append(runtime.step(batches, net, optimizer, clip_norm=1.0).item())
    except Exception as caught:  # noqa: BLE001 - judged by the test
        error = caught
    for name, reduce in good.items():
        setattr(reducer, name, reduce)
    runtime.close()
    return {
        "losses": losses,
        "weights": [p.to_local().double().sum().item() for p in net.parameters()],
        "buffers": [b.double().sum().item() for b in net.buffers()],
        "random": torch.rand(1).item(),
        "reduced": reduced,
        "error": [type(error).__name__, list(getattr(error, "ranks", ())), str(error)],
        "events": [
            [str(e.kind), e.fields.get("ranks"), e.fields.get("phase"), e.fields.get("asked_bytes")] for e in events
            if e.kind in (EventKind.OUT_OF_MEMORY, EventKind.STEP_RESTARTED)
        ],
    }  # fmt: skip


def result_of(run: dict[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("losses", "weights", "buffers", "random", "error")}


def join(grace_s: float = 5.0) -> None:
    swap_group.register_backend(grace_s=grace_s)
    dist.init_process_group("memwall", timeout=timedelta(seconds=90))


def worker_restarts(rank: int, world: int) -> dict[str, Any]:
    """One fault after the other in one process: the epoch grows, the results stay."""
    join()
    runs = {"undisturbed": train(rank, world, None)}
    mid, last = MICRO + 2, 2 * MICRO
    one = world - 1
    plans = {
        "forward": Plan("forward", mid) if rank == one else None,
        "backward, last": Plan("backward", last) if rank == one else None,
        "first": Plan("forward", 1) if rank == 0 else None,
        "real": Plan("forward", mid, error=MemoryError) if rank == one else None,
        "lane": Plan("lane", 3 * mid) if rank == one else None,  # several transfers pass in a backward
    }
    for name, plan in plans.items():
        runs[name] = train(rank, world, plan)
    plan = Plan("forward", mid) if rank == one else None
    runs["stock"] = train(rank, world, plan, overlap=OverlapConfig(lanes=False))
    on_host = PoolConfig(gradients="host", host_budget="16MiB", host_modules=("blocks.0",))
    for name, place in (("on host", "forward"), ("backward, last, on host", "backward")):
        plan = Plan(place, last) if rank == one else None  # two micro-batches have left sums there
        runs[name] = train(rank, world, plan, pool=on_host)
    runs["both"] = train(rank, world, Plan("forward", mid) if rank in (0, one) else None, lambda missing_bytes, **_: 1)
    given: list[int] = []

    def escalate(missing_bytes: int, **_: bool) -> int:
        given.append(missing_bytes)
        return 1

    runs["three times"] = train(rank, world, Plan("forward", mid, 3) if rank == one else None, escalate)
    return {"runs": runs, "given": given, "epoch": swap_group.group_health().epoch}


def check_restarts(results: list[dict[str, Any]]) -> None:
    one = len(results) - 1
    for rank, result in enumerate(results):
        wanted = result_of(result["runs"].pop("undisturbed"))
        assert wanted["error"][0] == "NoneType" and len(wanted["losses"]) == STEPS, wanted
        for name, run in result["runs"].items():
            assert result_of(run) == wanted, name
            # Through windows from the first to the last, also those of the epoch after the restart.
            assert {how for how, _ in run["reduced"]} == (set() if name == "stock" else {"reduce_scatter_shared"}), name
            if name not in ("stock", "first"):  # the very first forward reduces nothing in its epoch
                assert len({epoch for _, epoch in run["reduced"]}) > 1, name
            if name == "both":  # at once, or, where one was freed from a collective first, one after the other
                assert {each for event in run["events"] for each in event[1]} == {0, one}, run["events"]
                continue
            times = 3 if name == "three times" else 1
            assert [event[0] for event in run["events"]] == ["out_of_memory", "step_restarted"] * times, name
            ranks = [0] if name == "first" else [one]
            assert all(event[1] == ranks for event in run["events"]), (name, run["events"])
            phase = "backward" if "backward" in name or name == "lane" else "forward"
            if name != "lane":  # whichever wait meets it
                asked_bytes = 2**28 if name == "real" else 2**31
                assert run["events"][0][2:] == [phase, asked_bytes], (name, run["events"])
        assert result["given"] == ([2**31] * 3 if rank == one else [0] * 3)


def test_a_restarted_step_is_the_undisturbed_one_to_the_last_bit() -> None:
    check_restarts(run_ranks(worker_restarts, 2, timeout_s=150))


def worker_named(rank: int, world: int) -> dict[str, Any]:
    """What cannot be restarted; each on new groups."""
    join(grace_s=2.0)
    met = {}
    one = world - 1
    cases = {
        "again": ("forward", 3, torch.OutOfMemoryError),  # activations give way first, then second buffers
        "optimizer": ("optimizer", 1, torch.OutOfMemoryError),
        "other": ("forward", 1, ValueError),
    }
    for name, (place, times, error) in cases.items():
        run = train(rank, world, Plan(place, 2, times, error) if rank == one else None)
        met[name] = run["error"]
        health = swap_group.group_health()
        if health.error is not None:
            swap_group.configure(health.epoch + 1, timeout_s=60)
    return met


def test_what_cannot_be_restarted_ends_by_name_on_every_rank() -> None:
    results = run_ranks(worker_named, 3, timeout_s=150)
    for rank, met in enumerate(results):
        kind, ranks, text = met["again"]
        assert (kind, ranks) == ("RankOutOfMemory", [2]), met["again"]
        assert "rank 2 ran out of memory in phase 'forward'" in text and "Nothing is left" in text
        kind, ranks, text = met["optimizer"]
        assert (kind, ranks) == ("RankOutOfMemory", [2]), met["optimizer"]
        assert "on rank 2, the optimizer had begun to step" in text
        kind, ranks, text = met["other"]
        if rank == 2:
            assert (kind, text) == ("ValueError", SHORT)
        else:
            assert (kind, ranks) == ("CollectiveError", [2]), met["other"]
            assert f"rank 2 gave up: ValueError: {SHORT}" in text
    assert len({met["again"][2] for met in results}) == 1
    assert issubclass(RankOutOfMemory, MemwallError) and not issubclass(RankOutOfMemory, CollectiveError)
