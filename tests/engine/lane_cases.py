"""Small models, and one run of each on stock FSDP2 and on lanes, for the engine's tests on ranks.

Stock is the same model sharded by ``shard_model`` without ``FsdpLanes``. On the lanes, every buffer starts as NaN and
every transfer starts late by a random moment, so that what is read too early, or never written, shows.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from memwall_strategy.core.lane import Lane
from memwall_strategy.engine import lanes as lanes_module
from memwall_strategy.engine import reducer as reducer_module
from memwall_strategy.engine.fsdp import local_tensor
from memwall_strategy.engine.inference import gather_outside_inference_mode
from memwall_strategy.engine.lanes import FsdpLanes
from memwall_strategy.engine.sharding import data_parallel_mesh, set_prefetch, shard_model
from memwall_strategy.engine.shared_ring import Lease, SharedRing
from tests.lightning.checks import Here

TIMEOUT_S = 30.0
LONGEST_DELAY_S = 0.002

# -- where --


def join(here: Here) -> None:
    """The default process group, made once for all checks of these ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def mesh_of(here: Here, layout: str) -> DeviceMesh | None:
    """``"3"``: sharded over the first three ranks, None on the others; ``"2x2"``: two replicas of two shards."""
    join(here)
    meshes = here.kept.setdefault("meshes", {})
    if layout not in meshes:
        if layout == f"{here.world}":
            meshes[layout] = data_parallel_mesh("cpu", here.world, 1)
        elif "x" in layout:
            meshes[layout] = data_parallel_mesh("cpu", here.world, int(layout.partition("x")[0]))
        else:
            meshes[layout] = DeviceMesh("cpu", list(range(int(layout))), mesh_dim_names=("shard",))
    members = here.world if "x" in layout else int(layout)
    return meshes[layout] if here.rank < members else None


# -- models --


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A transformer block; ``again`` runs it through torch's recompute."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.again = False

    def body(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x):
        if self.again:
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


class GPT(nn.Module):
    """Sizes divide by no number of ranks; ``order`` reorders the blocks."""

    VOCAB, LENGTH = 29, 6

    def __init__(self, layers: int = 3, width: int = 10, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCAB, width)
        self.position = nn.Parameter(torch.randn(self.LENGTH, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.order = list(range(layers))
        self.around = False

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for i in self.order:
            block = self.blocks[i]
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return self.head(self.norm(x))

    def batch(self, seed: int, size: int = 2):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.VOCAB, (size, self.LENGTH), generator=generator)

    def loss(self, tokens):
        return F.cross_entropy(self(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class ConvBlock(nn.Module):
    def __init__(self, channels: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), norm(channels)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


class Conv(nn.Module):
    def __init__(self, channels: int = 5, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3)
        self.blocks = nn.Sequential(ConvBlock(channels, norm), ConvBlock(channels, norm))
        self.head = nn.Linear(channels, 7)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))

    def batch(self, seed: int, size: int = 2):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 7, (size,), generator=generator)

    def loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self(images).float(), labels)


