"""``Trainer(strategy="memwall")``: translates Lightning's life cycle into the runtime's.

The strategy extends Lightning's ``ModelParallelStrategy`` (FSDP2). What it adds: a plain LightningModule needs no
``configure_model``; data parallel over all ranks is the default; precision goes through FSDP2's policy; gradients are
reduced no further than a micro-batch needs; checkpoints are whole or not there; data resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memwall_strategy.callbacks.pillars import configured
from memwall_strategy.config import MemwallConfig
from memwall_strategy.core.block import Phase
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.lightning_bridge import (
    ModelParallelSeams,
    around_closures,
    choose_precision_by_strategy,
    install_stop_agreement,
    mark_training_data,
    materialize,
    time_fetches,
    trainer_package,
    trainer_package_of,
    unwrap_optimizer,
)
from memwall_strategy.engine.loader import batch_weight, follow, settle_resume
from memwall_strategy.engine.processes import die_with_parent
from memwall_strategy.engine.sharding import data_parallel_mesh, is_sharded
from memwall_strategy.engine.sync_norm import synchronize_batch_norms
from memwall_strategy.lightning.checkpoints import CheckpointMethods
from memwall_strategy.lightning.input import input_lane
from memwall_strategy.lightning.journal import Journal, MicroBatch, loss_in
from memwall_strategy.lightning.precision import precision_class
from memwall_strategy.lightning.world import WorldMethods, choose_precision, divided, read_options, sum_for
from memwall_strategy.runtime import Runtime
from memwall_strategy.runtime.input_lane import InputLane, use_lane
from memwall_strategy.telemetry.events import Events

_OUTSIDE_FORWARD = "mixed torch.Tensor and DTensor"
"""What torch says when a sharded weight meets a plain tensor: a weight was used outside its module's forward."""

_SEE_GRADIENTS = ("on_before_backward", "on_after_backward", "on_train_batch_end", "on_train_batch_start")
"""Hooks that run between the backward of one micro-batch and that of the next."""

_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")
"""Lightning's callbacks that keep a second, whole model."""


