"""Small models, their data, and the plain loop that every strategy's losses are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TRAINERS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}

VOCABULARY, CONTEXT, WIDTH = 31, 6, 16


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, 2, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """Predicts the next token; ``tied`` uses one matrix for both ends."""

    def __init__(self, blocks: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """A small convolutional classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(2, 5), Stage(5, 5)])
        self.head = nn.Linear(5, 4)

    def forward(self, image: Tensor) -> Tensor:
        for stage in self.stages:
            image = stage(image)
        return self.head(image.mean((2, 3)))


class Layer(nn.Module):
    """A layer with an expert that only some samples use (those above the threshold) and one that none does."""

    def __init__(self, width: int, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.always, self.sometimes, self.never = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > self.threshold
        y = torch.tanh(self.always(x))
        if chosen.any():
            y = y + chosen[:, None] * self.sometimes(x)
        return x + 0.5 * y


class Mlp(nn.Module):
    """Layers with unused parameters; its widths divide by no number of ranks."""

    def __init__(self, threshold: float = 1.2, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, threshold) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


NETS: dict[str, Callable[[], nn.Module]] = {
    "gpt": Gpt,
    "conv": ConvNet,
    "mlp": Mlp,
    "mlp_alike": partial(Mlp, threshold=-100.0),  # the same parameters are unused on every rank: stock FSDP2 can too
}


def make_net(kind: str, seed: int = 1) -> nn.Module:
    """The net of a kind, the same on every rank."""
    torch.manual_seed(seed)
    return NETS[kind]()


def make_data(kind: str, count: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """(inputs, labels) of ``count`` samples."""
    random = torch.Generator().manual_seed(seed)
    if kind == "gpt":
        tokens = torch.randint(0, VOCABULARY, (count, CONTEXT + 1), generator=random)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if kind == "conv":
        return torch.randn(count, 2, 5, 5, generator=random), torch.randint(0, 4, (count,), generator=random)
    return torch.randn(count, 7, generator=random), torch.randint(0, 3, (count,), generator=random)


def make_loader(
    kind: str, count: int, batch: int, *, rank: int = 0, world: int = 1, seed: int = 2
) -> DataLoader:
    """A rank's samples of ``count``, in order: the n-th batches of all ranks make up the n-th whole batch."""
    mine = [tensor[rank::world] for tensor in make_data(kind, count, seed)]
    return DataLoader(TensorDataset(*mine), batch_size=batch)


def loss_of(net: nn.Module, batch: Iterable[Tensor]) -> Tensor:
    """Mean cross-entropy."""
    inputs, labels = batch
    return F.cross_entropy(net(inputs).flatten(0, -2).float(), labels.flatten())


def make_optimizer(parameters: Iterable[Any], name: str = "sgd") -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@cache
def module_class(namespace: str) -> type:
    """A LightningModule around one net, for a namespace; it notes the loss of every micro-batch."""
    base = import_module(TRAINERS[namespace]).LightningModule

    class Module(base):
        def __init__(self, net: nn.Module, optimizer: str = "sgd") -> None:
            super().__init__()
            self.net, self.optimizer = net, optimizer
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", loss_of(self.net, batch), sync_dist=True)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", loss_of(self.net, batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters(), self.optimizer)

    return Module


def make_module(kind: str, namespace: str = "lightning", optimizer: str = "sgd") -> Any:
    """``module_class`` around a new net."""
    return module_class(namespace)(make_net(kind), optimizer)


def make_trainer(world: int, *, namespace: str = "lightning", strategy: Any = "memwall", **options: Any) -> Any:
    """A quiet trainer on ``world`` CPU ranks of this machine; imports memwall's strategies."""
    import_module("memwall_strategy.lightning")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # Lightning's shuffles; see make_loader
    }
    trainer_class = import_module(TRAINERS[namespace]).Trainer
    return trainer_class(accelerator="cpu", devices=world, strategy=strategy, **(quiet | options))


def train_plain(
    net: nn.Module,
    kind: str,
    *,
    steps: int,
    micro: int,
    accumulate: int = 1,
    optimizer: str = "sgd",
    clip: Callable[[list[nn.Parameter]], Any] | None = None,
    seed: int = 2,
) -> list[float]:
    """Train in one process on whole batches and return the mean loss of every micro-batch.

    Args:
        micro: samples of one micro-batch, of all ranks together.
        clip: called with the parameters before each optimizer step.
    """
    inputs, labels = make_data(kind, steps * accumulate * micro, seed)
    batches = list(zip(inputs.split(micro), labels.split(micro), strict=True))
    stepper = make_optimizer(net.parameters(), optimizer)
    losses = []
    for first in range(0, len(batches), accumulate):
        for batch in batches[first : first + accumulate]:
            loss = loss_of(net, batch)
            (loss / accumulate).backward()
            losses.append(loss.item())
        if clip is not None:
            clip(list(net.parameters()))
        stepper.step()
        stepper.zero_grad()
    return losses


def mean_over_ranks(values: list[float]) -> list[float]:
    """Element-wise mean; the same on every rank."""
    mean = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(mean)
    return (mean / torch.distributed.get_world_size()).tolist()


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, whole, on every rank."""
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        for name, tensor in model.state_dict().items()
    }


def assert_close(found: Iterable[float], wanted: Iterable[float], relative: float = 1e-6) -> None:
    """Each pair differs by no more than ``relative`` of the wanted value."""
    found, wanted = list(found), list(wanted)
    assert len(found) == len(wanted) > 0, (len(found), len(wanted))
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    shown = f"\nfound  {found[:6]}\nwanted {wanted[:6]}"
    assert worst <= relative, f"relative difference {worst:.2e} above {relative:.0e}{shown}"


def assert_same_weights(found: dict[str, Tensor], wanted: dict[str, Tensor], relative: float = 1e-5) -> None:
    """Weights agree: elementwise within ``relative`` of the tensor's largest value."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, tensor in wanted.items():
        scale = tensor.abs().max().item() or 1.0
        worst = (found[name] - tensor).abs().max().item() / scale
        assert worst <= relative, f"{name}: off by {worst:.2e} of its largest value"
