"""Who gets the segment: those who know the group's secret and run as the same user; and who is told apart as a host."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine import shared_memory, shared_peers
from memwall_strategy.engine.shared_peers import _join, _objection, _Offer, _proof, fingerprint

pytestmark = pytest.mark.skipif(bool(shared_memory.why_not()), reason=shared_memory.why_not() or "-")

SECRET = b"s" * 32
OTHER = b"o" * 32


@pytest.fixture
def offer():
    made = _Offer(8192, 2)
    note = {"problem": "", "lacks": ""}
    made.open(note)
    assert note["problem"] == ""
    made.listener = note["listener"]
    yield made
    made.close()


def serve(offer):
    served = []
    thread = threading.Thread(target=lambda: served.append(offer.serve(SECRET)))
    thread.start()
    return thread, served


def knock(listener, hello):
    """What a stranger gets for saying ``hello``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(10)
        stranger.connect(f"\0{listener}")
        try:
            stranger.send(hello)
            return socket.recv_fds(stranger, 256, 8)[:2]
        except (BrokenPipeError, ConnectionResetError):  # sent away before it spoke, or unheard
            return b"", []


def test_strangers_get_nothing_and_do_not_take_a_seat(offer):
    before = len(os.listdir("/proc/self/fd"))
    thread, served = serve(offer)
    for hello in (
        b"not json",
        b"[1]",
        b'{"rank": "x", "proof": ""}',
        json.dumps({"rank": 1, "proof": _proof(OTHER, "client", 1).decode()}).encode(),
        json.dumps({"rank": 1, "proof": _proof(SECRET, "server", 1).decode()}).encode(),
        json.dumps({"rank": 7, "proof": _proof(SECRET, "client", 7).decode()}).encode(),
        json.dumps({"rank": 0, "proof": _proof(SECRET, "client", 0).decode()}).encode(),
    ):
        assert knock(offer.listener, hello) == (b"", []), hello
    joined = _join(offer.listener, SECRET, 1)
    thread.join(30)
    (mine,) = served
    assert set(joined.doorbells) == {0} and set(mine.doorbells) == {1}
    assert os.fstat(joined.descriptor).st_ino == os.fstat(mine.descriptor).st_ino
    assert not any(os.get_inheritable(fd) for fd in (joined.descriptor, mine.descriptor))
    mine.ring()
    joined.sleep(10)  # returns at once: it was rung
    assert joined.dead() == []
    mine.close()
    assert joined.dead() == [0]
    for connection in (mine, joined):
        os.close(connection.descriptor)
    joined.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the offer's own descriptor was handed on"


def test_an_offer_of_somebody_else_is_refused(offer, monkeypatch):
    thread, served = serve(offer)
    # An offer that lets everybody in: its side compares texts.
    monkeypatch.setattr(shared_peers.hmac, "compare_digest", lambda a, b: isinstance(a, str))
    with pytest.raises(MemwallError, match="secret"):
        _join(offer.listener, OTHER, 1)
    thread.join(30)
    for connection in served:
        os.close(connection.descriptor)
        connection.close()


@pytest.mark.parametrize("side", ["client", "server"])
def test_another_user_is_refused(offer, monkeypatch, side):
    monkeypatch.setattr(shared_peers, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(shared_peers, "_user_of", lambda peer: os.geteuid() + 1)
    if side == "client":
        with pytest.raises(MemwallError, match="another user"):
            _join(offer.listener, SECRET, 1)
        return
    failed = []

    def try_to_serve():
        try:
            offer.serve(SECRET)
        except MemwallError as error:
            failed.append(str(error))

    thread = threading.Thread(target=try_to_serve)
    thread.start()
    hello = json.dumps({"rank": 1, "proof": _proof(SECRET, "client", 1).decode()}).encode()
    assert knock(offer.listener, hello) == (b"", [])
    thread.join(30)
    assert failed == ["ranks [1] did not come for the segment"]


def test_a_group_that_fails_before_all_have_told_leaves_no_descriptor(monkeypatch):
    """The process lives on, and its next epoch connects again."""
    told = []

    class Group:
        rank = staticmethod(lambda: 0)
        size = staticmethod(lambda: 2)

    def tell(group, mine):
        if told:
            raise MemwallError("a rank was lost")
        told.append(mine)
        offered = mine["listener"]
        secret = shared_peers.hashlib.sha256((mine["salt"] + "x").encode()).digest()
        threads.append(threading.Thread(target=lambda: joined.append(_join(offered, secret, 1))))
        threads[0].start()
        return [mine, {**mine, "salt": "x"}]

    threads, joined = [], []
    monkeypatch.setattr(shared_peers, "_tell", tell)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemwallError, match="a rank was lost"):
        shared_peers.connect(Group(), 8192)
    threads[0].join(30)
    assert joined[0].dead() == [0], "the other side sees that this one let go"
    os.close(joined[0].descriptor)
    joined[0].close()
    assert len(os.listdir("/proc/self/fd")) == before


def note(**changes):
    return {"lacks": "", "problem": "", "host": "a", "node": "n", "uid": 0, "bytes": 8, **changes}


@pytest.mark.parametrize(
    ("changes", "reason", "ordinary"),
    [
        ({}, None, None),
        ({"lacks": "it needs Linux"}, "on rank 1 of the group it needs Linux", True),
        ({"host": "b"}, "network namespaces or hosts named n", True),
        ({"host": "b", "node": "m"}, "several hosts: m, n", True),
        ({"problem": "no segment"}, "on rank 1 of the group no segment", False),
        ({"uid": 5}, "several users", False),
        ({"bytes": 9}, "different sizes", False),
    ],
)
def test_why_a_group_cannot_share(changes, reason, ordinary):
    refusal = _objection([note(), note(**changes)])
    if reason is None:
        assert refusal is None
    else:
        assert reason in refusal.reason and refusal.ordinary is ordinary


def test_a_network_namespace_is_part_of_the_fingerprint():
    assert os.readlink("/proc/self/ns/net") in fingerprint()
