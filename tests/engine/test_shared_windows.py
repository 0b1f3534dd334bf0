"""Shared windows under lanes on real ranks: used where they can be, booked once, rebuilt, gone, and never stuck."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from memwall_strategy.core.block import Kind
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine import shared_memory, shared_peers, swap_group
from memwall_strategy.engine.fsdp import fsdp_groups
from memwall_strategy.engine.lanes import FsdpLanes
from memwall_strategy.engine.memory import MemoryAccount
from memwall_strategy.engine.reset import reset_aborted_step
from memwall_strategy.engine.sharding import set_prefetch, shard_model
from memwall_strategy.engine.shared_windows import gather_bytes, reduce_bytes
from recipes.netns import linked_hosts
from tests.engine.lane_cases import GPT, assert_same, both, gradients, mesh_of, sgd, sharded, train
from tests.lightning.checks import on_ranks
from tests.ranks import ROOT, free_port, run_ranks

pytestmark = pytest.mark.skipif(bool(shared_memory.why_not()), reason=shared_memory.why_not() or "-")

PATIENCE = timedelta(seconds=60)


def held():
    """Open descriptors of this process, and mapped windows."""
    gc.collect()
    with open("/proc/self/maps") as file:
        return len(os.listdir("/proc/self/fd")), sum("memwall-window" in line for line in file)


def shared_bytes(lanes):
    return sum(lane.take_stats().shared_bytes for lane in (lanes.gather, lanes.reduce))


@on_ranks(2, "32-true", "bf16-mixed", "16-mixed", group="engine")
def test_every_byte_goes_through_the_windows(here):
    """And the loss is stock's to the last bit."""

    def run(model, lanes):
        if lanes is None:
            return train(model, 2, seed=here.rank)
        shared_bytes(lanes)
        found = train(model, 2, seed=here.rank)
        gathered = sum(gather_bytes(group) for group in fsdp_groups(model))
        reduced = sum(reduce_bytes(group) for group in fsdp_groups(model))
        # Twice gathered, and the root once: it stays gathered between forward and backward.
        (root,) = [g for g in fsdp_groups(model) if g.modules[0] is model]
        assert shared_bytes(lanes) == 2 * (2 * gathered - gather_bytes(root) + reduced) // 2
        return found

    both(GPT, mesh_of(here, "2"), run, precision=here.case)


@on_ranks(2, group="engine")
def test_several_units_gathered_at_once_go_through_the_group(here):
    """More than there are slots for: the rest takes gloo, on both ranks alike, and nothing is mixed up."""
    with sharded(lambda: GPT(layers=6), mesh_of(here, "2"), lanes=False) as (model, _):
        expected = train(model, 2, seed=here.rank)
    with sharded(lambda: GPT(layers=6), mesh_of(here, "2"), prefetch=0) as (model, _):
        found = []
        for step in range(2):
            works = [block.unshard(async_op=True) for block in model.blocks]
            for work in reversed(works):
                work.wait()
            loss = model.loss(model.batch(here.rank + 1000 * step))
            loss.backward()
            found.append((loss.detach(), gradients(model)))
            sgd(model)
    assert_same(found, expected[:2])


