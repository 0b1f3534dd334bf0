"""Pooled memory: an address table over the tiers of one rank's memory, and the tiers themselves.

Resolved on first use: the table and the allocator are pure Python and import no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "AddressTable": "table",
    "Arena": "arena",
    "BookedArena": "arena",
    "Capabilities": "probe",
    "DeviceStore": "device",
    "DiskStore": "disk",
    "HostStore": "host",
    "Pool": "pool",
    "needed_device_bytes": "beside",
    "sqrt_plan": "activations",
    "Store": "store",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
