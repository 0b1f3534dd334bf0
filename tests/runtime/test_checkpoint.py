"""Checkpoints of several ranks: other world sizes, failures on one rank, the background, memory."""

from __future__ import annotations

import hashlib
import resource
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.save import ShardedSave
from memwall_strategy.runtime.checkpoint import Checkpointer, consolidate, model_state, verify
from tests.ranks import process_group, run_ranks

STEPS = 2
FOLDERS = ("sharded", "full.ckpt", "plain")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.frozen = nn.Parameter(torch.randn(1), requires_grad=False)  # one element: empty on all ranks but the first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.frozen


class Lm(nn.Module):
    """Tied embedding, odd sizes, a plain parameter outside the sharding, a running buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.plain = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embedding(tokens) * self.plain
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def build(mesh=None, seed: int = 0):
    torch.manual_seed(seed)
    model = Lm()
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        # not resharded after forward: the state must be the sharded one all the same
        fully_shard(model, mesh=mesh, ignored_params={model.plain}, reshard_after_forward=False)
    return model, [
        torch.optim.AdamW([p for p in model.blocks.parameters() if p.requires_grad], lr=0.01),
        torch.optim.SGD([model.embedding.weight, model.plain], lr=0.01, momentum=0.9),
    ]


def train(model, optimizers, count: int, start: int) -> list[float]:
    losses = []
    for step in range(start, start + count):
        tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(step))
        loss = model(tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def digest(model, optimizers) -> str:
    """A hash of every value of model and optimizers, whole; collective."""
    seen = hashlib.sha256()
    values = {f"model {name}": value for name, value in model_state(model).items()}
    for i, optimizer in enumerate(optimizers):
        names = {p: n for n, p in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            values |= {f"{i} {names[parameter]} {key}": value for key, value in state.items()}
        seen.update(repr([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]).encode())
    for name in sorted(values):
        value = values[name]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        seen.update(name.encode() + str(whole.dtype).encode() + whole.detach().contiguous().numpy().tobytes())
    return seen.hexdigest()


def resume(path, mesh=None, group=None) -> dict[str, object]:
    """Load into another model and say what came of it."""
    model, optimizers = build(mesh, seed=1)
    train(model, optimizers, 1, start=9)
    with Checkpointer(model, optimizers, process_group=group) as checkpointer:
        extra = checkpointer.load(path)
    loaded = digest(model, optimizers)
    return {"extra": extra, "digest": loaded, "losses": train(model, optimizers, 2, start=STEPS)}


# -- saved with two ranks, loaded with 1, 3, 4, sharded or not --


def write_with_two(rank: int, world: int, folder: str) -> dict[str, object]:
    base = Path(folder)
    with process_group():
        mesh = init_device_mesh("cpu", (world,))
        model, optimizers = build(mesh)
        train(model, optimizers, STEPS, start=0)
        with Checkpointer(model, optimizers) as checkpointer:
            with torch.no_grad():
                model(torch.zeros(1, 3, dtype=torch.int64))  # leaves the root gathered
            checkpointer.save(base / "sharded", {"epoch": 3}, STEPS)
            checkpointer.save_full(base / "full.ckpt", {"epoch": 3}, STEPS)
            checkpointer.export_safetensors(base / "weights.safetensors")
        result = {"digest": digest(model, optimizers), "losses": train(model, optimizers, 2, start=STEPS)}
        result["from_plain"] = resume(base / "plain", mesh)
        odd_state(mesh, base / "odd", save=True)
        return result


def read_with_up_to_four(rank: int, world: int, folder: str) -> dict[str, object]:
    """Load with 1, 3 and 4 ranks; the four as two replicas of two shards."""
    base, results = Path(folder), {}
    with process_group():
        for size in (1, 3):
            mesh, group = DeviceMesh("cpu", list(range(size))), dist.new_group(list(range(size)))
            if rank < size:
                results[str(size)] = {name: resume(base / name, mesh, group) for name in FOLDERS}
                if size == 3:
                    results["odd"] = odd_state(mesh, base / "odd", save=False, group=group)
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        results["4"] = {name: resume(base / name, hybrid) for name in FOLDERS}
        model, optimizers = build(hybrid, seed=1)
        with Checkpointer(model, optimizers) as checkpointer:
            checkpointer.load(base / "sharded")
            checkpointer.save(base / "hybrid", {"epoch": 3}, STEPS)
        results["4"]["hybrid"] = resume(base / "hybrid", hybrid)
        return results


def odd_state(mesh, path, *, save: bool, group=None) -> list[object] | None:
    """Optimizer state of other shapes than its parameter, spread over ranks in every way."""
    model = nn.Linear(5, 7)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if save:
        mine = torch.full((3,), dist.get_rank() + 1.0)
        optimizer.state[model.weight] = {
            "rows": distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.arange(5.0), mesh, [Replicate()]),
            "sum": DTensor.from_local(mine, mesh, [Partial()]),
            "number": 3,
            "past": [torch.ones(2) * 4, None],
        }
    with Checkpointer(model, [optimizer], process_group=group) as checkpointer:
        if save:
            checkpointer.save(path)
            return None
        checkpointer.load(path)
    state = optimizer.state[model.weight]
    kinds = [str(state[key].placements) for key in ("rows", "columns", "sum")]
    whole = [state[key].full_tensor().tolist() for key in ("rows", "columns", "sum")]
    return [kinds, whole, state["number"], state["past"][0].full_tensor().tolist(), state["past"][1]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model, optimizers = build()
    train(model, optimizers, STEPS, start=0)
    Checkpointer(model, optimizers).save(folder / "plain", {"epoch": 3}, STEPS)
    plain = {"digest": digest(model, optimizers), "losses": train(model, optimizers, 2, start=STEPS)}
    two = run_ranks(write_with_two, 2, folder=str(folder))
    assert two[0] == two[1]
    return folder, plain, two[0]


def check_resumed(result, expected, which: str = "") -> None:
    assert result["extra"]["epoch"] == 3, which
    assert result["digest"] == expected["digest"], which
    assert result["losses"][0] == expected["losses"][0], which  # the same weights: the same loss to the last bit
    # gradients are averaged in another order
    assert result["losses"][1] == pytest.approx(expected["losses"][1], rel=1e-6), which


def test_unsharded_to_two_ranks(saved):
    _, plain, two = saved
    check_resumed(two["from_plain"], plain)


def test_two_ranks_to_other_world_sizes(saved):
    folder, plain, two = saved
    ranks = run_ranks(read_with_up_to_four, 4, folder=str(folder))
    assert [sorted(results) for results in ranks] == [["1", "3", "4", "odd"], *[["3", "4", "odd"]] * 2, ["4"]]
    for results in ranks:
        odd = results.pop("odd", None)
        for world, by_name in results.items():
            for name, resumed in by_name.items():
                check_resumed(resumed, plain if name == "plain" else two, f"{name} with {world}")
        if odd is not None:
            kinds, whole, number, past, nothing = odd
            assert kinds == ["(Shard(dim=0),)", "(Replicate(),)", "(Replicate(),)"]
            assert whole == [list(range(7)), list(range(5)), [3.0] * 3]
            assert number == 3 and past == [4.0, 4.0] and nothing is None
    # replicas are written once
    sizes = [sum(file.stat().st_size for file in (folder / n).glob("*.distcp")) for n in ("hybrid", "sharded")]
    assert len(list((folder / "hybrid").glob("*.distcp"))) == 4 and sizes[0] < 1.3 * sizes[1]


def test_two_ranks_to_a_plain_model_without_a_group(saved, tmp_path):
    folder, _, two = saved
    consolidate(folder / "sharded", tmp_path / "one.ckpt")
    consolidate(folder / "sharded", tmp_path / "w.safetensors")
    for path in (folder / "sharded", folder / "full.ckpt", tmp_path / "one.ckpt"):
        check_resumed(resume(path), two)
    assert (tmp_path / "w.safetensors").read_bytes() == (folder / "weights.safetensors").read_bytes()
    ordinary = torch.load(tmp_path / "one.ckpt", weights_only=True)
    model, optimizers = build(seed=1)
    model.load_state_dict(ordinary["state_dict"], strict=True)
    for optimizer, state in zip(optimizers, ordinary["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    assert digest(model, optimizers) == two["digest"]


# -- one rank fails, the background, generators --


def fail_and_recover(base: Path, rank: int, mesh) -> dict[str, object]:
    seen: dict[str, object] = {}
    model, optimizers = build(mesh)
    checkpointer = Checkpointer(model, optimizers, timeout_s=30)

    torch.manual_seed(rank)
    checkpointer.save(base / "c", {"step": 0}, 0)  # before the first step
    drawn = torch.rand(3).tolist()
    train(model, optimizers, 1, start=0)
    checkpointer.load(base / "c")
    seen["states"] = [len(optimizer.state) for optimizer in optimizers]
    seen["generators"] = [drawn, torch.rand(3).tolist()]

    train(model, optimizers, 1, start=0)
    checkpointer.save(base / "c", {"step": 1}, 1)
    seen["digest"] = digest(model, optimizers)
    train(model, optimizers, 1, start=1)
    with disk_full_on(1, rank):
        seen["full disk"] = error_of(lambda: checkpointer.save(base / "c", {"step": 2}, 2))
    seen["left"] = sorted(entry.name for entry in base.iterdir())
    torch.distributed.barrier()  # the next save makes its folder

    model.extra = nn.Parameter(torch.zeros(2)) if rank == 1 else None
    seen["other names"] = error_of(lambda: checkpointer.save(base / "c", {"step": 2}, 2))
    del model.extra
    seen["unpicklable"] = error_of(lambda: checkpointer.save(base / "c", {"odd": lambda: None}, 2))
    model.seen = torch.zeros(3 if rank == 1 else ())
    seen["shape on one rank"] = error_of(lambda: checkpointer.load(base / "c"))
    model.seen = torch.zeros((), dtype=torch.int64)

    checkpointer.load(base / "c")
    seen["digest after"] = digest(model, optimizers)
    checkpointer.close()
    checkpointer.close()
    seen["closed"] = error_of(lambda: checkpointer.save(base / "c"))
    return seen


class disk_full_on:
    """Let a rank's files grow no further than a few bytes, as a full disk would."""

    def __init__(self, full: int, rank: int) -> None:
        self.full = full == rank

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def error_of(run) -> str | None:
    try:
        run()
    except CheckpointError as error:
        return str(error)
    return None


