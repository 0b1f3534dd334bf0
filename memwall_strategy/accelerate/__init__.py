"""The Accelerate front end: ``MemwallAccelerator`` and ``MemwallPlugin``, over the runtime of Lightning's."""

from memwall_strategy.accelerate.accelerator import MemwallAccelerator
from memwall_strategy.accelerate.plugin import MemwallPlugin

__all__ = ["MemwallAccelerator", "MemwallPlugin"]
