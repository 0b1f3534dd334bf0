"""The private names of Lightning that memwall relies on, gathered in one place.

``tests/engine/test_lightning_bridge.py`` fails when one of them changes.

Lightning exists under two package names with two sets of classes; everything here takes the namespace, ``lightning`` or
``pytorch_lightning`` (and ``lightning.fabric`` or ``lightning_fabric``), and never imports the other one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from memwall_strategy.core.errors import ConfigError, PeerLost
from memwall_strategy.engine.capacity import share_threads
from memwall_strategy.engine.processes import die_with_parent, is_interactive, is_launched_child, parent_is_gone

TRAINER_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
FABRIC_PACKAGES = {"lightning.fabric": "lightning.fabric", "lightning_fabric": "lightning_fabric"}


def trainer_package(namespace: str) -> str:
    """Import path of the trainer for a namespace."""
    return TRAINER_PACKAGES[namespace]


def trainer_package_of(trainer: Any) -> str:
    """Import path of the package that a trainer comes from."""
    return type(trainer).__module__.partition(".trainer")[0]


def materialize(module: torch.nn.Module, device: torch.device, trainer: Any) -> None:
    """Give a module that its owner sharded on the meta device memory and fresh weights, as Lightning's strategy does.

    Relies on the private ``_materialize_distributed_module``, which does nothing to modules that are not on meta.
    """
    strategies = import_module(f"{trainer_package_of(trainer)}.strategies.model_parallel")
    strategies._materialize_distributed_module(module, device)


def choose_precision_by_strategy(connector_module: str, attribute: str, strategy_type: type, build: Callable) -> None:
    """Let our strategies choose their precision plugin.

    The connector skips its own check for a strategy given by name, turns ``16-mixed`` on CPU into ``bf16-mixed`` and
    wraps the step in autocast on top of FSDP2's policy. For our strategies ``_check_and_init_precision`` is replaced by
    ``build(precision)``; others keep theirs.

    Args:
        connector_module: module of the (accelerator) connector.
        attribute: name under which the connector keeps the precision the user asked for.
    """
    module = import_module(connector_module)
    connector = module._AcceleratorConnector if hasattr(module, "_AcceleratorConnector") else module._Connector
    original = connector._check_and_init_precision
    if getattr(original, "memwall_strategies", None) is not None:
        original.memwall_strategies[strategy_type] = build
        return
    strategies = {strategy_type: build}

    @functools.wraps(original)
    def chosen(self: Any) -> Any:
        ours = next((make for kind, make in strategies.items() if isinstance(self.strategy, kind)), None)
        if ours is None:
            return original(self)
        given = getattr(self, "_precision_plugin_flag", None) or getattr(self, "_precision_instance", None)
        return ours(getattr(self, attribute), given)

    chosen.memwall_strategies = strategies
    connector._check_and_init_precision = chosen


def install_stop_agreement(trainer: Any, save: Callable[[], None], before_batch: Callable[[], None]) -> None:
    """Make a SIGTERM, or ``trainer.should_stop``, on any rank stop every rank at the same batch.

    Lightning broadcasts inside the signal handler, where it can meet any other collective half way, listens to rank 0
    only, and swallows what its per-batch broadcast raises. Here the handler only notes the signal and passes it on to
    the processes this one launched; instead of the per-batch broadcast, each batch ends with one all-reduce of the
    notes, before the loop looks whether it is done. When a rank was told to stop, all of them run ``save`` before the
    next batch that would start an optimizer step, and raise ``SIGTERMException`` as usual. ``should_stop``, which a
    callback may have set on one rank only, comes out the same on all.

    Args:
        save: writes the checkpoint.
        before_batch: called before each batch is fetched.
    """
    connector = trainer._signal_connector  # .received_sigterm is what trainer.received_sigterm reads
    epoch_loop = trainer.fit_loop.epoch_loop
    stop = import_module(f"{trainer_package_of(trainer)}.utilities.exceptions").SIGTERMException
    told = {"stop": False}
    agreed = {"stop": False}

    def note(signum: int, _: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if not told["stop"] and launcher is not None:
            launcher.kill(signum)
        told["stop"] = True

    def advance(data_fetcher: Any) -> None:
        if agreed["stop"] and epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0:
            save()
            connector.received_sigterm = True
            raise stop
        before_batch()
        type(epoch_loop).advance(epoch_loop, data_fetcher)

    def on_advance_end(data_fetcher: Any) -> None:
        type(epoch_loop).on_advance_end(epoch_loop, data_fetcher)
        flags = torch.tensor([int(told["stop"]), int(trainer.should_stop)], device=trainer.strategy.root_device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        agreed["stop"], trainer.should_stop = (bool(flag) for flag in flags.tolist())

    connector._sigterm_notifier_fn = note
    epoch_loop._broadcast_sigterm_tensor = _nothing
    epoch_loop.advance = advance
    epoch_loop.on_advance_end = on_advance_end


def _nothing() -> None:
    return None


def mark_training_data(trainer: Any, mark: Callable[[bool], None]) -> None:
    """Call ``mark(True)`` while the fit loop sets up its training data and ``mark(False)`` after.

    ``strategy.process_dataloader`` is not told which loader it gets. Validation loaders are set up elsewhere.
    """
    loop = trainer.fit_loop

    def setup_data() -> None:
        mark(True)
        try:
            type(loop).setup_data(loop)
        finally:
            mark(False)

    loop.setup_data = setup_data


def time_fetches(trainer: Any, clock: AbstractContextManager[Any]) -> None:
    """Let the fit loop wait for its training batches inside ``clock``, whatever they come from.

    Relies on: ``epoch_loop.on_run_start`` hands its ``_on_before_fetch`` and ``_on_after_fetch``, which only feed the
    profiler, to the fetcher, which calls them around ``next`` of the combined loader.
    """
    epoch_loop = trainer.fit_loop.epoch_loop

    def before() -> None:
        type(epoch_loop)._on_before_fetch(epoch_loop)
        clock.__enter__()

    def after() -> None:
        clock.__exit__(None, None, None)
        type(epoch_loop)._on_after_fetch(epoch_loop)

    epoch_loop._on_before_fetch, epoch_loop._on_after_fetch = before, after


def around_closures(trainer: Any, run: Callable[[Callable[[], Any], int], Any]) -> None:
    """Let ``run(closure, batch_idx)`` call the closure of each micro-batch of automatic optimization.

    Relies on ``_AutomaticOptimization._make_closure(kwargs, optimizer, batch_idx)``, whose ``Closure`` keeps the result
    of its method ``closure``: that method is replaced on the instance.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization

    def make(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = type(loop)._make_closure(loop, kwargs, optimizer, batch_idx)
        inner = closure.closure
        closure.closure = lambda *args, **options: run(lambda: inner(*args, **options), batch_idx)
        return closure

    loop._make_closure = make


class ModelParallelSeams:
    """Mixin before Lightning's ``ModelParallelStrategy``: the private methods whose behaviour memwall changes.

    Attributes:
        check_world: raises ``ConfigError`` for options that the number of processes rules out; runs when the trainer is
            made, before any process starts.
        group_backend: name of the process group backend to use when the user named none.
    """

    _wanted_tensor_parallel = 1
    check_world: Callable[[int], None]
    group_backend: Callable[[], str]

    def _configure_launcher(self) -> None:
        # Called at the end of the connector's set-up, when devices and nodes are known and nothing has started yet.
        world = self.num_processes * self.num_nodes
        self.check_world(world)
        share_threads(self.num_processes)
        if is_launched_child():
            die_with_parent(True)
            if parent_is_gone():
                raise PeerLost("rank 0, whose process started this one, ended before it was set up.", (0,))
        if not is_interactive():
            super()._configure_launcher()
        elif world > 1 and not self.cluster_environment.creates_processes_externally:
            raise ConfigError(
                f"devices={self.num_processes} in a notebook: every rank runs the script that made the trainer, and a "
                "notebook has none. Put the code into a script and run it, or use devices=1 here."
            )

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or self.group_backend()

    def syncs_batch_norms(self) -> bool:
        """Whether the trainer was made with ``sync_batchnorm=True``."""
        return self._layer_sync is not None

    def set_parallel_sizes(self) -> None:
        """Data parallel over all ranks that tensor parallelism leaves; Lightning's default is TP over a node."""
        world = self.num_processes * self.num_nodes
        self._tensor_parallel_size = self._wanted_tensor_parallel
        self._data_parallel_size = world // self._wanted_tensor_parallel


class FabricSeams(ModelParallelSeams):
    """The same for Fabric's ``ModelParallelStrategy``."""

    def set_sync_control(self, micro_batch: Callable[[Any, bool], Any]) -> None:
        """Let ``fabric.no_backward_sync(module, enabled)`` run ``micro_batch(module, enabled)``."""
        self._backward_sync_control = _SyncControl(micro_batch)


class _SyncControl:
    def __init__(self, micro_batch: Callable[[Any, bool], Any]) -> None:
        self._micro_batch = micro_batch

    def no_backward_sync(self, module: Any, enabled: bool) -> Any:
        return self._micro_batch(module, enabled)


class PrecisionSeams:
    """Mixin before Lightning's ``Precision``: what happens between the backward and the optimizer.

    Attributes:
        gradients_ready: called before ``on_before_optimizer_step`` and clipping.
        before_optimizer: called after them.
    """

    gradients_ready: Callable[[], None]
    before_optimizer: Callable[[], None]

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        self.gradients_ready()
        super()._after_closure(model, optimizer)
        self.before_optimizer()

    def hooks_and_clipping(self, model: Any, optimizer: Any) -> None:
        """Lightning's own sequence, for ``optimizer_step``s that run the closure themselves."""
        self._after_closure(model, optimizer)


def optimizer_handles_unscaling(optimizer: Any) -> bool:
    """Fused optimizers unscale inside ``step`` (the attribute torch's own scaler looks at)."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def unwrap_module(module: Any) -> torch.nn.Module:
    """The module inside Fabric's wrapper; any other as it is."""
    return getattr(module, "_original_module", None) or module


_OPTIMIZER_WRAPPERS = ("LightningOptimizer", "_FabricOptimizer")


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Lightning's or Fabric's wrapper; any other as it is."""
    if any(kind.__name__ in _OPTIMIZER_WRAPPERS for kind in type(optimizer).__mro__):
        return optimizer.optimizer
    return optimizer
