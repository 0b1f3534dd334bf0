"""What telemetry can be told. Stdlib only, so that a mistake is found before torch is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from memwall_strategy.core.errors import ConfigError, nearest

WANDB_MODES = ("offline", "online")


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    """Figures, events and profiles."""

    every_n_steps: int | None = None
    """Steps between two rows of figures. None: as the trainer's log_every_n_steps says."""

    memory_alert: float | None = 0.95
    """Share of pool.device_budget from which a step's peak is an alert (event memory_high). None: no alert."""

    alert_every_s: float = 300.0
    """Least seconds between two W&B alerts of one kind; those in between are counted in the next."""

    profile: bool = False
    """Write a Chrome trace of a few steps on rank 0: torch's operations, with memwall's lanes beside them."""

    profile_skip_steps: int = 3
    """Steps before the profile: what is built lazily would fill it."""

    profile_steps: int = 3
    """Steps in the profile."""

    def __post_init__(self) -> None:
        if self.every_n_steps is not None:
            _whole_number("every_n_steps", self.every_n_steps, 1)
        _whole_number("profile_skip_steps", self.profile_skip_steps, 0)
        _whole_number("profile_steps", self.profile_steps, 1)
        if not isinstance(self.profile, bool):
            raise ConfigError(f"telemetry.profile={self.profile!r} must be true or false.")
        if self.memory_alert is not None and not (_is_number(self.memory_alert) and 0 < self.memory_alert <= 1):
            raise ConfigError(
                f"telemetry.memory_alert={self.memory_alert!r} must be a share of the budget between 0 and 1, "
                "such as 0.95, or null for no alert."
            )
        if not (_is_number(self.alert_every_s) and 0 <= self.alert_every_s < math.inf):
            raise ConfigError(f"telemetry.alert_every_s={self.alert_every_s!r} must be a number of seconds, 0 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressOptions:
    """Progress on rank 0: a bar on a terminal, plain lines elsewhere."""

    every_n_steps: int = 10
    """Steps between two lines where there is no terminal for a bar."""

    def __post_init__(self) -> None:
        _whole_number("every_n_steps", self.every_n_steps, 1, group="progress")


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbOptions:
    """Weights & Biases."""

    mode: str = "offline"
    """offline: into the run folder, for `wandb sync` later; online: to the server as it runs."""

    project: str | None = None
    """Project of the run. None: the run's name."""

    entity: str | None = None
    """User or team. None: the one that is logged in."""

    group: str | None = None
    """Group of runs."""

    tags: tuple[str, ...] = ()
    """Tags of the run."""

    save_dir: str | None = None
    """Where the folder wandb/ goes. None: the run folder."""

    def __post_init__(self) -> None:
        if self.mode not in WANDB_MODES:
            raise ConfigError(
                f"logger.wandb.mode={self.mode!r} is not one of {', '.join(WANDB_MODES)}."
                f"{nearest(str(self.mode), WANDB_MODES)} For a run without W&B choose logger=csv."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoardOptions:
    """TensorBoard."""

    save_dir: str | None = None
    """Where the folder of event files goes. None: the run folder."""

    name: str = "tensorboard"
    """Name of that folder."""

    version: str = ""
    """A folder below it; empty: none."""


def telemetry_config(options: dict[str, Any]) -> TelemetryConfig:
    """Build from keywords.

    Raises:
        ConfigError: an unknown option, with the nearest known one, or a value that cannot be.
    """
    known = {f.name for f in fields(TelemetryConfig)}
    for name in options:
        if name not in known:
            raise ConfigError(
                f"Telemetry has no option {name!r}.{nearest(name, known)} Known options: {', '.join(sorted(known))}."
            )
    return TelemetryConfig(**options)


def _whole_number(name: str, value: object, lowest: int, *, group: str = "telemetry") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f"{group}.{name}={value!r} must be a whole number of at least {lowest}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
