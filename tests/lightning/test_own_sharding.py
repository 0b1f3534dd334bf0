"""What the user shards in ``configure_model`` is kept: FSDP2, and tensor parallelism beside it; FSDP1 is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from memwall_strategy.core.errors import ConfigError
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    assert_close,
    full_weights,
    make_loader,
    make_net,
    make_trainer,
    mean_over_ranks,
    module_class,
    train_plain,
)


class Sharded(module_class("lightning")):
    """Shards two of the net's parts, not those that memwall would choose."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.configured = 0

    def configure_model(self) -> None:
        self.configured += 1
        if isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net.blocks[0].mlp, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


@on_ranks(2, "lanes", "accumulate")
def test_own_fully_shard_is_kept(here: Here) -> None:
    module = Sharded(make_net("gpt"))
    options = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.4} if here.case == "accumulate" else {}
    trainer = make_trainer(2, **options)
    accumulate = options.get("accumulate_grad_batches", 1)
    trainer.fit(module, make_loader("gpt", 8 * 4 * accumulate, 2, rank=here.rank, world=2))
    sharded = [name for name, child in module.named_modules() if isinstance(child, FSDPModule)]
    assert sharded == ["net", "net.blocks.0.mlp"]
    assert {unit.name for unit in trainer.strategy.runtime.units} == set(sharded)

    def clip(parameters: list[nn.Parameter]) -> None:
        if accumulate > 1:
            nn.utils.clip_grad_norm_(parameters, 0.4)

    wanted = train_plain(make_net("gpt"), "gpt", steps=8, micro=4, accumulate=accumulate, clip=clip)
    assert_close(mean_over_ranks(module.losses), wanted)
    metrics = trainer.strategy.runtime.metrics()
    assert metrics["memwall/overlap/lane_busy_s/gather"] > 0, metrics


@on_ranks(2)
def test_own_sharding_on_meta_is_initialized(here: Here) -> None:
    """A module that is built and sharded on meta gets memory and the weights of its ``reset_parameters``."""
    started: dict[str, Tensor] = {}

    class Meta(Sharded):
        def configure_model(self) -> None:
            if self.net is None:
                with torch.device("meta"):
                    self.net = make_net("mlp_alike")
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_fit_start(self) -> None:
            started.update(full_weights(self.net))

    module = Meta(None)
    make_trainer(2).fit(module, make_loader("mlp", 5 * 4, 2, rank=here.rank, world=2))
    net = make_net("mlp_alike")
    bound = 7**-0.5  # of nn.Linear's initialization
    for name, weight in started.items():
        assert weight.isfinite().all() and weight.abs().max() <= (bound if "unused" not in name else 1), name
    assert started["layers.0.always.weight"].std() > 0.2 * bound
    net.load_state_dict(started)
    assert_close(mean_over_ranks(module.losses), train_plain(net, "mlp", steps=5, micro=4))


class TensorParallel(module_class("lightning")):
    """Tensor parallel inside the MLPs, FSDP2 over the rest of the mesh."""

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        for block in self.net.blocks:
            plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@on_ranks(4, "norm", "value")
def test_tensor_parallel_is_kept(here: Here) -> None:
    """2 x 2: data-parallel ranks see different batches, tensor-parallel ones the same; clipping spans both meshes."""
    from memwall_strategy.lightning import MemwallStrategy

    module = TensorParallel(make_net("gpt"))
    limit = {"norm": 0.4, "value": 0.01}[here.case]
    trainer = make_trainer(
        4,
        strategy=MemwallStrategy(tensor_parallel_size=2),
        accumulate_grad_batches=2,
        gradient_clip_val=limit,
        gradient_clip_algorithm=here.case,
    )
    trainer.fit(module, make_loader("gpt", 6 * 2 * 4, 2, rank=here.rank // 2, world=2))
    assert module.device_mesh["tensor_parallel"].size() == 2
    weight = module.net.blocks[0].mlp[0].weight
    assert weight.device_mesh.ndim == 2, weight.device_mesh
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[here.case]
    net = make_net("gpt")
    wanted = train_plain(net, "gpt", steps=6, micro=4, accumulate=2, clip=lambda ps: clip(ps, limit))
    assert_close(mean_over_ranks(module.losses), wanted)
    for name, tensor in full_weights(module.net).items():
        torch.testing.assert_close(tensor, net.state_dict()[name], rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_lightnings_sampler_deals_over_data_parallel_ranks(here: Here) -> None:
    """With tensor parallelism, ranks of one data-parallel place get the same samples, the others the rest."""
    from memwall_strategy.lightning import MemwallStrategy

    seen: list[int] = []

    class Module(TensorParallel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.extend(batch[1].tolist())
            return super().training_step((batch[0], batch[0]), batch_idx)

    tokens = torch.zeros(16, 6, dtype=torch.long)
    data = torch.utils.data.TensorDataset(tokens, torch.arange(16))
    trainer = make_trainer(4, strategy=MemwallStrategy(tensor_parallel_size=2), use_distributed_sampler=True)
    trainer.fit(Module(make_net("gpt")), torch.utils.data.DataLoader(data, batch_size=2))
    everywhere: list[list[int]] = [[]] * 4
    dist.all_gather_object(everywhere, seen)
    assert everywhere[0] == everywhere[1] and everywhere[2] == everywhere[3], everywhere
    assert sorted(everywhere[0] + everywhere[2]) == list(range(16)), everywhere


@on_ranks(2)
def test_the_first_fsdp_is_refused(here: Here) -> None:
    class Wrapped(module_class("lightning")):
        def configure_model(self) -> None:
            if not isinstance(self.net, FullyShardedDataParallel):
                self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"))

    with pytest.raises(ConfigError, match=r"FullyShardedDataParallel.*Take the wrapper out"):
        make_trainer(2).fit(Wrapped(make_net("mlp_alike")), make_loader("mlp", 4, 2))


@on_ranks(2)
def test_configure_model_without_sharding_is_sharded(here: Here) -> None:
    """A ``configure_model`` that only builds the layers leaves the sharding to memwall."""

    class Late(module_class("lightning")):
        def configure_model(self) -> None:
            if self.net is None:
                self.net = make_net("gpt")

    module = Late(None)
    make_trainer(2).fit(module, make_loader("gpt", 5 * 4, 2, rank=here.rank, world=2))
    assert isinstance(module.net.blocks[1], FSDPModule)
    assert_close(mean_over_ranks(module.losses), train_plain(make_net("gpt"), "gpt", steps=5, micro=4))


@on_ranks(2)
def test_an_edit_after_validation_is_seen_by_the_next_step(here: Here) -> None:
    """What the user's root keeps gathered after an evaluation is dropped, as for modules that memwall shards."""

    class Halve(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.held = list(module.parameters())

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                for parameter in self.held:
                    parameter.data.mul_(0.5)

    losses = []
    for kind in (Sharded, module_class("lightning")):
        module = kind(make_net("gpt"))
        trainer = make_trainer(2, callbacks=[Halve()], val_check_interval=2)
        loaders = [make_loader("gpt", n, 2, rank=here.rank, world=2) for n in (16, 4)]
        trainer.fit(module, *loaders)
        losses.append(module.losses)
    assert len(losses[0]) == 4
    assert_close(losses[0], losses[1])
