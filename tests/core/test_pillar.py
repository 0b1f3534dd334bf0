"""The life cycle that pillars share."""

import inspect

import pytest

from memwall_strategy.core.block import Block, Kind, Phase, Placement, Tier
from memwall_strategy.core.pillar import BasePillar, Pillar
from memwall_strategy.core.unit import Unit

MOMENTS = [name for name, member in vars(Pillar).items() if inspect.isfunction(member) and not name.startswith("_")]


def test_the_protocol_is_not_empty():
    assert {"attach", "before_step", "after_backward", "before_optimizer", "after_step", "on_failure"} <= {*MOMENTS}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_base_takes_the_same_arguments_as_the_protocol(moment):
    assert list(inspect.signature(getattr(BasePillar, moment)).parameters) == list(
        inspect.signature(getattr(Pillar, moment)).parameters
    )


def test_a_pillar_states_only_what_it_does():
    class Quiet(BasePillar):
        name = "quiet"

    pillar = Quiet()
    assert isinstance(pillar, Pillar)
    assert not isinstance(object(), Pillar)
    assert pillar.metrics() == {}
    assert pillar.state_dict() == {}


def test_blocks_are_addresses():
    """Equal coordinates are one key of the address table; kinds and tiers are written as plain words."""
    placements = {Block("blocks.0", "weight", Kind.PARAM): Placement(Tier.DEVICE, 0, "torch", 0, 64)}
    assert placements[Block("blocks.0", "weight", "param")].generation == 0
    assert [str(kind) for kind in (Kind.EXP_AVG, Tier.HOST, Phase.STEP)] == ["exp_avg", "host", "step"]
    with pytest.raises(AttributeError):
        Block("a", "b", "c").unit = "d"


def test_units_cannot_change():
    unit = Unit(0, "root", ("weight",), 4, 2, 4)
    with pytest.raises(AttributeError):
        unit.numel = 5
