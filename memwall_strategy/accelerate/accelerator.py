"""``MemwallAccelerator``: translates Accelerate's life cycle into the runtime's.

``prepare`` shards models in place and points optimizers at the shards; ``accumulate`` and ``no_sync`` mark
micro-batches that no optimizer step follows; clipping, saving, loading and gathering know of shards. What is not
overridden here is Accelerate's own. An exception in a forward, a backward, a step or an ``accumulate`` block drops the
step's gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs, InitProcessGroupKwargs, send_to_device
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memwall_strategy.accelerate.arguments import PRECISIONS, check_arguments, check_plugin
from memwall_strategy.accelerate.checkpoints import CheckpointMethods
from memwall_strategy.accelerate.forward import ForwardScope
from memwall_strategy.accelerate.gathering import GatherMethods
from memwall_strategy.accelerate.loader import PreparedLoader, deals
from memwall_strategy.accelerate.plugin import MemwallPlugin
from memwall_strategy.accelerate.tokens import TokenWeights
from memwall_strategy.accelerate.world import check_agreement, runs_on_cpu, start_group
from memwall_strategy.core.block import Phase
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.accelerate_bridge import (
    SteppingOptimizer,
    active_loader,
    compiled_from,
    is_prepared,
    mark_prepared,
    prepared_by,
    unwrap_optimizer,
)
from memwall_strategy.engine.clip import clip_grad_norm, clip_grad_value, scale_gradients
from memwall_strategy.engine.optimizers import parameter_names, point_at_shards
from memwall_strategy.engine.scaler import ShardedGradScaler
from memwall_strategy.engine.sharding import data_parallel_mesh
from memwall_strategy.runtime import Runtime
from memwall_strategy.runtime.data import position_loader
from memwall_strategy.runtime.input_clock import InputClock, timed
from memwall_strategy.runtime.input_lane import lane_for, use_lane

_DROPPED = "memwall_dropped_step"
"""Attribute of an exception whose step was dropped, so that this happens once whoever meets it first."""


class MemwallAccelerator(CheckpointMethods, GatherMethods, Accelerator):
    """``accelerate.Accelerator`` over memwall's runtime.

    Args:
        memwall: memwall's options; None for the defaults.
        options: as ``Accelerator`` takes them, without what contradicts memwall (other engines' plugins, fp8, dynamo).

    Attributes:
        memwall: the plugin; ``acc.memwall.runtime`` is the runtime of the model prepared last.
        weigh_batches: multiply losses by the weight of their batch in the last, uneven step of an epoch. Switch it off
            where losses are normalized over all ranks already (``transformers.Trainer``).

    Raises:
        ConfigError: a contradictory argument or environment variable, before anything starts.
    """

    def __init__(self, *args: Any, memwall: MemwallPlugin | None = None, **options: Any) -> None:
        if args:
            raise ConfigError("MemwallAccelerator takes keywords only. Write MemwallAccelerator(cpu=True, ...).")
        self.memwall = check_plugin(memwall)
        check_arguments(options)
        cpu = options["cpu"] = runs_on_cpu(options.get("cpu", False))
        handlers = options.get("kwargs_handlers") or ()
        group = next((each for each in handlers if isinstance(each, InitProcessGroupKwargs)), None)
        start_group(self.memwall.config, cpu=cpu, handler=group)
        super().__init__(**options)
        check_agreement(self.num_processes, self.device)
        self.memwall.events.rank = self.process_index
        self.weigh_batches = True
        self._input_clock = InputClock()
        self._input_lane = lane_for(
            self.device, partial(send_to_device, device=self.device, non_blocking=self.non_blocking),
            overlap=self.memwall.config.overlap, timeout_s=self.memwall.config.timeout_s, clock=self._input_clock,
        )  # fmt: skip
        if self._input_lane is not None:
            weakref.finalize(self, self._input_lane.close)
        self._mesh = data_parallel_mesh(
            self.device.type, torch.distributed.get_world_size(), self.memwall.config.replicate
        )
        self._mixed = self.mixed_precision != "no"
        self.native_amp = self._mixed  # what autocast() asks; models' own forwards never autocast
        scaling = next((each for each in handlers if isinstance(each, GradScalerKwargs)), None)
        self.scaler = None
        if self.mixed_precision == "fp16":
            chosen = scaling.to_kwargs() if scaling is not None else {}
            self.scaler = ShardedGradScaler(self.device.type, **chosen)
        self._scopes: dict[nn.Module, ForwardScope] = {}
        self._tokens = TokenWeights(self.device)
        self._held_back = 0
        self._finalizer = weakref.finalize(self, _close_all, self.memwall.runtimes, self._checkpointers())

    # -- set-up --

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard models, point their optimizers at the shards, deal loaders; any number of each, in any order.

        An optimizer goes with its model, or is made after it from ``model.parameters()``.

        Raises:
            ConfigError: an optimizer that has stepped, or that holds parameters of no prepared model.
        """
        models = [item for item in args if isinstance(item, nn.Module) and self._runtime_of(item) is None]
        optimizers = [item for item in args if isinstance(item, Optimizer) and not is_prepared(item)]
        together = nn.ModuleList([*self.memwall.runtimes, *map(compiled_from, models)])
        before = parameter_names(together)
        for optimizer in optimizers:
            self._check_owned(optimizer, before)
        for model in models:
            self.prepare_model(model)
        point_at_shards(optimizers, before, together)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard ``model`` in place and return it."""
        held = prepared_by(self).models
        if self._runtime_of(model) is not None:
            if not any(each is model for each in held):
                held.append(model)
            return model
        if self.verify_device_map(model):
            raise ConfigError("the model was loaded with device_map='auto'. Load it without: memwall places it.")
        inner = compiled_from(model)
        precision, events = PRECISIONS[self.mixed_precision], self.memwall.events
        runtime = Runtime(
            self.memwall.config, mesh=self._mesh, precision=precision, events=events, input_clock=self._input_clock
        )
        runtime.setup(inner)
        self.memwall.runtimes[inner] = runtime
        self._scopes[inner] = ForwardScope(inner, runtime, mixed=self._mixed, failed=self._abort)
        held.append(model)
        mark_prepared(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Wrap an optimizer of prepared models."""
        held = prepared_by(self).optimizers
        if is_prepared(optimizer):
            if not any(each is optimizer for each in held):
                held.append(optimizer)
            return optimizer
        self._check_owned(optimizer, {})
        for model, runtime in self.memwall.runtimes.items():
            own = set(model.parameters())
            if any(parameter in own for parameter in _parameters(optimizer)):
                runtime.add_optimizers([*runtime.optimizers, optimizer])
        wrapped = SteppingOptimizer(optimizer, self.scaler, self._around_step, lambda: prepared_by(self).optimizers)
        held.append(wrapped)
        return wrapped

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Deal a loader over the ranks, with a position; iterable data is left to Accelerate's loaders."""
        if is_prepared(data_loader) or not deals(data_loader, self.dispatch_batches):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        seed = self.dataloader_config.data_seed
        inner = position_loader(
            data_loader,
            rank=self.process_index,
            world=self.num_processes,
            seed=self._first_ranks_seed() if seed is None else seed,
            mode="passes",
            deal=True,
            split=self.split_batches,
        )
        place = self.device_placement if device_placement is None else device_placement
        if place:
            use_lane(inner, self._input_lane)
        prepared = PreparedLoader(
            timed(inner, self._input_clock),
            device=self.device if place else None,
            non_blocking=self.non_blocking,
            world=self.num_processes,
        )
        prepared_by(self).loaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Let the next pass start after so many batches. After ``load_state`` the loader is there already."""
        if not isinstance(dataloader, PreparedLoader):
            return super().skip_first_batches(dataloader, num_batches)
        dataloader.skip(num_batches)
        return dataloader

    def _first_ranks_seed(self) -> int:
        box = [torch.initial_seed() % 2**63]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def _check_owned(self, optimizer: Optimizer, coming: Mapping[nn.Parameter, str]) -> None:
        held = {parameter for model in self.memwall.runtimes for parameter in model.parameters()}
        foreign = [p for p in _parameters(optimizer) if p not in held and p not in coming]
        if foreign:
            raise ConfigError(
                f"{type(optimizer).__name__} holds {len(foreign)} parameters of no prepared model. Pass model and "
                "optimizer to acc.prepare together, or make the optimizer from the prepared model's parameters()."
            )

    def _runtime_of(self, model: nn.Module) -> Runtime | None:
        return self.memwall.runtimes.get(compiled_from(model))

    # -- one micro-batch, one step --

    def backward(
        self, loss: torch.Tensor | Mapping[str, Any], *, tokens: int | torch.Tensor | None = None, **options: Any
    ) -> None:
        """Backpropagate a micro-batch's mean loss.

        Args:
            loss: the loss, or ``{"loss": ..., "tokens": ...}``.
            tokens: how many labels this rank's loss is the mean of. With it the step equals one big batch whatever the
                counts are on other ranks and in other micro-batches, and ``gradient_accumulation_steps`` does not
                divide. Pass it in every micro-batch of a step, on every rank. Without it ranks and micro-batches count
                alike, but for the last step of an epoch, whose ranks count by their samples.

        Raises:
            MemwallError: no model was prepared.
        """
        if isinstance(loss, Mapping):
            tokens, loss = loss.get("tokens", tokens), loss["loss"]
        if not self.memwall.runtimes:
            raise MemwallError("acc.backward came before acc.prepare(model, ...). Prepare the model first.")
        runtimes = [scope.runtime for scope in self._scopes.values() if scope.in_flight]
        runtimes = runtimes or list(self.memwall.runtimes.values())
        with self._failing():
            weight = self.batch_weight if self.weigh_batches else 1.0
            for runtime in runtimes:
                runtime.begin_step()
            if tokens is not None:
                tokens = 0 if weight == 0.0 else tokens  # a repeated sample
                runtimes[-1].count({"loss": loss, "tokens": tokens})
                loss = self._tokens.weigh(loss, tokens)
            else:
                runtimes[-1].count(loss)
                loss = self._tokens.weigh(loss, None) * (weight / self.gradient_accumulation_steps)
            if self.scaler is not None:
                self.scaler.before_scale()
                loss = self.scaler.scale(loss)
            with ExitStack() as phases:
                for runtime in runtimes:
                    phases.enter_context(runtime.phase(Phase.BACKWARD))
                    if runtime.pool is not None and not self.sync_gradients:  # reduced or not, no step follows
                        phases.enter_context(runtime.pool.gradients.resting())
                loss.backward(**options)
            if self.sync_gradients and not self._held_back and (factor := self._tokens.factor()) != 1.0:
                for runtime in runtimes:
                    scale_gradients(runtime.model.parameters(), factor)

    @property
    def batch_weight(self) -> float:
        """Weight of the batch that the loader under way handed out last: not 1 in an epoch's last, uneven step; 0 for a
        sample of another rank, repeated so that all ranks make the same steps."""
        return getattr(active_loader(self), "weight", 1.0)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Around a micro-batch that no optimizer step follows: gradients are reduced no further than they must."""
        runtime = self._runtime_of(model)
        if runtime is None:
            yield
            return
        self._held_back += 1
        try:
            with runtime.micro_batch(last=False):
                yield
        finally:
            self._held_back -= 1

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """As in Accelerate: every ``gradient_accumulation_steps`` micro-batches, and at a loader's end, a step."""
        with self._failing(), super().accumulate(*models):
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Nothing to do: loaders end together on all ranks."""
        yield

    @contextmanager
    def _around_step(self, optimizer: Optimizer) -> Iterator[None]:
        scopes = [scope for scope in self._scopes.values() if optimizer in scope.runtime.optimizers]
        with self._failing():
            with ExitStack() as phases:
                for scope in scopes:
                    scope.runtime.begin_step()
                    scope.runtime.gradients_ready()
                    scope.runtime.before_optimizer()
                    phases.enter_context(scope.runtime.phase(Phase.STEP))
                yield
            self._tokens.restart()
            for scope in scopes:
                scope.in_flight = False
                scope.runtime.end_step()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        """Leave no gradient of a broken step; once for an exception, whoever meets it first."""
        if getattr(error, _DROPPED, None) == id(self):
            return
        setattr(error, _DROPPED, id(self))  # on the error: a number that stands for it may come again
        self._forget_step()
        for scope in self._scopes.values():
            scope.runtime.abort_step(error)

    def drop_step(self) -> None:
        """Drop the gradients of the step under way, accumulated ones included."""
        self._forget_step()
        for scope in self._scopes.values():
            scope.runtime.drop_step()

    def _forget_step(self) -> None:
        self._tokens.restart()
        if self.scaler is not None:
            self.scaler.forget()
        for scope in self._scopes.values():
            scope.in_flight = False

    def unscale_gradients(self, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Divide gradients by the scaler's scale, once a step; of all prepared optimizers unless told otherwise."""
        self._bring_gradients_back()
        if self.scaler is None:
            return
        if optimizer is None:
            optimizer = prepared_by(self).optimizers
        for each in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
            self.scaler.unscale_once(unwrap_optimizer(each))

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip to a total norm over all shards; returns the norm before."""
        parameters = self._unscaled(parameters)
        with self._failing():
            return clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient element."""
        clip_grad_value(self._unscaled(parameters), clip_value)

    def _bring_gradients_back(self) -> None:
        """Who looks at gradients between micro-batches sees all of them, wherever they rest."""
        for scope in self._scopes.values():
            if scope.runtime.pool is not None:
                scope.runtime.pool.gradients.bring_back()

    def _unscaled(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        asked = set(parameters)
        owners = [o for o in prepared_by(self).optimizers if any(p in asked for p in _parameters(o))]
        self.unscale_gradients(owners)
        return parameters

    # -- metrics, end --

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Log ``values`` and the runtime's figures of the last step (``memwall/...``) to all trackers.

        Args:
            options: ``metrics=False`` logs ``values`` alone.
        """
        figures = self.metrics() if options.pop("metrics", True) else {}
        super().log({**figures, **values}, step=step, log_kwargs=log_kwargs, **options)

    def metrics(self) -> dict[str, float]:
        """Figures of the last step, of the model prepared last; this rank's."""
        runtime = self.memwall.runtime
        return {} if runtime is None else runtime.metrics()

    def free_memory(self, *objects: Any) -> Any:
        """Let go of everything prepared; models stay plain FSDP2 models, without lanes and hooks."""
        self._let_go()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Finish trackers, wait for a checkpoint in the background, end lanes and the process group."""
        self._let_go()
        if self._input_lane is not None:
            self._input_lane.close()
        super().end_training()

    def _let_go(self) -> None:
        for scope in self._scopes.values():
            scope.remove()
        self._scopes.clear()
        self._tokens.restart()
        _close_all(self.memwall.runtimes, self._checkpointers())


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _close_all(runtimes: dict[nn.Module, Runtime], checkpointers: dict[str, Any]) -> None:
    closers: list[Callable[[], None]] = [each.close for each in (*checkpointers.values(), *runtimes.values())]
    checkpointers.clear()
    runtimes.clear()
    with ExitStack() as stack:
        for close in reversed(closers):
            stack.callback(close)
