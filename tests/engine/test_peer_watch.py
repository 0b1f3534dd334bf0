"""A rank is killed, frozen, slow, gone or replaced: everybody raises one sticky, named error, until configured anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine import peer_verdict, swap_group
from tests.engine.test_swap_group import PATIENCE, join_group, open_store, sharded_model
from tests.ranks import run_ranks

SHORT = timedelta(seconds=3)  # a collective that must time out; long enough for every other on a busy machine


# -- workers: a rank is lost --


def _error(call) -> list:
    """Class name, ranks and text of what the call raises."""
    try:
        call()
    except (MemwallError, RuntimeError) as error:  # torch's own too, so that a test shows what got through unnamed
        return [type(error).__name__, list(getattr(error, "ranks", ())), str(error)]
    return ["nothing", [], ""]


def _die(how: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if how == "freeze" else signal.SIGKILL)


def worker_lost(rank: int, world: int, victim: int, where: str) -> dict[str, object]:
    """One rank dies at ``where``; the survivors say what each of their threads met, at first and again."""
    freeze = where == "freeze"
    swap_group.register_backend(grace_s=1.0)
    dist.init_process_group("memwall", timeout=PATIENCE)
    lanes = {"gather": dist.new_group(timeout=PATIENCE), "reduce": dist.new_group(timeout=PATIENCE)}
    model = sharded_model(init_device_mesh("cpu", (world,)))
    met: dict[str, list] = {}
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    if freeze:
        dist.group.WORLD.set_timeout(SHORT)

    def lane(name: str) -> None:
        while True:
            dist.all_reduce(torch.ones(1000), group=lanes[name])

    def in_lane(name: str) -> None:
        met[name] = _error(lambda: lane(name))

    def train() -> None:
        for turn in range(10**9):
            if where in ("all_reduce", "freeze") and turn == 5 and rank == victim:
                _die(where)
            output = model(torch.ones(2, 8))
            if where == "backward" and turn == 2 and rank == victim:
                output.register_hook(lambda grad: _die(where))
            output.sum().backward()
            dist.all_reduce(torch.ones(10))

    threads = [threading.Thread(target=in_lane, args=(name,), daemon=True) for name in lanes]
    for thread in threads:
        thread.start()
    met["training thread"] = _error(train)
    for thread in threads:
        thread.join(30)
    met["again"] = _error(dist.barrier)
    met["again, another group"] = _error(lambda: dist.all_reduce(torch.ones(1), group=lanes["gather"]))
    met["raise_if_lost"] = _error(swap_group.raise_if_lost)
    late = threading.Thread(target=lambda: met.update({"a new thread": _error(dist.barrier)}))
    late.start()
    late.join(30)
    health = swap_group.group_health()
    if freeze and rank == (victim + 1) % world:
        os.kill(pids[victim], signal.SIGKILL)
    return {"met": met, "settling": health.settling, "epoch": health.epoch, "pid": pids[victim]}


@pytest.mark.parametrize(
    ("victim", "where"), [(1, "all_reduce"), (0, "backward"), (1, "freeze")], ids=lambda value: str(value)
)
def test_every_survivor_and_thread_names_the_lost_rank(victim: int, where: str) -> None:
    world = 2 if where == "freeze" else 3
    results = run_ranks(worker_lost, world, expect_exit={victim: -9}, timeout_s=120, victim=victim, where=where)
    survivors = [result for result in results if result is not None]
    assert len(survivors) == world - 1
    texts = set()
    for result in survivors:
        assert len(result["met"]) == 7, result["met"]
        for place, (kind, ranks, text) in result["met"].items():
            assert (kind, ranks) == ("PeerLost", [victim]), (place, kind, ranks, text)
            texts.add(text)
        assert not result["settling"]
        if victim != 0:
            why = "did not answer within 1 s" if where == "freeze" else f"its process {result['pid']} ended"
            assert f"rank {victim}: " in text and why in text
        else:
            assert "store, hosted by the process of rank 0" in text
    if victim != 0:  # with the store gone, each rank has only its own words
        assert len(texts) == 1


# -- workers: a rank is lost half way through a transfer --

_HALF_WAY = 32_000_000
"""Elements: 128 MB, far more than sockets hold."""


def worker_half_way(rank: int, world: int) -> dict[str, list]:
    """Rank 1 stops itself while rank 0's send, and receive, are half way on the wire, and is killed then."""
    swap_group.register_backend(grace_s=1.0)
    dist.init_process_group("memwall", timeout=timedelta(minutes=10))  # far above the limit of this test
    groups = [dist.new_group(timeout=timedelta(minutes=10)) for _ in range(3)]
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    big = torch.ones(_HALF_WAY)
    started = []
    if rank == 0:
        started.append(dist.irecv(big, 1, group=groups[0]))
        dist.barrier()
        dist.barrier()
        started.append(dist.isend(big, 1, group=groups[1]))
        started.append(dist.broadcast(big.clone(), 0, group=groups[2], async_op=True))
    else:
        dist.barrier()
        dist.irecv(torch.empty(_HALF_WAY), 0, group=groups[1])
        dist.broadcast(torch.empty(_HALF_WAY), 0, group=groups[2], async_op=True)
        dist.barrier()
        dist.isend(big, 0, group=groups[0])
        os.kill(os.getpid(), signal.SIGSTOP)
    while peer_verdict._state_and_birth(pids[1])[0] != "T":
        time.sleep(0.01)
    time.sleep(0.3)  # what the sockets hold is on its way
    threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
    return {name: _error(work.wait) for name, work in zip(("receive", "send", "broadcast"), started, strict=True)}


