"""What a verdict says, and what the process table tells about a peer."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

import pytest

from memwall_strategy.engine.peer_verdict import Failure, brief, has_ended, identity, judge

# -- the verdict --


def test_verdict_names_the_lost_and_why() -> None:
    failure = Failure(0, "allreduce", "7", (0, 1, 2), "Connection closed by peer")
    verdict = judge(failure, {0: {}, 2: {}}, {1: "its process 12 ended"}, 3)
    assert verdict.lost and verdict.ranks == (1,) and verdict.answered == (0, 2)
    assert verdict.message.startswith(
        "1 of 3 ranks lost (rank 1: its process 12 ended). Met first when allreduce on group '7' (ranks 0, 1, 2) "
        "failed on rank 0: Connection closed by peer. Every later collective raises this error again."
    )


@pytest.mark.parametrize(
    ("reports", "ranks", "words"),
    [
        ({0: {"7": (5, "barrier")}, 1: {"7": (4, "barrier")}, 2: {"7": (3, "barrier")}}, (1, 2),
         "Not arrived: rank 1, 2 (collective 4, 3 of 5)."),
        ({0: {"7": (5, "barrier")}, 1: {"7": (5, "reduce")}, 2: {"7": (5, "reduce")}}, (),
         "different collectives (rank 0: barrier, rank 1: reduce, rank 2: reduce)"),
        ({rank: {"7": (5, "barrier")} for rank in range(3)}, (), "All its ranks had arrived."),
        ({0: {"7": (5, "barrier")}, 1: {}, 2: {"7": (5, "barrier")}}, (), "All its ranks had arrived."),
    ],
    ids=["behind", "different", "arrived", "one went on"],
)  # fmt: skip
def test_verdict_says_who_had_not_arrived(reports: dict, ranks: tuple[int, ...], words: str) -> None:
    verdict = judge(Failure(0, "barrier", "7", (0, 1, 2), "Timed out"), reports, {}, 4)
    assert not verdict.lost and verdict.ranks == ranks
    assert words in verdict.message and "though all 4 ranks are alive" in verdict.message


def test_messages_of_the_backend_lose_paths_and_advice() -> None:
    long = RuntimeError(
        "[/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a "
        "crash\nException raised from"
    )
    assert brief(long) == "Connection closed by peer [127.0.0.1]:1"
    assert brief(RuntimeError("Failed to recv. Did the remote server shutdown?\nframe")) == "Failed to recv"


def test_an_ended_process_is_known_and_a_stranger_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me, stat = identity(), pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    member = {**me, "pid": child.pid, "born": stat[19]}
    assert not has_ended(me) and not has_ended(member)
    assert has_ended({**member, "born": "1"})  # the number was given to another process
    child.stdin.close()
    deadline = time.monotonic() + 30
    while not has_ended(member) and time.monotonic() < deadline:  # a zombie counts: nobody waits for it here
        time.sleep(0.01)
    assert has_ended(member)
    child.wait()
    assert has_ended(member)
    assert not has_ended({**member, "host": "elsewhere"}) and not has_ended({**member, "host": ""})
