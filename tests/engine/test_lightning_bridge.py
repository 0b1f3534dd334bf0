"""The private names of Lightning that the engine relies on, under both package names.

When a new Lightning fails here, the name in the failing test's id is what changed.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from memwall_strategy.engine.lightning_bridge import (
    FABRIC_PACKAGES,
    TRAINER_PACKAGES,
    FabricSeams,
    ModelParallelSeams,
    PrecisionSeams,
    choose_precision_by_strategy,
    install_stop_agreement,
    mark_training_data,
    optimizer_handles_unscaling,
    trainer_package,
    trainer_package_of,
    unwrap_module,
    unwrap_optimizer,
)

NAMESPACES = sorted(TRAINER_PACKAGES)
FABRICS = sorted(FABRIC_PACKAGES)


@pytest.fixture(autouse=True)
def quiet():
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load(namespace, module, name):
    return getattr(import_module(f"{(TRAINER_PACKAGES | FABRIC_PACKAGES)[namespace]}.{module}"), name)


def strategy_of(namespace):
    kind = load(namespace, "strategies.model_parallel", "ModelParallelStrategy")
    return kind(lambda model, mesh: model) if namespace in FABRICS else kind()


def trainer_of(namespace, **options):
    options = {"max_steps": 4, "enable_progress_bar": False, "enable_model_summary": False, "logger": False} | options
    trainer = import_module(TRAINER_PACKAGES[namespace]).Trainer
    return trainer(accelerator="cpu", devices=1, enable_checkpointing=False, **options)


def module_of(namespace):
    """A tiny LightningModule of this namespace; ``.steps`` are the batches it trained on."""

    class Tiny(import_module(TRAINER_PACKAGES[namespace]).LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.steps = []
            self.at_step = lambda i: None

        def training_step(self, batch, i):
            self.steps.append(i)
            self.at_step(i)
            return self.layer(batch).sum()

        def validation_step(self, batch, i):
            self.layer(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return DataLoader(torch.ones(8, 2), batch_size=1)

        def val_dataloader(self):
            return DataLoader(torch.ones(2, 2), batch_size=1)

    return Tiny()


# -- names --


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("trainer.connectors.accelerator_connector", "_AcceleratorConnector", "_check_and_init_precision"),
        ("trainer.connectors.signal_connector", "_SignalConnector", "_sigterm_notifier_fn"),
        ("loops.training_epoch_loop", "_TrainingEpochLoop", "_broadcast_sigterm_tensor"),
        ("loops.training_epoch_loop", "_TrainingEpochLoop", "advance"),
        ("loops.fit_loop", "_FitLoop", "setup_data"),
        ("utilities.exceptions", "SIGTERMException", "__init__"),
        ("strategies.model_parallel", "ModelParallelStrategy", "_configure_launcher"),
        ("strategies.model_parallel", "ModelParallelStrategy", "_get_process_group_backend"),
        ("plugins.precision.precision", "Precision", "_after_closure"),
        ("core.optimizer", "LightningOptimizer", "optimizer"),
    ],
)
def test_a_private_name_of_the_trainer_is_there(namespace, module, owner, name):
    assert hasattr(load(namespace, module, owner), name)


@pytest.mark.parametrize("namespace", FABRICS)
@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("connector", "_Connector", "_check_and_init_precision"),
        ("wrappers", "_FabricOptimizer", "optimizer"),
        ("wrappers", "_FabricModule", "module"),
        ("strategies.model_parallel", "ModelParallelStrategy", "_configure_launcher"),
        ("strategies.model_parallel", "ModelParallelStrategy", "_get_process_group_backend"),
    ],
)
def test_a_private_name_of_fabric_is_there(namespace, module, owner, name):
    assert hasattr(load(namespace, module, owner), name)


@pytest.mark.parametrize("namespace", [*NAMESPACES, *FABRICS])
@pytest.mark.parametrize("name", ["_process_group_backend", "_tensor_parallel_size", "_data_parallel_size"])
def test_an_attribute_of_the_strategy_is_there(namespace, name):
    assert hasattr(strategy_of(namespace), name)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_strategy_keeps_its_layer_sync(namespace):
    assert strategy_of(namespace)._layer_sync is None


@pytest.mark.parametrize("namespace", FABRICS)
def test_fabrics_strategy_keeps_its_sync_control(namespace):
    strategy = strategy_of(namespace)
    control = inspect.signature(strategy._backward_sync_control.no_backward_sync).parameters
    assert list(control) == ["module", "enabled"]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_attributes_of_the_trainer_are_there(namespace):
    trainer = trainer_of(namespace)
    assert trainer._signal_connector.received_sigterm is False
    assert trainer.received_sigterm is False
    assert trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0
    assert trainer_package_of(trainer) == trainer_package(namespace) == TRAINER_PACKAGES[namespace]
    for name in ("_precision_flag", "_precision_plugin_flag"):
        assert hasattr(trainer._accelerator_connector, name)


# -- precision by strategy --


class Marked:
    """Stands for memwall's strategy and for its precision plugin."""


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_our_strategies_choose_their_precision_and_others_keep_theirs(namespace, monkeypatch):
    place = f"{TRAINER_PACKAGES[namespace]}.trainer.connectors.accelerator_connector"
    connector = import_module(place)._AcceleratorConnector
    monkeypatch.setattr(connector, "_check_and_init_precision", connector._check_and_init_precision)
    single = load(namespace, "strategies", "SingleDeviceStrategy")
    plain = load(namespace, "plugins.precision.precision", "Precision")

    class Ours(single):
        pass

    class AlsoOurs(single):
        pass

    seen = []

    def build(asked, given):
        seen.append((asked, given))
        return given or plain()

    choose_precision_by_strategy(place, "_precision_flag", Ours, build)
    replaced = connector._check_and_init_precision
    choose_precision_by_strategy(place, "_precision_flag", AlsoOurs, build)
    assert connector._check_and_init_precision is replaced, "one replacement serves all strategies"

    for kind in (Ours, AlsoOurs):
        trainer = trainer_of(namespace, strategy=kind(device=torch.device("cpu")), precision="16-mixed")
        assert type(trainer.precision_plugin) is plain
    assert seen == [("16-mixed", None)] * 2
    given = plain()
    trainer = trainer_of(namespace, strategy=Ours(device=torch.device("cpu")), plugins=given)
    assert trainer.precision_plugin is given
    assert seen[2][1] is given
    other = trainer_of(namespace, strategy=single(device=torch.device("cpu")), precision="bf16-mixed")
    assert type(other.precision_plugin).__name__ == "MixedPrecision"
    assert len(seen) == 3


