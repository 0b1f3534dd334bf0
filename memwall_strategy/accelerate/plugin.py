"""``MemwallPlugin``: memwall's options for an accelerator, and where its runtimes are found."""

from __future__ import annotations

from typing import Any

from torch import nn

from memwall_strategy.config import MemwallConfig
from memwall_strategy.runtime import Runtime
from memwall_strategy.runtime.world import read_options, refuse_trainer_only
from memwall_strategy.telemetry.events import Events


class MemwallPlugin:
    """Options for ``MemwallAccelerator(memwall=MemwallPlugin(...))``.

    It is no plugin of Accelerate's own kinds on purpose: a plain ``Accelerator(fsdp_plugin=MemwallPlugin())`` raises a
    ``TypeError`` before anything starts, where an FSDP plugin would be ignored on CPU and the model trained with DDP.

    Args:
        config: everything at once; or the fields of ``MemwallConfig`` as keywords.
        options: fields of ``MemwallConfig``.

    Attributes:
        runtimes: one for each model that was prepared, in order.
        events: what happens, to all of them and to checkpoints; subscribe before or while they run.

    Raises:
        ConfigError: an unknown option, with the nearest known one, or a value that cannot be.
    """

    def __init__(self, config: MemwallConfig | None = None, **options: Any) -> None:
        self.config = read_options(config, options, "MemwallPlugin")
        refuse_trainer_only(self.config, "Accelerate")
        self.runtimes: dict[nn.Module, Runtime] = {}
        self.events = Events()

    @property
    def runtime(self) -> Runtime | None:
        """Runtime of the model that was prepared last; None before."""
        return next(reversed(self.runtimes.values()), None)

    def __repr__(self) -> str:
        return f"MemwallPlugin({self.config})"
