"""Pillars and telemetry as Lightning callbacks: pass, subclass or drop them.

    Trainer(strategy="memwall", callbacks=[PooledMemory(device_budget="512MiB"), Overlap(prefetch=2), Telemetry()])

| callback | takes the fields of | in this version |
|---|---|---|
| ``PooledMemory`` | ``PoolConfig`` | yes |
| ``Overlap`` | ``OverlapConfig`` | yes |
| ``Rollback`` | ``ResilienceConfig`` | yes |
| ``Telemetry`` | ``TelemetryConfig`` | yes |
| ``DynamicClustering`` | ``ClusterConfig`` | refused when it is made |
| ``TopologyBalance`` | ``TopologyConfig`` | refused when it is made |

Lightning exists under two names with two ``Callback`` classes. ``memwall_strategy.callbacks.lightning`` and
``memwall_strategy.callbacks.pytorch_lightning`` have the callbacks for each; names taken from this module are
``lightning``'s, unless the process has imported ``pytorch_lightning`` and not ``lightning.pytorch`` when it asks for
the first one. The strategy takes up either kind under either package.

Nothing is imported before a name is asked for.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["DynamicClustering", "Overlap", "PooledMemory", "Rollback", "Telemetry", "TopologyBalance"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_chosen(), name)


@cache
def _chosen() -> ModuleType:
    only_the_other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return import_module(f"{__name__}.{'pytorch_lightning' if only_the_other else 'lightning'}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
