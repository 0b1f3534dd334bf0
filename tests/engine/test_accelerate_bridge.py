"""The private names of Accelerate that memwall relies on still mean what they meant."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

from memwall_strategy.engine.accelerate_bridge import (
    PassState,
    SteppingOptimizer,
    active_loader,
    call_load_hooks,
    call_save_hooks,
    compiled_from,
    is_prepared,
    mark_prepared,
    prepared_by,
    unwrap_optimizer,
)
from memwall_strategy.engine.scaler import ShardedGradScaler


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """A plain one, in this process alone."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_what_an_accelerator_holds(accelerator: Accelerator) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(range(4))
    accelerator.register_for_checkpointing(scheduler)
    prepared = accelerator.prepare(net, optimizer, scheduler, loader)
    held = prepared_by(accelerator)
    assert (held.models, held.optimizers, held.schedulers, held.loaders) == tuple([each] for each in prepared)
    assert held.objects == [scheduler]
    assert all(is_prepared(each) for each in prepared)
    assert unwrap_optimizer(prepared[1]) is optimizer
    held.models.append(net)
    assert len(prepared_by(accelerator).models) == 2, "the lists are its own"


def test_what_is_marked_is_not_prepared_again(accelerator: Accelerator) -> None:
    net = nn.Linear(2, 2)
    assert not is_prepared(net)
    mark_prepared(net)
    accelerator.native_amp = True
    assert accelerator.prepare(net) is net
    assert "forward" not in vars(net), "no autocast was put around it"


def test_hooks_around_saving_and_loading(accelerator: Accelerator) -> None:
    called: list[object] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: called.append((models, weights, folder)))
    accelerator.register_load_state_pre_hook(lambda models, folder: called.append((models, folder)))
    call_save_hooks(accelerator, "a")
    call_load_hooks(accelerator, "b")
    assert called == [([], [], "a"), ([], "b")]


def test_compiled_models_hold_the_module() -> None:
    net = nn.Linear(2, 2)
    assert compiled_from(torch.compile(net, backend="eager")) is net
    assert compiled_from(net) is net


def test_a_pass_is_what_accumulate_looks_at(accelerator: Accelerator) -> None:
    loader = PassState(DataLoader(range(3), batch_size=2))
    assert isinstance(loader, DataLoader)
    assert loader.batch_size == 2
    assert active_loader(accelerator) is None
    loader.enter_pass()
    loader.enter_pass()
    assert active_loader(accelerator) is loader
    loader.end_of_dataloader = True
    assert accelerator.gradient_state.end_of_dataloader
    with accelerator.accumulate():
        assert accelerator.sync_gradients
    loader.leave_pass()
    assert active_loader(accelerator) is None


@contextmanager
def nothing(_: torch.optim.Optimizer) -> Iterator[None]:
    yield


def test_an_optimizer_keeps_its_groups_and_steps_in_sync_only(accelerator: Accelerator) -> None:
    weight = nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([weight], 1.0)
    group = plain.param_groups[0]
    stepping = SteppingOptimizer(plain, None, nothing, list)
    assert isinstance(stepping, AcceleratedOptimizer)
    assert stepping.param_groups[0] is group
    weight.grad = torch.ones(1)
    accelerator.gradient_state.sync_gradients = False
    stepping.step()
    stepping.zero_grad()
    assert weight.item() == 1.0 and weight.grad is not None
    accelerator.gradient_state.sync_gradients = True
    stepping.step()
    assert weight.item() == 0.0


def test_two_optimizers_share_a_scale(accelerator: Accelerator) -> None:
    """The second one's gradients, unscaled before the first stepped, are not unscaled again; inf skips one step."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    steppers: list[SteppingOptimizer] = []
    for weight in weights:
        steppers.append(SteppingOptimizer(torch.optim.SGD([weight], 1.0), scaler, nothing, lambda: steppers))
    for factor, skipped, left, scale in ((1.0, False, 0.0, 4.0), (float("inf"), True, 0.0, 2.0)):
        scaler.before_scale()
        scaler.scale(factor * weights[0] + weights[1]).backward()
        for stepper in steppers:
            scaler.unscale_(stepper.optimizer)
        assert scaler.get_scale() == 4.0
        steppers[0].step()
        assert scaler.get_scale() == 4.0, "the other one's gradients still carry it"
        steppers[1].step()
        assert steppers[0].step_was_skipped is skipped
        assert not steppers[1].step_was_skipped
        assert weights[0].item() == left
        assert scaler.get_scale() == scale
        for stepper in steppers:
            stepper.zero_grad()
    assert weights[1].item() == -1.0


def test_one_of_two_may_go_on_alone(accelerator: Accelerator) -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    steppers: list[SteppingOptimizer] = []
    for weight in weights:
        steppers.append(SteppingOptimizer(torch.optim.SGD([weight], 1.0), scaler, nothing, lambda: steppers))
    for _ in range(3):  # the other one keeps gradients that nobody steps
        scaler.before_scale()
        scaler.scale(weights[0] + weights[1]).backward()
        scaler.unscale_(steppers[0].optimizer)
        steppers[0].step()
        steppers[0].zero_grad()
    assert [weight.item() for weight in weights] == [-2.0, 1.0]


def test_signatures() -> None:
    assert list(inspect.signature(AcceleratedOptimizer.__init__).parameters)[1:] == [
        "optimizer",
        "device_placement",
        "scaler",
    ]
    assert {"_add_dataloader", "_remove_dataloader"} <= set(vars(GradientState))
