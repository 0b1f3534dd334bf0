"""The account against independent counts, on sharded models: a census of every tensor of the process at rest, and a
walk over FSDP2's internals in the middle of forward and backward."""

from __future__ import annotations

import gc
import time

import torch
import torch.nn.functional as F
from torch import nn

from memwall_strategy.core.block import Kind, Phase
from tests.ranks import process_group, run_ranks

WIDTH, VOCAB = 10, 13  # neither is a multiple of two ranks' padding: 13 rows over 2 ranks are 7 + 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)  # odd
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """A table that is used twice, blocks, a frozen scale and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.bias.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale[0]


class Chain(nn.Module):
    """Layers only: the first unit's inputs need no gradient, the root holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


MODELS = {"tied": Tied, "chain": Chain}


def units_of(model: nn.Module) -> list[nn.Module]:
    return list(model.blocks if isinstance(model, Tied) else model.layers)


def batch_for(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Tied):
        return torch.randint(0, VOCAB, (2, 4), generator=generator)
    return torch.randn(3, 5, generator=generator)


def shard(model: nn.Module, precision: str, mesh) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = {
        "32-true": MixedPrecisionPolicy(),
        "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "bf16-reduced": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }[precision]
    for unit in units_of(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


# -- independent counts --


def census(*exclude: torch.Tensor) -> int:
    """Bytes of every storage in this process that a Python-visible tensor holds, the given ones excluded."""
    gc.collect()
    left_out = {t.untyped_storage().data_ptr() for t in exclude}
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.dtype != torch.int32:  # int32: DeviceMesh's lists of ranks
            storage = getattr(item, "_local_tensor", item).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in left_out:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def internals(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes per kind, by reading FSDP2's attributes one after the other. Each storage once."""
    from memwall_strategy.engine.fsdp import fsdp_states, state_groups

    seen: set[int] = set()
    sizes: dict[str, int] = dict.fromkeys((Kind.PARAM, Kind.GRAD, Kind.BUFFER, Kind.GATHERED, Kind.COMM, "state"), 0)

    def count(kind: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[kind] += storage.nbytes()

    for buffer in model.buffers():
        count(Kind.BUFFER, buffer)
    for state in fsdp_states(model):
        context = state._comm_ctx
        if context.all_gather_state is not None:
            count(Kind.COMM, context.all_gather_state.all_gather_result.all_gather_output)
        for reduction in context.reduce_scatter_states:
            count(Kind.COMM, reduction.reduce_scatter_input)
        for group in state_groups(state):
            if group._all_gather_result is not None:
                count(Kind.COMM, group._all_gather_result.all_gather_output)
            for param in group.fsdp_params:
                count(Kind.PARAM, param._sharded_param_data)
                for output in param.all_gather_outputs:
                    count(Kind.GATHERED, output)
                count(Kind.GRAD, param.sharded_param.grad)
                count(Kind.GRAD, param.unsharded_accumulated_grad)
                if hasattr(param, "_unsharded_param"):
                    count(Kind.GRAD, param._unsharded_param.grad)
    for entries in optimizer.state.values():
        for value in entries.values():
            count("state", value)
    return sizes


def counted(account) -> dict[str, int]:
    live = account.current()
    states = (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.MASTER, Kind.OPTIMIZER)
    sizes = {kind: live[kind] for kind in (Kind.PARAM, Kind.GRAD, Kind.BUFFER, Kind.GATHERED, Kind.COMM)}
    return sizes | {"state": sum(live[kind] for kind in states)}


# -- workers --


CASES = {
    # name: model, precision, micro-batches, gradients kept whole between them, ranks that share the weights
    "one rank": ("tied", "32-true", 1, False, 1),
    "one rank, converted": ("chain", "bf16-mixed", 2, True, 1),
    "two ranks": ("tied", "32-true", 2, False, 2),
    "two ranks, kept whole": ("tied", "bf16-mixed", 2, True, 2),
    "two ranks, reduced in bf16": ("chain", "bf16-reduced", 2, False, 2),
}
STEPS = 2
GLOO_LETS_GO_S = 2.0
"""gloo's thread lets go of a buffer a moment after the collective ended: until then it is held, and counted."""


def follow_all(rank: int, world: int) -> dict:
    """Every case in the same processes; a mesh of one rank stands for a world of one."""
    from torch.distributed.device_mesh import init_device_mesh

    with process_group():
        gc.freeze()  # a census need not look at what the imports made
        meshes = {1: init_device_mesh("cpu", (world, 1), mesh_dim_names=("apart", "alone"))["alone"], world: None}
        meshes[world] = init_device_mesh("cpu", (world,))
        return {
            name: follow_steps(rank, kind, precision, accumulate, whole, meshes[ranks])
            for name, (kind, precision, accumulate, whole, ranks) in CASES.items()
        }


def follow_steps(rank: int, kind: str, precision: str, accumulate: int, whole: bool, mesh) -> dict:
    """Train and compare at every unit's forward and backward and at rest."""
    from memwall_strategy.engine.memory import MemoryAccount

    torch.manual_seed(0)
    model = MODELS[kind]()
    shard(model, precision, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    account = MemoryAccount(deep=True)
    account.attach(model, [optimizer])
    elsewhere = census() - account.device_bytes  # earlier cases' leftovers that are still held
    compared: dict[str, int] = {}
    wrong: list = []

    def compare(where: str) -> None:
        compared[where] = compared.get(where, 0) + 1
        deadline = time.monotonic() + GLOO_LETS_GO_S
        while (expected := internals(model, optimizer)) != (seen := counted(account)):
            if time.monotonic() > deadline:
                wrong.append([where, {k: [v, seen[k]] for k, v in expected.items() if v != seen[k]}])
                return

    def compare_all(where: str, *exclude: torch.Tensor) -> None:
        compare(where)
        held = census(*exclude) - elsewhere
        if held != account.device_bytes:
            wrong.append([f"census {where}", held, account.device_bytes])

    for unit in units_of(model):
        unit.register_forward_pre_hook(lambda *_: compare("before unit"))
        unit.register_forward_hook(lambda *_: compare("after unit"))
        unit.register_full_backward_hook(lambda *_: compare("unit backward"))
    for step in range(STEPS):
        for micro_batch in range(accumulate):
            if whole:
                model.set_requires_gradient_sync(micro_batch == accumulate - 1)
            batch = batch_for(model, 100 * step + 10 * micro_batch + rank)
            account.phase(Phase.FORWARD)
            with account.saved_activations():
                loss = model(batch).float().square().mean()
            is_saved = kind == "tied" or precision == "32-true"  # else a conversion of the batch is
            compare_all("after forward", loss, *([] if is_saved else [batch]))
            account.phase(Phase.BACKWARD)
            loss.backward()
            compare_all("after backward", loss, batch)
            del loss, batch
        account.phase(Phase.STEP)
        optimizer.step()
        compare("after step")
        optimizer.zero_grad()
        account.phase(Phase.IDLE)
        compare_all("at rest")
    account.detach()
    left = {k: v for k, v in account.current().items() if v}
    return {"wrong": wrong[:4], "compared": compared, "left": left, "elsewhere": elsewhere}


def test_every_byte_is_counted_in_every_moment():
    for rank, results in enumerate(run_ranks(follow_all, 2)):
        assert results.keys() == CASES.keys()
        for name, result in results.items():
            where = f"rank {rank}, {name}"
            assert result["wrong"] == [], where
            assert result["left"] == {}, where
            assert result["compared"]["unit backward"] == STEPS * CASES[name][2] * 3, where
