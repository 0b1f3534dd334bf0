"""Mixed precision through FSDP2's ``MixedPrecisionPolicy``; no autocast on top.

| precision    | weights kept | computed in | gradients reduced in |
|--------------|--------------|-------------|----------------------|
| ``32-true``    | fp32         | fp32        | fp32                 |
| ``bf16-true``  | bf16         | bf16        | fp32                 |
| ``bf16-mixed`` | fp32         | bf16        | fp32                 |
| ``16-mixed``   | fp32         | fp16        | fp32, loss scaled    |

Modules that keep running statistics (the BatchNorm family) stay in fp32 altogether: their weights, inputs and
statistics are fp32 and only their output is cast back. Layer and group norms compute their statistics in fp32 inside
torch's kernels whatever the input is.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _NormBase  # the one base of all modules with running statistics

from memwall_strategy.core.errors import ConfigError, nearest

_COMPUTE = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
_ALIASES = {32: "32-true", "32": "32-true", "bf16": "bf16-mixed", 16: "16-mixed", "16": "16-mixed", None: "32-true"}
_UNLIKE = {
    **dict.fromkeys(("64-true", "64", 64), "float64 is not among its arithmetic; 32-true is the most precise."),
    "16-true": "Weights in float16 lose small updates; use bf16-true, or 16-mixed with float32 weights.",
    "transformer-engine": "float8 is not among its arithmetic; use bf16-mixed.",
}
"""Other names that Lightning knows, with what to take instead."""
SUPPORTED = tuple(_COMPUTE)


def canonical_precision(precision: str | int | None) -> str:
    """Return the precision under the name that the table above uses.

    Raises:
        ConfigError: a precision that memwall does not compute in.
    """
    name = _ALIASES.get(precision, precision)
    if name not in _COMPUTE:
        hint = f" {_UNLIKE[precision]}" if precision in _UNLIKE else nearest(str(precision), SUPPORTED)
        raise ConfigError(
            f"precision={precision!r} is not supported by memwall.{hint} Choose one of {', '.join(SUPPORTED)}."
        )
    return str(name)


def compute_dtype(precision: str) -> torch.dtype:
    """Dtype of the arithmetic in forward and backward."""
    return _COMPUTE[precision]


def weight_dtype(precision: str) -> torch.dtype:
    """Dtype in which sharded weights, and so optimizer states, are kept."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def mixed_precision_policy(precision: str) -> MixedPrecisionPolicy:
    """Policy of an ordinary unit."""
    dtype = _COMPUTE[precision]
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def statistics_policy(precision: str) -> MixedPrecisionPolicy:
    """Policy of a module with running statistics: fp32 inside, the compute dtype outside."""
    return MixedPrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        output_dtype=_COMPUTE[precision],
        cast_forward_inputs=True,
    )


def keeps_statistics(module: nn.Module) -> bool:
    """Whether the module tracks running statistics."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def convert_weights(owner: nn.Module, precision: str) -> None:
    """Bring a module's own fp32 weights and buffers to the dtype they are kept in, in place.

    Only ``bf16-true`` converts; modules with running statistics, and weights that are not fp32 (chosen so by the user),
    are left as they are.
    """
    dtype = weight_dtype(precision)
    if dtype == torch.float32 or keeps_statistics(owner):
        return
    for parameter in owner.parameters(recurse=False):
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)
    for name, buffer in owner.named_buffers(recurse=False):
        if buffer.dtype == torch.float32:
            owner._buffers[name] = buffer.to(dtype)