@on_ranks(2, group="engine")
def test_windows_are_booked_once_and_leave_nothing(here):
    mesh_of(here, "2")
    with sharded(GPT, mesh_of(here, "2")):
        pass  # what the process keeps for good
    before = held()
    for _ in range(2):
        account = MemoryAccount()
        with sharded(GPT, mesh_of(here, "2"), prefetch=1, reduce_buffers=2, account=account) as (model, lanes):
            account.attach(model)
            rings = [o.ring for w in (lanes.windows, lanes.reducer.windows) for o in w._opened.values()]
            gathers = sorted((gather_bytes(group) for group in fsdp_groups(model)), reverse=True)
            reduces = sorted((reduce_bytes(group) for group in fsdp_groups(model)), reverse=True)
            booked = sum(ring.total_bytes // 2 for ring in rings)
            needed = sum(gathers[:3]) / 2 + sum(reduces[:2])
            assert needed <= booked <= needed + 2048
            assert account.current()[Kind.COMM] == booked
            train(model, 2, seed=here.rank)
            assert account.current()[Kind.COMM] == booked, "no more than at set-up"
            assert {kinds[Kind.COMM] for kinds in account.kind_peaks().values()} == {booked}
            assert held()[1] == before[1] + 2
            account.detach()
        assert account.current()[Kind.COMM] == 0
        del model, lanes, rings
    assert held() == before


@on_ranks(2, group="engine")
def test_windows_are_not_booked_again_for_modules_on_the_host(here):
    model = GPT()
    account = MemoryAccount(host_modules=(model.blocks[0],))
    with sharded(lambda: model, mesh_of(here, "2"), account=account) as (model, lanes):
        account.attach(model)
        booked = account.current()[Kind.COMM]
        train(model, 2, seed=here.rank)
        assert shared_bytes(lanes) > 0
        assert account.current()[Kind.COMM] == booked
        assert account.host.live()[Kind.PARAM] > 0
        assert not any(kinds.get(Kind.COMM) for kinds in account.host.kind_peaks().values())
        account.detach()


@on_ranks(2, "auto", "true", group="engine")
def test_a_handshake_that_fails_on_one_rank_is_told_to_all(here):
    """``auto`` goes through the group with a warning on each rank, ``true`` is refused on each."""

    def refuse(*_):
        raise OSError("sockets are forbidden here")

    dist.barrier()
    wanted = True if here.case == "true" else "auto"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(shared_peers, "HANDSHAKE_S", 1.0)
        patch.setattr(shared_peers, "_join", refuse)  # what the rank other than the first calls
        if wanted is True:
            with pytest.raises(ConfigError, match=r"overlap\.shared_memory=true.*on rank 1 of the group sockets are"):
                sharded(GPT, mesh_of(here, "2"), shared_memory=True).__enter__()
            return
        both(GPT, mesh_of(here, "2"), lambda model, lanes: train(model, 1, seed=here.rank))
    texts = [str(w.message) for w in warned if "through sockets" in str(w.message)]
    assert len(texts) == 2 and all("rank 1 of the group sockets are forbidden here" in text for text in texts)


# -- ranks that die or are replaced --


def _met(call):
    try:
        call()
    except MemwallError as error:
        return [type(error).__name__, list(getattr(error, "ranks", ())), str(error)]
    return ["nothing", [], ""]


def _laned(world):
    torch.manual_seed(11)
    model = GPT()
    shard_model(model, init_device_mesh("cpu", (world,)), precision="32-true")
    set_prefetch(model, 1)
    return model, FsdpLanes(model, prefetch=1, reduce_buffers=2, timeout_s=60, shared_memory=True)


def worker_killed(rank, world, victim, seed):
    """One rank is killed at a random moment, and leaves a child that holds its sockets open."""
    swap_group.register_backend(grace_s=2.0)
    dist.init_process_group("memwall", timeout=PATIENCE)
    model, lanes = _laned(world)
    train(model, 1, seed=rank)
    if rank == victim:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        delay_s = random.Random(seed).random() * 0.1
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    first = _met(lambda: train(model, 10**6, seed=rank))
    reset_aborted_step(model, lanes)
    again = [_met(lambda: train(model, 1, seed=rank)), _met(dist.barrier)]
    lanes.close()
    return {"first": first, "again": again}


@pytest.mark.parametrize(("world", "victim", "seed"), [(2, 1, 1), (2, 0, 2), (3, 0, 3), (3, 2, 4)])
def test_a_rank_that_is_killed_at_any_moment_is_named_by_all_others(world, victim, seed):
    files = set(os.listdir("/dev/shm"))
    with contextlib.closing(_Store()) as outside:
        env = {"MASTER_PORT": str(outside.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        results = run_ranks(
            worker_killed, world, expect_exit={victim: -signal.SIGKILL}, env=env, victim=victim, seed=seed
        )
    for rank, result in enumerate(results):
        if rank != victim:
            for kind, ranks, text in (result["first"], *result["again"]):
                assert (kind, ranks) == ("PeerLost", [victim]), text
                assert f"rank {victim}: its process" in text
    assert set(os.listdir("/dev/shm")) == files


class _Store:
    """A store outside of every rank, as under a supervisor."""

    def __init__(self):
        self.port = free_port()
        self._store = dist.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)

    def close(self):
        del self._store


def worker_replaced(rank, world):
    """Rank 1 is killed in a step; another process takes its rank, with windows of its own."""
    swap_group.register_backend(grace_s=2.0)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=PATIENCE)
    dist.init_process_group("memwall", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    model, lanes = _laned(world)
    before = _losses(model, rank)
    mapped = held()[1]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    met = _met(lambda: train(model, 10**6, seed=rank))
    reset_aborted_step(model, lanes)
    model.zero_grad()
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.test_shared_windows", "replacement"]
    spare = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    swap_group.configure(1, timeout_s=90)
    (former,) = [opened.ring for opened in lanes.windows._opened.values()]
    after = _losses(model, rank)
    assert former._closed and all(opened.ring is not former for opened in lanes.windows._opened.values())
    del former
    assert held()[1] == mapped, "the former epoch's windows are gone"
    through = shared_bytes(lanes)
    said = json.loads(spare.communicate(timeout=60)[0])
    lanes.close()
    dist.destroy_process_group()
    return {"met": met, "before": before, "after": after, "spare": said, "shared": through}


def _losses(model, rank):
    """Of one forward and backward whose weights stay as they are."""
    loss = model.loss(model.batch(rank))
    loss.backward()
    total = sum(float(g.square().sum()) for g in gradients(model).values())
    model.zero_grad()
    return [float(loss.detach()), total]


def _replacement():
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=PATIENCE)
    swap_group.register_backend(stand_in=True)
    dist.init_process_group("memwall", store=store, rank=1, world_size=2, timeout=PATIENCE)
    model, lanes = _laned(2)
    swap_group.configure(1, timeout_s=90)
    after = _losses(model, 1)
    print(json.dumps({"after": after, "shared": shared_bytes(lanes)}))
    lanes.close()
    dist.destroy_process_group()


def test_a_replacement_gets_windows_of_the_new_epoch():
    survivor, _ = run_ranks(worker_replaced, 2, expect_exit={1: -signal.SIGKILL})
    assert survivor["met"][:2] == ["PeerLost", [1]], survivor["met"]
    assert survivor["after"] == survivor["before"]
    assert survivor["spare"]["shared"] > 0 and survivor["shared"] > survivor["spare"]["shared"]


# -- several hosts --


def _on_a_host_of_its_own():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(11)
    model = GPT()
    shard_model(model, mesh, precision="32-true")
    lanes = FsdpLanes(model, prefetch=1, reduce_buffers=2, timeout_s=60)
    reasons = {opened.reason for w in (lanes.windows, lanes.reducer.windows) for opened in w._opened.values()}
    train(model, 1, seed=dist.get_rank())
    through = shared_bytes(lanes)
    lanes.close()
    refused = _met(lambda: FsdpLanes(model, prefetch=1, reduce_buffers=2, timeout_s=60, shared_memory=True))
    dist.destroy_process_group()
    print(json.dumps({"reasons": sorted(reasons), "shared": through, "refused": refused}))


@pytest.mark.requires_netns
def test_network_namespaces_are_several_hosts():
    port = str(free_port())
    with linked_hosts(2, "1gbit") as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            env = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": host.interface, "PYTHONPATH": str(ROOT),
            }  # fmt: skip
            command = host.command(sys.executable, "-W", "ignore", "-m", "tests.engine.test_shared_windows", "host")
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT))
        try:
            said = [json.loads(process.communicate(timeout=90)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for each in said:
        assert each["shared"] == 0
        assert len(each["reasons"]) == 1 and "network namespaces" in each["reasons"][0]
        assert each["refused"][0] == "ConfigError" and "overlap.shared_memory=true" in each["refused"][2]


if __name__ == "__main__":
    {"replacement": _replacement, "host": _on_a_host_of_its_own}[sys.argv[1]]()
