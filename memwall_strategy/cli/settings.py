"""A composed configuration as checked objects. Stdlib and OmegaConf only: nothing of torch is imported to find a
mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from memwall_strategy.cli.options import (
    CheckpointsOptions,
    ClaimOptions,
    PathsOptions,
    TrainerOptions,
    TrainOptions,
)
from memwall_strategy.cli.schema import ENTRIES, GPT_TARGET, GROUPS, PILLARS, TEXT_TARGET
from memwall_strategy.config import MemwallConfig, config_from
from memwall_strategy.core.errors import ConfigError, nearest
from memwall_strategy.recipes.gpt.options import GPTOptions
from memwall_strategy.recipes.text.options import VOCAB, TextOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """A run, checked.

    Attributes:
        run, trainer, paths, memwall: their options.
        model: of our GPT; None for a model of the user's own (``model._target_``).
        text: of our text; None for data of the user's own.
        plain: everything, as plain values.
    """

    run: TrainOptions
    trainer: TrainerOptions
    paths: PathsOptions
    memwall: MemwallConfig
    model: GPTOptions | None
    text: TextOptions | None
    plain: dict[str, Any]


def check(config: DictConfig) -> Settings:
    """Build every option object, each of which checks its values, then what two groups must agree on.

    Raises:
        ConfigError: the first value that cannot be used.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    top = {name: value for name, value in plain.items() if name not in GROUPS}
    top["checkpoints"] = build(CheckpointsOptions, top["checkpoints"], "checkpoints")
    top["claims"] = tuple(build(ClaimOptions, claim, "claims") for claim in top["claims"])
    model, data = plain["model"], plain["data"]
    settings = Settings(
        run=build(TrainOptions, top, ""),
        trainer=build(TrainerOptions, plain["trainer"], "trainer"),
        paths=build(PathsOptions, plain["paths"], "paths"),
        memwall=config_from({**plain["strategy"], **{pillar: plain[pillar] for pillar in PILLARS}}),
        model=build(GPTOptions, model, "model") if model.get("_target_") == GPT_TARGET else None,
        text=build(TextOptions, data, "data") if data.get("_target_") == TEXT_TARGET else None,
        plain=plain,
    )
    for group in ENTRIES:
        _check_entries(group, plain[group])
    _check_together(settings)
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


def build(cls: type[T], values: Mapping[str, Any], group: str) -> T:
    """Make an options object from plain values, lists as tuples; keys with ``_`` are Hydra's."""
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if not name.startswith("_")}
    prefix = f"{group}." if group else ""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"There is no option {prefix + name!r}.{nearest(name, known)} "
                f"There are: {', '.join(sorted(prefix + k for k in known))}."
            )
    return cls(**given)


def _check_together(settings: Settings) -> None:
    model, text, trainer = settings.model, settings.text, settings.trainer
    if model and text:
        if text.seq_len > model.context:
            raise ConfigError(
                f"data.seq_len={text.seq_len} is longer than model.context={model.context}. "
                f"Set model.context={text.seq_len}, or leave it out: it follows data.seq_len."
            )
        if model.vocab < VOCAB:
            raise ConfigError(f"model.vocab={model.vocab} is too small: text as bytes has {VOCAB} token values.")
    if isinstance(trainer.devices, int):
        world = trainer.devices * trainer.num_nodes
        if world % settings.memwall.replicate:
            raise ConfigError(
                f"strategy.replicate={settings.memwall.replicate} does not divide the {world} ranks of "
                "trainer.devices x trainer.num_nodes. Choose a divisor."
            )