def test_a_transfer_that_is_half_way_is_left_when_the_peer_is_killed() -> None:
    """gloo tells nobody who waits for such a transfer: the wait would last until the group's timeout."""
    met, killed = run_ranks(worker_half_way, 2, expect_exit={1: -9}, timeout_s=60)
    assert killed is None
    assert {name: each[:2] for name, each in met.items()} == {name: ["PeerLost", [1]] for name in met}, met


# -- workers: everybody is alive --


def worker_alive(rank: int, world: int) -> dict[str, object]:
    """One failure after the other, each cleared by ``configure``; ends without destroying anything."""
    swap_group.register_backend(grace_s=5.0)
    dist.init_process_group("memwall", timeout=PATIENCE)
    lane = dist.new_group(timeout=PATIENCE)
    dist.group.WORLD.set_timeout(SHORT)
    met: dict[str, list] = {}
    ones = torch.ones(4)

    # Wrong arguments are the caller's error: torch's own text, and the group stays sound.
    for name, call in {
        "type": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)),
        "operation": lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.PREMUL_SUM(2.0)),
    }.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        met[name] = [type(caught.value).__name__, [], " ".join([str(caught.value), *caught.value.__notes__])]
    time.sleep(0.2)  # gloo's barrier waits for every work that its threads have not put away yet, a failed one too
    dist.barrier()

    # The caller's own limit: named, not sticky.
    work = dist.all_reduce(ones.clone(), group=lane, async_op=True) if rank == 0 else None
    if rank == 0:
        met["own limit"] = _error(lambda: work.wait(timedelta(milliseconds=50)))
    dist.barrier()
    if rank == 1:
        work = dist.all_reduce(ones.clone(), group=lane, async_op=True)
    work.wait()

    if rank == 1:
        time.sleep(SHORT.total_seconds() + 1.0)
    met["slow"] = _error(lambda: dist.all_reduce(ones.clone()))
    met["slow, again"] = _error(lambda: dist.barrier(lane))
    swap_group.configure(1, timeout_s=30)
    assert swap_group.peer_lost() is None
    dist.barrier()

    met["different"] = _error(dist.barrier if rank == 0 else lambda: dist.all_gather([ones, ones.clone()], ones))
    swap_group.configure(2, timeout_s=30)

    if rank == 0:
        met["gave up"] = [*_error(lambda: _raise(swap_group.report_failure("out of memory")))]
    else:
        met["gave up"] = _error(lambda: dist.all_reduce(ones.clone(), group=lane))
    swap_group.configure(3, timeout_s=30)
    dist.all_reduce(total := ones.clone(), group=lane)
    met["old epoch"] = _error(lambda: swap_group.configure(3))

    # Rank 1 ends with a thread of its own in a collective, without a word to torch; rank 0 waits for it.
    dist.barrier()
    if rank == 1:
        threading.Thread(target=lambda: _error(lambda: dist.barrier(lane)), daemon=True).start()
        time.sleep(0.2)
    else:
        met["left"] = _error(lambda: dist.recv(ones.clone(), 1, group=lane))
    return {"met": met, "total": total.tolist(), "issued": [group.issued for group in swap_group.live_groups()]}


