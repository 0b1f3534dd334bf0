"""Gathers of the next iteration start early, and whatever happens to the weights meanwhile, nobody can tell.

Every case runs on stock FSDP2 and on lanes whose buffers are poisoned and whose transfers are late, and must give the
same losses, gradients and weights to the last bit.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from memwall_strategy.engine import lanes as lanes_module
from memwall_strategy.engine.early_gathers import EDITS_IN_A_ROW, _same_bits
from memwall_strategy.engine.fsdp import fsdp_groups, local_tensor
from memwall_strategy.engine.lanes import FsdpLanes
from memwall_strategy.engine.reset import reset_aborted_step
from tests.engine.lane_cases import GPT, MODELS, assert_same, both, gradients, hold, mesh_of, sgd, sharded, weights
from tests.lightning.checks import Here, on_ranks

STEPS = 4


def _nudge(model: nn.Module, index: int, amount: float = 0.5) -> None:
    """Change one number of one weight of this rank, and leave no trace."""
    local_tensor(list(model.parameters())[index]).data.view(-1)[:1].add_(amount)


def _every_weight(model: nn.Module, here: Here, lanes: FsdpLanes | None, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.25)


def _one_rank(model: nn.Module, here: Here, lanes: FsdpLanes | None, step: int) -> None:
    if here.rank == step % here.world:
        _nudge(model, 0 if step % 2 else 3)


def _late_unit(model: nn.Module, here: Here, lanes: FsdpLanes | None, step: int) -> None:
    _nudge(model, -4)


def _swap_and_back(model: nn.Module, here: Here, lanes: FsdpLanes | None, step: int) -> None:
    """Averaged weights for an evaluation, then the others again."""
    kept = [local_tensor(p).clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    with torch.inference_mode() if step % 2 else torch.no_grad():
        model.loss(model.batch(here.rank + 77))
    for parameter, before in zip(model.parameters(), kept, strict=True):
        local_tensor(parameter).data.copy_(before)


def _load(model: nn.Module, here: Here, lanes: FsdpLanes | None, step: int) -> None:
    model.load_state_dict({name: weight.detach() * 0.75 for name, weight in model.state_dict().items()})


def _reorder(model: nn.Module, here: Here, lanes: FsdpLanes | None, step: int) -> None:
    model.order = [[0, 1, 2], [2, 0, 1], [1, 2, 0]][step % 3]


def _gather_by_hand(model: nn.Module, here: Here, lanes: FsdpLanes | None, step: int) -> None:
    """The user's own ``unshard`` after an edit sees the edit."""
    _every_weight(model, here, lanes, step)
    local = [local_tensor(p).clone() for p in model.blocks[0].parameters()]
    model.blocks[0].unshard()
    for mine, whole in zip(local, model.blocks[0].parameters(), strict=True):
        part = -(-whole.shape[0] // here.world)
        assert torch.equal(whole[part * here.rank :][: mine.shape[0]], mine)
    model.blocks[0].reshard()


def _abort(model: nn.Module, here: Here, lanes: FsdpLanes | None, step: int) -> None:
    """A step that breaks in its forward, after the buffers were looked at, or before it on odd steps."""
    if step % 2 == 0:
        with contextlib.suppress(ZeroDivisionError), mock.patch.object(model.blocks[1], "body", _broken):
            model.loss(model.batch(here.rank))
    reset_aborted_step(model, lanes)
    _every_weight(model, here, lanes, step)


def _broken(*_: object) -> None:
    raise ZeroDivisionError


def _nothing(*_: object) -> None:
    return None


EDITS = {
    "nothing": _nothing,
    "every weight": _every_weight,
    "one rank": _one_rank,
    "late unit": _late_unit,
    "swap": _swap_and_back,
    "load": _load,
    "reorder": _reorder,
    "by hand": _gather_by_hand,
    "abort": _abort,
}


def _run(model: nn.Module, here: Here, lanes: FsdpLanes | None, edit: str, micro_batches: int = 1) -> list:
    seen = []
    for step in range(STEPS):
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if last else hold(lanes):
                loss = model.loss(model.batch(here.rank + 1000 * step + 100 * micro_batch))
                loss.backward()
            seen.append(loss.detach())
        seen.append(gradients(model))
        sgd(model)
        if lanes is not None:
            lanes.step_ended()
            assert lanes.next_iteration_began or step >= EDITS_IN_A_ROW
        EDITS[edit](model, here, lanes, step)
    seen.append(weights(model))
    return seen


@on_ranks(2, *EDITS, group="early")
def test_edits_are_seen(here):
    both(MODELS["gpt"], mesh_of(here, "2"), lambda model, lanes: _run(model, here, lanes, here.case), early=True)


@on_ranks(4, "3 one rank", "4 swap", "2x2 one rank", "2x2 nothing", group="early")
def test_edits_are_seen_on_other_meshes(here):
    layout, edit = here.case.split(maxsplit=1)
    both(
        MODELS["gpt"],
        mesh_of(here, layout),
        lambda model, lanes: _run(model, here, lanes, edit, micro_batches=2),
        early=True,
        prefetch=2,
    )


@on_ranks(2, "one rank", "nothing", group="early")
def test_edits_are_seen_in_low_precision(here):
    """What is compared is what was sent: the converted copy."""
    both(
        MODELS["gpt"],
        mesh_of(here, "2"),
        lambda model, lanes: _run(model, here, lanes, here.case),
        early=True,
        precision="bf16-mixed",
    )


@on_ranks(2, "nothing", "every weight", "late unit", group="early")
def test_no_gather_is_made_twice_without_need(here):
    def count(early: bool) -> tuple[int, int]:
        calls, gather = [], lanes_module.LaneAllGather.__call__

        def counted(*args, **named):
            calls.append(1)
            return gather(*args, **named)

        with sharded(GPT, mesh_of(here, "2"), early=early) as (model, lanes):
            with mock.patch.object(lanes_module.LaneAllGather, "__call__", counted):
                for step in range(STEPS + 1):
                    loss = model.loss(model.batch(here.rank + step))
                    loss.backward()
                    sgd(model)
                    if step < STEPS:
                        lanes.step_ended()
                        EDITS[here.case](model, here, lanes, step)
                lanes.rest()
            return len(calls), lanes.early.dropped if early else 0

    (plain, _), (found, dropped) = count(False), count(True)
    units = 2  # the root and the first block
    assert dropped == (units * EDITS_IN_A_ROW if here.case == "every weight" else 0)
    assert found == plain + dropped


@on_ranks(2, group="early")
def test_units_start_in_one_order_whatever_order_they_step_in(here):
    with sharded(GPT, mesh_of(here, "2"), early=True) as (model, lanes):
        model.loss(model.batch(here.rank)).backward()
        sgd(model)
        names = dict(model.named_modules())
        root, first = (next(g for g in fsdp_groups(model) if names[n] in g.modules) for n in ("", "blocks.0"))
        lanes.early.unit_stepped("blocks.2")
        lanes.early.unit_stepped("blocks.0")
        assert first._all_gather_result is None, "the root comes first, and was not stepped"
        lanes.early.unit_stepped("root")
        assert root._all_gather_result is not None and first._all_gather_result is not None
        lanes.step_ended()
        _every_weight(model, here, lanes, 0)
        kept = weights(model)
        found = model.loss(model.batch(here.rank + 1)).detach()
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
        for parameter, weight in zip(model.parameters(), kept.values(), strict=True):
            local_tensor(parameter).data.copy_(weight)
        assert_same(found, model.loss(model.batch(here.rank + 1)).detach())


@on_ranks(2, group="early")
def test_what_the_last_step_started_goes_with_the_lanes(here):
    with sharded(GPT, mesh_of(here, "2"), early=True) as (model, lanes):
        model.loss(model.batch(here.rank)).backward()
        sgd(model)
        lanes.step_ended()
    assert all(group._all_gather_result is None for group in fsdp_groups(model))
    _every_weight(model, here, None, 0)
    kept = weights(model)
    found = model.loss(model.batch(here.rank)).detach()
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (other, _):
        for mine, its in zip(other.parameters(), kept.values(), strict=True):
            local_tensor(mine).data.copy_(its)
        assert_same(found, other.loss(other.batch(here.rank)).detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_bits(dtype):
    a = torch.arange(7).to(dtype)
    assert _same_bits(a, a.clone()) and _same_bits(a[:0], a[:0])
    assert not _same_bits(a, a.flip(0)) and not _same_bits(a, a[:5])
    assert _same_bits(a, torch.stack([a, a], 1)[:, 0]), "the same numbers, not next to each other"
    if dtype.is_floating_point:
        nan, zero = torch.tensor([float("nan")], dtype=dtype), torch.zeros(1, dtype=dtype)
        assert _same_bits(nan, nan.clone()) and not _same_bits(zero, -zero)
