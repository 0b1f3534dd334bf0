"""Memory of a run with paged state as the kernel counts it, and copies that later steps must not change."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.engine.checkpoint.save import ShardedSave
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.pool.arena import LARGE_BYTES, PAGE_BYTES
from memwall_strategy.runtime.checkpoint import Checkpointer
from tests.pool.test_memory_stores import not_forked
from tests.ranks import process_group, run_ranks
from tests.runtime.test_pool_cases import WHERE, batch_of, loss_of, rests, start

# -- what is mapped is what is booked --

ODD = [{"layers": 5, "width": 37}, {"layers": 4, "width": 301}, {"layers": 4, "width": 515}]
"""Small blocks share pages; 301 x 301 floats are a little more than a large block's least; 515 x 515 a power of two and
a bit, which rounding up to powers of two would double."""


def mapped_and_booked(rank: int, world: int, folder: str) -> list[dict[str, int]]:
    found = []
    with process_group():
        for sizes in ODD:
            gc.collect()
            before = not_forked()
            runtime, optimizer = start("host", folder, world, **sizes)
            assert rests(runtime)["device"] == 0
            runtime.step([batch_of(0, sizes["width"])], lambda x, r=runtime: loss_of(r.model, x), optimizer)
            mapped, resident = (b - a for a, b in zip(before, not_forked(), strict=True))
            table = runtime.pool.table
            balance = table.balance(Tier.HOST)
            device = table.capacity_bytes(Tier.DEVICE) // PAGE_BYTES * PAGE_BYTES
            found.append({
                "host": mapped - device, "resident": resident, "slots": table.balance(Tier.DEVICE).held_bytes,
                "held": balance.held_bytes,
                "asked": balance.bytes,
                "state": rests(runtime)["host"],
                "blocks": balance.blocks,
            })  # fmt: skip
            runtime.close()
            del runtime, optimizer, table
            gc.collect()
            assert not_forked() == before
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_the_hosts_bytes_are_those_that_were_booked(world: int, tmp_path: Path) -> None:
    """CASES 3: to the page, for odd sizes (with large blocks: to one a unit). Padding is below 64 bytes a small block
    and 1.6 % of a large one."""
    for results in run_ranks(mapped_and_booked, world, folder=str(tmp_path)):
        assert len(results) == len(ODD)
        for sizes, found in zip(ODD, results, strict=True):
            # A large block starts on a page; a unit's small ones, behind its large ones, leave a part of one.
            pages = sizes["layers"] if 4 * sizes["width"] ** 2 / world >= LARGE_BYTES else 1
            assert 0 <= found["host"] - found["held"] < pages * PAGE_BYTES, (sizes, found)
            assert found["host"] <= found["resident"] <= found["host"] + found["slots"] + PAGE_BYTES
            assert found["asked"] == found["state"] > 0
            padding = found["held"] - found["asked"]
            assert 0 <= padding <= 64 * found["blocks"] + 0.016 * found["asked"], (sizes, found)


# -- copies --


def changed_while_saving(rank: int, world: int, folder: str) -> None:
    """Save in the background, change everything before a byte is written, and load what was saved."""
    write = ShardedSave._write
    with process_group():
        for where in WHERE:
            hold = threading.Event()
            ShardedSave._write = lambda self, hold=hold: (hold.wait(20), write(self))[1]
            path = Path(folder) / f"of {where}"
            try:
                runtime, optimizer = start(where, folder, world)
                train(runtime, optimizer, 2)
                wanted = contents(runtime, optimizer)
                with Checkpointer(runtime.model, [optimizer], asynchronous=True) as checkpointer:
                    checkpointer.save(path, {}, 2)
                    train(runtime, optimizer, 2)
                    with torch.no_grad():
                        for parameter in runtime.model.parameters():
                            local_tensor(parameter).fill_(float("nan"))
                    assert not path.exists()
                    hold.set()
                runtime.close()
            finally:
                ShardedSave._write = write
            runtime, optimizer = start("device", folder, world)
            with Checkpointer(runtime.model, [optimizer]) as checkpointer:
                checkpointer.load(path)
            found = contents(runtime, optimizer)
            assert found.keys() == wanted.keys() and len(found) == 4 * len(list(runtime.model.parameters()))
            for name, value in wanted.items():
                assert torch.equal(found[name], value), (where, name)
            runtime.close()


def train(runtime: Any, optimizer: Any, steps: int) -> None:
    for number in range(steps):
        runtime.step([batch_of(number)], lambda x: loss_of(runtime.model, x), optimizer)


def contents(runtime: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and state of this rank, copied."""
    names = [name for name, _ in runtime.model.named_parameters()]
    found = {name: local_tensor(p).detach().clone() for name, p in runtime.model.named_parameters()}
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{names[number]} {key}": local_tensor(value).clone() for key, value in entries.items()}
    return found


