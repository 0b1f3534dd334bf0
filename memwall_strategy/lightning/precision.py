"""Precision plugin: mixed precision comes from FSDP2's policy, nothing is autocast on top.

What each precision keeps, computes and reduces in is said in ``engine.precision``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.clip import clip_grad_norm, clip_grad_value
from memwall_strategy.engine.lightning_bridge import PrecisionSeams, optimizer_handles_unscaling, trainer_package
from memwall_strategy.engine.precision import canonical_precision
from memwall_strategy.engine.scaler import ShardedGradScaler

if TYPE_CHECKING:
    from memwall_strategy.runtime import Runtime


class PrecisionMethods(PrecisionSeams):
    """What the plugin changes of Lightning's ``Precision``; mixed into it by ``precision_class``.

    Args:
        precision: ``32-true``, ``bf16-true``, ``bf16-mixed`` or ``16-mixed``.

    Raises:
        ConfigError: any other precision.
    """

    def __init__(self, precision: str | int | None = "32-true") -> None:
        super().__init__()
        self.precision = canonical_precision(precision)
        self.scaler: ShardedGradScaler | None = None
        self.runtime: Runtime | None = None

    def attach(self, runtime: Runtime) -> None:
        """Called by the strategy when the model is sharded."""
        self.runtime = runtime
        if self.precision == "16-mixed" and self.scaler is None:
            self.scaler = ShardedGradScaler(runtime.device.type)

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Nothing: the policy casts at each unit's boundary."""
        yield

    def convert_input(self, data: Any) -> Any:
        """Nothing: units cast what they take."""
        return data

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        skipped = result is None and model.automatic_optimization  # training_step returned None
        if not skipped and not optimizer_handles_unscaling(optimizer):
            self.scaler.unscale_(optimizer)
        self.hooks_and_clipping(model, optimizer)
        if skipped:
            return result
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def gradients_ready(self) -> None:
        """Hooks and clipping, which come next, see finished gradients."""
        if self.runtime is not None:
            self.runtime.gradients_ready()

    def before_optimizer(self) -> None:
        """Hooks and clipping are done."""
        if self.runtime is not None:
            self.runtime.before_optimizer()

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self._refuse_fused_scaling(optimizer)
        clip_grad_norm(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        self._refuse_fused_scaling(optimizer)
        clip_grad_value(self.main_params(optimizer), clip_val)

    def _refuse_fused_scaling(self, optimizer: Any) -> None:
        if self.scaler is not None and optimizer_handles_unscaling(optimizer):
            raise ConfigError(
                "gradient_clip_val with precision='16-mixed' and a fused optimizer: it unscales gradients inside its "
                "step, after clipping. Use fused=False, or precision='bf16-mixed'."
            )

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


@cache
def precision_class(namespace: str) -> type:
    """``MemwallPrecision`` for ``lightning`` or ``pytorch_lightning``."""
    base = import_module(f"{trainer_package(namespace)}.plugins.precision.precision").Precision
    return type("MemwallPrecision", (PrecisionMethods, base), {"__doc__": PrecisionMethods.__doc__})
