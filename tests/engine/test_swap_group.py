"""The swappable group: equal to gloo while all is well; one sticky, named error for everybody when it is not."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine import group_proxy, swap_group
from memwall_strategy.engine.peer_verdict import CollectiveError, Failure, brief, has_ended, identity, judge
from tests.ranks import free_port, run_ranks

PATIENCE = timedelta(seconds=60)
SHORT = timedelta(seconds=3)  # a collective that must time out; long enough for every other on a busy machine


# -- workers: all is well --


def _store(rank: int, world: int) -> dist.Store:
    """The job's store, kept over several default groups of one process."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=PATIENCE)


def _join(backend: str, store: dist.Store, rank: int, world: int) -> None:
    swap_group.register_backend()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)


def _collectives(rank: int, world: int) -> dict[str, object]:
    """Every collective of torch.distributed that gloo has, with values that differ from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randn(4, 3, generator=generator)
    blocks = list(torch.randn(world, 5, generator=generator))
    stacked = torch.randn(2 * world, 3, generator=generator)
    other = (rank + 1) % world
    found: dict[str, object] = {}

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        found[f"all_reduce {op}"] = value = mine.clone()
        dist.all_reduce(value, op=op)
    found["all_reduce async"] = value = mine.clone()
    work = dist.all_reduce(value, async_op=True)
    assert work.wait() and work.is_completed()
    found["get_future"] = dist.all_reduce(mine.clone(), async_op=True).get_future().wait()[0]
    found["broadcast"] = value = mine.clone()
    dist.broadcast(value, src=1)
    found["reduce"] = value = mine.clone()
    dist.reduce(value, dst=1)
    if rank != 1:
        found["reduce"] = None  # undefined but on the destination
    found["all_gather"] = out = [torch.empty(4, 3) for _ in range(world)]
    dist.all_gather(out, mine)
    found["all_gather_into_tensor"] = out = torch.empty(4 * world, 3)
    dist.all_gather_into_tensor(out, mine)
    found["reduce_scatter"] = out = torch.empty(5)
    dist.reduce_scatter(out, blocks)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        found[f"reduce_scatter_tensor {op}"] = out = torch.empty(2, 3)
        dist.reduce_scatter_tensor(out, stacked, op=op)
    found["all_to_all_single"] = out = torch.empty(2 * world, 3)
    dist.all_to_all_single(out, stacked)
    found["gather"] = out = [torch.empty(4, 3) for _ in range(world)] if rank == 0 else None
    dist.gather(mine, out, dst=0)
    found["scatter"] = out = torch.empty(5)
    dist.scatter(out, blocks if rank == 1 else None, src=1)
    dist.barrier()

    found["send, recv"] = value = torch.empty(4, 3)
    if rank == 0:
        dist.send(mine, other)
        dist.recv(value, other)
    else:
        dist.recv(value, other)
        dist.send(mine, other)
    found["isend, irecv"] = value = torch.empty(4, 3)
    for work in [dist.irecv(value, other, tag=3), dist.isend(mine, other, tag=3)]:
        work.wait()
    found["batch_isend_irecv"] = value = torch.empty(4, 3)
    pairs = [dist.P2POp(dist.irecv, value, other), dist.P2POp(dist.isend, mine, other)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    found["recv from any"] = value = torch.empty(4, 3)
    sending = dist.isend(mine, other)
    found["its source"] = dist.recv(value)
    sending.wait()

    found["all_gather_object"] = out = [None] * world
    dist.all_gather_object(out, {"rank": rank})
    found["broadcast_object_list"] = out = [rank, "x" * rank]
    dist.broadcast_object_list(out, src=1)
    found["gather_object"] = out = [None] * world if rank == 0 else None
    dist.gather_object(rank * 2, out, dst=0)
    found["scatter_object_list"] = out = [None]
    dist.scatter_object_list(out, [10, 20] if rank == 0 else None, src=0)

    with dist.distributed_c10d._coalescing_manager():
        found["coalesced"] = values = [mine.clone(), mine * 2]
        for value in values:
            dist.all_reduce(value)

    everyone = dist.group.WORLD
    found["functional all_reduce"] = funcol.wait_tensor(funcol.all_reduce(mine, "avg", everyone))
    found["functional all_gather"] = funcol.wait_tensor(funcol.all_gather_tensor(mine, 0, everyone))
    found["functional reduce_scatter"] = funcol.wait_tensor(funcol.reduce_scatter_tensor(stacked, "sum", 0, everyone))
    found["functional all_to_all"] = funcol.wait_tensor(funcol.all_to_all_single(stacked, None, None, everyone))
    found["functional broadcast"] = funcol.wait_tensor(funcol.broadcast(mine, 1, everyone))
    found["functional coalesced"] = list(funcol.all_reduce_coalesced([mine, blocks[0]], "sum", everyone))

    halves = [dist.new_group([r]) for r in range(world)]
    backwards = dist.new_group(list(range(world)), timeout=timedelta(seconds=30))
    dist.all_reduce(mine.clone(), group=halves[rank])
    found["subgroup"] = value = mine.clone()
    dist.all_reduce(value, group=backwards)
    dist.destroy_process_group(backwards)

    mesh = init_device_mesh("cpu", (world,))
    spread = distribute_tensor(torch.arange(12.0).reshape(4, 3) * (1 if rank == 0 else -1), mesh, [Shard(0)])
    found["full_tensor"] = spread.full_tensor()
    found["redistribute"] = spread.redistribute(mesh, [Shard(1)]).to_local()
    found["replicate"] = spread.redistribute(mesh, [Replicate()]).to_local()
    found["partial sum"] = (spread @ distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])).sum().full_tensor()
    return found


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    return a == b


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _sharded_model(mesh: dist.DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(_Block(8), _Block(8), nn.Linear(8, 4))
    for block in list(model)[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(mesh_shape: tuple[int, ...], rank: int, folder: str | None = None) -> list[float]:
    """Losses and gradient norms of three FSDP2 steps; with a folder, also of one more after a DCP save and load."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    model = _sharded_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    numbers: list[float] = []

    def step() -> None:
        loss = model(torch.randn(3, 8, generator=generator)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        numbers.extend([total.item(), norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()])

    for _ in range(3):
        step()
    if folder is not None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(state, checkpoint_id=folder)
        before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state["model"])
        assert all(torch.equal(before[n], v.to_local()) for n, v in model.state_dict().items())
        step()
    return numbers


