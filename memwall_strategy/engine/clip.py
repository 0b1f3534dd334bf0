"""Gradient clipping for models that are only partly sharded, or sharded over several meshes.

``torch.nn.utils.clip_grad_norm_`` puts all norms into one stack, which fails as soon as plain tensors and DTensors, or
DTensors of two meshes, meet. Here norms are summed over ranks separately for each kind, with the same arithmetic as
torch, and then combined. With one mesh the result is torch's, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.fsdp import local_tensor

_Key = tuple[DeviceMesh | None, tuple[Placement, ...]]


def _by_layout(parameters: Iterable[torch.Tensor]) -> dict[_Key, list[torch.Tensor]]:
    """Local gradients, grouped by how they are laid out over ranks."""
    groups: dict[_Key, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            if any(isinstance(p, Partial) for p in gradient.placements):
                raise MemwallError("a gradient is still partial: clipping must come after its reduction")
            groups.setdefault((gradient.device_mesh, gradient.placements), []).append(local_tensor(gradient))
        else:
            groups.setdefault((None, ()), []).append(gradient)
    return groups


@torch.no_grad()
def total_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Norm of all gradients as if they were one vector; a 0-dim tensor, equal on every rank.

    Args:
        parameters: on one device; each rank must pass the same ones.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
    """
    norms = [_layout_norms(key, grads, float(norm_type)) for key, grads in _by_layout(parameters).items()]
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.cat([n.to(norms[0].device) for n in norms]), norm_type)


def _layout_norms(key: _Key, gradients: list[torch.Tensor], p: float) -> torch.Tensor:
    """Norm of each gradient over all ranks, in order; as torch does it, which sums each over ranks before combining."""
    mesh, placements = key
    filled = [g for g in gradients if g.numel()]  # a rank may hold no row of a small parameter
    found = iter(torch._foreach_norm(filled, p) if filled else ())
    norms = torch.stack([next(found) if g.numel() else g.new_zeros(()) for g in gradients])
    sharded = [mesh.get_group(i) for i, where in enumerate(placements) if not isinstance(where, Replicate)]
    if not sharded:
        return norms
    if math.isinf(p):
        for group in sharded:
            dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=group)
        return norms
    norms = norms.pow(p)
    for group in sharded:
        dist.all_reduce(norms, group=group)
    return norms.pow(1.0 / p)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``; return the norm before.

    Raises:
        MemwallError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    parameters = list(parameters)
    norm = total_norm(parameters, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise MemwallError(f"the total gradient norm is {norm.item()}: gradients cannot be clipped to {max_norm}")
    # 1e-6 and the clamp instead of a branch are torch's own: no device synchronization, the same rounding.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in _by_layout(parameters).values():
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


@torch.no_grad()
def clip_grad_value(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every gradient element to [-clip_value, clip_value] in place.

    Raises:
        ConfigError: ``clip_value`` is negative.
    """
    if clip_value < 0:
        raise ConfigError(f"gradient_clip_val={clip_value} is negative.")
    for gradients in _by_layout(parameters).values():
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply every gradient by ``factor`` in place."""
    for gradients in _by_layout(parameters).values():
        torch._foreach_mul_(gradients, factor)