def on_two_nodes(rank: int, world: int, folder: str) -> list[set[str]]:
    """State and gradients where the machine's memory has two unequal parts, neither of which holds all."""
    from memwall_strategy.pool import host as host_module
    from memwall_strategy.pool.numa import Node

    host_module.nodes = lambda: [Node(0, 3 << 30), Node(1, 2 << 30)]
    host_module.bind, host_module.why_unbound = (lambda *_: None), lambda _: ""
    found = []
    with process_group():
        for sizes in (*ODD, {"layers": 7, "width": 131}):
            for gradients in ("device", "host"):
                runtime, optimizer = start("host", folder, world, gradients=gradients, **sizes)
                batches = [batch_of(number, sizes["width"]) for number in range(2)]
                runtime.step(batches, lambda x, r=runtime: loss_of(r.model, x), optimizer)
                found.append(sorted({p.arena for _, p in runtime.pool.table if p.tier is Tier.HOST}))
                runtime.pool.table.check()
                runtime.close()
    return found


def test_a_unit_finds_room_in_one_piece_on_every_node(tmp_path: Path) -> None:
    """One arena for each NUMA node, and what lies in one piece does not straddle two."""
    (found,) = run_ranks(on_two_nodes, 1, folder=str(tmp_path))
    assert len(found) == 2 * (len(ODD) + 1) and ["node0", "node1"] in found


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_in_flight_holds_what_was_there(world: int, tmp_path: Path) -> None:
    """CASES 10: weights, and state on the device, on the host and on disk."""
    run_ranks(changed_while_saving, world, folder=str(tmp_path))


def sums_on_the_host(rank: int, world: int, folder: str) -> None:
    """Gradients that come back from the host are no views of the host's memory, and those that went left none."""
    from memwall_strategy.config import MemwallConfig, PoolConfig
    from memwall_strategy.engine.sharding import data_parallel_mesh
    from memwall_strategy.runtime import Runtime
    from tests.runtime.test_pool_cases import Net

    with process_group():
        runtime = Runtime(MemwallConfig(pool=PoolConfig(gradients="host")), mesh=data_parallel_mesh("cpu", world, 1))
        model = runtime.setup(Net())
        runtime.add_optimizers([torch.optim.SGD(model.parameters(), lr=0.1)])
        table, store = runtime.pool.table, runtime.pool.stores[Tier.HOST]
        runtime.begin_step()
        for last in (False, True):
            with runtime.micro_batch(last=last):
                loss_of(model, batch_of(int(last))).backward()
        runtime.gradients_ready()
        homes = {b: store.bytes_of(p) for b, p in table if p.tier is Tier.HOST and b.kind is Kind.GRAD}
        gradients = [local_tensor(p.grad) for p in model.parameters()]
        assert len(homes) == len(gradients) > 0
        before = {b: memory.clone() for b, memory in homes.items()}
        for gradient in gradients:
            gradient.fill_(7.0)
        assert all(torch.equal(memory, before[b]) for b, memory in homes.items())
        for memory in homes.values():
            memory.zero_()
        assert all(bool((gradient == 7.0).all()) for gradient in gradients)
        runtime.abort_step(None)
        runtime.close()


def test_gradients_on_the_host_share_no_memory_with_those_on_the_device(tmp_path: Path) -> None:
    """CASES 10, of gradients: on CPU both are host memory, and every byte is copied all the same."""
    run_ranks(sums_on_the_host, 2, folder=str(tmp_path))


