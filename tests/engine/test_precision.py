"""Names of precisions, the policies they mean, and weights brought to the dtype they are kept in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.precision import (
    SUPPORTED,
    canonical_precision,
    compute_dtype,
    convert_weights,
    keeps_statistics,
    mixed_precision_policy,
    statistics_policy,
    weight_dtype,
)

TABLE = {  # kept, computed, reduced (None: as computed)
    "32-true": (torch.float32, torch.float32, None),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32),
    "16-mixed": (torch.float32, torch.float16, torch.float32),
}


def test_the_table_is_complete():
    assert set(SUPPORTED) == set(TABLE)


@pytest.mark.parametrize("precision", TABLE)
def test_policies(precision):
    kept, computed, reduced = TABLE[precision]
    assert (weight_dtype(precision), compute_dtype(precision)) == (kept, computed)
    policy = mixed_precision_policy(precision)
    assert (policy.param_dtype or torch.float32, policy.reduce_dtype) == (computed, reduced)
    assert policy.cast_forward_inputs
    statistics = statistics_policy(precision)
    assert (statistics.param_dtype, statistics.reduce_dtype, statistics.output_dtype) == (
        torch.float32, torch.float32, computed,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (32, "32-true"),
        ("32", "32-true"),
        (None, "32-true"),
        (16, "16-mixed"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
    ]
    + [(name, name) for name in TABLE],
)
def test_names_that_lightning_takes(asked, name):
    assert canonical_precision(asked) == name


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("bf16-mixd", "Did you mean 'bf16-mixed'"),
        ("64-true", "32-true is the most precise"),
        ("16-true", "use bf16-true"),
        (64, ""),
        ("transformer-engine", ""),
    ],
)
def test_what_memwall_does_not_compute_in_is_refused(asked, hint):
    with pytest.raises(ConfigError, match=f"precision={asked!r} is not supported") as caught:
        canonical_precision(asked)
    assert hint in str(caught.value)
    assert "32-true, bf16-true, bf16-mixed, 16-mixed" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "keeps"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.BatchNorm3d(3, affine=False), True),
        (nn.SyncBatchNorm(3), True),
        (nn.BatchNorm2d(3, track_running_stats=False), False),
        (nn.InstanceNorm2d(3), False),
        (nn.InstanceNorm2d(3, track_running_stats=True), True),
        (nn.LayerNorm(3), False),
        (nn.GroupNorm(1, 3), False),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_who_keeps_running_statistics(module, keeps):
    assert keeps_statistics(module) is keeps


def test_only_bf16_true_converts_and_only_what_is_fp32():
    def made():
        module = nn.Linear(2, 2)
        module.sixteen = nn.Parameter(torch.ones(1, dtype=torch.float16))
        module.register_buffer("table", torch.ones(2))
        module.register_buffer("count", torch.ones(2, dtype=torch.int64))
        module.child = nn.Linear(2, 2)
        return module

    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        module = made()
        convert_weights(module, precision)
        assert module.weight.dtype == module.table.dtype == torch.float32
    module = made()
    weight = module.weight
    convert_weights(module, "bf16-true")
    assert module.weight is weight, "the parameter object must stay: optimizers and ties know it"
    assert weight.dtype == module.bias.dtype == module.table.dtype == torch.bfloat16
    assert (module.sixteen.dtype, module.count.dtype) == (torch.float16, torch.int64)
    assert module.child.weight.dtype == torch.float32  # its own module's matter


def test_statistics_are_not_converted():
    norm = nn.BatchNorm1d(2)
    convert_weights(norm, "bf16-true")
    assert norm.weight.dtype == norm.running_mean.dtype == torch.float32
