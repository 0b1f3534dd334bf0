"""Modules that run on the host: the same losses, and their bytes in the host's books instead of the device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memwall_strategy import MemwallStrategy
from memwall_strategy.config import MemwallConfig, PoolConfig
from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.fsdp import fsdp_roots, fsdp_state, local_tensor
from memwall_strategy.engine.host_modules import find_host_modules
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.runtime import Runtime
from tests.lightning.checks import Here, on_ranks, rank_results
from tests.lightning.models import (
    Gpt,
    assert_close,
    assert_same_weights,
    full_weights,
    loss_of,
    make_loader,
    make_module,
    make_net,
    make_optimizer,
    make_trainer,
    mean_over_ranks,
    module_class,
    train_plain,
)
from tests.pool.test_gradients import batches_of, train

__all__ = ["rank_results"]  # pytest finds the fixture here

EMBEDDING = PoolConfig(host_modules=("token",), host_budget="16MiB")


def make_runtime(here: Here, pool: PoolConfig, precision: str = "32-true", **options: Any) -> tuple[Runtime, Any]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    config = MemwallConfig(pool=pool, **options)
    runtime = Runtime(config, mesh=data_parallel_mesh("cpu", here.world, 1), precision=precision)
    net = make_net("gpt")
    runtime.setup(net)
    optimizer = make_optimizer(net.parameters(), "adamw")
    runtime.add_optimizers([optimizer])
    return runtime, optimizer


def same_as_plain(here: Here) -> None:
    """Losses, weights and norms of a plain loop; bits of a run without the option, in low precision too."""
    low = []
    for pool in (PoolConfig(), EMBEDDING):
        runtime, optimizer = make_runtime(here, pool, "bf16-mixed")
        low.append(train(runtime, optimizer, batches_of(here, "gpt", 4), 2))
        runtime.close()
    assert low[0] == low[1]
    found = {}
    for name, pool in {
        "device": PoolConfig(),
        "token": EMBEDDING,
        "block": PoolConfig(host_modules=("blocks.1", "Embedding"), gradients="host", host_budget="16MiB"),
    }.items():
        runtime, optimizer = make_runtime(here, pool)
        losses = train(runtime, optimizer, batches_of(here, "gpt", 12), 3, clip_norm=0.4)
        found[name] = losses, full_weights(runtime.model)
        runtime.pool.table.check()
        runtime.close()
        assert len(runtime.pool.table) == 0
    for name in ("token", "block"):
        assert found[name][0] == found["device"][0]
        assert all(torch.equal(value, found["device"][1][key]) for key, value in found[name][1].items())
    plain = make_net("gpt")
    clip = lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.4)  # noqa: E731
    losses = train_plain(plain, "gpt", steps=4, micro=2 * here.world, accumulate=3, optimizer="adamw", clip=clip)
    wanted = [sum(losses[i : i + 3]) / 3 for i in range(0, 12, 3)]
    assert_close(mean_over_ranks(found["token"][0]), wanted, 1e-5)
    assert_same_weights(found["token"][1], plain.state_dict(), 1e-4)


@on_ranks(2)
def test_losses_of_a_plain_loop(here: Here) -> None:
    same_as_plain(here)


@on_ranks(1)
def test_losses_of_a_plain_loop_on_one_rank(here: Here) -> None:
    same_as_plain(here)


@on_ranks(2)
def test_bytes_are_the_hosts(here: Here) -> None:
    """What one side's books lose the other's gain, between steps and at each moment of one."""
    books = []
    for pool in (PoolConfig(host_budget="16MiB"), EMBEDDING):
        runtime, optimizer = make_runtime(here, pool)
        train(runtime, optimizer, batches_of(here, "gpt", 2), 1)
        with runtime.micro_batch(last=True):
            loss_of(runtime.model, batches_of(here, "gpt", 1)[0]).backward()
        runtime.gradients_ready()
        books.append((runtime.memory.current(), runtime.memory.host.live()))
        if pool is EMBEDDING:
            weight = local_tensor(dict(runtime.model.named_parameters())["token.weight"])
            blocks = {block: place for block, place in runtime.pool.table if block.unit == "token"}
            assert {place.tier for place in blocks.values()} == {Tier.HOST}
            assert {block.kind: place.bytes for block, place in blocks.items()} == {
                Kind.PARAM: weight.nbytes, Kind.EXP_AVG: weight.nbytes, Kind.EXP_AVG_SQ: weight.nbytes, "step": 4,
            }  # fmt: skip
            assert runtime.metrics()["memwall/pool/host_bytes"] == 3 * weight.nbytes + 4
            assert sum(p.numel for p in runtime.model_spec.parameters) == sum(
                p.numel() for name, p in runtime.model.named_parameters() if not name.startswith("token")
            )
            roots = fsdp_roots(runtime.model)
            assert roots == [runtime.model, runtime.model.token] and fsdp_state(roots[1])._is_root
        optimizer.zero_grad()
        runtime.close()
    (device, nothing), (rest, host) = books
    assert not any(nothing.values())
    for kind in (Kind.PARAM, Kind.GRAD, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.OPTIMIZER):
        assert rest[kind] + host[kind] == device[kind] and host[kind] > 0, kind


@on_ranks(2)
def test_under_a_budget_with_paged_state(here: Here) -> None:
    """Less device memory is enough; its own state is never paged; steps that break leave nothing."""
    runtime, optimizer = make_runtime(here, PoolConfig())
    losses = train(runtime, optimizer, batches_of(here, "gpt", 4), 2)
    runtime.close()
    pool = PoolConfig(host_modules=("token",), device_budget=82_500, host_budget="16MiB")
    runtime, optimizer = make_runtime(here, pool)
    assert any(runtime.pool.pagers[0].homes.paged)
    pager, own = runtime.pool.pagers[0], [block for block, _ in runtime.pool.table if block.unit == "token"]
    assert own and not any(pager.is_paged(block) for block in own)
    first = train(runtime, optimizer, batches_of(here, "gpt", 2), 2)

    def broken(batch: Any) -> torch.Tensor:
        loss = loss_of(runtime.model, batch)
        loss.backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runtime.step(batches_of(here, "gpt", 1), broken, optimizer)
    assert first + train(runtime, optimizer, batches_of(here, "gpt", 4)[2:], 2) == losses
    runtime.pool.table.check()
    runtime.close()


@on_ranks(2)
def test_trainer_and_resume(here: Here) -> None:
    """Under the Trainer, evaluated in between, saved on the host and resumed without the option, and the other way."""

    def fit(host: bool, path: Any = None, **options: Any) -> tuple[list[float], Any]:
        module = make_module("gpt", optimizer="adamw")
        pool = PoolConfig(host_modules=("net.token",), host_budget="16MiB") if host else PoolConfig()
        strategy = MemwallStrategy(pool=pool, timeout_s=60.0)
        trainer = make_trainer(2, strategy=strategy, accumulate_grad_batches=2, gradient_clip_val=0.4, **options)
        module.on_train_batch_end = lambda outputs, batch, index: (
            index == 3 and not path and trainer.save_checkpoint(here.folder / f"{host}.ckpt")
        )
        loader = make_loader("gpt", 8 * 2 * 4, 2, rank=here.rank, world=2)
        trainer.fit(module, loader, loader, ckpt_path=path)
        return module.losses, trainer

    wanted = fit(False, max_epochs=1)[0]
    assert fit(True, max_epochs=1)[0] == wanted
    for host in (True, False):
        rest, _ = fit(not host, str(here.folder / f"{host}.ckpt"), max_epochs=1)
        assert rest == wanted[-len(rest) :] and len(rest) == 12, host


@on_ranks(2)
def test_a_module_without_a_forward_of_its_own(here: Here) -> None:
    """A LightningModule whose training_step calls its parts: roots of their own, and parts on the host among them."""

    class Parts(module_class("lightning")):
        def __init__(self) -> None:
            super().__init__(torch.nn.Identity(), "adamw")
            torch.manual_seed(1)
            net = Gpt(2)
            self.token, self.position, self.blocks = net.token, net.position, net.blocks
            self.norm, self.head = net.norm, net.head

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = loss_of(lambda tokens: Gpt.forward(self, tokens), batch)
            self.losses.append(loss.item())
            return loss

    losses = []
    for names in ((), ("token",), ("Block", "head")):
        module = Parts()
        strategy = MemwallStrategy(pool=PoolConfig(host_modules=names, host_budget="16MiB"))
        trainer = make_trainer(2, strategy=strategy, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.3)
        trainer.fit(module, make_loader("gpt", 32, 2, rank=here.rank, world=2))
        losses.append(module.losses)
    assert losses[0] == losses[1] == losses[2]


def test_what_cannot_run_on_the_host_is_named() -> None:
    tied = Gpt(2, tied=True)
    for names, word in (
        (("tokne",), "'token'"),
        (("blocks",), "no forward"),
        (("Embeding",), "'Embedding'"),
    ):
        with pytest.raises(ConfigError, match=word):
            find_host_modules(Gpt(2), names)
    with pytest.raises(ConfigError, match=r"token.weight and head.weight are one weight"):
        find_host_modules(tied, ("token",))
    with pytest.raises(ConfigError, match="one weight"):
        find_host_modules(tied, ("token", "head"))
    with pytest.raises(ConfigError, match="every weight"):
        find_host_modules(torch.nn.Sequential(Gpt(2)), ("0",))
    assert list(find_host_modules(Gpt(3), ("blocks.1", "Block"))) == ["blocks.1", "blocks.0", "blocks.2"]
    with pytest.raises(ConfigError, match="sequence of names"):
        PoolConfig(host_modules="token")
    with pytest.raises(ConfigError, match="needs the pool"):
        PoolConfig(host_modules=("token",), enabled=False)
