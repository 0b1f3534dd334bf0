"""The options as Hydra's structured configs, and their docstrings for the help.

OmegaConf makes a frozen dataclass read-only, which no override survives; so each schema is a copy that is not frozen.
The frozen original is built from the composed values afterwards, and checks them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from memwall_strategy.cli import options as cli
from memwall_strategy.config import (
    ClusterConfig,
    MemwallConfig,
    OverlapConfig,
    PoolConfig,
    ResilienceConfig,
    TopologyConfig,
)
from memwall_strategy.recipes.gpt.options import GPTOptions
from memwall_strategy.recipes.text.options import TextOptions
from memwall_strategy.telemetry.options import ProgressOptions, TelemetryConfig, TensorBoardOptions, WandbOptions

_MODULE = "memwall_strategy.recipes"
GPT_TARGET = f"{_MODULE}.gpt.module.gpt"
TEXT_TARGET = f"{_MODULE}.text.data.text_data"

TARGETS = {"model": GPT_TARGET, "data": TEXT_TARGET}
"""Groups whose class a user may replace by one of their own -> ours."""

_OPTIMIZERS = (("adamw", cli.AdamWOptions, "torch.optim.AdamW"), ("sgd", cli.SGDOptions, "torch.optim.SGD"))
_SCHEDULERS = (
    ("cosine", cli.CosineOptions, f"{_MODULE}.schedule.cosine"),
    ("constant", cli.ConstantOptions, f"{_MODULE}.schedule.constant"),
)
KNOWN_TARGETS = {GPT_TARGET, TEXT_TARGET, *(target for _, _, target in (*_OPTIMIZERS, *_SCHEDULERS))}
"""What our own choices build."""

GROUPS: dict[str, tuple[type, ...]] = {
    "model": (GPTOptions,),
    "data": (TextOptions,),
    "trainer": (cli.TrainerOptions,),
    "optimizer": (cli.AdamWOptions, cli.SGDOptions),
    "scheduler": (cli.CosineOptions, cli.ConstantOptions),
    "strategy": (MemwallConfig,),
    "pool": (PoolConfig,),
    "overlap": (OverlapConfig,),
    "cluster": (ClusterConfig,),
    "topology": (TopologyConfig,),
    "resilience": (ResilienceConfig,),
    "hardware": (cli.HardwareOptions,),
    "paths": (cli.PathsOptions,),
    "logger": (),
    "callbacks": (),
}
"""Group -> the dataclasses that describe its options."""

ENTRIES: dict[str, dict[str, tuple[type, str]]] = {
    "logger": {
        "wandb": (WandbOptions, "memwall_strategy.telemetry.wandb_log.wandb_logger"),
        "tensorboard": (TensorBoardOptions, "lightning.pytorch.loggers.TensorBoardLogger"),
    },
    "callbacks": {
        "telemetry": (TelemetryConfig, "memwall_strategy.callbacks.lightning.Telemetry"),
        "progress": (ProgressOptions, "memwall_strategy.telemetry.progress.StepProgress"),
    },
}
"""Groups that hold any number of objects -> name -> options and class of ours; the user adds others by ``_target_``."""

PILLARS = ("pool", "overlap", "cluster", "topology", "resilience")
"""Groups that are parts of ``MemwallConfig``."""

STRATEGY_FIELDS = tuple(f.name for f in dataclasses.fields(MemwallConfig) if f.default is not dataclasses.MISSING)
"""Options of the strategy itself: those of ``MemwallConfig`` that are not a pillar's part."""