# -- SIGTERM --


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize(("accumulate", "stops_after"), [(1, 2), (2, 2), (3, 3)])
def test_sigterm_stops_before_the_next_optimizer_step_starts(namespace, accumulate, stops_after):
    """The batch that is under way ends, and so does its optimizer step; then ``save``, then the exception."""
    before = signal.getsignal(signal.SIGTERM)
    trainer, module, seen = trainer_of(namespace, accumulate_grad_batches=accumulate), module_of(namespace), []

    def terminate(i):
        if i == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    module.at_step = terminate
    install_stop_agreement(trainer, lambda: seen.append(("save", *module.steps)), lambda: seen.append("batch"))
    with pytest.raises(load(namespace, "utilities.exceptions", "SIGTERMException")):
        trainer.fit(module)
    assert module.steps == list(range(stops_after))
    assert seen == ["batch"] * stops_after + [("save", *range(stops_after))]
    assert trainer.received_sigterm
    assert trainer.global_step == -(-stops_after // accumulate)
    assert signal.getsignal(signal.SIGTERM) is before, "the handler outlived the fit"


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_without_sigterm_nothing_changes(namespace):
    trainer, module, seen = trainer_of(namespace), module_of(namespace), []
    install_stop_agreement(trainer, lambda: seen.append("save"), lambda: seen.append("batch"))
    trainer.fit(module)
    assert seen == ["batch"] * 4
    assert trainer.global_step == 4


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_training_data_is_marked_and_validation_data_is_not(namespace):
    trainer, module, marks, seen = trainer_of(namespace), module_of(namespace), [False], []
    loaders = {"train": module.train_dataloader, "val": module.val_dataloader}
    for name, make in loaders.items():
        setattr(module, f"{name}_dataloader", lambda name=name, make=make: (seen.append((name, marks[-1])), make())[1])
    mark_training_data(trainer, marks.append)
    trainer.fit(module)
    assert set(seen) == {("train", True), ("val", False)}
    assert marks[-1] is False


# -- seams --


class Parent:
    """What a seam calls on Lightning's class; notes it."""

    def __init__(self, **attributes):
        self.called = []
        vars(self).update(attributes)

    def _configure_launcher(self):
        self.called.append("launcher")

    def _after_closure(self, model, optimizer):
        self.called.append("closure")


def test_the_world_is_checked_before_anything_starts():
    class Strategy(ModelParallelSeams, Parent):
        def check_world(self, world):
            self.called.append(world)

    strategy = Strategy(num_processes=2, num_nodes=3)
    strategy._configure_launcher()
    assert strategy.called == [6, "launcher"]


def test_data_parallel_is_what_tensor_parallelism_leaves():
    class Strategy(ModelParallelSeams, Parent):
        pass

    strategy = Strategy(num_processes=4, num_nodes=2)
    strategy.set_parallel_sizes()
    assert (strategy._tensor_parallel_size, strategy._data_parallel_size) == (1, 8)
    strategy._wanted_tensor_parallel = 4
    strategy.set_parallel_sizes()
    assert (strategy._tensor_parallel_size, strategy._data_parallel_size) == (4, 2)


def test_the_users_backend_goes_before_ours():
    class Strategy(ModelParallelSeams, Parent):
        def group_backend(self):
            return "memwall"

    assert Strategy(_process_group_backend=None)._get_process_group_backend() == "memwall"
    assert Strategy(_process_group_backend="gloo")._get_process_group_backend() == "gloo"


def test_fabrics_sync_control_is_ours():
    class Strategy(FabricSeams, Parent):
        pass

    strategy = Strategy()
    strategy.set_sync_control(lambda module, enabled: (module, enabled))
    assert strategy._backward_sync_control.no_backward_sync("module", True) == ("module", True)


def test_gradients_are_ready_before_hooks_and_clipping():
    class Precision(PrecisionSeams, Parent):
        def gradients_ready(self):
            self.called.append("ready")

        def before_optimizer(self):
            self.called.append("before optimizer")

    precision = Precision()
    precision._after_closure("model", "optimizer")
    assert precision.called == ["ready", "closure", "before optimizer"]
    precision.hooks_and_clipping("model", "optimizer")
    assert precision.called[3:] == ["ready", "closure", "before optimizer"]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_after_the_closure_come_hooks_and_clipping(namespace):
    """What ``_after_closure`` of Lightning's own plugin does, in this order."""
    trainer, module, seen = trainer_of(namespace, gradient_clip_val=0.5, max_steps=1), module_of(namespace), []
    module.on_before_optimizer_step = lambda optimizer: seen.append("hook")
    module.configure_gradient_clipping = lambda *args, **named: seen.append("clip")
    trainer.fit(module)
    assert seen == ["hook", "clip"]


# -- wrappers --


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_lightnings_optimizer_is_unwrapped(namespace):
    raw = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert unwrap_optimizer(load(namespace, "core.optimizer", "LightningOptimizer")(raw)) is raw
    assert unwrap_optimizer(raw) is raw


@pytest.mark.parametrize("namespace", FABRICS)
def test_fabrics_wrappers_are_unwrapped(namespace):
    fabric = import_module(FABRIC_PACKAGES[namespace]).Fabric(accelerator="cpu", devices=1)
    raw_model = nn.Linear(2, 2)
    raw_optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(raw_model, raw_optimizer)
    assert model is not raw_model
    assert unwrap_module(model) is raw_model
    assert unwrap_module(raw_model) is raw_model
    assert type(optimizer) is not type(raw_optimizer)
    assert unwrap_optimizer(optimizer) is raw_optimizer


def test_who_unscales_by_himself():
    weight = [nn.Parameter(torch.ones(1))]
    assert optimizer_handles_unscaling(torch.optim.AdamW(weight, fused=True))
    assert not optimizer_handles_unscaling(torch.optim.AdamW(weight))
