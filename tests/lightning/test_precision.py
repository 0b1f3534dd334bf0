"""Precision: what is computed in, kept in and reduced in; the scaler; what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from memwall_strategy.core.errors import ConfigError
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    assert_close,
    full_weights,
    loss_of,
    make_loader,
    make_module,
    make_net,
    make_trainer,
    mean_over_ranks,
    module_class,
    train_plain,
)

COMPUTED = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
KEPT = {"bf16-true": torch.bfloat16}
LOSS_TOLERANCE = {"32-true": 1e-6, "bf16-true": 5e-2, "bf16-mixed": 2e-2, "16-mixed": 5e-3}
"""Against fp32 over a few steps: a few units of the dtype's last place (2**-8 and 2**-11) of the loss."""


def loader(here: Here, kind: str, whole_batches: int, seed: int = 2) -> torch.utils.data.DataLoader:
    return make_loader(kind, whole_batches * 2 * here.world, 2, rank=here.rank, world=here.world, seed=seed)


@on_ranks(2, *(f"{precision} {kind}" for precision in COMPUTED for kind in ("gpt", "conv")))
def test_dtypes(here: Here) -> None:
    """Arithmetic, weights, gradients, optimizer state and statistics have the dtypes that the table says."""
    precision, kind = here.case.split()
    namespace = "pytorch_lightning" if precision == "bf16-mixed" else "lightning"
    module = make_module(kind, namespace, optimizer="adamw")
    inside: list[tuple[Any, ...]] = []

    def note(layer: nn.Module, args: tuple, output: torch.Tensor) -> None:
        weight = layer.weight
        inside.append((args[0].dtype, weight.dtype, output.dtype, torch.is_autocast_enabled("cpu")))

    layers = [m for m in module.net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    norms = [m for m in module.net.modules() if isinstance(m, nn.BatchNorm2d)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    norm_inputs: list[torch.dtype] = []
    handles += [norm.register_forward_hook(lambda m, a, o: norm_inputs.append(a[0].dtype)) for norm in norms]
    gradients: set[torch.dtype] = set()
    module.on_before_optimizer_step = lambda _: gradients.update(
        p.grad.dtype for p in module.parameters() if p.grad is not None
    )
    trainer = make_trainer(2, namespace=namespace, precision=precision, gradient_clip_val=1.0)
    trainer.fit(module, loader(here, kind, 6))
    for handle in handles:
        handle.remove()
    wanted, kept = COMPUTED[precision], KEPT.get(precision, torch.float32)
    assert {x for entry in inside for x in entry[:3]} == {wanted}, set(inside)
    assert not any(entry[3] for entry in inside), "autocast is active inside the step"
    weights = {n: p.dtype for n, p in module.net.named_parameters() if "norm" not in n}
    assert set(weights.values()) == {kept}, weights
    assert kept in gradients, gradients
    assert gradients <= {kept, torch.float32}, gradients
    states = [s for state in trainer.optimizers[0].state.values() for s in (state["exp_avg"], state["exp_avg_sq"])]
    assert states and {s.dtype for s in states} <= {kept, torch.float32}
    if kind == "conv":
        buffers = {n: b.dtype for n, b in module.net.named_buffers() if "running" in n}
        assert set(buffers.values()) == {torch.float32}, buffers
        assert all(norm.weight.dtype == torch.float32 for norm in norms)
        assert set(norm_inputs) == {torch.float32}, set(norm_inputs)
    assert all(map(math.isfinite, module.losses)), module.losses
    if kind == "gpt":
        plain = train_plain(make_net(kind), kind, steps=6, micro=4, optimizer="adamw", clip=clip_one)
        assert_close(mean_over_ranks(module.losses), plain, LOSS_TOLERANCE[precision])


def clip_one(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 1.0)


@on_ranks(2, "bf16-mixed", "16-mixed")
def test_sync_batchnorm_in_low_precision(here: Here) -> None:
    """Statistics over ranks are those of fp32 to the dtype's accuracy."""
    module = make_module("conv")
    make_trainer(2, precision=here.case, sync_batchnorm=True).fit(module, loader(here, "conv", 6))
    net = make_net("conv")
    plain = train_plain(net, "conv", steps=6, micro=4)
    assert_close(mean_over_ranks(module.losses), plain, 5e-2)
    found, wanted = full_weights(module.net), net.state_dict()
    for name in (n for n in wanted if "running" in n):
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], wanted[name], rtol=0.1, atol=0.02)


