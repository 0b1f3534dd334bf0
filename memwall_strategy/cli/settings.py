"""A composed configuration as checked objects. Stdlib and OmegaConf only: nothing of torch is imported to find a
mistake."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from memwall_strategy.cli.options import (
    CheckpointsOptions,
    ClaimOptions,
    HardwareOptions,
    PathsOptions,
    TrainerOptions,
    TrainOptions,
)
from memwall_strategy.cli.schema import ENTRIES, GPT_TARGET, GROUPS, KNOWN_TARGETS, PILLARS, TEXT_TARGET
from memwall_strategy.config import MemwallConfig, check_entries, config_from
from memwall_strategy.core.errors import ConfigError, nearest
from memwall_strategy.recipes.gpt.options import GPTOptions
from memwall_strategy.recipes.text.options import VOCAB, TextOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """A run, checked.

    Attributes:
        run, trainer, hardware, paths, memwall: their options.
        model: of our GPT; None for a model of the user's own (``model._target_``).
        text: of our text; None for data of the user's own.
        plain: everything, as plain values.
    """

    run: TrainOptions
    trainer: TrainerOptions
    hardware: HardwareOptions
    paths: PathsOptions
    memwall: MemwallConfig
    model: GPTOptions | None
    text: TextOptions | None
    plain: dict[str, Any]

    def with_devices(self, devices: int) -> Settings:
        """The same run on so many devices of a machine."""
        return dataclasses.replace(self, trainer=dataclasses.replace(self.trainer, devices=devices))


def check(config: DictConfig) -> Settings:
    """Build every option object, each of which checks its values, then what two groups must agree on.

    Raises:
        ConfigError: the first value that cannot be used.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    for group in GROUPS:
        if not isinstance(plain[group], dict):
            raise ConfigError(
                f"{group}={plain[group]}: this configuration holds the options of {group} themselves, not a choice. "
                f"Set single ones ({group}.name=value), or start from an experiment instead of a saved run."
            )
        if (target := plain[group].get("_target_")) is not None:
            _check_target(group, target)
    top = {name: value for name, value in plain.items() if name not in GROUPS}
    top["checkpoints"] = build(CheckpointsOptions, top["checkpoints"], "checkpoints")
    top["claims"] = tuple(build(ClaimOptions, claim, "claims") for claim in top["claims"])
    model, data = plain["model"], plain["data"]
    settings = Settings(
        run=build(TrainOptions, top, ""),
        trainer=build(TrainerOptions, plain["trainer"], "trainer"),
        hardware=build(HardwareOptions, plain["hardware"], "hardware"),
        paths=build(PathsOptions, plain["paths"], "paths"),
        memwall=config_from({**plain["strategy"], **{pillar: plain[pillar] for pillar in PILLARS}}),
        model=build(GPTOptions, model, "model") if model.get("_target_") == GPT_TARGET else None,
        text=build(TextOptions, data, "data") if data.get("_target_") == TEXT_TARGET else None,
        plain=plain,
    )
    for group in ENTRIES:
        _check_entries(group, plain[group])
    _check_together(settings)
    _make_absolute(plain)
    return settings


def _check_entries(group: str, nodes: Mapping[str, Any]) -> None:
    """Loggers and callbacks: ours by their options, others by having a class at all."""
    for name, node in nodes.items():
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            raise ConfigError(
                f"{group}.{name}={node!r} says no class. Write '+{group}.{name}._target_=my_package.MyClass', "
                f"and its arguments as +{group}.{name}.argument=value."
            )
        cls, target = ENTRIES[group].get(name, (None, None))
        if cls is not None and node["_target_"] == target:
            build(cls, node, f"{group}.{name}")


def check_vocabulary(settings: Settings, values: int) -> None:
    """The model must have a row for each token value.

    Raises:
        ConfigError: it has fewer.
    """
    if settings.model is None or settings.text is None or settings.model.vocab >= values:
        return
    tokenizer = settings.text.tokenizer
    what = f"data.tokenizer={tokenizer} has" if tokenizer else "text as bytes has"
    raise ConfigError(
        f"model.vocab={settings.model.vocab} is too small: {what} {values} token values. Set model.vocab={values}."
    )


def check_tokenizer(settings: Settings) -> None:
    """The tokenizer's values against the model's, where the tokenizer's file tells them.

    Raises:
        ConfigError: no such tokenizer, or a model with fewer values.
    """
    if settings.text is None or settings.text.tokenizer is None:
        return
    from memwall_strategy.recipes.text.hf import tokenizer_values

    values = tokenizer_values(settings.text.tokenizer)
    if values is not None:
        check_vocabulary(settings, values)


def build(cls: type[T], values: Mapping[str, Any], group: str) -> T:
    """Make an options object from plain values, lists as tuples; keys with ``_`` are Hydra's."""
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if not name.startswith("_")}
    prefix = f"{group}." if group else ""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"There is no option {prefix + name!r}.{nearest(prefix + name, [prefix + k for k in known])} "
                f"There are: {', '.join(sorted(prefix + k for k in known))}."
            )
    return cls(**given)


def _check_target(group: str, target: str) -> None:
    """Whether there is such a package at all; it is imported later, and may be heavy."""
    package = str(target).partition(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{group}._target_={target}: there is no package {package!r}, installed or on PYTHONPATH. "
            "Write the full path of a class or function, such as my_package.models.Net."
        )


def find_targets(settings: Settings) -> None:
    """Import what the user named in place of ours, so that a wrong name shows before anything heavier is begun.

    Raises:
        ConfigError: there is no such class or function.
    """
    for group in GROUPS:
        target = settings.plain[group].get("_target_")
        if target is None or target in KNOWN_TARGETS:
            continue
        module, _, name = target.rpartition(".")
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"{group}._target_={target}: {error}. Correct the path of the class.") from error
        if not hasattr(found, name):
            known = [each for each in vars(found) if not each.startswith("_")]
            raise ConfigError(
                f"{group}._target_={target}: {module} has no {name!r}.{nearest(name, known)} "
                "Write the full path of a class or function."
            )


def _make_absolute(plain: dict[str, Any]) -> None:
    """Paths as seen from anywhere, so that the saved configuration means the same files from another folder."""
    data = plain["data"]
    if data.get("_target_") == TEXT_TARGET:
        data["files"] = [_absolute(name) for name in data["files"]]
    for values, name in (
        (plain["paths"], "root"), (plain["paths"], "run_folder"), (plain["paths"], "cache_dir"),
        (data, "cache_dir"), (data, "dataset"), (data, "tokenizer"),
    ):  # fmt: skip
        if isinstance(values.get(name), str):
            values[name] = _absolute(values[name])
    if plain["ckpt_path"] not in (None, "last"):
        plain["ckpt_path"] = _absolute(plain["ckpt_path"])


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _check_together(settings: Settings) -> None:
    model, text, trainer = settings.model, settings.text, settings.trainer
    if model and text:
        if text.seq_len > model.context:
            raise ConfigError(
                f"data.seq_len={text.seq_len} is longer than model.context={model.context}. "
                f"Set model.context={text.seq_len}, or leave it out: it follows data.seq_len."
            )
        if text.tokenizer is None:
            check_vocabulary(settings, VOCAB)
    if isinstance(trainer.devices, int):
        world = trainer.devices * trainer.num_nodes
        if world % settings.memwall.replicate:
            raise ConfigError(
                f"strategy.replicate={settings.memwall.replicate} does not divide the {world} ranks of "
                "trainer.devices x trainer.num_nodes. Choose a divisor."
            )
        check_entries(settings.memwall.pool, world)
