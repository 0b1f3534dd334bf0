"""Lanes: order, bound, errors that stick, clean ends, figures."""

import gc
import re
import threading
import time
import weakref

import pytest

from memwall_strategy.core.errors import MemwallError, PeerLost, TransferError
from memwall_strategy.core.lane import RATED_BYTES, Lane

WAIT_S = 10.0
"""Far above what any step of these tests takes; a wait this long means that something hangs."""


@pytest.fixture
def lane():
    lane = Lane("gather", capacity=4, timeout_s=WAIT_S, record_spans=True)
    yield lane
    lane.close()


def boom():
    raise ValueError("link down")


class Gate:
    """A transfer that runs until it is let go."""

    def __init__(self):
        self.running, self.go = threading.Event(), threading.Event()

    def __call__(self):
        self.running.set()
        assert self.go.wait(WAIT_S)


def in_thread(fn):
    """Run ``fn`` beside the test; ``.outcome`` is what it returned or raised."""

    class Beside(threading.Thread):
        outcome = None

        def run(self):
            try:
                self.outcome = fn()
            except (MemwallError, RuntimeError, ValueError) as error:
                self.outcome = error

    thread = Beside(daemon=True)
    thread.start()
    return thread


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.001)


def test_transfers_run_in_order_on_one_thread(lane):
    seen = []
    for i in range(50):
        lane.submit(lambda i=i: seen.append((i, threading.current_thread().name)), transfer="t", unit=str(i))
    lane.drain()
    assert [i for i, _ in seen] == list(range(50))
    assert {name for _, name in seen} == {"memwall-gather"}


def test_submit_returns_at_once_and_done_never_blocks(lane):
    gate = Gate()
    transfer = lane.submit(gate, transfer="t", unit="u")
    assert gate.running.wait(WAIT_S)
    assert not transfer.done()
    gate.go.set()
    transfer.wait()
    assert transfer.done()


def test_capacity_bounds_what_is_unfinished():
    lane = Lane("reduce", capacity=2, timeout_s=WAIT_S)
    gates = [Gate(), Gate()]
    for gate in gates:
        lane.submit(gate, transfer="t", unit="u")
    third = in_thread(lambda: lane.submit(lambda: None, transfer="t", unit="third"))
    third.join(0.1)
    assert third.is_alive(), "a third transfer was accepted although two are unfinished"
    gates[0].go.set()
    third.join(WAIT_S)
    assert not third.is_alive()
    gates[1].go.set()
    lane.close()
    assert third.outcome.done()


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_below_one_is_refused(capacity):
    with pytest.raises(ValueError, match=f"'x'.*at least 1, got {capacity}"):
        Lane("x", capacity=capacity)


def test_many_producers_lose_nothing():
    lane = Lane("input", capacity=3, timeout_s=WAIT_S)
    seen = []

    def produce(name):
        for i in range(100):
            lane.submit(lambda i=i: seen.append((name, i)), transfer="t", unit=str(i)).wait()

    threads = [in_thread(lambda name=name: produce(name)) for name in range(5)]
    for thread in threads:
        thread.join(WAIT_S)
        assert thread.outcome is None
    lane.close()
    assert sorted(seen) == [(name, i) for name in range(5) for i in range(100)]
    for name in range(5):
        assert [i for n, i in seen if n == name] == list(range(100))


def test_a_submission_that_waits_for_room_while_the_lane_closes_is_run_or_refused():
    """It must not be queued behind the thread's end, where nobody would ever run it."""
    for _ in range(20):
        lane = Lane("gather", capacity=1, timeout_s=WAIT_S)
        gate, ran = Gate(), []
        lane.submit(gate, transfer="t", unit="first")
        waiting = in_thread(lambda lane=lane, ran=ran: lane.submit(lambda: ran.append(1), transfer="t", unit="second"))
        waiting.join(0.01)
        closing = in_thread(lane.close)
        closing.join(0.005)
        gate.go.set()
        closing.join(WAIT_S)
        waiting.join(WAIT_S)
        if isinstance(waiting.outcome, RuntimeError):
            assert "'gather' is closed" in str(waiting.outcome)
            assert not ran
        else:
            waiting.outcome.wait(WAIT_S)
            assert ran


