"""The Lightning front end: ``MemwallStrategy`` for Trainer and Fabric, and its precision plugin.

Importing this module also registers the name ``memwall`` with Lightning, for processes in which torch does not load its
entry points (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).
"""

from memwall_strategy.lightning.fabric import fabric_strategy_class
from memwall_strategy.lightning.precision import precision_class
from memwall_strategy.lightning.register import register
from memwall_strategy.lightning.strategy import strategy_class

register()
MemwallStrategy = strategy_class("lightning")
MemwallPrecision = precision_class("lightning")
MemwallFabricStrategy = fabric_strategy_class("lightning.fabric")

__all__ = [
    "MemwallFabricStrategy",
    "MemwallPrecision",
    "MemwallStrategy",
    "fabric_strategy_class",
    "precision_class",
    "strategy_class",
]
