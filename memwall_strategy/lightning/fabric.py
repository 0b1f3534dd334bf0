"""``Fabric(strategy="memwall")``: the same runtime under a loop that the user writes.

``fabric.setup(model, optimizer)`` shards the model and points the optimizer at the shards; ``fabric.no_backward_sync``
marks micro-batches that no optimizer step follows; clipping, saving and loading go through memwall's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer

from memwall_strategy.config import MemwallConfig
from memwall_strategy.core.block import Phase
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.clip import clip_grad_norm, clip_grad_value
from memwall_strategy.engine.lightning_bridge import (
    FABRIC_PACKAGES,
    FabricSeams,
    choose_precision_by_strategy,
    unwrap_optimizer,
)
from memwall_strategy.engine.optimizers import parameter_names, point_at_shards
from memwall_strategy.engine.precision import canonical_precision, compute_dtype
from memwall_strategy.engine.scaler import ShardedGradScaler
from memwall_strategy.engine.sharding import STEP_METHODS, data_parallel_mesh
from memwall_strategy.lightning.checkpoints import FabricCheckpointMethods
from memwall_strategy.lightning.world import WorldMethods, choose_precision, divided, read_options, sum_for
from memwall_strategy.runtime import Runtime
from memwall_strategy.runtime.input_clock import InputClock, timed
from memwall_strategy.runtime.world import refuse_trainer_only


class FabricPrecisionMethods:
    """Fabric's precision plugin over FSDP2's policy; see ``lightning.precision``."""

    def __init__(self, precision: str | int | None = "32-true") -> None:
        super().__init__()
        self.precision = canonical_precision(precision)
        self.scaler: ShardedGradScaler | None = None

    def attach(self, device_type: str) -> None:
        """Called when a model is set up."""
        if self.precision == "16-mixed" and self.scaler is None:
            self.scaler = ShardedGradScaler(device_type)

    def convert_output(self, data: Any) -> Any:
        """Low-precision outputs come back in fp32, as from Fabric's own plugins, so that losses are taken in fp32."""
        low = compute_dtype(self.precision)
        if low == torch.float32 or self.precision == "bf16-true":
            return data
        return apply_to_collection(data, torch.Tensor, lambda t: t.float() if t.dtype == low else t)

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        super().backward(tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


class FabricStrategyMethods(FabricCheckpointMethods, WorldMethods, FabricSeams):
    """Pooled, sharded, overlapped training under Fabric; see ``MemwallStrategy`` for the arguments.

    Attributes:
        runtime: the ``Runtime`` of the model that was set up last.
        runtimes: one for each model that was set up.
    """

    def __init__(
        self,
        config: MemwallConfig | None = None,
        *,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        self.config = read_options(config, options, "MemwallFabricStrategy")
        refuse_trainer_only(self.config, "Fabric")
        self.runtimes: dict[nn.Module, Runtime] = {}
        self.input_clock = InputClock()
        super().__init__(
            parallelize_fn=lambda module, mesh: module,
            save_distributed_checkpoint=self.config.checkpoint == "sharded",
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self.config.timeout_s),
        )
        self.set_sync_control(self._micro_batch)

    @property
    def runtime(self) -> Runtime | None:
        """Runtime of the model that was set up last."""
        return next(reversed(self.runtimes.values()), None)

    def setup_module(self, module: nn.Module) -> nn.Module:
        runtime = Runtime(
            self.config,
            mesh=data_parallel_mesh(self.root_device.type, self.world_size, self.config.replicate),
            precision=self.precision.precision,
            input_clock=self.input_clock,
        )
        self.precision.attach(self.root_device.type)
        runtime.setup(module)
        # Fabric sends a LightningModule's steps through forward only where the strategy wraps the module.
        for method in STEP_METHODS:
            if hasattr(module, method):
                register_fsdp_forward_method(module, method)
        self.runtimes[module] = runtime
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        before = parameter_names(module)
        module = self.setup_module(module)
        point_at_shards(optimizers, before, module)
        self.runtimes[module].add_optimizers(optimizers)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        for module, runtime in self.runtimes.items():
            own = set(module.parameters())
            if any(p in own for group in optimizer.param_groups for p in group["params"]):
                runtime.add_optimizers([*runtime.optimizers, optimizer])
                return optimizer
        raise ConfigError(
            f"{type(optimizer).__name__} holds no parameter of a model that was set up. Make it after "
            "fabric.setup_module(model), or pass both to fabric.setup(model, optimizer)."
        )

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give loaders a position (save ``loader.state_dict()`` with the rest of the state), and time their batches."""
        return timed(self.give_position(super().process_dataloader(dataloader), "passes"), self.input_clock)

    def _micro_batch(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        runtime = self.runtimes.get(module)
        return runtime.micro_batch(last=False) if enabled and runtime is not None else nullcontext()

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        runtime = self._runtime_of(module)
        runtime.begin_step()
        runtime.count(tensor)
        with runtime.phase(Phase.BACKWARD):
            super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        plain = unwrap_optimizer(optimizer)
        runtime = next((r for r in self.runtimes.values() if plain in r.optimizers), self.runtime)
        runtime.begin_step()
        runtime.gradients_ready()
        runtime.before_optimizer()
        with runtime.phase(Phase.STEP):
            output = super().optimizer_step(optimizer, **kwargs)
        runtime.end_step()
        return output

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        clip_grad_value(self.precision.main_params(optimizer), clip_val)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        op, divide = sum_for(tensor, reduce_op)
        reduced = super().all_reduce(tensor, group, op)
        return divided(reduced, group) if divide else reduced

    def teardown(self) -> None:
        self.close_checkpointers()
        for runtime in self.runtimes.values():
            runtime.close()
        super().teardown()

    def _runtime_of(self, module: nn.Module | None) -> Runtime:
        runtime = self.runtimes.get(module) if module is not None else None
        runtime = runtime or self.runtime
        if runtime is None:
            raise MemwallError("fabric.backward came before fabric.setup(model, optimizer). Set the model up first.")
        return runtime


@cache
def fabric_strategy_class(namespace: str) -> type:
    """``MemwallFabricStrategy`` for ``lightning.fabric`` or ``lightning_fabric``."""
    package = FABRIC_PACKAGES[namespace]
    base = import_module(f"{package}.strategies.model_parallel").ModelParallelStrategy
    precision_base = import_module(f"{package}.plugins.precision.precision").Precision
    doc = {"__doc__": FabricStrategyMethods.__doc__, "__module__": __name__}
    strategy = type("MemwallFabricStrategy", (FabricStrategyMethods, base), doc)
    precision = type("MemwallFabricPrecision", (FabricPrecisionMethods, precision_base), {"__module__": __name__})

    remedy = "precision='bf16-mixed' (or 32-true, bf16-true, 16-mixed)"
    choose_precision_by_strategy(
        f"{package}.connector", "_precision_input", strategy, partial(choose_precision, precision, remedy=remedy)
    )
    return strategy
