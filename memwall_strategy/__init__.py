"""memwall: break the GPU memory wall with ``Trainer(strategy="memwall")``.

This module imports neither torch nor Lightning: names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "MemwallConfig": "memwall_strategy.config",
    "PoolConfig": "memwall_strategy.config",
    "OverlapConfig": "memwall_strategy.config",
    "TopologyConfig": "memwall_strategy.config",
    "ClusterConfig": "memwall_strategy.config",
    "ResilienceConfig": "memwall_strategy.config",
    "MemwallStrategy": "memwall_strategy.lightning",
    "MemwallPrecision": "memwall_strategy.lightning",
    "MemwallFabricStrategy": "memwall_strategy.lightning",
    "Runtime": "memwall_strategy.runtime",
    "MemwallError": "memwall_strategy.core.errors",
    "ConfigError": "memwall_strategy.core.errors",
    "CheckpointError": "memwall_strategy.core.errors",
    "CollectiveError": "memwall_strategy.core.errors",
    "PeerLost": "memwall_strategy.core.errors",
    "TransferError": "memwall_strategy.core.errors",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