class StrategyMethods(CheckpointMethods, WorldMethods, ModelParallelSeams):
    """Pooled, sharded, overlapped training; mixed into Lightning's strategy by ``strategy_class``.

    Args:
        config: everything at once; or the fields of ``MemwallConfig`` as keywords.
        tensor_parallel_size: ranks that a model's own ``configure_model`` uses for tensor parallelism.
        process_group_backend: ``gloo``, ``nccl``...; None: by device, and swappable where the config says so.
        options: fields of ``MemwallConfig``.

    Attributes:
        config: as given, with what the trainer's callbacks say of their pillars from the environment's set-up on.
        runtime: the ``Runtime``, from set-up on; its metrics stay readable after training.
        events: what happens, in every run of this strategy; subscribe before or while it runs.

    Raises:
        ConfigError: an unknown option or a value that cannot be.
    """

    def __init__(
        self,
        config: MemwallConfig | None = None,
        *,
        tensor_parallel_size: int = 1,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        self.config = self._given_config = read_options(config, options, "MemwallStrategy")
        self.runtime: Runtime | None = None
        self.events = Events()
        self._wanted_tensor_parallel = tensor_parallel_size
        self._failed = False
        self._training_data = False
        self._journal: Journal | None = None
        self._accumulating = False
        self._input_lane: InputLane | None = None
        super().__init__(
            save_distributed_checkpoint=self.config.checkpoint == "sharded",
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self.config.timeout_s),
        )

    # -- set-up --

    def setup_environment(self) -> None:
        self.config = configured(self._given_config, self.lightning_module.trainer.callbacks)
        if self.config != self._given_config:
            self.check_world(self.num_processes * self.num_nodes)
        super().setup_environment()
        self.events.rank = self.global_rank

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self._failed = False
        module = self.lightning_module
        self._refuse_fsdp1(module)
        fitting = trainer.state.fn == "fit"
        if fitting:
            self._refuse_averages(trainer)
        given = is_sharded(module)
        if given:
            materialize(module, self.root_device, trainer)
        self.runtime = Runtime(
            self.config, mesh=self._data_mesh(), precision=self.precision_plugin.precision, events=self.events
        )
        if not given and self.syncs_batch_norms():
            synchronize_batch_norms(module, self.root_device.type)
        if not given and fitting and not module.automatic_optimization:
            self._refuse_root_parameters(module)
        self.runtime.setup(module, split=True)
        self.model = module
        if not self.runtime.host_modules:  # they stay; what is sharded is on the device already
            self.model_to_device()
        self.precision_plugin.attach(self.runtime)
        self.barrier()
        if fitting:
            mark_training_data(trainer, self._mark_training_data)  # configure_optimizers may ask for the data's length
            self.setup_optimizers(trainer)
            self.runtime.micro_batches = trainer.accumulate_grad_batches if module.automatic_optimization else 2
            if self.config.pool.gradients == "host" and not module.automatic_optimization:
                raise ConfigError(
                    "pool.gradients='host' and manual optimization cannot go together: no backward says that it is "
                    "the last before a step. Use automatic optimization, or pool.gradients='device'."
                )
            self.runtime.total_steps = trainer.max_steps if trainer.max_steps > 0 else None
            if self.config.overlap.enabled and self.config.overlap.optimizer_in_backward:
                self._refuse_between_backward_and_step(trainer)
            self.runtime.add_optimizers(self.optimizers)
            install_stop_agreement(trainer, lambda: self.save_on_sigterm(trainer), self.restore_rng_once)
            time_fetches(trainer, self.runtime.input_clock)
            if module.automatic_optimization and self.runtime.restart.enabled:
                self._journal = Journal(module)
                around_closures(trainer, self._run_closure)
        self.setup_precision_plugin()
        self.start_checkpoints()

    def _data_mesh(self) -> DeviceMesh:
        """The mesh to shard over: all ranks, or the data-parallel ones of a user's tensor parallelism."""
        if self._wanted_tensor_parallel > 1:
            return self.device_mesh["data_parallel"]
        return data_parallel_mesh(self.root_device.type, self.world_size, self.config.replicate)

    @staticmethod
    def _refuse_fsdp1(module: nn.Module) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
            raise ConfigError(
                "the model holds torch's first FSDP (FullyShardedDataParallel). Take the wrapper out: memwall shards "
                "plain modules itself, or keep fully_shard in configure_model."
            )

    @staticmethod
    def _refuse_averages(trainer: Any) -> None:
        callbacks = import_module(f"{trainer_package_of(trainer)}.callbacks")
        kinds = tuple(getattr(callbacks, name) for name in _AVERAGES if hasattr(callbacks, name))
        if averaging := next((each for each in trainer.callbacks if isinstance(each, kinds)), None):
            raise ConfigError(
                f"callbacks=[{type(averaging).__name__}(...)] copies the whole model before it is sharded and cannot "
                "average shards. Take it out, and average module.parameters(), which are this rank's shards, in a "
                "callback of your own."
            )

    @staticmethod
    def _refuse_root_parameters(module: nn.Module) -> None:
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise ConfigError(
                f"manual optimization with parameters directly on {type(module).__name__} ({', '.join(own)}): they "
                "would be resharded after the first backward inside training_step. Move them into a child module."
            )

    def _refuse_between_backward_and_step(self, trainer: Any) -> None:
        """With units that step inside the backward nobody sees all gradients before the step."""
        module, package = self.lightning_module, trainer_package_of(trainer)
        module_type = import_module(f"{package}.core.module").LightningModule
        callback_type = import_module(f"{package}.callbacks").Callback
        between = ("on_before_optimizer_step", "on_after_backward")
        known = (f"{package}.", "memwall_strategy.")
        watching = next(
            (
                type(each).__name__
                for each in trainer.callbacks
                if _overrides(each, callback_type, between, own_class=not _module_of(each).startswith(known))
            ),
            None,
        )
        met = {
            "manual optimization": not module.automatic_optimization,
            "several optimizers": len(self.optimizers) > 1,
            "gradient_clip_val": bool(trainer.gradient_clip_val),
            "configure_gradient_clipping": _overrides(module, module_type, ("configure_gradient_clipping",)),
            "precision='16-mixed' (its scaler looks at all gradients first)": self.precision_plugin.scaler is not None,
            f"a hook of {type(module).__name__} between backward and step": _overrides(module, module_type, between),
            f"a hook of {watching} between backward and step": watching is not None,
        }
        if reason := next((reason for reason, holds in met.items() if holds), None):
            raise ConfigError(
                f"overlap.optimizer_in_backward=true and {reason} cannot go together: units step before all gradients "
                "are there. Take one of them out."
            )

    # -- data --

    def _mark_training_data(self, under_way: bool) -> None:
        self._training_data = under_way

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give training loaders a position, so that a resumed run goes on with exactly the samples not yet seen."""
        dataloader = super().process_dataloader(dataloader)
        if not self._training_data:
            return dataloader
        positioned = self.give_position(dataloader, "train")
        follow(positioned, self.lightning_module.trainer)
        if self._input_lane is None:
            trainer = self.lightning_module.trainer
            self._input_lane = input_lane(trainer, self.root_device, self.config, self.runtime.input_clock)
        use_lane(positioned, self._input_lane)
        return positioned

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A copy that the training thread waits for is input too."""
        training = self.runtime is not None and self.lightning_module.trainer.training
        with self.runtime.input_clock if training else nullcontext():
            return super().batch_to_device(batch, *args, **kwargs)

    def on_train_start(self) -> None:
        settle_resume(self.lightning_module.trainer)
        super().on_train_start()

    # -- one micro-batch, one step --

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.runtime.begin_batch()
        if self._journal is not None:
            self._journal.current.step_args = (args, kwargs)
            return self._forward(*args, **kwargs)
        with self.runtime.restart.named("manual optimization steps by itself"):
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.runtime.phase(Phase.FORWARD), _explain_outside_forward():
            output = super().training_step(*args, **kwargs)
        self.runtime.count(output)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation("validation"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation("a test"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation("a prediction"):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluation(self, what: str) -> Generator[None, None, None]:
        named = self.runtime.restart.named(f"it was in {what}, which is not run again")
        with named, self.runtime.phase(Phase.FORWARD), _explain_outside_forward():
            yield

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.runtime.begin_step()
        weight = batch_weight(self.lightning_module.trainer)
        if self._journal is not None:
            self._journal.current.backward_args, self._journal.current.weight = (args, kwargs), weight
        return self._backward(closure_loss, weight, *args, **kwargs)

    def _backward(self, closure_loss: torch.Tensor, weight: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        if weight != 1.0:  # the last steps of an epoch that does not divide evenly; see runtime.sampler
            closure_loss = closure_loss * weight
        with self.runtime.phase(Phase.BACKWARD):
            return super().backward(closure_loss, *args, **kwargs)

    # -- a step that begins anew, see runtime.restart --

    def _run_closure(self, closure: Callable[[], Any], batch_idx: int) -> Any:
        """Forward and backward of one micro-batch; again, with those before it, where a rank ran out of memory."""
        if self._journal is None:  # of an earlier run of the trainer
            return closure()
        self.runtime.begin_step()
        last = not self._accumulating
        self._journal.begin(observed=last or self._gradients_observed())

        def run() -> Any:
            output = closure()
            if last:
                self.runtime.land_gradients()
            return output

        return self.runtime.restart.protect(
            run, lambda: self._journal.run_again(self._run_again), self._refused, stepping=last
        )

    def _run_again(self, micro_batch: MicroBatch) -> None:
        (step_args, step_options), (args, options) = micro_batch.step_args, micro_batch.backward_args
        with self.runtime.micro_batch(last=False, observed=micro_batch.observed):
            output = self._forward(*step_args, **step_options)
            loss = loss_in(output, self.lightning_module.trainer.accumulate_grad_batches)
            self._backward(loss, micro_batch.weight, *args, **options)

    def _refused(self) -> str:
        """Why a step cannot be computed again."""
        if self.config.overlap.enabled and self.config.overlap.optimizer_in_backward:
            return "overlap.optimizer_in_backward=true lets units step inside the backward"
        for name, each in self.lightning_module.named_modules():
            if any(f"{kind.__module__}.".startswith("torchmetrics.") for kind in type(each).__mro__):
                return f"{name!r} is a torchmetrics metric, which would count the step's micro-batches twice"
        return ""

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning wraps every micro-batch but the last of an accumulation in this."""
        self._accumulating = True
        try:
            with self.runtime.micro_batch(last=False, observed=self._gradients_observed()):
                yield
        finally:
            self._accumulating = False

    def _gradients_observed(self) -> bool:
        """Whether anybody may look at gradients after a backward that no optimizer step follows.

        Manual optimization may at once. Lightning's own callbacks look at none, unless they were given a hook.
        """
        module = self.lightning_module
        package = trainer_package_of(module.trainer)
        module_type = import_module(f"{package}.core.module").LightningModule
        callback_type = import_module(f"{package}.callbacks").Callback
        known = (f"{package}.", "memwall_strategy.")
        return (
            not module.automatic_optimization
            or self.config.overlap.optimizer_in_backward  # what lands in the last backward must be its own
            or _overrides(module, module_type, (*_SEE_GRADIENTS, "backward"))
            or any(
                _overrides(each, callback_type, _SEE_GRADIENTS, own_class=not _module_of(each).startswith(known))
                for each in module.trainer.callbacks
            )
        )

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self.runtime.begin_step()
        with self.runtime.restart.named(), self.runtime.phase(Phase.STEP):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.runtime.end_step()
        if self._journal is not None:
            self._journal.end_step()
        return output

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        op, divide = sum_for(tensor, reduce_op)
        reduced = super().reduce(tensor, group, op)
        return divided(reduced, group) if divide else reduced

    def on_exception(self, exception: BaseException) -> None:
        """Leave the engine at rest, so that a notebook or a test may go on with the model."""
        if self.runtime is not None and not isinstance(exception, (KeyboardInterrupt, SystemExit)):
            self.runtime.abort_step(exception)
        if self._journal is not None:
            self._journal.end_step()
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        self.stop_checkpoints(failed=self._failed)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._input_lane is not None:
            self._input_lane.close()
            self._input_lane = None
        if self.runtime is not None:
            self.runtime.close()
        die_with_parent(False)  # whatever the script does next need not end with rank 0
        super().teardown()

    def raw_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers without Lightning's wrappers."""
        return [unwrap_optimizer(optimizer) for optimizer in self.optimizers]


def _module_of(item: object) -> str:
    return f"{type(item).__module__}."


def _overrides(item: object, base: type, hooks: tuple[str, ...], *, own_class: bool = True) -> bool:
    """Whether ``item`` has a hook of its own: on the instance, or from its class where ``own_class`` says to look."""
    return any(
        hook in vars(item) or (own_class and getattr(type(item), hook) is not getattr(base, hook)) for hook in hooks
    )


@contextmanager
def _explain_outside_forward() -> Generator[None, None, None]:
    try:
        yield
    except RuntimeError as error:
        if _OUTSIDE_FORWARD in str(error):
            raise MemwallError(
                "a sharded weight met a plain tensor: it was used outside its module's forward (a child's child called "
                "directly, or module.weight read in training_step). Call the module itself, or name smaller units with "
                "unit_classes=(...)."
            ) from error
        raise


@cache
def strategy_class(namespace: str) -> type:
    """``MemwallStrategy`` for ``lightning`` or ``pytorch_lightning``; their base classes are not the same."""
    package = trainer_package(namespace)
    base = import_module(f"{package}.strategies.model_parallel").ModelParallelStrategy
    methods = {"__doc__": StrategyMethods.__doc__, "__module__": __name__}
    strategy = type("MemwallStrategy", (StrategyMethods, base), methods)
    connector = f"{package}.trainer.connectors.accelerator_connector"
    remedy = (
        "precision='bf16-mixed' (or 32-true, bf16-true, 16-mixed), or pass "
        "plugins=memwall_strategy.MemwallPrecision(...)"
    )
    choose_precision_by_strategy(
        connector, "_precision_flag", strategy, partial(choose_precision, precision_class(namespace), remedy=remedy)
    )
    return strategy
