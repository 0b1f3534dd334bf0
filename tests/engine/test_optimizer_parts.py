"""Stepping an optimizer in parts relies on private names of torch.optim; these fail when one changes."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Optimizer

from memwall_strategy.engine.optimizer_parts import _HOOKS, ParameterKind, probe
from memwall_strategy.engine.optimizer_step import bare_step, only


def make(**options: object) -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(5))], **options)


def test_hooks_live_where_they_are_looked_for() -> None:
    optimizer = make()
    held = {name for name in vars(optimizer) if name.endswith("_hooks")}
    assert held == set(_HOOKS)


def test_step_is_wrapped_once_per_class_and_unwrapped_here() -> None:
    optimizer, calls = make(), []
    assert type(optimizer).step.hooked
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 2)
    bare_step(optimizer)()
    assert calls == [] and len(optimizer.state) == 1
    optimizer.step()
    assert calls == ["pre"]


def test_the_scheduler_marks_its_step() -> None:
    optimizer = make()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert hasattr(vars(optimizer)["step"], "_wrapped_by_lr_sched")
    optimizer.step()
    assert optimizer._opt_called


def test_only_puts_groups_back_after_an_error() -> None:
    optimizer = make()
    first, second = optimizer.param_groups[0]["params"]
    with pytest.raises(ZeroDivisionError), only(optimizer, [second]):
        assert optimizer.param_groups[0]["params"] == [second]
        raise ZeroDivisionError
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(first), id(second)]


def test_probe_leaves_no_trace() -> None:
    optimizer = make(lr=torch.tensor(0.1), foreach=False)
    before = torch.get_rng_state()
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    found = probe(optimizer)
    assert found.alone
    assert found.like[ParameterKind(0, 2, torch.float32)] == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    assert torch.equal(torch.get_rng_state(), before) and not optimizer.state
    assert all(p.abs().sum() == 0 and p.grad is None for p in optimizer.param_groups[0]["params"])
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == group


def test_probe_goes_by_what_the_state_has_become() -> None:
    """State of another dtype, as it was loaded, and a constructor's own state."""
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))])
    assert probe(optimizer).like == {ParameterKind(0, 2, torch.bfloat16): {"sum": torch.bfloat16}}
    assert isinstance(optimizer, Optimizer) and optimizer.state