def two_ranks_in_trouble(rank: int, world: int, folder: str) -> dict[str, object]:
    with process_group():
        mesh = init_device_mesh("cpu", (world,))
        return {run.__name__: run(Path(folder) / run.__name__, rank, mesh) for run in TROUBLES}


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trouble")
    return folder, run_ranks(two_ranks_in_trouble, 2, folder=str(folder))


def test_a_failure_on_one_rank_is_everyones_and_the_old_checkpoint_stands(trouble):
    folder, ranks = trouble
    first, second = (seen["fail_and_recover"] for seen in ranks)
    for seen in (first, second):
        assert seen["states"] == [0, 0]
        assert seen["generators"][0] == seen["generators"][1]
        assert "failed on rank 1" in seen["full disk"] and "File too large" in seen["full disk"]
        assert seen["left"] == ["c"]
        assert "rank 1 holds tensors of other names" in seen["other names"]
        assert "failed on rank 0" in seen["unpicklable"] and "lambda" in seen["unpicklable"]
        assert "failed on rank 1" in seen["shape on one rank"] and "seen is () there" in seen["shape on one rank"]
        assert seen["digest after"] == seen["digest"]
        assert "closed" in seen["closed"]
        for key in ("full disk", "other names", "unpicklable", "shape on one rank"):
            assert first[key] == second[key]
    assert first["generators"] != second["generators"]
    assert verify(folder / "fail_and_recover" / "c").marker.step == 1