def test_submit_after_close_is_refused(lane):
    lane.submit(lambda: None, transfer="t", unit="u")
    lane.close()
    with pytest.raises(RuntimeError, match="'gather' is closed"):
        lane.submit(lambda: None, transfer="t", unit="u")


def test_submit_from_its_own_thread_is_refused(lane):
    transfer = lane.submit(lambda: lane.submit(lambda: None, transfer="inner", unit="v"), transfer="outer", unit="u")
    with pytest.raises(TransferError, match="may not submit to its own lane"):
        transfer.wait()


# -- errors --

NAMED = r"lane 'gather': all-gather of unit 'blocks\.1' failed: ValueError: link down"


def failed(lane):
    transfer = lane.submit(boom, transfer="all-gather", unit="blocks.1")
    with pytest.raises(TransferError):
        transfer.wait()
    return transfer


@pytest.mark.parametrize("meet", ["wait", "drain", "submit"])
def test_an_error_is_named_and_keeps_its_cause(lane, meet):
    transfer = failed(lane)
    with pytest.raises(TransferError, match=NAMED) as caught:
        if meet == "wait":
            transfer.wait()
        elif meet == "drain":
            lane.drain()
        else:
            lane.submit(lambda: None, transfer="next", unit="u")
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(caught.value, MemwallError)


def test_an_error_surfaces_at_submit_even_while_the_lane_is_full():
    lane = Lane("gather", capacity=1, timeout_s=WAIT_S)
    gate = Gate()

    def fail_late():
        gate()
        boom()

    lane.submit(fail_late, transfer="all-gather", unit="blocks.1")
    waiting = in_thread(lambda: lane.submit(lambda: None, transfer="t", unit="u"))
    waiting.join(0.05)
    gate.go.set()
    waiting.join(WAIT_S)
    assert re.search(NAMED, str(waiting.outcome))
    lane.close()


def test_an_error_sticks_and_later_transfers_do_not_run(lane):
    gate, ran = Gate(), []

    def fail_late():
        gate()
        boom()

    first = lane.submit(fail_late, transfer="all-gather", unit="blocks.1")
    second = lane.submit(lambda: ran.append(1), transfer="all-gather", unit="blocks.2")
    gate.go.set()
    for transfer in (first, second):
        with pytest.raises(TransferError, match=NAMED):
            transfer.wait()
    for _ in range(2):
        with pytest.raises(TransferError, match=NAMED):
            lane.drain()
    assert ran == []


def test_reset_forgets_the_error_and_the_lane_goes_on(lane):
    failed(lane)
    lane.reset()
    ran = []
    lane.submit(lambda: ran.append(1), transfer="t", unit="u").wait()
    lane.drain()
    assert ran == [1]


def test_reset_waits_for_the_running_transfer(lane):
    gate = Gate()
    lane.submit(gate, transfer="t", unit="u")
    resetting = in_thread(lane.reset)
    resetting.join(0.05)
    assert resetting.is_alive()
    gate.go.set()
    resetting.join(WAIT_S)
    assert not resetting.is_alive()


def test_memwalls_own_errors_keep_their_class(lane):
    def lose():
        raise PeerLost("rank 3 is gone", ranks=(3,))

    transfer = lane.submit(lose, transfer="reduce", unit="head")
    with pytest.raises(PeerLost) as caught:
        transfer.wait()
    assert caught.value.ranks == (3,)
    assert caught.value.__notes__ == ["met in lane 'gather': reduce of unit 'head'"]


def test_even_system_exit_on_the_lane_reaches_the_waiting_thread(lane):
    def leave():
        raise SystemExit(3)

    with pytest.raises(TransferError, match="SystemExit: 3"):
        lane.submit(leave, transfer="t", unit="u").wait()


@pytest.mark.parametrize("meet", ["wait", "submit", "drain", "reset"])
def test_no_wait_is_longer_than_the_timeout(meet):
    lane = Lane("gather", capacity=1, timeout_s=0.05)
    gate = Gate()
    transfer = lane.submit(gate, transfer="all-gather", unit="blocks.7")
    calls = {
        "wait": transfer.wait,
        "submit": lambda: lane.submit(lambda: None, transfer="next", unit="u"),
        "drain": lane.drain,
        "reset": lane.reset,
    }
    with pytest.raises(TransferError, match=r"lane 'gather': all-gather of unit 'blocks\.7'"):  # what hangs is named
        calls[meet]()
    gate.go.set()
    transfer.wait(WAIT_S)
    lane.close()


