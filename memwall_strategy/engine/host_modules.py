"""Modules that run on the host: found by name, sharded over the ranks' hosts, their inputs and outputs carried over.

Each is an FSDP2 root of its own, on a mesh of CPUs: its weights are sharded over the ranks' hosts like any unit's over
their devices, gathered and reduced on the host (gloo), and stepped there. FSDP2 shares streams and the order of
gathers below one root, for one kind of device; a root takes every sharded module below it for its own unless these are
out of sight while it is initialized (``isolate``). Private: ``FSDPState._lazy_init`` (``engine.fsdp.init_root``).

Where the ranks' device is the CPU anyway the arithmetic is the same, and so are the bits; what differs is whose memory
the module's bytes are counted as.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from memwall_strategy.core.errors import ConfigError, nearest
from memwall_strategy.engine.fsdp import fsdp_roots, init_root
from memwall_strategy.engine.units import ShardPlan, has_forward, has_parameters

CPU = torch.device("cpu")


def find_host_modules(model: nn.Module, wanted: Sequence[str]) -> dict[str, nn.Module]:
    """Name -> module of what runs on the host; ``wanted`` are names of modules or of classes.

    Raises:
        ConfigError: a name that is no module's, a module that cannot run on the host by itself, or shares a weight with
            what does not, or with another of them.
    """
    named = {name: module for name, module in model.named_modules() if name}
    classes = {type(module).__name__ for module in named.values() if has_parameters(module)}
    found: dict[str, nn.Module] = {}
    for name in wanted:
        by_class = {n: m for n, m in named.items() if type(m).__name__ == name and has_parameters(m)}
        these = {name: named[name]} if name in named else by_class
        if not these:
            raise ConfigError(
                f"pool.host_modules names {name!r}, which is no module and no class of {type(model).__name__}."
                f"{nearest(name, [*named, *classes])}"
            )
        found |= these
    found = {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}
    for name, module in found.items():
        why = _why_not(model, module)
        if why is not None:
            raise ConfigError(f"pool.host_modules names {name!r}, which {why}.")
    _refuse_ties(model, found)
    return found


def _why_not(model: nn.Module, module: nn.Module) -> str | None:
    if not has_parameters(module):
        return "has no weights. Name the module that holds them"
    if not has_forward(module):
        return "has no forward (a list of modules). Name its members, or their class"
    if set(module.parameters()) == set(model.parameters()):
        return "holds every weight. Name a part of the model, or train on accelerator='cpu'"
    return None


def _refuse_ties(model: nn.Module, found: dict[str, nn.Module]) -> None:
    owner: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        where = next((host for host in found if name.startswith(f"{host}.")), "")
        first, first_name = owner.setdefault(parameter, (where, name))
        if first != where:
            raise ConfigError(
                f"pool.host_modules={list(found)}: {first_name} and {name} are one weight, which two modules cannot "
                "gather by themselves. Untie them, or leave the module on the device."
            )


def without_host(plan: ShardPlan, host: dict[str, nn.Module]) -> ShardPlan:
    """The plan of what is left on the device."""
    inside = {child for module in host.values() for child in module.modules()}
    return replace(
        plan,
        units=tuple((n, m) for n, m in plan.units if m not in inside),
        apart=tuple((n, m) for n, m in plan.apart if m not in inside),
        roots=tuple((n, m) for n, m in plan.roots if m not in inside),
    )


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of the same ranks' CPUs; ``mesh`` itself where it is one.

    Raises:
        ConfigError: weights are replicated as well as sharded, on another device than the CPU.
    """
    if mesh.device_type == "cpu":
        return mesh
    if mesh.ndim > 1:
        raise ConfigError("pool.host_modules with replicate above 1 works on CPU only. Set replicate=1.")
    # NCCL moves no host memory; every rank makes the group, in the same order.
    group = dist.new_group(mesh.mesh.flatten().tolist(), backend="gloo")
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=mesh.mesh_dim_names)


def isolate(model: nn.Module, host: dict[str, nn.Module]) -> None:
    """Make every host module the root of its own iteration, out of sight of the roots above it."""
    roots = [root for root in fsdp_roots(model) if all(root is not module for module in host.values())]
    with _out_of_sight(model, host):
        for root in roots:
            init_root(root)
    for module in host.values():
        init_root(module)


@contextmanager
def _out_of_sight(model: nn.Module, host: dict[str, nn.Module]) -> Iterator[None]:
    hidden = set(host.values())
    places = [
        (parent, key, child) for parent in model.modules() for key, child in parent._modules.items() if child in hidden
    ]
    for parent, key, _ in places:
        parent._modules[key] = nn.Identity()
    try:
        yield
    finally:
        for parent, key, child in places:
            parent._modules[key] = child


def carry(module: nn.Module, device: torch.device) -> None:
    """Carry a host module's inputs to the host and its outputs to ``device``; autograd carries gradients back.

    After ``fully_shard``: inputs come before the engine's own hook, outputs go after it. The copies are waited for:
    the host computes at once.
    """
    if device.type == "cpu":
        return

    def to(value: Any, where: torch.device) -> Any:
        return tree_map(lambda each: each.to(where) if isinstance(each, torch.Tensor) else each, value)

    module.register_forward_pre_hook(
        lambda _, args, kwargs: (to(args, CPU), to(kwargs, CPU)), prepend=True, with_kwargs=True
    )
    module.register_forward_hook(lambda _, args, output: to(output, device))