def worker_equal(rank: int, world: int, folder: str) -> dict[str, object]:
    store = _store(rank, world)
    found, trained, names = {}, {}, {}
    for name, backend in (("gloo", "gloo"), ("first", "memwall"), ("second", "cpu:memwall")):
        # One prefix for both sessions of memwall: the second must not read what the first left in the store.
        _join(backend, dist.PrefixStore(backend[-4:], store), rank, world)
        found[name] = _collectives(rank, world)
        trained[name] = _train((world,), rank, f"{folder}/{name}")
        names[name] = dist.get_backend()
        live = len(swap_group.live_groups())
        assert (live > 0) == (name != "gloo")
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized() and swap_group.live_groups() == ()
    listener = [thread.name for thread in threading.enumerate() if thread.name.startswith("memwall")]
    unequal = [f"{run}: {key}" for run in ("first", "second") for key in found["gloo"]
               if not _same(found["gloo"][key], found[run][key])]  # fmt: skip
    return {"unequal": unequal, "trained": trained, "names": names, "threads": listener, "count": len(found["gloo"])}


def worker_mesh(rank: int, world: int) -> list[list[float]]:
    store, numbers = _store(rank, world), []
    for backend in ("gloo", "memwall"):
        _join(backend, dist.PrefixStore(backend, store), rank, world)
        numbers.append(_train((2, world // 2), rank))
        dist.barrier()
        dist.destroy_process_group()
    return numbers


def test_everything_that_gloo_does_comes_out_the_same(tmp_path: pathlib.Path) -> None:
    for result in run_ranks(worker_equal, 2, folder=str(tmp_path)):
        assert result["unequal"] == []
        assert result["count"] > 35
        assert result["trained"]["first"] == result["trained"]["gloo"]
        assert result["trained"]["second"] == result["trained"]["gloo"]
        assert len(result["trained"]["gloo"]) == 8
        assert result["names"] == {"gloo": "gloo", "first": "memwall", "second": "cpu:memwall"}
        assert result["threads"] == []


def test_two_dimensional_mesh_trains_bit_for_bit_as_with_gloo() -> None:
    for gloo, memwall in run_ranks(worker_mesh, 4):
        assert memwall == gloo


# -- workers: a rank is lost --


def _error(call) -> list:
    """Class name, ranks and text of what the call raises."""
    try:
        call()
    except MemwallError as error:
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
    model = _sharded_model(init_device_mesh("cpu", (world,)))
    met: dict[str, list] = {}
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    if freeze:
        dist.group.WORLD.set_timeout(SHORT)

    def lane(name: str) -> None:
        for turn in range(10**9):
            if where == "lane" and name == "reduce" and turn == 20 and rank == victim:
                _die(where)
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
    ("victim", "where"), [(1, "all_reduce"), (0, "backward"), (1, "lane"), (1, "freeze")], ids=lambda value: str(value)
)
def test_every_survivor_and_thread_names_the_lost_rank(victim: int, where: str) -> None:
    world = 3 if where in ("all_reduce", "backward") else 2
    results = run_ranks(worker_lost, world, expect_exit={victim: -9}, timeout_s=120, victim=victim, where=where)
    survivors = [result for result in results if result is not None]
    assert len(survivors) == world - 1
    texts = set()
    for result in survivors:
        assert len(result["met"]) == 7
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
    store = _store(rank, world)
    _join("memwall", dist.PrefixStore("job", store), rank, world)
    dist.new_group()
    dist.barrier()
    dist.destroy_process_group()
    # The replacement must find its way to this second session, not to what the first left in the store.
    _join("memwall", dist.PrefixStore("job", store), rank, world)
    lane = dist.new_group()
    model = _sharded_model(init_device_mesh("cpu", (world,)))
    before = _take_part(rank, model, lane)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    met = _error(lambda: dist.all_reduce(torch.ones(1)))
    model.zero_grad()
    spare = None
    if rank == 0:
        command = [sys.executable, "-W", "ignore", "-m", "tests.engine.test_swap_group", str(os.getpid())]
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
    dist.init_process_group(
        "memwall", store=dist.PrefixStore("job", store), rank=2, world_size=3, timeout=PATIENCE
    )
    lane = dist.new_group()
    model = _sharded_model(init_device_mesh("cpu", (3,)))
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


# -- one process --


@pytest.fixture
def alone():
    swap_group.register_backend()
    dist.init_process_group("memwall", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_health_timeout_and_configure_of_a_single_rank(alone: None) -> None:
    dist.all_reduce(value := torch.ones(2))
    assert value.tolist() == [1.0, 1.0]
    health = swap_group.group_health()
    assert (health.epoch, health.settling, health.error) == (0, False, None)
    assert [(group.name, group.ranks, group.issued) for group in health.groups] == [("0", (0,), 1)]
    assert swap_group.peer_lost() is None
    swap_group.raise_if_lost()
    group = dist.group.WORLD
    assert isinstance(group, swap_group.SwapGroup)
    assert (group.rank(), group.size(), group.name(), group.group_desc) == (0, 1, "memwall", "default_pg")
    group.set_timeout(timedelta(seconds=7))
    swap_group.configure(5)
    assert swap_group.group_health().epoch == 5
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    dist.barrier()
    swap_group.teardown()
    with pytest.raises(CollectiveError, match=r"group '0' \(ranks 0\): the group is closed\. Call configure"):
        dist.barrier()


def test_options_are_refused_by_name(alone: None) -> None:
    with pytest.raises(ConfigError, match="takes no pg_options, got a Options"):
        dist.new_group([0], pg_options=torch._C._distributed_c10d.Backend.Options("gloo"))
    dist.destroy_process_group()
    with pytest.raises(ConfigError, match="has no group of the backend 'memwall'"):
        swap_group.configure(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="needs 'memwall' as the default group's backend too"):
        dist.new_group([0], backend="memwall")
    assert swap_group.report_failure("nobody is there") is None
    assert swap_group.group_health().epoch == -1


@pytest.mark.skipif(torch.cuda.is_available(), reason="names what is missing without a GPU")
def test_nccl_is_refused_without_a_gpu() -> None:
    swap_group.register_backend(cuda="nccl")
    try:
        with pytest.raises(ConfigError, match="cuda='nccl' needs a GPU"):
            dist.init_process_group("memwall", store=dist.HashStore(), rank=0, world_size=1)
    finally:
        swap_group.register_backend()
    assert not dist.is_initialized() and swap_group.live_groups() == ()


def test_every_collective_of_torch_is_forwarded() -> None:
    """Fails when torch adds a collective to ProcessGroup that a swappable group would not pass on."""
    others = {
        "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "abort", "bound_device_id", "boxed",
        "get_group_store", "group_desc", "group_name", "merge_remote_group", "monitored_barrier", "name", "rank",
        "set_timeout", "shutdown", "size", "split_group", "unbox", "use_pg_for_symm_mem_rendezvous",
    }  # fmt: skip
    public = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")}
    forwarded = {*group_proxy.COLLECTIVES, *group_proxy.POINT_TO_POINT}
    assert public - others <= forwarded
    for name in forwarded & set(dir(dist.ProcessGroup)):
        assert name in vars(swap_group.SwapGroup), name


def test_store_says_whether_this_process_serves_it() -> None:
    """The watch reads TCPStore's repr, which promises nothing."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    assert "server=<nullptr>" in repr(client)
    assert "server=" in repr(server) and "server=<nullptr>" not in repr(server)


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


if __name__ == "__main__":
    _replacement()
