"""Counts of one step, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from memwall_strategy.accelerate.tokens import TokenWeights
from memwall_strategy.core.errors import ConfigError, MemwallError


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_micro_batches_add_up_to_the_mean_over_all_labels(one_rank: None) -> None:
    """Sums over labels of 3, 0, 5 and 2: whenever gradients are looked at, they are the mean's so far."""
    weights = TokenWeights(torch.device("cpu"))
    counts, sums = (3, 0, 5, 2), (6.0, 0.0, 2.5, -1.0)
    gradient = 0.0
    for index, (count, total) in enumerate(zip(counts, sums, strict=True)):
        mean = torch.tensor(total) / count  # the mean over no label is not a number
        gradient += weights.weigh(mean, torch.tensor(count)).item()
        if index >= 2:
            gradient *= weights.factor()
            assert gradient == pytest.approx(sum(sums[: index + 1]) / sum(counts[: index + 1]))
    weights.restart()
    assert weights.weigh(torch.tensor(2.0), 7).item() == 2.0
    assert weights.factor() == 1.0


def test_no_label_at_all(one_rank: None) -> None:
    weights = TokenWeights(torch.device("cpu"))
    loss = torch.tensor(float("nan"), requires_grad=True)
    weights.weigh(loss, 0).backward()
    assert loss.grad.item() == 0.0
    assert weights.factor() == 1.0


def test_counts_in_all_or_in_none(one_rank: None) -> None:
    weights = TokenWeights(torch.device("cpu"))
    assert weights.weigh(torch.tensor(2.0), None).item() == 2.0
    with pytest.raises(MemwallError, match="Pass it in all or in none"):
        weights.weigh(torch.tensor(2.0), 3)
    weights.restart()
    with pytest.raises(ConfigError, match="negative"):
        weights.weigh(torch.tensor(2.0), -3)
