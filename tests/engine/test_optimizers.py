"""Optimizers that were made before their model was sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.optimizers import parameter_names, point_at_shards
from memwall_strategy.engine.sharding import shard_model
from tests.engine.lane_cases import GPT, assert_same, mesh_of, weights
from tests.lightning.checks import on_ranks


class Sharded(nn.Module):
    """Stands for a model whose parameters sharding replaced."""

    def __init__(self, plain):
        super().__init__()
        for name, p in plain.named_parameters():
            self.register_parameter(name, nn.Parameter(p.detach().clone()))


def tied():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    return model


def replaced(model):
    """The same model with new parameters, tied as before."""
    moved = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, moved.setdefault(p, nn.Parameter(p.detach().clone())))
    return model


def test_groups_keep_their_parameters_and_options():
    model = tied()
    optimizer = torch.optim.SGD(
        [{"params": [model[2].bias], "lr": 0.5, "name": "head"}, {"params": [model[0].weight, model[2].weight]}], lr=0.1
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = parameter_names(model)
    assert len(before) == 3
    replaced(model)
    point_at_shards([optimizer], before, model)
    first, second = optimizer.param_groups
    assert (first["lr"], first["name"], first["initial_lr"], second["lr"]) == (0.5, "head", 0.5, 0.1)
    assert [id(p) for p in first["params"]] == [id(model[2].bias)]
    assert [id(p) for p in second["params"]] == [id(model[1].weight), id(model[2].weight)]
    optimizer.step()
    schedule.step()  # drives the same groups
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.05]


def test_an_optimizer_that_points_at_the_new_parameters_already_stays():
    model = tied()
    before = parameter_names(model)
    replaced(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    point_at_shards([optimizer], before, model)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_an_optimizer_that_stepped_is_refused():
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="AdamW has stepped before the model was sharded"):
        point_at_shards([optimizer], parameter_names(model), model)


def test_parameters_of_another_model_are_refused():
    model, other = tied(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    before = parameter_names(model)
    with pytest.raises(ConfigError, match="SGD holds 2 parameters that are not in"):
        point_at_shards([optimizer], before, replaced(model))


@on_ranks(2, group="engine")
def test_it_steps_like_one_made_after_sharding(here):
    found = []
    for early in (True, False):
        torch.manual_seed(11)
        model = GPT(tied=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if early else None
        before = parameter_names(model)
        shard_model(model, mesh_of(here, "2"), precision="32-true")
        if early:
            point_at_shards([optimizer], before, model)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            model.loss(model.batch(here.rank + 10 * step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    assert_same(*found)