def _raise(error: MemwallError) -> None:
    raise error


def test_failures_among_the_living_are_named_and_cleared_by_configure() -> None:
    first, second = run_ranks(worker_alive, 2, timeout_s=120)
    for result in (first, second):
        met = result["met"]
        assert met["type"][0] == met["operation"][0] == "RuntimeError"
        assert "Invalid scalar type allreduce on group '0' (ranks 0, 1)" in met["type"][2]
        kind, ranks, text = met["slow"]
        assert (kind, ranks) == ("CollectiveError", [1])
        assert "allreduce on group '0' (ranks 0, 1) failed on rank 0: Timed out" in text
        assert "all 2 ranks are alive. Not arrived: rank 1 (collective " in text
        assert met["slow, again"] == met["slow"]
        assert met["different"][0] == "CollectiveError"
        assert "different collectives (rank 0: barrier, rank 1: allgather)" in met["different"][2]
        assert met["gave up"][:2] == ["CollectiveError", [0]]
        assert "rank 0 gave up: out of memory. All 2 ranks are alive." in met["gave up"][2]
        assert met["old epoch"][0] == "ConfigError" and "epochs only grow" in met["old epoch"][2]
        assert result["total"] == [2.0] * 4
    assert first["met"]["own limit"][0] == "CollectiveError"
    assert "took longer than the caller's limit of 0.05 s" in first["met"]["own limit"][2]
    assert first["met"]["left"][:2] == ["PeerLost", [1]]
    assert "rank 1: it had ended its process group" in first["met"]["left"][2]


# -- workers: a rank is replaced --


def _take_part(rank: int, model: nn.Module, lane: dist.ProcessGroup) -> list[float]:
    """Collectives on two groups and a training step, over groups that existed before the loss."""
    dist.all_reduce(total := torch.tensor([float(rank + 1)]))
    dist.all_reduce(largest := torch.tensor([float(rank)]), op=dist.ReduceOp.MAX, group=lane)
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
    return [total.item(), largest.item(), loss.item(), norm.item()]


def worker_takeover(rank: int, world: int) -> dict[str, object]:
    store = open_store(rank, world)
    join_group("memwall", dist.PrefixStore("job", store), rank, world)
    dist.new_group()
    dist.barrier()
    dist.destroy_process_group()
    # The replacement must find its way to this second session, not to what the first left in the store.
    join_group("memwall", dist.PrefixStore("job", store), rank, world)
    lane = dist.new_group()
    model = sharded_model(init_device_mesh("cpu", (world,)))
    before = _take_part(rank, model, lane)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    met = _error(lambda: dist.all_reduce(torch.ones(1)))
    model.zero_grad()
    spare = None
    if rank == 0:
        command = [sys.executable, "-W", "ignore", "-m", "tests.engine.test_peer_watch", str(os.getpid())]
        spare = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    swap_group.configure(1, timeout_s=90)
    after = _take_part(rank, model, lane)
    dist.barrier()
    dist.destroy_process_group()
    said = json.loads(spare.communicate(timeout=60)[0]) if spare is not None else None
    return {"met": met, "before": before, "after": after, "spare": said, "code": spare and spare.returncode}


def _replacement() -> None:
    """The new rank 2: builds its model while its groups do nothing, then joins."""
    torch.set_num_threads(1)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    swap_group.register_backend(stand_in=True)
    dist.init_process_group("memwall", store=dist.PrefixStore("job", store), rank=2, world_size=3, timeout=PATIENCE)
    lane = dist.new_group()
    model = sharded_model(init_device_mesh("cpu", (3,)))
    alone = swap_group.group_health().epoch
    dist.all_reduce(torch.ones(1))
    dist.barrier(lane)
    swap_group.configure(1, timeout_s=90)
    after = _take_part(2, model, lane)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"alone": alone, "after": after}))


def test_a_replacement_takes_the_rank_of_the_killed_one() -> None:
    first, second, lost = run_ranks(worker_takeover, 3, expect_exit={2: -9}, timeout_s=150)
    assert lost is None
    for result in (first, second):
        assert result["met"][:2] == ["PeerLost", [2]]
        assert result["before"][:2] == [6.0, 2.0]
        assert result["after"] == result["before"]
    assert first["code"] == 0
    assert first["spare"] == {"alone": -1, "after": first["before"]}


if __name__ == "__main__":
    _replacement()
