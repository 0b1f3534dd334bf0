"""The swappable group while all is well: everything comes out as with gloo."""

from __future__ import annotations

import os
import pathlib
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from memwall_strategy.core.errors import CollectiveError, ConfigError
from memwall_strategy.engine import group_proxy, swap_group
from tests.ranks import free_port, run_ranks

PATIENCE = timedelta(seconds=60)


# -- workers: all is well --


def open_store(rank: int, world: int) -> dist.Store:
    """The job's store, kept over several default groups of one process."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=PATIENCE)


def join_group(backend: str, store: dist.Store, rank: int, world: int) -> None:
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


def sharded_model(mesh: dist.DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(_Block(8), _Block(8), nn.Linear(8, 4))
    for block in list(model)[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(mesh_shape: tuple[int, ...], rank: int, folder: str | None = None) -> list[float]:
    """Losses and gradient norms of three FSDP2 steps; with a folder, also of one more after a DCP save and load."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    model = sharded_model(mesh)
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
    store = open_store(rank, world)
    found, trained, names = {}, {}, {}
    for name, backend in (("gloo", "gloo"), ("first", "memwall"), ("second", "cpu:memwall")):
        # One prefix for both sessions of memwall: the second must not read what the first left in the store.
        join_group(backend, dist.PrefixStore(backend[-4:], store), rank, world)
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
    store, numbers = open_store(rank, world), []
    for backend in ("gloo", "memwall"):
        join_group(backend, dist.PrefixStore(backend, store), rank, world)
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
