"""Which modules become units, and which module is the root that FSDP2 hooks.

Everything here looks at classes, so it runs before ``fully_shard``, which renames them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from memwall_strategy.core.errors import ConfigError, nearest
from memwall_strategy.engine.precision import keeps_statistics

_Named = list[tuple[str, nn.Module]]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What will be sharded, outermost last.

    Attributes:
        units: (name, module) of each unit, in module order.
        apart: (name, module) of modules with groups of their own inside units: running statistics under low
            precision, or weights of another dtype than the rest of their unit.
        roots: (name, module) of the modules that hold what no unit holds; ``""`` is the model itself.
        crown: the model is a root without parameters over units and roots that it calls itself, so that they are
            prefetched across each other. Otherwise each root's forward starts and ends an iteration of its own.
    """

    units: tuple[tuple[str, nn.Module], ...]
    apart: tuple[tuple[str, nn.Module], ...]
    roots: tuple[tuple[str, nn.Module], ...]
    crown: bool


def has_forward(module: nn.Module) -> bool:
    """Whether the module defines ``forward`` (containers such as ``ModuleList`` do not)."""
    return _kind(module).forward is not nn.Module.forward


def _kind(module: nn.Module) -> type[nn.Module]:
    """Class of the module, or of what ``torch.compile`` wrapped in it (kept as ``_orig_mod``)."""
    return type(getattr(module, "_orig_mod", module))


def has_parameters(module: nn.Module) -> bool:
    """Whether there is any parameter below the module."""
    return next(module.parameters(), None) is not None


def plan_sharding(model: nn.Module, *, unit_classes: tuple[str, ...], split: bool, low_precision: bool) -> ShardPlan:
    """Decide units and roots.

    Args:
        unit_classes: names of the classes that become units; empty: see ``unit_class_names``.
        split: the model's own ``forward`` is not what runs (a LightningModule runs ``training_step``): make its
            children roots where that is possible.
        low_precision: modules with running statistics need groups of their own.

    Raises:
        ConfigError: nothing to shard, ``unit_classes`` names no module that can be a unit, or they share weights.
    """
    if not has_parameters(model):
        raise ConfigError(
            f"{type(model).__name__} has no parameters: there is no unit to shard. Create the layers in __init__ or "
            "configure_model before training starts, or train this model with strategy='auto'."
        )
    names = unit_classes or unit_class_names(model)
    units = _outermost(model, set(names))
    if unit_classes:
        _check_classes(model, unit_classes, units)
    roots = _roots(model, split)
    root_modules = {module for _, module in roots}
    loose = sum(1 for _, module in units if module in root_modules)  # units that no other root would call
    crown = split and loose >= 2
    if crown:
        roots = [(name, module) for name, module in roots if all(module is not unit for _, unit in units)]
    else:
        units = [(name, module) for name, module in units if module not in root_modules]
    units = _without_ties(model, units, roots, chosen=bool(unit_classes))
    apart = _apart(model, [m for _, m in units] + [m for _, m in roots], low_precision)
    return ShardPlan(tuple(units), tuple(apart), tuple(roots), crown)


def unit_class_names(model: nn.Module) -> tuple[str, ...]:
    """Class names that become units when the user names none.

    A Hugging Face model says so itself (``_no_split_modules``); otherwise the class repeated most often in the longest
    ``ModuleList`` (or ``Sequential``) of the model; nothing when there is no repetition.
    """
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        if declared:
            present = {type(m).__name__ for m in model.modules()}
            if found := tuple(name for name in declared if name in present):
                return found
    best: tuple[int, str] | None = None
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        classes = Counter(_kind(c).__name__ for c in module if has_parameters(c) and has_forward(c))
        if classes:
            name, count = classes.most_common(1)[0]
            if count >= 2 and (best is None or count > best[0]):
                best = (count, name)
    return () if best is None else (best[1],)


def recomputes_itself(model: nn.Module) -> bool:
    """Whether a Hugging Face model recomputes activations by its own ``gradient_checkpointing``.

    Raises:
        ConfigError: it does so in the reentrant way, whose recomputation runs outside FSDP2's hooks.
    """
    own = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in own:
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise ConfigError(
                f"{type(module).__name__} uses reentrant gradient checkpointing, which sharded weights do not survive. "
                "Write gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
            )
    return bool(own)


