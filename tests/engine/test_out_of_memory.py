"""What counts as a lack of memory, and how much was asked for."""

from __future__ import annotations

import pytest
import torch

from memwall_strategy.core.errors import CollectiveError, TransferError
from memwall_strategy.engine.out_of_memory import asked_bytes, out_of_memory

CUDA = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.80 GiB."


def of_cpu() -> RuntimeError:
    """What the CPU allocator raises for a tensor of an exbibyte; the words are torch's own."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


def test_the_cpu_allocator_is_recognized_by_its_words() -> None:
    error = of_cpu()
    assert out_of_memory(error) is error
    assert asked_bytes(error) == 2**60


def test_cuda_and_python() -> None:
    error = torch.OutOfMemoryError(CUDA)
    assert out_of_memory(error) is error
    assert asked_bytes(error) == 3 * 2**29
    assert out_of_memory(python := MemoryError()) is python
    assert asked_bytes(python) == 0


def test_what_a_lane_met_is_found_behind_its_error() -> None:
    named = TransferError("lane 'reduce': reduce of unit 'a' failed")
    named.__cause__ = error = of_cpu()
    assert out_of_memory(named) is error


def test_others_are_none() -> None:
    assert out_of_memory(ValueError(CUDA)) is None
    assert out_of_memory(RuntimeError("shape mismatch")) is None
    assert out_of_memory(CollectiveError(f"rank 1 gave up: {of_cpu()}", (1,))) is None  # it quotes another rank's
    circle = RuntimeError("a")
    circle.__cause__ = other = RuntimeError("b")
    other.__cause__ = circle
    assert out_of_memory(circle) is None
