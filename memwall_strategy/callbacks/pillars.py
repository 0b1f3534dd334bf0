"""Pillars as callbacks: what a callback says of one pillar, and how the strategy takes them up.

``Trainer(strategy="memwall", callbacks=[PooledMemory(device_budget="512MiB")])`` has the effect of
``MemwallStrategy(pool=PoolConfig(device_budget="512MiB"))``. The strategy asks ``configured`` before it makes process
groups and mesh, so before any callback's own ``setup``. Known by this mixin, not by a class of Lightning, a callback of
either Lightning package works in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

from memwall_strategy.config import MemwallConfig, config_from
from memwall_strategy.core.errors import ConfigError


class MemwallCallback:
    """Mixin of every callback of memwall; a subclass counts as its base's kind.

    Attributes:
        memwall_kind: name of the kind; a trainer takes one of each.
    """

    memwall_kind: ClassVar[str]

    @property
    def state_key(self) -> str:
        """The kind's: what a user's subclass saves is found again under either Lightning, whatever its name."""
        return f"memwall.{self.memwall_kind}"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by any strategy; ours has taken the callback up by then.

        Raises:
            ConfigError: the strategy is another one.
        """
        if not hasattr(trainer.strategy, "runtime"):
            raise ConfigError(
                f"callbacks=[{type(self).__name__}(...)] works with memwall's strategy, and this trainer has "
                f'{type(trainer.strategy).__name__}. Use Trainer(strategy="memwall"), or leave the callback out.'
            )


class PillarCallback(MemwallCallback):
    """Mixin of the callbacks that stand for a pillar's configuration.

    Args:
        config: the pillar's configuration as a whole; or its fields as keywords.

    Attributes:
        memwall_config: the configuration.

    Raises:
        ConfigError: an unknown option, a value that cannot be, or both ways at once.
    """

    memwall_part: ClassVar[str]
    """Field of ``MemwallConfig``."""

    def __init__(self, config: Any = None, **options: Any) -> None:
        super().__init__()
        part = next(f for f in fields(MemwallConfig) if f.name == self.memwall_part)
        kind, name = part.default_factory, type(self).__name__
        if config is not None and options:
            raise ConfigError(f"{name}: give either a {kind.__name__} or single options, not both: {sorted(options)}.")
        if config is None:
            try:
                config = getattr(config_from({part.name: {"enabled": True, **options}}), part.name)
            except ConfigError as error:
                raise ConfigError(f"callbacks=[{name}(...)]: {error}") from error
        elif not is_dataclass(config) or not isinstance(config, kind):
            raise ConfigError(f"{name}({config!r}): write {name}({kind.__name__}(...)), or its options as keywords.")
        self.memwall_config = config


def configured(given: MemwallConfig, callbacks: Iterable[Any]) -> MemwallConfig:
    """The strategy's configuration with what the callbacks say of their pillars.

    Raises:
        ConfigError: two callbacks of one kind, or one beside another configuration of its pillar.
    """
    seen: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    default = MemwallConfig()
    for callback in callbacks:
        if not isinstance(callback, MemwallCallback):
            continue
        if (other := seen.setdefault(callback.memwall_kind, callback)) is not callback:
            raise ConfigError(
                f"callbacks= holds two of one kind: {type(other).__name__} and {type(callback).__name__} both stand "
                f"for {callback.memwall_kind}. Leave one out."
            )
        if not isinstance(callback, PillarCallback):
            continue
        part, wanted = callback.memwall_part, callback.memwall_config
        if getattr(given, part) not in (getattr(default, part), wanted):
            raise ConfigError(
                f"{part} is set twice, differently: {part}={getattr(given, part)} for the strategy, and "
                f"{type(callback).__name__} with {wanted} in callbacks=. Leave one out."
            )
        parts[part] = wanted
    return replace(given, **parts) if parts else given