def _outermost(model: nn.Module, class_names: set[str]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if name and _kind(module).__name__ in class_names and has_parameters(module) and has_forward(module):
            found.append((name, module))
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return found


def _check_classes(model: nn.Module, unit_classes: tuple[str, ...], units: list[tuple[str, nn.Module]]) -> None:
    used = {_kind(m).__name__ for _, m in units}
    known = {type(m).__name__ for m in model.modules() if has_parameters(m) and has_forward(m)}
    for name in unit_classes:
        if name not in used:
            why = "is nested in another unit class" if name in known else "is no class of a module with parameters"
            raise ConfigError(
                f"unit_classes names {name!r}, which {why} of {type(model).__name__}: no shardable unit."
                f"{nearest(name, known)} Classes with parameters: {', '.join(sorted(known)) or 'none'}."
            )


def _roots(model: nn.Module, split: bool) -> list[tuple[str, nn.Module]]:
    if not split or next(model.parameters(recurse=False), None) is not None:
        return [("", model)]
    roots: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if not has_parameters(child):
                continue
            if has_forward(child):
                roots.append((full, child))
            else:
                visit(full, child)

    visit("", model)
    owners: dict[nn.Parameter, nn.Module] = {}
    for _, root in roots:
        for parameter in root.parameters():
            if owners.setdefault(parameter, root) is not root:
                return [("", model)]  # tied across children: only their common parent can gather them together
    covered = sum(1 for _ in owners)
    return roots if covered == sum(1 for _ in model.parameters()) else [("", model)]


def _apart(model: nn.Module, groups: list[nn.Module], low_precision: bool) -> list[tuple[str, nn.Module]]:
    """Modules inside ``groups`` (units first, then roots) that cannot share their group's dtype."""
    names = {module: name for name, module in model.named_modules()}
    apart: dict[nn.Module, None] = {}
    if low_precision:
        apart |= {m: None for m in model.modules() if keeps_statistics(m) and has_parameters(m) and m not in groups}
    taken: set[nn.Module] = set()
    for group in groups:
        direct = [(m, p) for m in _until(group, taken | set(apart)) for p in m.parameters(recurse=False)]
        taken.add(group)
        sizes: Counter[torch.dtype] = Counter()
        for _, parameter in direct:
            if parameter.requires_grad:
                sizes[parameter.dtype] += parameter.numel()
        if len(sizes) < 2:
            continue
        majority = sizes.most_common(1)[0][0]
        for module, parameter in direct:
            if not parameter.requires_grad or parameter.dtype == majority or module in apart:
                continue
            if module is group or not has_forward(module) or len({p.dtype for p in module.parameters()}) > 1:
                raise ConfigError(
                    f"{names[module] or type(module).__name__} mixes parameters of several dtypes "
                    f"({', '.join(sorted(str(p.dtype) for p in module.parameters(recurse=False)))}), which cannot be "
                    "gathered together. Keep one dtype per module, e.g. module.to(torch.float32)."
                )
            apart[module] = None
    return [(names[m], m) for m in apart]


@dataclass(frozen=True, slots=True)
class _Tie:
    """One weight that two groups would shard, each its own copy of it."""

    groups: tuple[nn.Module, nn.Module]
    names: tuple[str, str]


def _ties(model: nn.Module, groups: list[nn.Module]) -> list[_Tie]:
    names = {module: name for name, module in model.named_modules()}
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    ties = []
    for group in groups:
        for module in _until(group, set(groups) - {group}):
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{names[module]}.{name}" if names[module] else name
                owner, first = owners.setdefault(parameter, (group, full))
                if owner is not group:
                    ties.append(_Tie((owner, group), (first, full)))
    return ties


def _without_ties(model: nn.Module, units: _Named, roots: _Named, *, chosen: bool) -> _Named:
    """Units that share no weight with what lies outside them.

    Raises:
        ConfigError: the user chose the units.
    """
    ties = _ties(model, [module for _, module in (*units, *roots)])
    if not ties:
        return units
    names = {module: name for name, module in model.named_modules()}
    first, second = (names[group] or "root" for group in ties[0].groups)
    said = f"{' and '.join(ties[0].names)} are one weight, but lie in different units ({first} and {second})"
    if chosen:
        raise ConfigError(
            f"{said}, which are gathered one after the other. Name classes of units that hold both, or neither, with "
            "unit_classes=(...)."
        )
    warnings.warn(
        f"{said}: units that share weights are gathered with their root. Name others with unit_classes=(...).",
        stacklevel=4,
    )
    tied = {group for tie in ties for group in tie.groups}
    return [(name, module) for name, module in units if module not in tied]


def _until(module: nn.Module, stops: set[nn.Module]) -> list[nn.Module]:
    """The module and everything below it that lies in no other group."""
    found = [module]
    for child in module.children():
        if child not in stops:
            found += _until(child, stops)
    return list(dict.fromkeys(found))
