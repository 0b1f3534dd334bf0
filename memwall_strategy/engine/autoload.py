"""Makes the name ``"memwall"`` known to Lightning before anybody imports memwall.

Lightning has no entry point for strategies, but torch calls every function of the entry-point group
``torch.backends`` at the end of ``import torch``, and Lightning imports torch. ``install`` is that function. It puts
a finder first on ``sys.meta_path`` that knows four modules, the ones that hold a strategy registry. When one of them
is imported, the finder asks the finders behind it for the module, as if it were not there, and hands on their spec
with a loader around theirs: it runs the module, then registers a builder. The builder imports the strategy when a
trainer asks for it, so ``import torch`` costs a lookup in ``sys.meta_path`` and nothing of Lightning or memwall.

What it must not do is break ``import torch`` or ``import lightning`` for people who never use memwall. So this
module needs the standard library alone, and what goes wrong in registering is logged, not raised.

What it does not do: with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` torch does not call it; ``import
memwall_strategy.lightning`` registers then (``lightning/register.py``). A registry module that is in the middle of
its own import when torch is first imported is not seen either; Lightning imports torch before its registries.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "memwall"
"""What users write: ``Trainer(strategy="memwall")``."""

DESCRIPTION = (
    "memwall: FSDP2 sharding of a plain module over all devices, communication on lanes beside the compute, bytes "
    "counted per kind, sharded checkpoints that resume at another world size. "
    "Options: strategy=memwall_strategy.MemwallStrategy(...)"
)
"""What Lightning's registry shows about the strategy."""

_log = logging.getLogger("memwall")


@dataclass(frozen=True, slots=True)
class Registry:
    """One of Lightning's strategy registries, and what makes a memwall strategy for it."""

    attribute: str
    """Name of the registry in its module."""

    factory_module: str
    """Module of memwall with the factory; imported when a strategy is built."""

    factory: str
    """Function there that takes the namespace and returns the strategy class."""

    namespace: str
    """Lightning's name as the user imported it: each has base classes of its own."""

    def build(self, **options: Any) -> Any:
        """Return a strategy for this registry; ``options`` are those of the strategy."""
        factory = getattr(import_module(self.factory_module), self.factory)
        return factory(self.namespace)(**options)


def _pytorch(namespace: str) -> Registry:
    return Registry("StrategyRegistry", "memwall_strategy.lightning.strategy", "strategy_class", namespace)


def _fabric(namespace: str) -> Registry:
    return Registry("STRATEGY_REGISTRY", "memwall_strategy.lightning.fabric", "fabric_strategy_class", namespace)


REGISTRIES = {
    "lightning.pytorch.strategies": _pytorch("lightning"),
    "pytorch_lightning.strategies": _pytorch("pytorch_lightning"),
    "lightning.fabric.strategies": _fabric("lightning.fabric"),
    "lightning_fabric.strategies": _fabric("lightning_fabric"),
}
"""Module -> the registry that it holds once it has run."""


def install() -> None:
    """Register memwall with every Lightning that is imported, and with each that will be.

    Never raises, may be called any number of times and from any thread, imports neither torch nor Lightning.
    """
    with _LOCK:
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    for name, module in imported():
        _register_quietly(module, name)


def imported() -> list[tuple[str, ModuleType]]:
    """The registry modules that have been imported; one that is running under our loader registers when it ends."""
    found = ((name, sys.modules.get(name)) for name in REGISTRIES)
    return [(name, module) for name, module in found if module is not None and name not in _RUNNING]


def register_in(module: ModuleType, name: str) -> None:
    """Register memwall in the registry of ``module``, imported as ``name``, unless it is there already."""
    entry = REGISTRIES[name]
    registry = getattr(module, entry.attribute)
    with _LOCK:
        if NAME not in registry:
            registry.register(NAME, entry.build, description=DESCRIPTION)


def _register_quietly(module: ModuleType, name: str) -> None:
    try:
        register_in(module, name)
    except Exception as error:  # noqa: BLE001  # a foreign registry may raise anything, and `import torch` must go on
        # Logged, not warned about: under `-W error` a warning would raise.
        _log.warning(
            "memwall could not register itself with %s (%s: %s); strategy=%r will not be known there. "
            "memwall needs lightning>=2.6,<3.",
            *(name, type(error).__name__, error, NAME),
        )


class _RegistryFinder(MetaPathFinder):
    """Finds the registry modules by way of the finders behind it; knows no other module."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in REGISTRIES:
            return None
        for finder in _behind(self):
            find_spec: Callable[..., ModuleSpec | None] | None = getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                # A loader without exec_module would need the import system's own old path: leave it untouched.
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _RegisteringLoader(fullname, spec.loader)  # type: ignore[arg-type]
                return spec
        return None


def _behind(finder: object) -> list[Any]:
    """The finders that have not been asked yet when ``finder`` is."""
    finders = list(sys.meta_path)
    return finders[finders.index(finder) + 1 :] if finder in finders else finders


class _RegisteringLoader(Loader):
    """Runs a module through its own loader, then registers memwall in it.

    Everything else that is asked of a loader (source, resources, whether it is a package) is the own loader's.
    """

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_loader"), name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Take ourselves out first: the module, and whoever inspects it, sees only its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _RUNNING.add(self._name)
        try:
            self._loader.exec_module(module)
        finally:
            _RUNNING.discard(self._name)
        _register_quietly(module, self._name)


_RUNNING: set[str] = set()
_LOCK = threading.Lock()
"""Held for a lookup and an insertion, never across an import."""
_FINDER = _RegistryFinder()
