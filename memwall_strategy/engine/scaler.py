"""A gradient scaler for sharded gradients: all ranks skip a step, or none does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from memwall_strategy.engine.fsdp import local_tensor


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that looks at each rank's shards and agrees on what it found.

    Relies on the private ``GradScaler._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)`` returning one
    ``found_inf`` per device, which ``step`` and ``update`` then read; and on ``_per_optimizer_states``, the stage of
    each optimizer since the last ``update``.
    """

    def step_one_of(self, optimizer: torch.optim.Optimizer, others: Iterable[torch.optim.Optimizer], *args: Any) -> Any:
        """``step``, and ``update`` unless another of the optimizers still holds gradients of the present scale.

        Args:
            others: all optimizers that share this scaler.
            args: for ``optimizer.step``.
        """
        result = self.step(optimizer, *args)
        if not any(not self._stepped(other) and _has_gradients(other) for other in others):
            self.update()
        return result

    def before_scale(self) -> None:
        """``update`` if a step has not been followed by one yet: new gradients come with the new scale."""
        if any(state["stage"] is OptState.STEPPED for state in self._per_optimizer_states.values()):
            self.update()

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """``unscale_``, unless it was done since the last ``update``: clipping twice, say."""
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED

    def forget(self) -> None:
        """Forget what was unscaled since the last ``update``: those gradients were dropped."""
        self._per_optimizer_states.clear()

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = local_tensor(parameter.grad)
                    if local.dtype == torch.float16 and not allow_fp16:
                        raise ValueError("Attempting to unscale FP16 gradients.")
                    by_dtype.setdefault(local.dtype, []).append(local)
        found = torch.zeros_like(found_inf)
        with torch.no_grad():
            for gradients in by_dtype.values():
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale)
            if dist.is_initialized():
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {found.device: found}


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
