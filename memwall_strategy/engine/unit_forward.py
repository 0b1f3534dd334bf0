"""The switch inside a unit's ``forward``: how each call keeps what its backward needs, changed between two steps.

``forward`` is replaced on the instance, inside FSDP2's hooks: weights are gathered when it runs, in the first run and
in a recomputation during backward, and a change of way rebuilds nothing. Without gradients a call goes straight to the
module's own ``forward``. Where the unit itself is ``torch.compile(unit)`` the switch is outside the compiled region.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.fsdp import fsdp_roots

Way = Callable[["UnitForward", tuple[Any, ...], dict[str, Any]], Any]
"""Runs one call of a unit: (unit, args, kwargs) -> output."""


class UnitForward:
    """One unit's ``forward`` with a switch in it.

    Args:
        name: fully qualified name of the module.
        module: the sharded unit.

    Attributes:
        inner: what ``module.forward`` was.
        way: how calls run; None: as ever.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.way: Way | None = None
        self.inner = inner = module.forward
        self._before = vars(module).get("forward")

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.way is None or not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            return self.way(self, args, kwargs)

        self._outer = forward
        module.forward = forward

    def remove(self) -> None:
        """Give the module its ``forward`` back; where somebody wrapped it again, calls pass on unchanged."""
        self.way = None
        if vars(self.module).get("forward") is not self._outer:
            return
        if self._before is None:
            del self.module.forward
        else:
            self.module.forward = self._before


def switchable_units(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Module]:
    """Name -> module of the units whose activations can be treated, in module order.

    Args:
        model: sharded.
        names: of the units, from the plan by which the model was sharded; None: its owner sharded it, and the units
            are the outermost FSDP2 modules below the roots.
    """
    modules = dict(model.named_modules())
    if names is not None:
        return {name: modules[name] for name in names}
    found: dict[str, nn.Module] = {}
    full = {module: name for name, module in modules.items()}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, FSDPModule):
                found.setdefault(full[child], child)
            else:
                visit(child)

    for root in fsdp_roots(model):
        visit(root)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module enter a compiled region: ``torch.compile(module)`` or ``module.compile()``."""
    return hasattr(module, "_orig_mod") or _compiled_in_place(module)


def _compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None  # private: what ``nn.Module.compile`` sets


def refuse_compiled(model: nn.Module, name: str, mode: str) -> None:
    """Check that a unit's switch is outside compiled regions.

    Raises:
        ConfigError: it is inside one, or the way cannot look into the unit's own.
    """
    parts = name.split(".")
    above = [".".join(parts[:count]) for count in range(len(parts))]
    modules = dict(model.named_modules())
    outer = [each for each in above if is_compiled(modules[each])]
    if outer or _compiled_in_place(modules[name]):
        where = (outer[0] or type(model).__name__) if outer else name
        raise ConfigError(
            f"activations of unit {name!r} cannot be {mode!r}: it runs inside the compiled region of {where}, where a "
            f"change between steps would compile anew each time. Compile inside the units, or wrap each unit with "
            "torch.compile(unit), or leave it at 'keep'."
        )
    if mode == "selective" and is_compiled(modules[name]):
        raise ConfigError(
            f"activations of unit {name!r} cannot be 'selective': it is compiled as a whole, and which operations it "
            "keeps is the compiler's decision. Use 'recompute' or 'offload', or compile inside the unit."
        )
