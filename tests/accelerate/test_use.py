"""What else users of Accelerate do: trackers, compiled and partly frozen models, misuse, one rank, the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader

from memwall_strategy.accelerate import MemwallPlugin
from memwall_strategy.config import ResilienceConfig
from memwall_strategy.core.errors import ConfigError, MemwallError, PeerLost
from memwall_strategy.telemetry.events import EventKind
from tests.accelerate.helpers import make_accelerator, whole_loader
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    assert_close,
    loss_of,
    make_data,
    make_net,
    make_optimizer,
    mean_over_ranks,
    train_plain,
)
from tests.ranks import run_ranks


class Kept(GeneralTracker):
    """Keeps what is logged."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.rows.append((values, None))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append((values, step))


@on_ranks(2)
def test_trackers_get_the_runtimes_figures(here: Here) -> None:
    tracker = Kept()
    acc = make_accelerator(log_with=tracker)
    acc.init_trackers("project", {"lr": 0.1})
    net = make_net("gpt")
    model, stepper, loader = acc.prepare(net, make_optimizer(net.parameters()), whole_loader("gpt", 8, 2))
    acc.log({"early": 1.0}, step=0)
    for index, batch in enumerate(loader):
        loss = loss_of(model, batch)
        acc.backward({"loss": loss, "tokens": batch[1].numel()})
        stepper.step()
        stepper.zero_grad()
        acc.log({"loss": loss.item()}, step=index + 1)
    acc.log({"alone": 1.0}, step=3, metrics=False)
    acc.free_memory()
    if here.rank:
        assert tracker.rows == []
        return
    assert tracker.rows[0] == ({"lr": 0.1}, None)
    assert tracker.rows[1] == ({"early": 1.0}, 0)
    values, step = tracker.rows[3]
    assert step == 2 and {"loss", "memwall/step_s", "memwall/pool/device_bytes", "memwall/tokens_per_s"} <= set(values)
    assert values["memwall/input/exposed_s"] > 0
    assert tracker.rows[4] == ({"alone": 1.0}, 3)


@on_ranks(2)
def test_a_compiled_model(here: Here) -> None:
    torch._dynamo.reset()
    acc = make_accelerator(gradient_accumulation_steps=2)
    net = make_net("gpt")
    compiled = torch.compile(net, backend="eager")
    model, stepper = acc.prepare(compiled, make_optimizer(net.parameters()))
    assert model is compiled
    loader = acc.prepare(whole_loader("gpt", 3 * 2 * 4, 2))
    losses = []
    for batch in loader:
        with acc.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            acc.backward(loss)
            stepper.step()
            stepper.zero_grad()
    wanted = train_plain(make_net("gpt"), "gpt", steps=3, micro=4, accumulate=2)
    assert_close(mean_over_ranks(losses), wanted, 1e-5)
    assert acc.unwrap_model(model, keep_torch_compile=False) is net
    acc.save_state(here.folder / "state")
    acc.load_state(here.folder / "state")
    acc.free_memory()


