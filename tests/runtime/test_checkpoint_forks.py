"""Checkpoints of two ranks that are measured, or killed: each in a fork, which starts without importing torch again."""

from __future__ import annotations

import gc
import json
import os
import resource
import threading
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.runtime.checkpoint import Checkpointer, find_last, tidy, verify
from tests.ranks import run_ranks

# -- memory --

BLOCK_BYTES = 8 << 20
BLOCKS = 8
SLACK_BYTES = 6 << 20  # Python, the index, file buffers
# Large blocks go back to the system when freed: glibc would otherwise keep some, and the peak would depend on its mood.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(base: Path, rank: int, world: int, what: str) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (world,))
    columns = 1021
    rows = BLOCK_BYTES * world // (4 * columns) - 1  # uneven: the last rank's shard is a view of a padded buffer
    model = nn.ModuleList([nn.Linear(columns, rows, bias=False, device="meta") for _ in range(BLOCKS)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm = Checkpointer(nn.Linear(2, 2))
    warm.save(base / "warm" / str(rank))
    warm.load(base / "warm" / str(rank))
    if what != "load":
        for parameter in model.parameters():
            optimizer.state[parameter] = {"momentum_buffer": torch.ones_like(parameter.detach())}
    gc.collect()
    before = peak_bytes()
    with Checkpointer(model, [optimizer], asynchronous=what == "save in the background") as checkpointer:
        if what == "load":
            checkpointer.load(base / "c")
        else:
            checkpointer.save(base / "c")
    return {"rise": peak_bytes() - before, "weights": sum(p.to_local().nbytes for p in model.parameters())}


def test_memory_of_saving_and_loading_is_bounded_by_one_block(forked):
    for rank in forked[1]:
        print(rank["memory"])
        save, load, background = (rank["memory"][what] for what in MEASURED)
        assert save["rise"] < BLOCK_BYTES + SLACK_BYTES
        assert load["rise"] < load["weights"] + BLOCK_BYTES + SLACK_BYTES  # the momentum had to be allocated
        assert background["rise"] < 2 * background["weights"] + SLACK_BYTES  # weights and momentum, once


# -- kill -9 at random moments --

SEEDS = 6


def save_until_killed(base: Path, rank: int, world: int, seed: int) -> None:
    """Save under one name in a loop, until one or both ranks are killed in the middle."""
    chance = torch.Generator().manual_seed(seed)
    victims = [(0,), (1,), (0, 1)][seed % 3]
    delay_s = 0.02 + 0.3 * torch.rand((), generator=chance).item()
    model = nn.Sequential(nn.Linear(301, 211), nn.Linear(211, 103))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    checkpointer = Checkpointer(model, asynchronous=seed % 2 == 1, timeout_s=10)
    for step in range(1000):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(float(step))
        checkpointer.save(base / "c", {"step": step}, step)
        if step == 1:
            checkpointer.wait()
            if rank in victims:
                threading.Timer(delay_s, os.kill, (os.getpid(), 9)).start()


def test_killed_at_any_moment_the_last_whole_checkpoint_is_of_one_step(forked):
    folder, ranks = forked
    for seed in range(SEEDS):
        codes = {rank["killed"][seed] for rank in ranks}
        assert codes <= {-9, LOST_THE_OTHER} and -9 in codes
        base = folder / f"killed-{seed}"
        tidy(base)  # as the next run does: whoever was killed while it cleaned up left a partial folder
        assert [entry.name for entry in base.iterdir()] == ["c"]
        found = find_last(base)
        marker = verify(found).marker
        model = nn.Sequential(nn.Linear(301, 211), nn.Linear(211, 103))
        for path in (found, base / "c"):
            step = Checkpointer(model).load(path)["step"]
            assert step == marker.step >= 1
            assert all((parameter == step).all() for parameter in model.parameters())
        Checkpointer(model).save(base / "c")
        assert [entry.name for entry in base.iterdir()] == ["c"]


# -- pairs of processes that start without importing torch again --

MEASURED = ("save", "load", "save in the background")
LOST_THE_OTHER = 3


def fork_pairs(rank: int, world: int, folder: str) -> dict[str, object]:
    memory = {what: in_child(Path(folder), "measured", rank, world, measure, what)[1] for what in MEASURED}
    killed = [in_child(Path(folder), f"killed-{n}", rank, world, save_until_killed, n)[0] for n in range(SEEDS)]
    return {"memory": memory, "killed": killed}


def in_child(base: Path, name: str, rank: int, world: int, run, argument) -> tuple[int, object]:
    """Run a function in a fork of this process, in a group with its like; return exit code and result."""
    result = base / f"{name}-{argument}-{rank}.json"
    (base / name).mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store = f"file://{base}/{name}-{argument}.store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
            result.write_text(json.dumps(run(base / name, rank, world, argument)))
            code = 0
        except CheckpointError as error:
            print(error, flush=True)
            code = LOST_THE_OTHER
        finally:
            traceback.print_exc()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(result.read_text()) if result.exists() else None


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forked")
    return folder, run_ranks(fork_pairs, 2, folder=str(folder), env=MALLOC)
