"""The ring between threads of this process, each in the part of a rank: sums, delays, poison, and what fails."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from memwall_strategy.core.errors import CollectiveError, PeerLost
from memwall_strategy.engine import shared_memory
from memwall_strategy.engine.shared_memory import create_sealed
from memwall_strategy.engine.shared_peers import Connection
from memwall_strategy.engine.shared_reduce import add_parts
from memwall_strategy.engine.shared_ring import SharedRing, layout

pytestmark = pytest.mark.skipif(bool(shared_memory.why_not()), reason=shared_memory.why_not() or "-")


class Group:
    """A group without a watch; ``lost`` is what its watch would raise."""

    def __init__(self, rank, world):
        self.rank, self.world, self.ranks = rank, world, tuple(10 + r for r in range(world))
        self.issued, self.lost = [], None

    def issue(self, name):
        self.issued.append(name)

    def check(self, name):
        if self.lost is not None:
            raise self.lost

    def failure(self, name, detail, error, ranks):
        return error(f"{name}: {detail}", ranks)


class Rings(list):
    """A ring for each rank, over one segment."""

    def __init__(self, world, sizes, *, divided=False, timeout_s=20.0):
        descriptor = create_sealed("memwall-test", layout(sizes, world, divided=divided)[0])
        pairs = {}
        for a in range(world):
            for b in range(a + 1, world):
                pairs[a, b], pairs[b, a] = socket.socketpair()
        for end in pairs.values():
            end.setblocking(False)
        self.groups = [Group(rank, world) for rank in range(world)]
        self.read_bytes = [0] * world
        for rank, group in enumerate(self.groups):
            doorbells = {peer: pairs[rank, peer] for peer in range(world) if peer != rank}
            connection = Connection(os.dup(descriptor), doorbells)

            def count(nbytes, rank=rank):
                self.read_bytes[rank] += nbytes

            self.append(SharedRing(connection, group, sizes, divided=divided, timeout_s=lambda: timeout_s, count=count))
        os.close(descriptor)

    def run(self, body):
        """``body(rank, ring)`` on a thread for each rank; what they return, or the first error."""
        with ThreadPoolExecutor(len(self)) as pool:
            return [f.result(60) for f in [pool.submit(body, rank, ring) for rank, ring in enumerate(self)]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for ring in self:
            ring.close()


def value(rank, turn, numel, dtype):
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(numel, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gathers_of_odd_sizes_with_late_ranks(world, dtype):
    """Slots are poisoned when they are reserved: a part that is read too early, or late, shows."""
    sizes = [n * dtype.itemsize * world for n in (1, 3, 17, 250, 1021)]

    def body(rank, ring):
        noise, plan = random.Random(rank), random.Random(5)
        for turn in range(60):
            numel = plan.choice((1, 3, 17, 250, 1021))
            lease = ring.reserve(numel * world * dtype.itemsize, "all-gather")
            flat = lease.whole(dtype)
            mine = flat[rank * numel : (rank + 1) * numel]
            mine.fill_(float("nan"))
            time.sleep(noise.random() * 0.002 if turn % 3 else 0)
            mine.copy_(value(rank, turn, numel, dtype))
            ring.arrive(lease, "all-gather")
            ring.wait(lease, "all-gather", 0)
            expected = torch.cat([value(r, turn, numel, dtype) for r in range(world)])
            assert torch.equal(flat, expected), (rank, turn)
            ring.release(lease)
            ring.free(lease)

    with Rings(world, sizes) as rings:
        rings.run(body)


@pytest.mark.parametrize("world", [2, 3])
def test_several_gathers_in_flight_end_in_any_order(world):
    """A slot that is still read is not written, by anybody."""
    numel = 64

    def body(rank, ring):
        noise, plan = random.Random(rank), random.Random(7)
        held = []
        for turn in range(80):
            lease = ring.reserve(numel * world * 4, "all-gather")
            if lease is None:
                held.sort(key=lambda item: plan.random())
            else:
                flat = lease.whole(torch.float32)
                flat[rank * numel : (rank + 1) * numel] = value(rank, turn, numel, torch.float32)
                ring.arrive(lease, "all-gather")
                held.append((turn, lease, flat))
            while held and (lease is None or plan.random() < 0.4):
                then, old, flat = held.pop()
                ring.wait(old, "all-gather", 5)
                time.sleep(noise.random() * 0.001)
                assert torch.equal(flat, torch.cat([value(r, then, numel, torch.float32) for r in range(world)]))
                ring.release(old)
                ring.free(old)
                if lease is None:
                    break

    with Rings(world, [numel * world * 4] * 3) as rings:
        rings.run(body)
        assert len(set(map(tuple, (g.issued for g in rings.groups)))) == 1
        assert all(nbytes % 5 == 0 and nbytes for nbytes in rings.read_bytes)


OPS = {
    "sum": (torch.distributed.ReduceOp.SUM, lambda parts: _in_order(parts)),
    "mean": (torch.distributed.ReduceOp.AVG, lambda parts: _in_order(parts) / len(parts)),
    "factor": (torch.distributed._make_nccl_premul_sum(0.25), lambda parts: _in_order([p * 0.25 for p in parts])),
}


def _in_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_reductions_add_up_in_the_order_of_the_ranks(world, op):
    numel = 37  # of each rank's result
    reduce_op, expected_of = OPS[op]

    def body(rank, ring):
        noise = random.Random(rank)
        for turn, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 6):
            lease = ring.reserve(numel * world * dtype.itemsize, "reduce-scatter")
            flat = lease.part(rank, dtype)
            flat.fill_(float("nan"))
            time.sleep(noise.random() * 0.002)
            flat.copy_(value(rank, turn, numel * world, dtype))
            output = torch.full((numel,), float("nan"), dtype=dtype)
            ring.arrive(lease, "reduce-scatter")
            ring.wait(lease, "reduce-scatter", 0)
            add_parts(lease, output, rank, world, reduce_op)
            ring.release(lease)
            ring.free(lease)
            mine = slice(rank * numel, (rank + 1) * numel)
            parts = [value(r, turn, numel * world, dtype)[mine] for r in range(world)]
            if op == "factor":  # a product and a sum, rounded once or twice
                torch.testing.assert_close(output, expected_of(parts), rtol=2e-2, atol=1e-2)
            else:
                assert torch.equal(output, expected_of(parts)), (rank, turn)

    with Rings(world, [numel * world * 4] * 2, divided=True) as rings:
        rings.run(body)


def test_which_slot_is_taken():
    with Rings(1, [400, 100, 100]) as (ring,):
        assert ring.fits(400) and not ring.fits(401) and not ring.fits(0)
        assert ring.reserve(0, "x") is None and ring.reserve(401, "x") is None
        first, second, third = ring.reserve(90, "x"), ring.reserve(90, "x"), ring.reserve(90, "x")
        assert [lease.slot.nbytes for lease in (first, second, third)] == [100, 100, 400]
        assert ring.reserve(1, "x") is None, "all are taken"
        ring.free(second)
        assert ring.reserve(101, "x") is None, "the one that is free is too small"
        ring.free(first)
        ring.free(third)
        again = ring.reserve(1, "x")
        assert again.slot is first.slot, "of equals, the one that was used longest ago"
        ring.free(first)  # a lease that is over
        assert not again.slot.free


# -- what fails --


def reserve_and_arrive(ring, nbytes=8, arrive=True):
    lease = ring.reserve(nbytes, "all-gather")
    if arrive:
        ring.arrive(lease, "all-gather")
    return lease


def test_a_peer_that_does_not_come_in_time_is_named():
    with Rings(3, [8], timeout_s=0.2) as rings:
        reserve_and_arrive(rings[1])
        lease = reserve_and_arrive(rings[0])
        with pytest.raises(CollectiveError, match="all-gather: rank 12 had not arrived in time") as caught:
            rings[0].wait(lease, "all-gather", 0)
        assert caught.value.ranks == (12,)


def test_a_slot_that_a_peer_still_reads_is_not_given_out():
    with Rings(2, [8], timeout_s=0.2) as rings:
        leases = [reserve_and_arrive(ring) for ring in rings]
        for ring, lease in zip(rings, leases, strict=True):
            ring.wait(lease, "all-gather", 0)
        rings[0].release(leases[0])
        rings[0].free(leases[0])
        with pytest.raises(CollectiveError, match="rank 11 had not arrived"):
            rings[0].reserve(8, "all-gather")
        rings[1].release(leases[1])
        assert rings[0].reserve(8, "all-gather") is not None


def test_a_peer_whose_end_closes_without_a_word_is_lost_at_once():
    with Rings(2, [8]) as rings:
        lease = reserve_and_arrive(rings[0])
        threading.Timer(0.1, rings[1]._connection.close).start()  # as the kernel does for a killed process
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            rings[0].wait(lease, "all-gather", 0)
        assert caught.value.ranks == (11,)
        assert time.monotonic() - start < 15, "noticed, and not timed out"


def test_what_a_peer_wrote_before_its_end_still_counts():
    with Rings(2, [8]) as rings:
        reserve_and_arrive(rings[1])
        rings[1]._connection.close()
        lease = reserve_and_arrive(rings[0])
        rings[0].wait(lease, "all-gather", 0)


def test_a_peer_that_closed_its_lanes_is_no_lost_one():
    with Rings(2, [8]) as rings:
        lease = reserve_and_arrive(rings[0])
        rings[1].close()
        with pytest.raises(CollectiveError, match="rank 11 had closed its lanes"):
            rings[0].wait(lease, "all-gather", 0)


def test_closing_ends_a_wait_of_this_rank():
    with Rings(2, [8]) as rings:
        lease = reserve_and_arrive(rings[0])
        threading.Timer(0.1, rings[0].close).start()
        with pytest.raises((CollectiveError, ValueError), match=r"closed|negative|descriptor"):
            rings[0].wait(lease, "all-gather", 0)
        with pytest.raises(CollectiveError, match="closed"):
            rings[0].arrive(lease, "all-gather")
        rings[0].close()


def test_a_wait_listens_to_the_watch_of_the_group():
    with Rings(2, [8]) as rings:
        lease = reserve_and_arrive(rings[0])
        lost = PeerLost("rank 11 lost", (11,))
        threading.Timer(0.1, setattr, (rings.groups[0], "lost", lost)).start()
        with pytest.raises(PeerLost, match="rank 11 lost"):
            rings[0].wait(lease, "all-gather", 0)


def test_a_rank_that_gave_the_step_up_is_told_apart():
    """Nothing of the step before is taken for what comes after, on either side."""
    with Rings(2, [8, 8], timeout_s=5.0) as rings:
        stale = [reserve_and_arrive(ring) for ring in rings]
        for lease, ring in zip(stale, rings, strict=True):
            lease.whole(torch.int64)[0] = 1
            ring.reset()
        with pytest.raises(CollectiveError, match="given up"):
            rings[0].arrive(stale[0], "all-gather")
        ahead = reserve_and_arrive(rings[0])
        assert ahead.slot is stale[0].slot, "the same slot, and the peer's old tag is still there"
        result = []
        waiter = threading.Thread(target=lambda: result.append(rings[0].wait(ahead, "all-gather", 0)))
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive(), "a former generation's tag is not an arrival"
        reserve_and_arrive(rings[1])
        waiter.join(10)
        assert result == [None]
        lone = reserve_and_arrive(rings[1])
        rings[0].reset()
        with pytest.raises(CollectiveError, match="rank 10 had given up the step"):
            rings[1].wait(lone, "all-gather", 0)


def test_ranks_that_are_out_of_step_raise():
    with Rings(2, [8, 16]) as rings:
        lease = reserve_and_arrive(rings[0], 8)
        reserve_and_arrive(rings[1], 16)  # another unit's gather: another slot
        other = reserve_and_arrive(rings[1], 8)
        with pytest.raises(CollectiveError, match="rank 11 was at a later collective"):
            rings[0].wait(lease, "all-gather", 0)
        with pytest.raises(CollectiveError, match="rank 10 had not arrived"):
            rings[1]._timeout_s = lambda: 0.2
            rings[1].wait(other, "all-gather", 0)


def test_nothing_is_left_of_a_closed_ring():
    def mapped():
        with open("/proc/self/maps") as file:
            return sum("memwall-test" in line for line in file)

    gc.collect()  # what other tests left
    before, maps = len(os.listdir("/proc/self/fd")), mapped()
    with Rings(3, [4096, 8192]) as rings:
        assert mapped() == maps + 3
    rings.clear()
    del rings
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), mapped()) == (before, maps)