def register() -> None:
    """Put every schema in Hydra's store; doing it again changes nothing."""
    store = ConfigStore.instance().store
    run = [(group, Any, dataclasses.field(default=MISSING)) for group in GROUPS]
    store(group="schema", name="train", node=dataclasses.make_dataclass("Run", run, bases=(_schema(cli.TrainOptions),)))
    store(group="schema", name="strategy", node=_schema(MemwallConfig, only=STRATEGY_FIELDS))
    for name in (*PILLARS, "hardware", "paths", "trainer"):
        store(group="schema", name=name, node=_schema(*GROUPS[name]))
    for group, entries in ENTRIES.items():
        for name, (cls, target) in entries.items():
            store(group=f"schema/{group}", name=name, node=_schema(cls, target=target))
    store(group="schema/model", name="gpt", node=_schema(GPTOptions, target=GPT_TARGET))
    store(group="schema/data", name="text", node=_schema(TextOptions, target=TEXT_TARGET))
    hf = _schema(TextOptions, target=TEXT_TARGET, mandatory=("dataset",))
    store(group="schema/data", name="hf", node=hf)
    for group, choices in (("optimizer", _OPTIMIZERS), ("scheduler", _SCHEDULERS)):
        for name, cls, target in choices:
            store(group=f"schema/{group}", name=name, node=_schema(cls, target=target, partial=True))


@functools.cache
def _schema(
    cls: type,
    *,
    target: str | None = None,
    partial: bool = False,
    only: tuple[str, ...] | None = None,
    mandatory: tuple[str, ...] = (),
) -> type:
    """A copy of a frozen options class that OmegaConf may write to, with Hydra's ``_target_`` where one is given.

    Args:
        only: fields to take; mandatory: those that must be given a value, whatever their default.
    """
    hints = typing.get_type_hints(cls)
    made: list[tuple[str, Any, Any]] = []
    if target is not None:
        made.append(("_target_", str, dataclasses.field(default=target)))
    if partial:
        made.append(("_partial_", bool, dataclasses.field(default=True)))
    for f in dataclasses.fields(cls):
        if only is None or f.name in only:
            field = dataclasses.field(default=MISSING) if f.name in mandatory else _field(f)
            made.append((f.name, _writable(hints[f.name]), field))
    return dataclasses.make_dataclass(cls.__name__, made, kw_only=True)


def _writable(hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return _schema(hint)
    if typing.get_origin(hint) is tuple:  # OmegaConf knows lists
        return list[_writable(typing.get_args(hint)[0])]
    if any(typing.get_origin(each) is tuple for each in typing.get_args(hint)):
        return Any  # one value or a list of them, which OmegaConf's unions cannot say; the dataclass checks it
    return hint


def _field(f: dataclasses.Field[Any]) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        make = f.default_factory
        if dataclasses.is_dataclass(make):
            return dataclasses.field(default_factory=_schema(make))
        return dataclasses.field(default_factory=make)
    if f.default is dataclasses.MISSING:
        return dataclasses.field()
    if isinstance(f.default, tuple):
        return dataclasses.field(default_factory=lambda: list(f.default))
    return dataclasses.field(default=f.default)


@dataclasses.dataclass(frozen=True, slots=True)
class OptionDoc:
    """One option as the help shows it."""

    name: str
    type: str
    text: str


def option_docs(cls: type, only: tuple[str, ...] | None = None) -> list[OptionDoc]:
    """Name, type and docstring of each field of an options class, in order."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: list[OptionDoc] = []
    for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        name = statement.target.id
        if only is not None and name not in only:
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        docs.append(OptionDoc(name, type_name(typing.get_type_hints(cls)[name]), text))
    return docs


_TYPE_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", types.NoneType: "null"}


def type_name(hint: Any) -> str:
    """A field's type in words, for errors and the help: ``int | None`` -> ``whole number or null``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin in (list, tuple):
        return f"list of {type_name(args[0])}"
    return _TYPE_WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def find_doc(key: str) -> OptionDoc | None:
    """The documentation of a dotted option such as ``pool.device_budget``; None where there is none."""
    group, _, name = key.rpartition(".")
    entries = {f"{group}.{entry}": (cls,) for group, named in ENTRIES.items() for entry, (cls, _) in named.items()}
    classes = {"": (cli.TrainOptions,), "checkpoints": (cli.CheckpointsOptions,), **GROUPS, **entries}.get(group, ())
    for cls in classes:
        for doc in option_docs(cls):
            if doc.name == name:
                return doc
    return None