class Layer(nn.Module):
    """A gain of shape (1,), rows that no world size divides, a branch taken on demand, and one never taken."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.linear = nn.Linear(width, width)
        self.branch = nn.Linear(width, width)
        self.never = nn.Linear(width, 3)

    def forward(self, x, branch: bool):
        y = torch.tanh(self.linear(x)) * self.gain
        return x + y + (self.branch(x) if branch else 0.0)


class MLP(nn.Module):
    """``branch`` says which layers take their branch; ``skip`` which are left out altogether."""

    def __init__(self, width: int = 5, layers: int = 3) -> None:
        super().__init__()
        self.start = nn.Linear(4, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.end = nn.Linear(width, 3)
        self.branch: set[int] = set()
        self.skip: set[int] = set()

    def forward(self, x):
        x = self.start(x)
        for i, layer in enumerate(self.layers):
            if i not in self.skip:
                x = layer(x, i in self.branch)
        return self.end(x)

    def batch(self, seed: int, size: int = 2):
        return torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))

    def loss(self, x):
        return self(x).square().mean()


def frozen_gpt() -> GPT:
    """A whole unit frozen, parts of another, and of the root."""
    model = GPT()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].attention.requires_grad_(False)
    model.embed.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "tied": lambda: GPT(tied=True),
    "frozen": frozen_gpt,
    "conv": Conv,
    "mlp": MLP,
}


# -- one run --


@contextlib.contextmanager
def rough_lanes(seed: int, longest_delay_s: float = LONGEST_DELAY_S) -> Iterator[None]:
    """Buffers of the lanes start as NaN, transfers start late."""
    noise = random.Random(seed)
    submit, new_empty, reserve = Lane.submit, torch.Tensor.new_empty, SharedRing.reserve

    def late(self: Lane, fn: Callable[[], object], **named: Any):
        delay_s = noise.random() * longest_delay_s

        def run() -> None:
            time.sleep(delay_s)
            fn()

        return submit(self, run, **named)

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    def reserve_poisoned(self: SharedRing, *args: Any) -> Lease | None:
        lease = reserve(self, *args)
        if lease is not None:  # the others may have written theirs already
            part = lease.slot.bytes.view(self._group.world, -1)[self._group.rank] if self.divided else None
            if part is None:
                mine = lease.nbytes // self._group.world
                part = lease.slot.bytes[self._group.rank * mine : (self._group.rank + 1) * mine]
            part.fill_(0xFF)  # NaN in every floating-point format
        return lease

    class Torch:
        """torch as the modules under test see it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*args: Any, **named: Any) -> torch.Tensor:
            return poison(torch.empty(*args, **named))

    with (
        mock.patch.object(Lane, "submit", late),
        mock.patch.object(SharedRing, "reserve", reserve_poisoned),
        mock.patch.object(lanes_module, "torch", Torch()),
        mock.patch.object(reducer_module, "torch", Torch()),
        mock.patch.object(torch.Tensor, "new_empty", lambda self, *a, **k: poison(new_empty(self, *a, **k))),
    ):
        yield


