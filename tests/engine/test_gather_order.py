"""Prefetch follows the order in which units run, and changes no number."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from memwall_strategy.engine import gather_order
from memwall_strategy.engine import lanes as lanes_module
from memwall_strategy.engine.fsdp import fsdp_state
from memwall_strategy.engine.gather_order import MARGIN, TIMED_STEPS, units_ahead
from tests.engine.lane_cases import GPT, MLP, both, gradients, mesh_of, sgd, sharded, weights
from tests.lightning.checks import on_ranks

GATHER = 1.0 / MARGIN
"""Seconds of a gather that, with the margin, take one."""


@pytest.mark.parametrize(
    ("gather_s", "compute_s", "most", "expected"),
    [
        ([], [], 3, []),
        ([GATHER], [1.0], 3, [1]),
        ([GATHER] * 4, [2.0] * 4, 3, [1, 1, 1, 1]),  # hidden by the unit before
        ([0.0] * 4, [0.0] * 4, 3, [1, 1, 1, 1]),
        ([GATHER] * 4, [0.5] * 4, 3, [2, 2, 1, 1]),  # never hidden: the lane never rests
        ([GATHER] * 4, [0.5] * 4, 1, [1, 1, 1, 1]),
        ([GATHER, GATHER, GATHER, 2.5 * GATHER], [1.0] * 4, 3, [3, 1, 1, 1]),  # a large one at the end
        ([GATHER / 4, GATHER / 4, GATHER / 4, 1.5 * GATHER], [1.0] * 4, 3, [1, 2, 1, 1]),
    ],
)
def test_how_far_ahead(gather_s, compute_s, most, expected):
    assert units_ahead(gather_s, compute_s, most) == expected


def _ahead(model: torch.nn.Module) -> dict[str, list[str]]:
    names = {module: name for name, module in model.named_modules()}
    return {
        names[module]: [names[s._modules[0]] for s in fsdp_state(module)._states_to_forward_prefetch]
        for module in model.modules()
        if hasattr(module, "set_modules_to_forward_prefetch")
    }


def _step(model: torch.nn.Module, lanes, seed: int) -> list:
    loss = model.loss(model.batch(seed))
    loss.backward()
    seen = [loss.detach(), gradients(model)]
    sgd(model)
    if lanes is not None:
        lanes.step_ended()
    return seen


ORDERS = ([0, 1, 2], [2, 0, 1], [2, 0, 1], [1, 0], [0, 1, 2, 1])


@on_ranks(2, "1 late", "2 late", "3 late", "0 late", "2 early", "1 early", group="order")
def test_orders_that_change_from_step_to_step(here):
    """Blocks that swap places, are left out, or run twice: the same numbers as stock FSDP2."""
    prefetch, early = here.case.split()

    def run(model, lanes):
        seen = []
        for step, order in enumerate(ORDERS):
            model.order = order
            seen.append(_step(model, lanes, here.rank + 100 * step))
        return [*seen, weights(model)]

    both(GPT, mesh_of(here, "2"), run, prefetch=int(prefetch), early=early == "early")


@on_ranks(2, group="order")
def test_lists_follow_the_order(here):
    with sharded(GPT, mesh_of(here, "2"), prefetch=2) as (model, lanes):
        first = _ahead(model)
        assert first == {
            "": ["blocks.0", "blocks.1"], "blocks.0": ["blocks.1", "blocks.2"],
            "blocks.1": ["blocks.2"], "blocks.2": [],
        }  # fmt: skip
        _step(model, lanes, here.rank)
        assert _ahead(model) == first, "it ran in module order"
        model.order = [2, 0]
        _step(model, lanes, here.rank)
        assert _ahead(model) == {
            "": ["blocks.2", "blocks.0"], "blocks.2": ["blocks.0"], "blocks.0": [], "blocks.1": [],
        }  # fmt: skip
        calls, gather = [], lanes_module.LaneAllGather.__call__

        def counted(*args, **named):
            calls.append(1)
            return gather(*args, **named)

        with mock.patch.object(lanes_module.LaneAllGather, "__call__", counted):
            _step(model, lanes, here.rank)
        assert len(calls) == 1 + 2 + 2, "the root once, two blocks in forward and in backward, and no third"


@on_ranks(2, group="order")
def test_depths_are_the_same_on_every_rank(here):
    """Each rank measures other times; what they decide is one decision."""
    gathers = {0: [0.0, GATHER, GATHER, 5.0], 1: [0.0, 0.1, 0.1, 0.1]}[here.rank]
    with sharded(GPT, mesh_of(here, "2"), prefetch=3) as (model, lanes):
        names = ["", "blocks.0", "blocks.1", "blocks.2"]
        lanes.order._gather_seconds = lambda group: gathers[
            next(i for i, name in enumerate(names) if dict(model.named_modules())[name] in group.modules)
        ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(gather_order.time, "perf_counter", _Ticks()))
            for step in range(TIMED_STEPS):
                assert lanes.order.ahead == {}
                _step(model, lanes, here.rank + step)
        assert list(lanes.order.ahead) == names
        assert lanes.order.ahead[""] == 3, "the last block's gather is long on one rank, so both start it at once"
        found = torch.tensor(list(lanes.order.ahead.values()))
        other = found.clone()
        torch.distributed.broadcast(other, src=0)
        assert torch.equal(found, other)
        expected = _step(model, lanes, here.rank)
        assert not any(g is not None and g.isnan().any() for g in expected[1].values())


class _Ticks:
    """A clock on which every reading is a second later."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 1.0
        return self._now_s


@on_ranks(2, group="order")
def test_skipped_units_are_not_gathered_ahead(here):
    def run(model, lanes):
        seen = []
        for step, skip in enumerate([set(), {1}, {1}, {0, 2}, set()]):
            model.skip = skip
            seen.append(_step(model, lanes, here.rank + step))
        return seen

    both(MLP, mesh_of(here, "2"), run, prefetch=2)