def test_a_wait_that_timed_out_does_not_poison_the_lane(lane):
    gate = Gate()
    transfer = lane.submit(gate, transfer="t", unit="u")
    with pytest.raises(TransferError, match="did not end within"):
        transfer.wait(0.01)
    gate.go.set()
    transfer.wait()
    lane.drain()


# -- the end --


def test_close_runs_what_is_queued_and_is_idempotent():
    lane = Lane("page-out", capacity=8, timeout_s=WAIT_S)
    gate, ran = Gate(), []
    lane.submit(gate, transfer="t", unit="u")
    for i in range(5):
        lane.submit(lambda i=i: ran.append(i), transfer="t", unit="u")
    closing = in_thread(lane.close)
    gate.go.set()
    closing.join(WAIT_S)
    lane.close()
    assert ran == [0, 1, 2, 3, 4]
    assert not any(thread.name == "memwall-page-out" for thread in threading.enumerate())


def test_close_swallows_a_transfers_error_and_an_unused_lane_starts_no_thread(lane):
    failed(lane)
    lane.close()
    Lane("never", capacity=1).close()
    assert not any(thread.name == "memwall-never" for thread in threading.enumerate())


def test_a_finished_transfer_holds_no_buffer(lane):
    class Buffer:
        pass

    buffer = Buffer()
    alive = weakref.ref(buffer)
    transfer = lane.submit(lambda kept=buffer: None, transfer="t", unit="u")
    transfer.wait()
    lane.drain()
    del buffer
    gc.collect()
    assert alive() is None, "the transfer's handle keeps its closure alive"


# -- figures --


def test_stats_count_transfers_bytes_busy_and_exposed_time(lane):
    def work():
        time.sleep(0.02)

    transfers = [lane.submit(work, transfer="t", unit="u", nbytes=100) for _ in range(3)]
    for transfer in transfers:
        transfer.wait()
    lane.drain()
    stats = lane.take_stats()
    assert (stats.transfers, stats.bytes) == (3, 300)
    assert stats.busy_s >= 0.06  # sleep never returns early
    assert stats.exposed_s > 0
    again = lane.take_stats()
    assert (again.transfers, again.bytes, again.busy_s, again.exposed_s) == (0, 0, 0.0, 0.0)


def test_waiting_for_a_finished_transfer_is_not_exposed(lane):
    transfer = lane.submit(lambda: None, transfer="t", unit="u")
    wait_until(transfer.done)
    lane.take_stats()
    transfer.wait()
    assert lane.take_stats().exposed_s == 0.0


def test_waiting_for_room_counts_as_exposed():
    lane = Lane("reduce", capacity=1, timeout_s=WAIT_S)
    lane.submit(lambda: time.sleep(0.02), transfer="t", unit="u")
    lane.submit(lambda: None, transfer="t", unit="u")
    lane.close()
    assert lane.take_stats().exposed_s > 0


def test_spans_tell_what_ran_when(lane):
    lane.submit(lambda: None, transfer="all-gather", unit="a", nbytes=7)
    lane.submit(lambda: None, transfer="all-gather", unit="b", nbytes=8)
    lane.drain()
    first, second = lane.take_spans()
    assert (first.lane, first.transfer, first.unit, first.bytes) == ("gather", "all-gather", "a", 7)
    assert (second.unit, second.bytes) == ("b", 8)
    assert first.start_s <= first.end_s <= second.start_s <= second.end_s
    assert lane.take_spans() == []


def test_spans_are_kept_only_on_request():
    lane = Lane("gather", timeout_s=WAIT_S)
    lane.submit(lambda: None, transfer="t", unit="u").wait()
    lane.close()
    assert lane.take_spans() == []


def test_only_large_transfers_tell_a_rate(lane):
    lane.submit(lambda: None, transfer="all-gather", unit="small", nbytes=RATED_BYTES - 1).wait()
    assert lane.take_stats().best_bytes_per_s == 0.0
    sent = lane.submit(lambda: time.sleep(0.001), transfer="all-gather", unit="large", nbytes=RATED_BYTES)
    sent.wait()
    assert sent.seconds >= 0.001
    assert lane.take_stats().best_bytes_per_s == RATED_BYTES / sent.seconds
