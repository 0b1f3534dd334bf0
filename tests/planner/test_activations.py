"""The estimate of saved activations beside what autograd saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.activations import measure_activations
from memwall_strategy.planner import ActivationSpec, gpt_activations
from memwall_strategy.recipes.gpt.model import GPT
from memwall_strategy.recipes.gpt.options import GPTOptions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mlp_ratio", [2, 4])
def test_the_estimate_is_what_autograd_saves(dtype, mlp_ratio):
    options = GPTOptions(layers=2, hidden=64, heads=4, context=32, mlp_ratio=mlp_ratio)
    model = GPT(options).to(dtype)
    tokens = torch.zeros(3, 32, dtype=torch.int64)
    targets = tokens.flatten().clone()
    units, outside = measure_activations(
        model, tokens, unit_names=["blocks.0", "blocks.1"],
        loss=lambda logits: F.cross_entropy(logits.flatten(0, 1).float(), targets),
    )  # fmt: skip
    estimate = gpt_activations(
        layers=2, hidden=64, heads=4, sequence=32, vocabulary=options.vocab, micro_batch=3, mlp_ratio=mlp_ratio,
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    assert estimate.source == "estimated"
    assert estimate.unit_bytes == pytest.approx(units, rel=0.01)
    assert estimate.root_bytes == pytest.approx(outside, rel=0.02)


def test_scores_are_counted_without_fused_attention():
    sizes = {"layers": 1, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 10, "micro_batch": 2}
    fused, explicit = gpt_activations(**sizes), gpt_activations(**sizes, fused_attention=False)
    scores = 2 * 4 * 2 * 128 * 128 * 4  # scores and probabilities, in float32
    statistics = 4 * 2 * 128 * 4
    assert explicit.unit_bytes[0] - fused.unit_bytes[0] == scores - statistics


def test_another_micro_batch():
    spec = ActivationSpec((100, 60), 10, 4, "measured")
    assert spec.at(2) == ActivationSpec((50, 30), 5, 2, "measured")
    with pytest.raises(ConfigError, match="micro_batch=0"):
        spec.at(0)
