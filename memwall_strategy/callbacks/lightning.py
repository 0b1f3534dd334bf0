"""The callbacks for ``lightning.pytorch``."""

from memwall_strategy.callbacks.classes import callback_classes

_CLASSES = callback_classes("lightning")

DynamicClustering = _CLASSES["DynamicClustering"]
Overlap = _CLASSES["Overlap"]
PooledMemory = _CLASSES["PooledMemory"]
Rollback = _CLASSES["Rollback"]
Telemetry = _CLASSES["Telemetry"]
TopologyBalance = _CLASSES["TopologyBalance"]

__all__ = ["DynamicClustering", "Overlap", "PooledMemory", "Rollback", "Telemetry", "TopologyBalance"]
