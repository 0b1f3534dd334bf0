"""``save_state`` and ``load_state``: the resumed run is the uninterrupted one.

A run trains once without a break, saves on its way, and a second one goes on from there with everything made anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import GradScalerKwargs, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset

from memwall_strategy.accelerate import MemwallPlugin
from memwall_strategy.core.errors import CheckpointError, ConfigError
from tests.accelerate.helpers import make_accelerator, whole_loader
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import assert_close, full_weights, loss_of, make_net, make_optimizer
from tests.ranks import run_ranks

SAMPLES, WIDTH, EPOCHS = 23, 8, 2


class Numbered(Dataset):
    """Samples that carry their index."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.x[index]


class Net(nn.Module):
    """Blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Counter:
    """Something of the user's that is registered for checkpointing."""

    def __init__(self) -> None:
        self.seen = {"batches": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


class Run:
    """Everything of one run, made anew."""

    def __init__(self, *, shuffle: bool = True, workers: int = 0, seed: int = 3, plugin: Any = None, **options: Any):
        torch.manual_seed(seed)
        self.acc = make_accelerator(plugin, gradient_accumulation_steps=2, **options)
        torch.manual_seed(7)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loader = DataLoader(Numbered(), batch_size=2, shuffle=shuffle, num_workers=workers)
        prepared = self.acc.prepare(net, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.counter = Counter()
        self.acc.register_for_checkpointing(self.counter)
        torch.manual_seed(seed + self.acc.process_index)

    def train(self, batches: int, save_at: int = -1, folder: Path | None = None) -> list[dict[str, Any]]:
        """Train so many micro-batches, however many epochs that takes."""
        rows: list[dict[str, Any]] = []
        while len(rows) < batches:
            for ids, x in self.loader:
                with self.acc.accumulate(self.model):
                    loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
                    self.acc.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.counter.seen["batches"] += 1
                scale = self.acc.scaler.get_scale() if self.acc.scaler else 0
                rates = self.scheduler.get_last_lr()
                rows.append({"ids": ids.tolist(), "loss": loss.item(), "lr": rates, "scale": scale})
                if len(rows) == save_at:
                    self.acc.save_state(folder)
                if len(rows) == batches:
                    break
        return rows


@on_ranks(2, "plain", "ordered", "workers", "fp16", "full", "background", "epoch_end")
def test_the_resumed_run_is_the_uninterrupted_one(here: Here) -> None:
    """Sample ids, losses with dropout, learning rates, scale and weights, bit by bit."""
    save_at = {"epoch_end": 6}.get(here.case, 4)
    options: dict[str, Any] = {
        "ordered": {"shuffle": False},
        "workers": {"workers": 2},
        "fp16": {
            "mixed_precision": "fp16",
            "kwargs_handlers": [GradScalerKwargs(init_scale=2.0**8, growth_interval=1)],
        },
    }.get(here.case, {})
    plugin = {"full": {"checkpoint": "full"}, "background": {"async_checkpoint": True}}.get(here.case, {})
    folder = here.folder / "state"
    whole = Run(**options, plugin=MemwallPlugin(**plugin))
    rows = whole.train(12, save_at, folder)
    wanted = full_weights(whole.model)
    whole.acc.free_memory()
    second = Run(**options, seed=99, plugin=MemwallPlugin(**plugin))
    if here.case != "epoch_end":
        second.train(3)  # what it did before must not matter
    second.acc.load_state(folder)
    assert second.counter.seen == {"batches": save_at}
    assert second.acc.memwall.runtime.steps == save_at // 2
    resumed = second.train(12 - save_at)
    for what in ("ids", "lr", "scale", "loss"):
        assert [row[what] for row in resumed] == [row[what] for row in rows[save_at:]], what
    found = full_weights(second.model)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    if here.case == "fp16":
        assert len({row["scale"] for row in rows}) > 2
    second.acc.free_memory()


def save_worker(rank: int, world: int, folder: str) -> list[list[int]]:
    run = Run()
    rows = run.train(12, 2, Path(folder))
    return [row["ids"] for row in rows]


def resume_worker(rank: int, world: int, folder: str) -> dict[str, Any]:
    run = Run(seed=99)
    run.acc.load_state(folder)
    loader = run.acc.skip_first_batches(run.loader, 2)
    assert loader is run.loader, "a restored position stays"
    run.model.eval()
    x = Numbered().x
    with torch.no_grad():
        loss = (run.model(x) - x.sum(1, keepdim=True)).square().mean().item()
    seen = [n for ids, _ in loader for n in run.acc.gather_for_metrics(ids).tolist()]
    run.acc.end_training()
    return {"seen": seen, "loss": loss}


def test_at_another_number_of_ranks(tmp_path: Path) -> None:
    """The rest of the epoch is what nobody had seen yet, in the same order; the weights are the same."""
    by_rank = run_ranks(save_worker, 2, folder=str(tmp_path))
    steps = list(zip(*by_rank, strict=True))
    epoch = [n for step in steps[:6] for ids in step for n in ids]
    assert sorted(epoch) == list(range(SAMPLES))
    losses = []
    for world in (1, 3):
        found = run_ranks(resume_worker, world, folder=str(tmp_path))
        assert all(each["seen"] == epoch[8:] for each in found), (found, epoch)
        losses.append(found[0]["loss"])
    assert_close(losses[:1], losses[1:])


@on_ranks(2)
def test_two_models_and_what_does_not_fit(here: Here) -> None:
    """Several models in one checkpoint; errors name what differs; a file beside the checkpoint stays."""

    def make() -> Any:
        acc = make_accelerator()
        nets = [make_net("gpt", 1), make_net("mlp", 2)]
        both = make_optimizer([*nets[0].parameters(), *nets[1].parameters()])
        prepared = acc.prepare(*nets, both, whole_loader("gpt", 8, 2))
        return acc, *prepared

    folder = here.folder / "two"
    acc, gpt, mlp, stepper, loader = make()
    hooked: list[Any] = []
    acc.register_save_state_pre_hook(lambda models, weights, path: hooked.append((len(models), weights, path)))
    for batch in loader:
        acc.backward(loss_of(gpt, batch))
        stepper.step()
        stepper.zero_grad()
    acc.save_state(folder)
    if here.rank == 0:
        (folder / "mine.txt").write_text("kept")
    acc.save_state(folder)
    assert (folder / "mine.txt").read_text() == "kept"
    assert hooked == [(2, [], str(folder))] * 2
    wanted = [full_weights(gpt), full_weights(mlp)]
    acc.free_memory()
    acc, gpt, mlp, _, _ = make()
    acc.load_state(folder)
    for found, there in zip((full_weights(gpt), full_weights(mlp)), wanted, strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in there.items())
    acc.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match=r"holds 0 schedulers, 0 objects, 2 models and .* 1 objects"):
        acc.load_state(folder)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        acc.load_state(here.folder / "nowhere")
    with pytest.raises(ConfigError, match="output_dir="):
        acc.save_state()
    acc.free_memory()
    with pytest.raises(CheckpointError, match="no prepared model"):
        acc.save_state(folder)


@on_ranks(2)
def test_automatic_naming(here: Here) -> None:
    """The oldest goes when the newest is whole; the last whole one is loaded."""
    project = ProjectConfiguration(str(here.folder), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(project_config=project)
    for _ in range(3):
        run.train(2)
        run.acc.save_state()
    run.acc.wait_for_everyone()
    folders = sorted(path.name for path in (here.folder / "checkpoints").iterdir())
    assert folders == ["checkpoint_1", "checkpoint_2"]
    run.acc.wait_for_everyone()
    if here.rank == 0:
        shutil.rmtree(here.folder / "checkpoints" / "checkpoint_2" / "memwall")
    run.acc.load_state()
    assert run.counter.seen == {"batches": 4}
    run.acc.free_memory()


@on_ranks(2)
def test_weights_alone(here: Here) -> None:
    """``get_state_dict`` and ``save_model``: whole weights once, tied ones under both names."""
    from safetensors.torch import load_file, load_model

    from tests.lightning.models import Gpt

    acc = make_accelerator()
    torch.manual_seed(1)
    net = Gpt(tied=True)
    wanted = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    model, _ = acc.prepare(net, make_optimizer(net.parameters()))
    assert acc.unwrap_model(model) is net
    state = acc.get_state_dict(model)
    if here.rank == 0:
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    else:
        assert state == {}
    acc.save_model(model, here.folder / "one")
    acc.save_model(model, here.folder / "many", max_shard_size="4KB")
    acc.wait_for_everyone()
    other = Gpt(tied=True)
    load_model(other, here.folder / "one" / "model.safetensors")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.state_dict().items())
    parts = sorted((here.folder / "many").glob("model-*.safetensors"))
    merged = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    assert len(parts) > 1 and all(torch.equal(tensor, wanted[name]) for name, tensor in merged.items())
    acc.free_memory()


class WithStatistics(nn.Module):
    """Sharded weights, and buffers that no rank shares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def snapshot_holds(here: Here) -> None:
    acc = make_accelerator()
    net = WithStatistics()
    model, optimizer = acc.prepare(net, make_optimizer(net.parameters()))
    state = acc.get_state_dict(model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    acc.backward(model(torch.randn(4, 5)).square().sum())
    optimizer.step()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            getattr(tensor, "_local_tensor", tensor).zero_()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert (len(state) == 7) == (here.rank == 0)
    acc.free_memory()


@on_ranks(2)
def test_a_state_dict_does_not_change_with_later_steps(here: Here) -> None:
    """CASES 10: weights and running statistics."""
    snapshot_holds(here)


@on_ranks(1)
def test_on_one_rank_neither(here: Here) -> None:
    """CASES 10: where nothing has to be gathered."""
    snapshot_holds(here)