@contextlib.contextmanager
def sharded(
    make: Callable[[], nn.Module],
    mesh: DeviceMesh,
    *,
    lanes: bool = True,
    precision: str = "32-true",
    prefetch: int = 1,
    reduce_buffers: int = 2,
    unit_classes: tuple[str, ...] = (),
    split: bool = False,
    longest_delay_s: float = LONGEST_DELAY_S,
    account: Any = None,
    early: bool = False,
    shared_memory: bool | str = "auto",
) -> Iterator[tuple[nn.Module, FsdpLanes | None]]:
    """A fresh model, the same on every rank, on lanes or on stock FSDP2."""
    torch.manual_seed(11)
    model = make()
    shard_model(model, mesh, precision=precision, unit_classes=unit_classes, split=split)
    gather_outside_inference_mode(model)
    if not lanes:
        yield model, None
        return
    set_prefetch(model, prefetch)
    with rough_lanes(dist.get_rank(), longest_delay_s):
        found = FsdpLanes(
            model, prefetch=prefetch, reduce_buffers=reduce_buffers, timeout_s=TIMEOUT_S, account=account, early=early,
            shared_memory=shared_memory,
        )  # fmt: skip
        try:
            yield model, found
        finally:
            found.close()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of this rank's gradients."""
    return {
        name: None if p.grad is None else local_tensor(p.grad).detach().clone() for name, p in model.named_parameters()
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of this rank's weights."""
    return {name: local_tensor(p).detach().clone() for name, p in model.named_parameters()}


def hold(lanes: FsdpLanes | None) -> contextlib.AbstractContextManager:
    """``lanes.reducer.hold()``; nothing on stock FSDP2."""
    return contextlib.nullcontext() if lanes is None else lanes.reducer.hold()


def finish(lanes: FsdpLanes | None) -> None:
    """``lanes.reducer.finish()``; nothing on stock FSDP2."""
    if lanes is not None:
        lanes.reducer.finish()


def both(
    make: Callable[[], nn.Module], mesh: DeviceMesh | None, run: Callable[[nn.Module, FsdpLanes | None], Any], **options
) -> Any:
    """Run on stock FSDP2 and on lanes, and demand the same result bit by bit; return it.

    With more than two shards, windows are summed in another order than gloo's: the lanes run once more without them.
    """
    if mesh is None:
        return None
    if mesh.size(-1) > 2:
        with sharded(make, mesh, **options) as (model, lanes):
            assert lanes.windows.reason(lanes._gather_groups.twin(mesh.get_group(-1))) == ""
            shared = run(model, lanes)
        options["shared_memory"] = False
    with sharded(make, mesh, lanes=False, **{k: v for k, v in options.items() if k in _FOR_STOCK}) as (model, none):
        expected = run(model, none)
    with sharded(make, mesh, **options) as (model, lanes):
        found = run(model, lanes)
    assert_same(found, expected)
    if mesh.size(-1) > 2:
        assert_same(shared, expected, rtol=1e-4, atol=2e-7)
    return expected


_FOR_STOCK = {"precision", "unit_classes", "split"}


def assert_same(found: Any, expected: Any, where: str = "result", rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal structure and, without tolerances, equal bits; says where the first difference is."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype, f"{where}: {found.dtype} instead of {expected.dtype}"
        assert found.shape == expected.shape, f"{where}: {found.shape} instead of {expected.shape}"
        assert not expected.isnan().any(), f"{where}: the expected value itself is NaN"
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m: f"{where}: {m}")
        return
    assert type(found) is type(expected), f"{where}: {found!r:.200} instead of {expected!r:.200}"
    if isinstance(expected, dict):
        assert list(found) == list(expected), f"{where}: keys {list(found)} instead of {list(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}", rtol, atol)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{where}: {len(found)} items instead of {len(expected)}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}[{i}]", rtol, atol)
    else:
        assert found == expected, f"{where}: {found!r} instead of {expected!r}"


def train(model: nn.Module, steps: int, seed: int, lr: float = 0.1) -> list[Any]:
    """Plain SGD; losses and gradients of each step, then the weights."""
    seen: list[Any] = []
    for step in range(steps):
        loss = model.loss(model.batch(seed + 1000 * step))
        loss.backward()
        seen.append((loss.detach(), gradients(model)))
        sgd(model, lr)
    seen.append(weights(model))
    return seen


@torch.no_grad()
def sgd(model: nn.Module, lr: float = 0.1) -> None:
    """One step without an optimizer's state."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            local_tensor(parameter).sub_(local_tensor(parameter.grad), alpha=lr)
            parameter.grad = None


def by_user(here: Here, lanes: bool, prepare: Callable[[nn.Module, DeviceMesh], None]) -> list[Any]:
    """Two steps of a GPT whose owner sharded the blocks, and in ``prepare`` the rest."""
    torch.manual_seed(11)
    model, mesh = GPT(), mesh_of(here, "2")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    prepare(model, mesh)
    found = FsdpLanes(model, prefetch=1, reduce_buffers=2, timeout_s=TIMEOUT_S) if lanes else None
    try:
        return train(model, 2, seed=here.rank)
    finally:
        if found is not None:
            found.close()


# -- by hand --


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Whole gradients, the same on every rank; None where there is none."""
    return {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}


def by_hand(
    make: Callable[[], nn.Module], here: Here, losses: Callable[[nn.Module, int], list[torch.Tensor]]
) -> dict[str, torch.Tensor | None]:
    """Mean gradient over all ranks, on the plain model in one process: ``losses(model, rank)`` are each rank's."""
    torch.manual_seed(11)
    model = make()
    for rank in range(here.world):
        for loss in losses(model, rank):
            (loss / here.world).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def assert_close(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    """Gradients that were summed in another order."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, f"{name} got a gradient from nowhere"
        else:
            assert found[name] is not None, f"{name} lost its gradient"
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
