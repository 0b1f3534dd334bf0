"""Floating-point operations of a step, counted once, and the rate the device can reach, measured once."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_PEAK_SIZE = 512
"""Rows and columns of the matrices whose product measures the peak on CPU."""
_PEAK_SIZE_GPU = 8192
_PEAK_REPEATS = 5


class FlopCount(TorchDispatchMode):
    """Counts the operations that torch's own registry knows (matrix products, convolutions, attention).

    torch's ``FlopCounterMode`` is not used because it tracks modules through hooks that FSDP2's resharding upsets, and
    its registry lacks the attention kernels of the CPU.

    Attributes:
        flops: operations so far; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.flops += sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.flops += sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)
        return out


def is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled: wrapped (``_orig_mod`` is what ``torch.compile`` wraps), or in place."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product, the best of a few; the denominator of MFU.

    It is what this process can reach with its threads on its device now, not a data-sheet figure.
    """
    size = _PEAK_SIZE_GPU if device.type == "cuda" else _PEAK_SIZE
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers must not move
    a = torch.randn(size, size, device=device, generator=generator).to(dtype)
    best = float("inf")
    for _ in range(_PEAK_REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
