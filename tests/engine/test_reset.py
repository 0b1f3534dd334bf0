"""A step that broke half way leaves nothing behind: the next gradient is exact, on lanes and on stock FSDP2."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memwall_strategy.engine import lanes as lanes_module
from memwall_strategy.engine import reducer as reducer_module
from memwall_strategy.engine.fsdp import TrainingState, fsdp_groups
from memwall_strategy.engine.reset import reset_aborted_step
from memwall_strategy.engine.shared_ring import SharedRing
from tests.engine.lane_cases import GPT, assert_same, finish, gradients, hold, mesh_of, sgd, sharded
from tests.lightning.checks import on_ranks


class BrokenError(RuntimeError):
    """What breaks a step in these tests, on every rank at the same point."""


class Fuse:
    """Breaks the forward, or the backward, of a block when it is lit."""

    def __init__(self, block: nn.Module, where: str) -> None:
        self.lit = False
        if where == "forward":
            block.norm2.register_forward_pre_hook(lambda module, args: self.blow())
        else:
            block.norm2.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: self.blow())

    def blow(self) -> None:
        if self.lit:
            self.lit = False
            raise BrokenError("link down")


def one_step(model, lanes, rank, how):
    """Four micro-batches and what they left; ``how`` as in the tests of accumulation."""
    for micro in range(4):
        last = micro == 3
        model.set_requires_gradient_sync(how != "whole" or last)
        model.set_requires_all_reduce(how == "each" or last)
        with hold(lanes) if how == "held" and not last else contextlib.nullcontext():
            model.loss(model.batch(rank + 10 * micro)).backward()
    finish(lanes)
    found = gradients(model)
    model.zero_grad()
    return found


def at_rest(model):
    for group in fsdp_groups(model):
        assert group.is_sharded
        assert group._training_state == TrainingState.IDLE
        assert group._all_gather_result is None
        for param in group.fsdp_params:
            assert param.unsharded_accumulated_grad is None
            assert getattr(getattr(param, "_unsharded_param", None), "grad", None) is None


def broken_step(here, layout, where, lanes, how="each", micro_batches=0, prefetch=1):
    """Break a step after some micro-batches, reset, and demand the gradients of an unbroken step."""
    with sharded(GPT, mesh_of(here, layout), lanes=lanes, prefetch=prefetch) as (model, found):
        fuse = Fuse(model.blocks[1], where)
        expected = one_step(model, found, here.rank, how)
        for _ in range(2):
            for micro in range(micro_batches):
                model.set_requires_gradient_sync(how != "whole")
                model.set_requires_all_reduce(False)
                with hold(found) if how == "held" else contextlib.nullcontext():
                    model.loss(model.batch(here.rank + 77 * micro)).backward()
            fuse.lit = True
            with pytest.raises(BrokenError):
                model.loss(model.batch(here.rank + 99)).backward()
            dropped = reset_aborted_step(model, found)
            assert not fuse.lit
            assert dropped > 0 or (where == "forward" and how != "whole")
            at_rest(model)
            model.zero_grad()  # the caller gives the whole step up
            assert_same(one_step(model, found, here.rank, how), expected)
        if found is not None:
            found.gather.drain()
            found.reduce.drain()
        sgd(model)
        one_step(model, found, here.rank, how)


@on_ranks(2, "forward lanes", "forward stock", "backward lanes", "backward stock", group="engine")
def test_the_next_gradient_is_exact(here):
    where, engine = here.case.split()
    broken_step(here, "2", where, engine == "lanes")


@on_ranks(2, "forward whole", "backward whole", "forward held", "backward held", group="engine")
def test_micro_batches_of_the_broken_step_are_gone(here):
    where, how = here.case.split()
    broken_step(here, "2", where, lanes=True, how=how, micro_batches=2, prefetch=3)


@on_ranks(4, "forward lanes", "backward lanes", "backward stock", group="engine")
def test_sums_that_wait_for_replicas_are_gone(here):
    where, engine = here.case.split()
    broken_step(here, "2x2", where, engine == "lanes", how="rack", micro_batches=2)


@on_ranks(2, "forward", "backward", group="engine")
def test_by_hand_where_torch_has_no_reset(here):
    """torch 2.11 has no ``reset_iter_state``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state")
        broken_step(here, "2", here.case, lanes=True)


@on_ranks(2, group="engine")
def test_sharded_gradients_of_earlier_micro_batches_stay(here):
    """Whether they still count is the caller's decision."""
    with sharded(GPT, mesh_of(here, "2")) as (model, lanes):
        fuse = Fuse(model.blocks[1], "forward")
        model.loss(model.batch(here.rank)).backward()
        kept = gradients(model)
        fuse.lit = True
        with pytest.raises(BrokenError):
            model.loss(model.batch(here.rank))
        assert reset_aborted_step(model, lanes) == 0
        assert_same(gradients(model), kept)


@on_ranks(2, group="engine")
def test_a_reset_before_the_first_forward_does_nothing(here):
    with sharded(GPT, mesh_of(here, "2")) as (model, lanes):
        assert reset_aborted_step(model, lanes) == 0
        model.loss(model.batch(here.rank)).backward()
        expected = gradients(model)
    with sharded(GPT, mesh_of(here, "2")) as (model, lanes):
        model.loss(model.batch(here.rank)).backward()
        assert_same(gradients(model), expected)


_FAILING = {
    "gather": (lanes_module, "all_gather"),
    "reduce": (reducer_module, "reduce_scatter"),
    "shared gather": (SharedRing, "wait"),
    "shared reduce": (reducer_module, "reduce_scatter_shared"),
}


@on_ranks(2, *_FAILING, group="engine")
def test_a_transfer_that_failed_everywhere(here):
    """The lane raises it, the reset forgets it, the next gradient is exact."""
    owner, name = _FAILING[here.case]
    lane = here.case.split()[-1]
    with sharded(GPT, mesh_of(here, "2"), shared_memory="shared" in here.case) as (model, lanes):
        model.loss(model.batch(here.rank)).backward()
        expected = gradients(model)
        model.zero_grad()
        calls, good = [], getattr(owner, name)

        def fail_third(*args, **named):
            calls.append(1)
            if len(calls) == 3:
                raise OSError("unplugged")
            return good(*args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, fail_third)
            with pytest.raises(RuntimeError, match=f"lane '{lane}': .* failed: OSError: unplugged"):
                model.loss(model.batch(here.rank + 9)).backward()
        reset_aborted_step(model, lanes)
        at_rest(model)
        model.zero_grad()
        model.loss(model.batch(here.rank)).backward()
        assert_same(gradients(model), expected)