@on_ranks(2, "clip", "accumulate", "plain", "one shard")
def test_scaler_halves_and_every_rank_skips(here: Here) -> None:
    """An inf in one rank's loss, or in its shard alone: nobody steps, all halve the scale, and training goes on."""
    weights: list[dict[str, torch.Tensor]] = []
    scales: list[float] = []

    class Module(module_class("lightning")):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            broken = here.rank == 1 and batch_idx == bad and here.case != "one shard"
            return loss * (float("inf") if broken else 1.0)

        def on_after_backward(self) -> None:
            if here.case == "one shard" and here.rank == 1 and len(self.losses) == bad + 1:
                self.net.head.weight.grad.to_local()[0, 0] = float("inf")

        def on_train_batch_end(self, *_: Any) -> None:
            weights.append(full_weights(self.net))
            scales.append(self.trainer.precision_plugin.scaler.get_scale())

    options = {"clip": {"gradient_clip_val": 0.5}, "accumulate": {"accumulate_grad_batches": 2}}.get(here.case, {})
    bad = 2
    module = Module(make_net("gpt"), "adamw")
    trainer = make_trainer(2, precision="16-mixed", **options)
    trainer.fit(module, loader(here, "gpt", 6))
    first = bad if here.case != "accumulate" else 3
    assert scales[first] == scales[first - 1] / 2, scales
    assert scales[-1] == scales[first]
    changed = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(weights)]
    wanted = [True, False, True, True, True] if here.case != "accumulate" else [True, False, False, False, True]
    assert changed == wanted, changed
    assert all(torch.isfinite(t).all() for t in weights[-1].values())
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, scales)
    assert everywhere[0] == everywhere[1]


@on_ranks(2)
def test_clipping_sees_unscaled_gradients(here: Here) -> None:
    """Under 16-mixed the hook before the optimizer and the clipping see true gradients."""
    norms: list[float] = []

    class Module(module_class("lightning")):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            squares = [p.grad.full_tensor().square().sum() for p in self.net.parameters() if p.grad is not None]
            norms.append(torch.stack(squares).sum().sqrt().item())

    module = Module(make_net("gpt"))
    make_trainer(2, precision="16-mixed", gradient_clip_val=0.3).fit(module, loader(here, "gpt", 3))
    net = make_net("gpt")
    wanted: list[float] = []

    def clip(parameters: list[nn.Parameter]) -> None:
        wanted.append(nn.utils.clip_grad_norm_(parameters, 0.3).item())

    train_plain(net, "gpt", steps=3, micro=4, clip=clip)
    assert_close(norms, wanted, 2e-2)


@on_ranks(2)
def test_manual_optimization_scales_too(here: Here) -> None:
    """``manual_backward`` scales and the step unscales, as with Lightning's own plugin."""

    class Module(module_class("lightning")):
        def __init__(self) -> None:
            super().__init__(make_net("gpt"))
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    module = Module()
    make_trainer(2, precision="16-mixed").fit(module, loader(here, "gpt", 6))
    assert_close(mean_over_ranks(module.losses), train_plain(make_net("gpt"), "gpt", steps=6, micro=4), 5e-3)


class Fused(module_class("lightning")):
    """torch's fused optimizers unscale inside their step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


@on_ranks(2, "32-true clipped", "16-mixed")
def test_fused_optimizers(here: Here) -> None:
    precision, *clipped = here.case.split()
    module = Fused(make_net("gpt"))
    options = {"gradient_clip_val": 1.0} if clipped else {}
    make_trainer(2, precision=precision, **options).fit(module, loader(here, "gpt", 6))
    clip = clip_one if clipped else None
    wanted = train_plain(make_net("gpt"), "gpt", steps=6, micro=4, optimizer="adamw", clip=clip)
    assert_close(mean_over_ranks(module.losses), wanted, 1e-5 if clipped else 2e-2)


@on_ranks(2)
def test_clipping_with_a_fused_optimizer_and_a_scaler_is_refused(here: Here) -> None:
    with pytest.raises(ConfigError, match=r"gradient_clip_val.*fused=False"):
        make_trainer(2, precision="16-mixed", gradient_clip_val=1.0).fit(
            Fused(make_net("gpt")), loader(here, "gpt", 1)
        )


# -- refused, before anything starts --


@pytest.mark.parametrize("precision", ["64-true", "16-true", "transformer-engine", "transformer-engine-float16"])
@pytest.mark.parametrize("by", ["name", "object"])
def test_unsupported_precisions_are_refused_by_name(precision: str, by: str) -> None:
    from memwall_strategy.lightning import MemwallStrategy

    strategy = "memwall" if by == "name" else MemwallStrategy()
    with pytest.raises(ConfigError, match=f"precision={precision!r} is not supported") as caught:
        make_trainer(2, strategy=strategy, precision=precision)
    assert "32-true, bf16-true, bf16-mixed, 16-mixed" in str(caught.value)


@pytest.mark.parametrize("namespace", ["lightning", "pytorch_lightning"])
def test_foreign_precision_plugin_is_refused(namespace: str) -> None:
    from importlib import import_module

    package = {"lightning": "lightning.pytorch"}.get(namespace, namespace)
    plugin = import_module(f"{package}.plugins").MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(ConfigError, match=r"plugins=MixedPrecision.*precision='bf16-mixed'"):
        make_trainer(2, namespace=namespace, plugins=plugin)


def test_own_precision_plugin_is_taken() -> None:
    from memwall_strategy.lightning import MemwallPrecision

    plugin = MemwallPrecision("bf16-mixed")
    trainer = make_trainer(2, plugins=plugin)
    assert trainer.precision_plugin is plugin
    assert trainer.precision == "bf16-mixed"


def test_other_strategies_keep_lightnings_precision() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    trainer = make_trainer(1, strategy="auto", precision="bf16-mixed")
    assert type(trainer.precision_plugin) is MixedPrecision
