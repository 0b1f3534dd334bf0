"""Models that others wrote: Hugging Face, compiled, and on the meta device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from memwall_strategy.core.errors import ConfigError
from tests.lightning.checks import Here, on_ranks
from tests.lightning.models import (
    CONTEXT,
    VOCABULARY,
    Gpt,
    assert_close,
    assert_same_weights,
    full_weights,
    make_data,
    make_loader,
    make_net,
    make_optimizer,
    make_trainer,
    mean_over_ranks,
    module_class,
    train_plain,
)

pytest.importorskip("transformers")


def make_gpt2() -> nn.Module:
    """GPT-2: input and output embeddings are one tensor."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_llama() -> nn.Module:
    """Llama: rotary embeddings in buffers, fewer key-value heads than heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_tied_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": make_gpt2, "llama": make_llama, "tied_llama": make_tied_llama}


class HuggingFace(module_class("lightning")):
    """Lets the model take the loss itself."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = hf_loss(self.net, batch[0])
        self.losses.append(loss.item())
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0]).logits


def hf_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def train_hf(model: nn.Module, *, steps: int, micro: int, accumulate: int) -> list[float]:
    optimizer = make_optimizer(model.parameters())
    losses = []
    for index, tokens in enumerate(make_data("gpt", steps * micro * accumulate)[0].split(micro)):
        loss = hf_loss(model, tokens)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@on_ranks(2, "gpt2", "llama", "tied_llama", "gpt2 recompute", "llama recompute")
def test_hugging_face(here: Here) -> None:
    """Units from the model itself, ties stay tied, recompute of its own goes through; equal to a plain loop."""
    kind, *recompute = here.case.split()
    model, plain = MODELS[kind](), MODELS[kind]()
    for each in (model, plain):
        each.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    module = HuggingFace(model)
    trainer = make_trainer(2, accumulate_grad_batches=2)
    trainer.fit(module, make_loader("gpt", 5 * 2 * 4, 2, rank=here.rank, world=2))
    names = [unit.name for unit in trainer.strategy.runtime.units]
    layers = "transformer.h" if kind == "gpt2" else "model.layers"
    assert [n for n in names if n.startswith("net.")] == [f"net.{layers}.{i}" for i in range(2)], names
    if kind != "llama":
        assert model.lm_head.weight is model.get_input_embeddings().weight
    assert_close(mean_over_ranks(module.losses), train_hf(plain, steps=5, micro=4, accumulate=2))
    assert_same_weights(full_weights(model), plain.state_dict())
    predicted = make_trainer(2).predict(module, make_loader("gpt", 4, 2, rank=here.rank, world=2))
    wanted = plain(input_ids=make_data("gpt", 4)[0][here.rank :: 2]).logits
    torch.testing.assert_close(predicted[0], wanted, rtol=1e-4, atol=1e-5)


@on_ranks(2, "bf16-mixed", "16-mixed")
def test_hugging_face_in_low_precision(here: Here) -> None:
    module = HuggingFace(make_gpt2().train())
    make_trainer(2, precision=here.case).fit(module, make_loader("gpt", 6 * 4, 2, rank=here.rank, world=2))
    assert_close(mean_over_ranks(module.losses), train_hf(make_gpt2().train(), steps=6, micro=4, accumulate=1), 2e-2)


@on_ranks(2, "block eager", "block aot_eager", "whole aot_eager", "in place eager")
def test_compiled_modules(here: Here) -> None:
    """torch.compile around blocks, around the net, or in place; MFU is left out because operations are hidden."""
    what, backend = here.case.rsplit(" ", 1)
    net = make_net("gpt")
    torch._dynamo.reset()
    if what == "block":
        for i, block in enumerate(net.blocks):
            net.blocks[i] = torch.compile(block, backend=backend)
    elif what == "whole":
        net = torch.compile(net, backend=backend)
    else:
        for block in net.blocks:
            block.compile(backend=backend)
    module = module_class("lightning")(net)
    trainer = make_trainer(2, accumulate_grad_batches=2)
    trainer.fit(module, make_loader("gpt", 5 * 2 * 4, 2, rank=here.rank, world=2))
    wanted = train_plain(make_net("gpt"), "gpt", steps=5, micro=4, accumulate=2)
    assert_close(mean_over_ranks(module.losses), wanted, 1e-5)  # compiled kernels round as they like
    metrics = trainer.strategy.runtime.metrics()
    assert "memwall/mfu" not in metrics, metrics
    assert len(trainer.strategy.runtime.units) == 3, trainer.strategy.runtime.units


@on_ranks(2)
def test_model_from_the_meta_device(here: Here) -> None:
    """``init_module(empty_init=True)`` builds without memory; every rank then holds one random initialization."""
    trainer = make_trainer(2)
    with trainer.init_module(empty_init=True):
        module = module_class("lightning")(Gpt())
    assert all(parameter.is_meta for parameter in module.parameters())
    os.environ.pop("PL_GLOBAL_SEED", None)  # an earlier check may have seeded everything: Lightning would seed again
    torch.manual_seed(11 + here.rank)  # rank 0's weights win
    trainer.fit(module, make_loader("gpt", 6 * 4, 2, rank=here.rank, world=2))
    assert isinstance(module.net.blocks[0], FSDPModule)
    assert math.isclose(mean_over_ranks(module.losses)[0], math.log(VOCABULARY), rel_tol=0.2)
    torch.manual_seed(11)
    net = Gpt()
    assert_close(mean_over_ranks(module.losses), train_plain(net, "gpt", steps=6, micro=4))


@on_ranks(2)
def test_meta_modules_that_cannot_initialize_themselves_are_named(here: Here) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    trainer = make_trainer(2)
    with trainer.init_module(empty_init=True):
        module = module_class("lightning")(nn.Sequential(nn.Linear(4, 4), Bare()))
    with pytest.raises(ConfigError, match=r"meta device.*Bare.*reset_parameters|meta device.*reset_parameters.*Bare"):
        trainer.fit(module, make_loader("mlp", 4, 2))


@on_ranks(2)
def test_a_model_without_parameters_is_named(here: Here) -> None:
    class Empty(module_class("lightning")):
        def configure_optimizers(self) -> Any:
            return None

    with pytest.raises(ConfigError, match="no parameters"):
        make_trainer(2).fit(Empty(nn.Identity()), make_loader("mlp", 4, 2))