# -- memory of a step --

LAYERS = 14
MATRIX_BYTES = 2 << 20
UNITS = 5
"""State of so many units, at most, beside what rests: two slots, one that torch makes in a unit's first step, and as
much as that again for the arithmetic's temporaries and for what is gathered."""


def rise_in_steps(rank: int, world: int, folder: str) -> list[dict[str, int]]:
    """Of resident memory, in each of the first steps, over what was there before it."""
    found = []
    with process_group():
        width = int((MATRIX_BYTES // 4) ** 0.5) - 1
        for where in ("host", "disk"):
            runtime, optimizer = start(where, folder, world, layers=LAYERS, width=width)
            for number in range(3):
                gc.collect()
                Path("/proc/self/clear_refs").write_text("5")
                before = peak_bytes()
                runtime.step([batch_of(number, width)], lambda x, r=runtime: loss_of(r.model, x), optimizer)
                found.append({"rise": peak_bytes() - before, "state": rests(runtime)[where]})
            found[-1]["gradients"] = weights_bytes(runtime.model)
            runtime.close()
    return found


def test_the_first_step_takes_no_more_than_the_others(tmp_path: Path) -> None:
    """CASES 2: gradients and the state of a few units; the whole state was booked at set-up."""
    (found,) = run_ranks(rise_in_steps, 1, folder=str(tmp_path), env=MALLOC)
    gradients, state = found[2]["gradients"], found[0]["state"]
    assert len(found) == 6 and state > UNITS * 2 * MATRIX_BYTES + 2 * SLACK_BYTES, "a step that held it all would show"
    for step in found:
        assert step["rise"] < gradients + UNITS * 2 * MATRIX_BYTES + SLACK_BYTES, found


# -- memory of saving --

BLOCK_BYTES = 4 << 20
"""Of a rank's part of one tensor."""
BLOCKS = 6
SLACK_BYTES = 6 << 20
"""Python, the index, file buffers."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def rise_while_saving(rank: int, world: int, folder: str) -> dict[str, dict[str, int]]:
    found = {}
    with process_group():
        width = int((world * BLOCK_BYTES // 4) ** 0.5) - 1
        for where in WHERE:
            runtime, optimizer = start(where, folder, world, layers=BLOCKS, width=width)
            runtime.step([batch_of(0, width)], lambda x, r=runtime: loss_of(r.model, x), optimizer)
            state = rests(runtime)
            for background in (False, True):
                with Checkpointer(nn.Linear(2, 2)) as warm:
                    warm.save(Path(folder) / f"warm {rank}" if world == 1 else Path(folder) / "warm")
                gc.collect()
                Path("/proc/self/clear_refs").write_text("5")  # a new peak of resident memory
                before = peak_bytes()
                with Checkpointer(runtime.model, [optimizer], asynchronous=background) as checkpointer:
                    checkpointer.save(Path(folder) / "large", {}, 1)
                found[f"{where}{' background' * background}"] = {
                    "rise": peak_bytes() - before, "state": state[where], "weights": weights_bytes(runtime.model),
                }  # fmt: skip
            runtime.close()
            del runtime, optimizer
    return found


def weights_bytes(model: nn.Module) -> int:
    return sum(local_tensor(p).nbytes for p in model.parameters())


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize("world", [1, 2])
def test_saving_adds_one_block_wherever_the_state_rests(world: int, tmp_path: Path) -> None:
    """CASES 12: the bound that ``runtime.checkpoint`` states. Per rank; the state and the number of ranks do not count.
    In the background it is the rank's own shards, once."""
    for results in run_ranks(rise_while_saving, world, folder=str(tmp_path), env=MALLOC):
        assert len(results) == 2 * len(WHERE)
        for name, found in results.items():
            assert found["state"] > 1.8 * BLOCKS * BLOCK_BYTES, "twelve times the bound"
            once = found["state"] + found["weights"] if "background" in name else 0
            assert found["rise"] < once + BLOCK_BYTES + SLACK_BYTES, (name, found)
