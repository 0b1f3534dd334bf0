"""Builds the callbacks over the ``Callback`` class of one of the two Lightning packages."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from memwall_strategy.callbacks.pillars import MemwallCallback, PillarCallback
from memwall_strategy.engine.lightning_bridge import trainer_package
from memwall_strategy.telemetry.callback import TelemetryMethods

PILLARS = {
    "PooledMemory": ("pool", "Memory: the fields of ``PoolConfig``."),
    "DynamicClustering": ("cluster", "Clustering by activity: the fields of ``ClusterConfig``. Not in this version."),
    "Overlap": ("overlap", "Communication in the shadow of compute: the fields of ``OverlapConfig``."),
    "TopologyBalance": ("topology", "Links and balance: the fields of ``TopologyConfig``. Not in this version."),
    "Rollback": ("resilience", "Faults as normal events: the fields of ``ResilienceConfig``."),
}
"""Class -> the part of ``MemwallConfig`` that it stands for, and its description."""


@cache
def callback_classes(namespace: str) -> dict[str, type]:
    """Every callback by name, for ``lightning`` or ``pytorch_lightning``."""
    base = import_module(f"{trainer_package(namespace)}.callbacks").Callback
    module = f"{__package__}.{namespace}"
    made = {
        name: type(
            name, (PillarCallback, base),
            {"__doc__": doc, "__module__": module, "memwall_kind": name, "memwall_part": part},
        )
        for name, (part, doc) in PILLARS.items()
    }  # fmt: skip
    made["Telemetry"] = type(
        "Telemetry",
        (TelemetryMethods, MemwallCallback, base),
        {
            "__doc__": TelemetryMethods.__doc__,
            "__module__": module,
            "memwall_kind": "Telemetry",
            "memwall_namespace": namespace,
        },
    )
    return made