@on_ranks(2)
def test_frozen_parameters_and_a_late_optimizer(here: Here) -> None:
    """Only the head learns, by an optimizer that is made and prepared after the model."""
    acc = make_accelerator()
    net = make_net("gpt")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    model = acc.prepare(net)
    stepper = acc.prepare(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    plain = make_net("gpt")
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    inputs, labels = make_data("gpt", 4)
    part = slice(2 * here.rank, 2 * here.rank + 2)
    for _ in range(3):
        acc.backward(loss_of(model, (inputs[part], labels[part])))
        stepper.step()
        stepper.zero_grad()
        loss_of(plain, (inputs, labels)).backward()
        with torch.no_grad():
            plain.head.weight -= 0.1 * plain.head.weight.grad
        plain.zero_grad()
    torch.testing.assert_close(model.head.weight.full_tensor(), plain.head.weight, rtol=1e-5, atol=1e-6)
    acc.free_memory()


@on_ranks(2)
def test_misuse_is_named(here: Here) -> None:
    acc = make_accelerator()
    with pytest.raises(MemwallError, match=r"before acc\.prepare"):
        acc.backward(torch.ones(1, requires_grad=True).sum())
    net, other = make_net("mlp"), make_net("mlp")
    with pytest.raises(ConfigError, match="parameters of no prepared model"):
        acc.prepare(make_optimizer(net.parameters()))
    with pytest.raises(ConfigError, match="parameters of no prepared model"):
        acc.prepare(net, make_optimizer(other.parameters()))
    assert acc.memwall.runtime is None, "nothing was sharded before the refusal"
    optimizer = make_optimizer(other.parameters())
    other(torch.zeros(2, 7)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="has stepped before"):
        acc.prepare(other, optimizer)
    model, _ = acc.prepare(net, make_optimizer(net.parameters()))
    out = model(torch.zeros(2, 7)).sum()
    with pytest.raises(ConfigError, match=r"tokens=-1\) is negative"):
        acc.backward(out, tokens=-1)
    with acc.no_sync(model):
        acc.backward(model(torch.zeros(2, 7)).sum(), tokens=3)
    with pytest.raises(MemwallError, match="in some micro-batches of a step and not in others"):
        acc.backward(model(torch.zeros(2, 7)).sum())
    with pytest.raises(ConfigError, match="save_state: memwall knows no shards"):
        acc.save_state(here.folder, shards=3)
    assert dist.get_backend() != "gloo"
    acc.free_memory()


@on_ranks(2)
def test_hugging_face_outputs_come_back_in_fp32(here: Here) -> None:
    transformers = pytest.importorskip("transformers")
    acc = make_accelerator(mixed_precision="bf16")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 32}
    torch.manual_seed(here.rank)  # weights are the first rank's
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = acc.prepare(transformers.GPT2LMHeadModel(config))
    tokens = torch.arange(8)[None]
    output = model(input_ids=tokens, labels=tokens)
    assert output.logits.dtype == output.loss.dtype == torch.float32
    assert acc.gather(output.loss.detach()).unique().numel() in (1, 2)
    acc.backward(output.loss)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    acc.unwrap_model(model).save_pretrained(
        here.folder / "out", state_dict=acc.get_state_dict(model), is_main_process=acc.is_main_process
    )
    acc.wait_for_everyone()
    again = transformers.GPT2LMHeadModel.from_pretrained(here.folder / "out")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.full_tensor())
    acc.free_memory()


def recipe_worker(rank: int, world: int, folder: str, steps: int, resume: bool) -> list[float]:
    from recipes.accelerate_gpt.__main__ import train

    losses = train(steps, Path(folder), resume=resume, cpu=True, precision="no")
    assert not dist.is_initialized(), "end_training ends the group"
    return losses


def test_the_recipe_trains_and_resumes_on_one_rank(tmp_path: Path) -> None:
    first = run_ranks(recipe_worker, 2, folder=str(tmp_path), steps=12, resume=False)
    assert first[0] == first[1] and first[0][-1] < first[0][0]
    (second,) = run_ranks(recipe_worker, 1, folder=str(tmp_path), steps=16, resume=True)
    assert len(second) == 4 and max(second) < first[0][0]


def group_worker(rank: int, world: int) -> list[str]:
    """The group is memwall's unless somebody chose another."""
    dist.init_process_group("gloo")
    with pytest.raises(ConfigError, match="process group over gloo exists already"):
        make_accelerator(MemwallPlugin(resilience=ResilienceConfig(swappable_groups=True)))
    make_accelerator().end_training()
    chosen = make_accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    names = [dist.get_backend()]
    chosen.end_training()
    acc = make_accelerator()
    names.append(dist.get_backend())
    loader = acc.prepare(DataLoader(range(5), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    model = acc.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    acc.backward(model(torch.ones(1, 2)).sum())
    acc.end_training()
    return names


def test_the_process_group(tmp_path: Path) -> None:
    from memwall_strategy.engine.swap_group import BACKEND

    assert run_ranks(group_worker, 1) == [["gloo", BACKEND]]


def lost_worker(rank: int, world: int) -> str:
    acc = make_accelerator(MemwallPlugin(timeout_s=20))
    told: list[EventKind] = []
    acc.memwall.events.subscribe(lambda event: told.append(event.kind))
    net = make_net("gpt")
    model, stepper, loader = acc.prepare(net, make_optimizer(net.parameters()), whole_loader("gpt", 400, 2))
    try:
        for index, batch in enumerate(loader):
            if index == 3 and rank == 1:
                os._exit(9)
            acc.backward(loss_of(model, batch))
            stepper.step()
            stepper.zero_grad()
    except PeerLost as error:
        assert EventKind.PEER_LOST in told and EventKind.STEP_ABORTED in told
        assert all(parameter.grad is None for parameter in model.parameters())
        return str(error)
    return "trained on without the other rank"


def test_a_lost_peer_is_named() -> None:
    """The other rank gets ``PeerLost`` instead of a hang."""
    (said, _) = run_ranks(lost_worker, 2, expect_exit={1: 9})
    assert "rank 1" in said or "ranks 1" in said, said
