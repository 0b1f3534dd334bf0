"""Errors: classes that callers may catch, and the hint at a misspelled name."""

import pytest

from memwall_strategy.core.errors import (
    CheckpointError,
    ConfigError,
    MemwallError,
    PeerLost,
    TransferError,
    nearest,
)


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, TransferError, PeerLost])
def test_one_base_catches_all(kind):
    with pytest.raises(MemwallError, match="why"):
        raise kind("why")


def test_a_bad_setting_is_also_a_value_error():
    with pytest.raises(ValueError, match="why"):
        raise ConfigError("why")


def test_peer_lost_knows_the_ranks():
    assert PeerLost("gone").ranks == ()
    error = PeerLost("gone", ranks=(1, 3))
    assert error.ranks == (1, 3)
    assert str(error) == "gone"


def test_nearest_hints_only_at_what_is_close():
    assert nearest("prefech", ["lanes", "prefetch"]) == " Did you mean 'prefetch'?"
    assert nearest("zebra", ["lanes", "prefetch"]) == ""
    assert nearest("x", []) == ""