def save_in_the_background(base: Path, rank: int, mesh) -> dict[str, object]:
    seen: dict[str, object] = {}
    model, optimizers = build(mesh)
    train(model, optimizers, 1, start=0)
    checkpointer = Checkpointer(model, optimizers, asynchronous=True, timeout_s=30)
    checkpointer.save(base / "old", {}, 0)
    checkpointer.wait()

    hold, write = threading.Event(), ShardedSave._write
    ShardedSave._write = lambda self: (hold.wait(20), write(self))[1]
    seen["digest"] = digest(model, optimizers)
    extra = {"callback": torch.ones(2)}
    checkpointer.save(base / "a", extra, 1)
    train(model, optimizers, 1, start=1)  # collectives and values of training, while the save is under way
    extra["callback"].zero_()
    with torch.no_grad():
        for tensor in model_state(model).values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    checkpointer.remove(base / "old")
    seen["while writing"] = [(base / "a").exists(), (base / "old").exists()]
    hold.set()
    checkpointer.save(base / "b", {}, 2)  # waits for the first
    seen["at the next"] = [(base / "a").exists(), (base / "old").exists() if rank == 0 else False]
    checkpointer.wait()
    ShardedSave._write = write

    seen["extra"] = checkpointer.load(base / "a")["callback"].tolist()
    seen["digest after"] = digest(model, optimizers)
    with disk_full_on(1, rank):
        checkpointer.save(base / "b", {}, 3)
        seen["later"] = error_of(lambda: checkpointer.save(base / "c", {}, 4))
    seen["then"] = error_of(lambda: checkpointer.save(base / "c", {}, 4))
    checkpointer.wait()
    with disk_full_on(1, rank):
        checkpointer.save(base / "b", {}, 5)
        seen["at close"] = error_of(checkpointer.close)
    seen["threads"] = [t.name for t in threading.enumerate() if "checkpoint" in t.name]
    return seen


def test_the_background_holds_the_old_values_and_reports_at_the_next_call(trouble):
    folder, ranks = trouble
    for seen in (rank["save_in_the_background"] for rank in ranks):
        assert seen["while writing"] == [False, True] and seen["at the next"] == [True, False]
        assert seen["digest after"] == seen["digest"] and seen["extra"] == [1.0, 1.0]
        assert "failed on rank 1" in seen["later"] and seen["then"] is None
        assert "failed on rank 1" in seen["at close"] and seen["threads"] == []
    folder /= "save_in_the_background"
    assert sorted(entry.name for entry in folder.iterdir()) == ["a", "b", "c"]
    assert [verify(folder / name).marker.step for name in "abc"] == [1, 2, 4]


TROUBLES = (fail_and_recover, save_in_the_background)
