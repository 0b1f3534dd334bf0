"""BatchNorm with the statistics of the whole batch, on devices where torch's ``SyncBatchNorm`` does not run.

torch's own is CUDA only. This one sums count, sum and sum of squares over ranks in float64 with a differentiable
all-reduce and leaves the backward to autograd: slower, but the result is that of one process on the whole batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm  # the base of BatchNorm1d, 2d and 3d


class CrossRankBatchNorm(_BatchNorm):
    """BatchNorm over the batches of all ranks; in evaluation an ordinary BatchNorm.

    Input (N, C, ...), any floating dtype; statistics are kept in the dtype of the running buffers.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if alone or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        dims = [0, *range(2, input.dim())]
        wide = input.to(torch.float64)
        count = torch.full((1,), input.numel() // input.size(1), dtype=torch.float64, device=input.device)
        sums = all_reduce(torch.cat([count, wide.sum(dims), wide.square().sum(dims)]))
        total, mean, square = sums[0], sums[1 : 1 + self.num_features], sums[1 + self.num_features :]
        mean, square = mean / total, square / total
        variance = square - mean.square()
        self._update_running(total, mean, variance)
        shape = [1, -1, *[1] * (input.dim() - 2)]
        normal = (wide - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, total: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or not self.training:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (total / (total - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def synchronize_batch_norms(model: nn.Module, device_type: str) -> nn.Module:
    """Replace every BatchNorm below ``model`` by one with the statistics of all ranks; return the model.

    A module that stands in several places stays one module.
    """
    if device_type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    made: dict[_BatchNorm, CrossRankBatchNorm] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # named_children() would pass over a second name of one child
            if isinstance(child, _BatchNorm) and not isinstance(child, CrossRankBatchNorm):
                if child not in made:
                    made[child] = _converted(child)
                parent._modules[name] = made[child]
    if isinstance(model, _BatchNorm) and not isinstance(model, CrossRankBatchNorm):
        return _converted(model)
    return model


def _converted(norm: _BatchNorm) -> CrossRankBatchNorm:
    new = CrossRankBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
    )
    # The same tensors, so that an optimizer or a tied module that knows them still does.
    for name, parameter in norm.named_parameters(recurse=False):
        setattr(new, name, parameter)
    for name, buffer in norm.named_buffers(recurse=False):
        new._buffers[name] = buffer
    new.training = norm.training
    return new
