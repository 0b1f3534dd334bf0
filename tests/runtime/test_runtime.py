"""The runtime in a plain loop, without any trainer."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall_strategy.config import MemwallConfig, OverlapConfig, PoolConfig
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.runtime import Runtime
from tests.lightning.checks import Here, on_ranks, rank_results
from tests.lightning.models import (
    assert_close,
    assert_same_weights,
    full_weights,
    loss_of,
    make_data,
    make_net,
    make_optimizer,
    mean_over_ranks,
    train_plain,
)

__all__ = ["rank_results"]  # pytest finds the fixture here


def make_runtime(here: Here, net: torch.nn.Module, *, precision: str = "32-true", **options: Any) -> Runtime:
    """A runtime around ``net`` on every rank's process group, which the first check makes and all share."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    config = MemwallConfig(**options)
    runtime = Runtime(config, mesh=data_parallel_mesh("cpu", here.world, config.replicate), precision=precision)
    runtime.setup(net)
    return runtime


def batches_of(here: Here, kind: str, count: int, seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of ``count`` whole batches of two samples a rank."""
    mine = [tensor[here.rank :: here.world].split(2) for tensor in make_data(kind, count * 2 * here.world, seed)]
    return list(zip(*mine, strict=True))


def run(
    runtime: Runtime, batches: list[Any], optimizer: torch.optim.Optimizer, accumulate: int, **clip: float
) -> list[float]:
    losses = []
    for first in range(0, len(batches), accumulate):
        window = batches[first : first + accumulate]
        losses.append(runtime.step(window, lambda batch: loss_of(runtime.model, batch), optimizer, **clip).item())
    return losses


def windows(losses: list[float], accumulate: int) -> list[float]:
    return [sum(losses[i : i + accumulate]) / accumulate for i in range(0, len(losses), accumulate)]


@on_ranks(2, "norm", "value", "whole", "bf16-mixed")
def test_same_losses_as_a_plain_loop(here: Here) -> None:
    """Steps over 4 micro-batches each."""
    steps = 20 if here.case == "norm" else 5
    clip: dict[str, float] = {"norm": {"clip_norm": 0.4}, "value": {"clip_value": 0.01}}.get(here.case, {})
    options: dict[str, Any] = {"accumulate": "whole"} if here.case == "whole" else {}
    precision = "bf16-mixed" if here.case == "bf16-mixed" else "32-true"
    net, plain = make_net("mlp"), make_net("mlp")
    runtime = make_runtime(here, net, precision=precision, **options)
    optimizer = make_optimizer(net.parameters())
    runtime.add_optimizers([optimizer])
    losses = run(runtime, batches_of(here, "mlp", steps * 4), optimizer, 4, **clip)

    def plain_clip(parameters: list[Tensor]) -> None:
        if "clip_norm" in clip:
            torch.nn.utils.clip_grad_norm_(parameters, 0.4)
        if "clip_value" in clip:
            torch.nn.utils.clip_grad_value_(parameters, 0.01)

    wanted = windows(train_plain(plain, "mlp", steps=steps, micro=4, accumulate=4, clip=plain_clip), 4)
    assert_close(mean_over_ranks(losses), wanted, 1e-6 if precision == "32-true" else 2e-2)
    if precision == "32-true":
        assert_same_weights(full_weights(net), plain.state_dict())
    assert runtime.steps == steps
    runtime.close()


@on_ranks(2)
def test_metrics_have_the_agreed_names_and_make_sense(here: Here) -> None:
    net = make_net("gpt")
    runtime = make_runtime(here, net, pool=PoolConfig(device_budget="64MiB"))
    assert runtime.metrics() == {}
    optimizer = make_optimizer(net.parameters(), "adamw")
    runtime.add_optimizers([optimizer])

    def with_tokens(batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(net, batch), "tokens": batch[1].numel()}

    for batch in batches_of(here, "gpt", 3):
        runtime.step([batch, batch], with_tokens, optimizer)
    metrics = runtime.metrics()
    assert set(metrics) == {
        "memwall/step_s", "memwall/tokens_per_s", "memwall/mfu", "memwall/overlap/exposed_s",
        "memwall/overlap/exposed_fraction", "memwall/overlap/contention_s", "memwall/overlap/copy_s",
        "memwall/overlap/shared_bytes", "memwall/overlap/prefetch", "memwall/overlap/reduce_buffers",
        "memwall/pool/device_bytes", "memwall/pool/device_peak_bytes", "memwall/pool/utilization",
        *(f"memwall/overlap/lane_{what}/{lane}" for what in ("busy_s", "bytes", "exposed_s")
          for lane in ("gather", "reduce")),
    }  # fmt: skip
    exposed = [metrics[f"memwall/overlap/lane_exposed_s/{lane}"] for lane in ("gather", "reduce")]
    assert sum(exposed) == pytest.approx(metrics["memwall/overlap/exposed_s"])
    assert 0 < metrics["memwall/overlap/copy_s"] < metrics["memwall/step_s"]
    # Both micro-batches gather and reduce every weight: half of it comes from the other rank, padding included.
    whole = 2 * 4 * sum(parameter.numel() for parameter in net.parameters())
    assert metrics["memwall/overlap/lane_bytes/reduce"] >= whole / 2
    assert metrics["memwall/overlap/lane_bytes/gather"] > metrics["memwall/overlap/lane_bytes/reduce"] * 1.1
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values()), metrics
    step_s = metrics["memwall/step_s"]
    assert metrics["memwall/tokens_per_s"] == pytest.approx(2 * 2 * 6 * 2 / step_s)
    assert 0 <= metrics["memwall/overlap/exposed_fraction"] <= 1
    assert 0 < metrics["memwall/mfu"] < 1
    numel = sum(parameter.to_local().numel() for parameter in net.parameters())
    assert metrics["memwall/pool/device_bytes"] >= 3 * 4 * numel, "weights and two moments"
    assert metrics["memwall/pool/device_peak_bytes"] > metrics["memwall/pool/device_bytes"]
    assert metrics["memwall/pool/utilization"] == metrics["memwall/pool/device_peak_bytes"] / 2**26
    runtime.close()
    assert runtime.metrics() == metrics, "readable after the end"
    runtime.close()


@on_ranks(2)
def test_evaluation_between_steps_is_no_part_of_a_step(here: Here) -> None:
    """A lane has one thread: within a step it cannot have worked longer than the step."""
    net = make_net("gpt")
    runtime = make_runtime(here, net)
    optimizer = make_optimizer(net.parameters())
    runtime.add_optimizers([optimizer])
    batches = batches_of(here, "gpt", 4)
    run(runtime, batches[:3], optimizer, 1)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            for _ in range(20):
                net(batches[0][0])
    run(runtime, batches[3:], optimizer, 1)
    metrics = runtime.metrics()
    assert metrics["memwall/overlap/lane_busy_s/gather"] <= metrics["memwall/step_s"], metrics
    assert metrics["memwall/overlap/exposed_fraction"] <= 1, metrics
    runtime.close()


@on_ranks(2)
def test_all_off_says_the_time_only(here: Here) -> None:
    net = make_net("gpt")
    off = {"pool": PoolConfig(enabled=False), "overlap": OverlapConfig(enabled=False)}
    runtime = make_runtime(here, net, **off)
    optimizer = make_optimizer(net.parameters())
    runtime.add_optimizers([optimizer])
    losses = run(runtime, batches_of(here, "gpt", 4), optimizer, 1)
    assert_close(mean_over_ranks(losses), train_plain(make_net("gpt"), "gpt", steps=4, micro=4))
    assert set(runtime.metrics()) == {"memwall/step_s", "memwall/mfu"}
    assert runtime.lanes == {} and runtime.memory is None


@on_ranks(2)
def test_trace_is_a_chrome_trace(here: Here) -> None:
    """Valid JSON; transfers of both lanes and the phases of the training thread, none of negative length."""
    net = make_net("gpt")
    runtime = make_runtime(here, net, overlap=OverlapConfig(trace=True))
    optimizer = make_optimizer(net.parameters())
    runtime.add_optimizers([optimizer])
    run(runtime, batches_of(here, "gpt", 4), optimizer, 2)
    written = json.loads(runtime.write_trace(here.folder / f"{here.rank}.json").read_text())
    rows = {e["tid"]: e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"}
    assert set(rows.values()) == {"lane gather", "lane reduce", "training thread"}
    events = [{**e, "tid": rows[e["tid"]].split()[-1]} for e in written["traceEvents"] if e["ph"] != "M"]
    for event in events:
        assert event["ph"] == "X" and event["pid"] == here.rank and event["dur"] >= 0 and event["ts"] > 0, event
        assert event["name"] and isinstance(event["args"]["bytes"], int)
    forwards = [event for event in events if event["tid"] == "thread" and event["name"].startswith("forward")]
    assert len(forwards) == 4
    named = {event["name"] for event in events if event["tid"] == "gather"}
    assert any("blocks.0" in name for name in named), named
    for lane in ("gather", "reduce"):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == lane)
        assert all(first[1] <= second[0] + 1 for first, second in itertools.pairwise(spans)), "in order"
    runtime.close()


@on_ranks(2)
def test_no_trace_without_the_option(here: Here) -> None:
    runtime = make_runtime(here, make_net("gpt"))
    with pytest.raises(ConfigError, match=r"overlap\.trace=true"):
        runtime.write_trace(Path(here.folder, "never.json"))
    runtime.close()


class Boom(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("broken on purpose")


@on_ranks(2, "forward", "backward", "second micro-batch", "optimizer", "whole", "no lanes")
def test_training_goes_on_exactly_after_an_exception(here: Here) -> None:
    """The broken step leaves nothing: the next steps equal those of a run that never broke."""
    options: dict[str, Any] = {
        "whole": {"accumulate": "whole"}, "no lanes": {"overlap": OverlapConfig(lanes=False)},
    }.get(here.case, {})  # fmt: skip
    net = make_net("gpt")
    runtime = make_runtime(here, net, **options)
    optimizer = make_optimizer(net.parameters())
    runtime.add_optimizers([optimizer])
    batches = batches_of(here, "gpt", 12)
    losses = run(runtime, batches[:4], optimizer, 2)

    calls: list[int] = []

    def broken(batch: Any) -> Tensor:
        calls.append(1)
        last = len(calls) == 2
        if here.case == "forward":
            hidden = net.token(batch[0])  # a child outside its root's forward, then an error
            raise ValueError(f"broken on purpose {hidden.shape}")
        loss = loss_of(net, batch)
        fails = here.case == "backward" or (last and here.case != "optimizer")
        return Boom.apply(loss) if fails else loss

    handle = None
    if here.case == "optimizer":

        def refuse(*_: Any) -> None:
            raise ValueError("broken on purpose")

        handle = optimizer.register_step_pre_hook(refuse)
    with pytest.raises((ValueError, RuntimeError)):
        runtime.step(batches[4:6], broken, optimizer)
    if handle is not None:
        handle.remove()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert runtime.steps == 2
    losses += run(runtime, batches[4:], optimizer, 2)
    wanted = windows(train_plain(make_net("gpt"), "gpt", steps=6, micro=4, accumulate=2), 2)
    assert_close(mean_over_ranks(losses), wanted)
    runtime.close()


@on_ranks(2)
def test_budget(here: Here) -> None:
    """A budget that cannot hold the model and what its optimizer needs is refused, as one above the machine is; steps
    that are short although everything gave way end on every rank."""
    net = make_net("gpt")
    runtime = make_runtime(here, net, pool=PoolConfig(device_budget="20KiB"))
    with pytest.raises(ConfigError, match=r"device tier: 2 slots .* are missing. Raise pool\.device_budget"):
        runtime.add_optimizers([make_optimizer(net.parameters())])
    plain = torch.optim.SGD(net.parameters(), lr=0.1)  # keeps no state: nothing to page
    runtime.add_optimizers([plain])
    with pytest.raises(MemwallError, match=r"device budget exceeded"):
        run(runtime, batches_of(here, "gpt", 8), plain, 1)
    assert 1 < runtime.steps < 8
    assert list(dict.fromkeys(runtime.pool.escalation.eased)) == ["recompute", "second buffers"]
    runtime.close()
    with pytest.raises(ConfigError, match=r"pool\.device_budget.*that are there"):
        make_runtime(here, make_net("gpt"), pool=PoolConfig(device_budget="900TiB"))


@on_ranks(2)
def test_empty_step_is_refused(here: Here) -> None:
    net = make_net("gpt")
    runtime = make_runtime(here, net)
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        runtime.step([], lambda batch: batch, make_optimizer(net.parameters()))
    runtime.close()


@on_ranks(2)
def test_pillars_are_driven_in_order(here: Here) -> None:
    """Each method of a pillar at its moment; its figures and state join the runtime's."""

    class Recorder:
        name = "recorder"

        def __init__(self) -> None:
            self.calls: list[str] = []
            self.loaded: Any = None

        def attach(self, runtime: Runtime) -> None:
            self.calls.append("attach")

        def __getattr__(self, name: str) -> Any:
            if name in ("optimizers_ready", "before_step", "after_backward", "before_optimizer", "after_step",
                        "on_failure", "close"):  # fmt: skip
                return lambda *_: self.calls.append(name)
            raise AttributeError(name)

        def metrics(self) -> dict[str, float]:
            return {"memwall/recorder": float(len(self.calls))}

        def state_dict(self) -> dict[str, Any]:
            return {"calls": len(self.calls)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    net, pillar = make_net("gpt"), Recorder()
    runtime = Runtime(MemwallConfig(), mesh=data_parallel_mesh("cpu", here.world, 1), pillars=[pillar])
    runtime.setup(net)
    optimizer = make_optimizer(net.parameters())
    runtime.add_optimizers([optimizer])
    run(runtime, batches_of(here, "gpt", 2), optimizer, 2)
    assert pillar.calls == [
        "attach", "optimizers_ready", "before_step", "after_backward", "before_optimizer", "after_step",
    ]  # fmt: skip
    assert runtime.metrics()["memwall/recorder"] == 6
    state = runtime.state_dict()
    assert state == {"steps": 1, "pillars": {"recorder": {"calls": 6}}}
    with pytest.raises(ZeroDivisionError):
        runtime.step(batches_of(here, "gpt", 1), lambda batch: 1 / 0, optimizer)
    assert pillar.calls[-2:] == ["before_step", "on_failure"]
    runtime.load_state_dict({"steps": 7, "pillars": {"recorder": {"calls": 9}, "unknown": {}}})
    assert runtime.steps == 7 and pillar.loaded == {"calls": 9}
    runtime.close()
    assert pillar.calls[-1] == "close"


@on_ranks(2)
def test_a_closed_runtime_leaves_a_plain_fsdp2_model(here: Here) -> None:
    """After ``close`` the model trains on FSDP2's own path, and a new runtime takes it up again."""
    net = make_net("gpt")
    runtime = make_runtime(here, net)
    optimizer = make_optimizer(net.parameters())
    runtime.add_optimizers([optimizer])
    batches = batches_of(here, "gpt", 9)
    losses = run(runtime, batches[:3], optimizer, 1)
    runtime.close()
    for batch in batches[3:6]:
        loss = loss_of(net, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    again = make_runtime(here, net)
    again.add_optimizers([optimizer])
    losses += run(again, batches[6:], optimizer, 1)
    assert_close(mean_over_ranks(losses), train_plain(make_net("gpt"), "gpt", steps=9, micro=4))
    again.close()
