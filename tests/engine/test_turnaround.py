"""The backward's first gathers at the end of the forward's last unit: when they start; they change no number."""

from __future__ import annotations

import torch

from tests.engine.lane_cases import GPT, both, gradients, mesh_of, sgd, sharded, weights
from tests.lightning.checks import on_ranks, rank_results

__all__ = ["rank_results"]


def _backward(model: torch.nn.Module, seed: int) -> torch.Tensor:
    loss = model.loss(model.batch(seed))
    loss.backward()
    return loss.detach()


@on_ranks(2, "1", "2", group="turn")
def test_from_the_second_step_on(here):
    prefetch = int(here.case)
    with sharded(GPT, mesh_of(here, "2"), prefetch=prefetch) as (model, lanes):
        for step in range(3):
            _backward(model, step)
            assert lanes.turn.started == step * prefetch
            sgd(model)
            lanes.step_ended()


@on_ranks(2, group="turn")
def test_what_a_step_did_not_show_is_not_started(here):
    with sharded(GPT, mesh_of(here, "2"), prefetch=1) as (model, lanes):

        def step(*forwards: int) -> int:
            """Backwards after so many forwards each; how many gathers were started at a turn."""
            before = lanes.turn.started
            for count in forwards:
                sum(model.loss(model.batch(i)) for i in range(count)).backward()
            sgd(model)
            lanes.step_ended()
            return lanes.turn.started - before

        assert step(1) == 0
        assert step(1, 1, 1) == 3
        assert step(2) == 2, "the second forward drops what the first one started"
        assert step(1) == 0, "the last unit ran twice before the backward"
        model.order = [2, 0, 1]
        assert step(1) == 1, "too early, after what came last before"
        assert step(1) == 1
        before = lanes.turn.started
        with torch.no_grad():
            model.loss(model.batch(0))
        assert lanes.turn.started == before and step(1) == 1


@on_ranks(2, group="turn")
def test_weights_edited_after_a_forward_without_a_backward(here):
    """The gather that such a forward started must not reach a later step."""

    def run(model, lanes):
        seen = []
        for step in range(4):
            loss = model.loss(model.batch(step + here.rank))
            if step == 2:  # given up
                with torch.no_grad():
                    for parameter in model.blocks.parameters():
                        parameter.to_local().mul_(0.5)
                continue
            loss.backward()
            seen += [loss.detach(), gradients(model)]
            sgd(model)
            if lanes is not None:
                lanes.step_ended()
        return [*seen, weights(model)]

    both(GPT, mesh_of(here, "2"), run, prefetch=2)


@on_ranks(2, group="turn")
def test_closing_leaves_nothing_behind(here):
    with sharded(GPT, mesh_of(here, "2"), prefetch=2) as (model, lanes):
        for step in range(2):
            _backward(model, step)
            sgd(model)
            lanes.step_ended()
        loss = model.loss(model.batch(7))  # its backward's first gathers are on their way
        assert lanes.turn.started
        del loss
        lanes.close()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().zero_()
        model.blocks[2].unshard()
        assert all(not parameter.any() for parameter in model.blocks[2].parameters())
        model.blocks[2].reshard()
