"""Sharding a plain model with FSDP2, unit by unit.

The order matters and is visible in ``shard_model``: weights come off the meta device, are made equal on all ranks,
converted to the dtype they are kept in, and sharded at once, so that no more than one unit (and what the root holds) is
ever whole in memory. Inner groups are sharded before the units that contain them, units before roots.
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.core.unit import Unit
from memwall_strategy.engine.fresh import keep_fresh
from memwall_strategy.engine.fsdp import fsdp_groups, fsdp_roots, group_name, init_root, own_states, trainable
from memwall_strategy.engine.host_modules import CPU, carry, host_mesh, isolate, without_host
from memwall_strategy.engine.precision import (
    convert_weights,
    keeps_statistics,
    mixed_precision_policy,
    statistics_policy,
)
from memwall_strategy.engine.units import ShardPlan, plan_sharding

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
"""What a LightningModule runs instead of ``forward``."""


def check_replicate(ranks: int, replicate: int) -> None:
    """Raise ``ConfigError`` where ``replicate`` does not divide the number of data-parallel ranks."""
    if ranks % replicate:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ConfigError(
            f"replicate={replicate} does not divide the {ranks} data-parallel ranks. Use one of {divisors}."
        )


def data_parallel_mesh(device_type: str, world: int, replicate: int) -> DeviceMesh:
    """The mesh that weights are sharded over: 1-D, or (replicate, shard) for HSDP.

    Raises:
        ConfigError: ``replicate`` does not divide the number of ranks.
    """
    check_replicate(world, replicate)
    if replicate == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))


def is_sharded(model: nn.Module) -> bool:
    """Whether somebody (a user's ``configure_model``) applied ``fully_shard`` already."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    precision: str,
    unit_classes: tuple[str, ...] = (),
    split: bool = False,
    host: Mapping[str, nn.Module] = MappingProxyType({}),
) -> ShardPlan:
    """Shard a plain model in place and return what was sharded.

    Args:
        model: on CPU, on the mesh's device, or on meta (materialized here through ``reset_parameters``).
        mesh: from ``data_parallel_mesh``.
        precision: canonical name, see ``engine.precision``.
        unit_classes: see ``plan_sharding``.
        split: a LightningModule; see ``plan_sharding``.
        host: modules that run on the host, from ``engine.host_modules.find_host_modules``.

    Raises:
        ConfigError: nothing to shard, several dtypes in one module, or a module on meta that cannot initialize itself.
    """
    policy = mixed_precision_policy(precision)
    plan = plan_sharding(model, unit_classes=unit_classes, split=split, low_precision=policy.param_dtype is not None)
    if not plan.units and len(plan.roots) == 1:
        warnings.warn(
            f"{type(model).__name__} has no repeated block: {plan.roots[0][0] or 'the whole model'} is one unit and is "
            "gathered whole. Name the classes to shard with unit_classes=(...) to save memory.",
            stacklevel=2,
        )
    plan = without_host(plan, host) if host else plan
    _check_meta(model)
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    groups = {module for _, module in (*plan.apart, *plan.units, *plan.roots)} | set(host.values())
    on_host = {child for module in host.values() for child in module.modules()}
    cpus = host_mesh(mesh) if host else mesh
    roots = {module for _, module in plan.roots}
    seen: set[nn.Module] = set()
    # Tied ones only: any other whole weight goes as soon as its module was sharded.
    uses = Counter(parameter for owner in model.modules() for parameter in owner.parameters(recurse=False))
    moved: dict[nn.Parameter, nn.Parameter | None] = {each: None for each, count in uses.items() if count > 1}
    del uses

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        # Parents before children: the order of model.modules(), so of the RNG.
        _materialize(module, CPU if module in on_host else device, moved)
        for child in module.children():
            visit(child)
        if module in groups:
            _start_equal(module, groups - {module}, mesh)
            _convert_own(module, groups - {module}, precision)
            apart = policy.param_dtype is not None and keeps_statistics(module)
            fully_shard(
                module,
                mesh=cpus if module in on_host else mesh,
                mp_policy=statistics_policy(precision) if apart else policy,
                # What a root holds stays gathered from forward to backward: the backward starts with it.
                reshard_after_forward=False if module in roots else None,
            )

    visit(model)
    moved.clear()  # ``visit`` refers to itself, so what it holds would wait for the garbage collector
    if plan.crown:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    if split and (plan.crown or model in roots):
        for method in STEP_METHODS:
            register_fsdp_forward_method(model, method)
        if not host:
            init_root(model)
    if host:
        isolate(model, dict(host))
        for module in host.values():
            carry(module, device)
    keep_fresh(model)
    return plan


def set_prefetch(model: nn.Module, units_ahead: int) -> None:
    """Gather ``units_ahead`` units before they are needed, in module order.

    In backward FSDP2 itself prefetches one unit by the order in which the forward really ran; an explicit list, by
    module order, is set only for more, or for none.
    """
    for root in fsdp_roots(model):
        chain = [state._modules[0] for state in own_states(root)]  # parents before children, the root first
        prefetch_along(chain, [units_ahead] * len(chain), root)


def prefetch_along(chain: Sequence[FSDPModule], ahead: Sequence[int], root: nn.Module) -> None:
    """Gather along ``chain``, in forward from its start, in backward from its end.

    Args:
        chain: in the order in which they run, the root first.
        ahead: how many modules to gather ahead of what follows each; where it is 1, backward is left to FSDP2 itself,
            which follows the order in which the forward ran; where it is 0 for all, nothing is gathered ahead.
        root: stays gathered until its backward, and is never gathered ahead of it.
    """
    for i, (module, units_ahead) in enumerate(zip(chain, ahead, strict=True)):
        module.set_modules_to_forward_prefetch(list(chain[i + 1 : i + 1 + units_ahead]))
        behind: Sequence[FSDPModule] = ()
        if max(ahead) == 0:  # a list switches FSDP2's own prefetch off; the module itself is gathered by then
            module.set_modules_to_backward_prefetch([module])
            continue
        if max(ahead) > 1:
            behind = chain[max(1, i - units_ahead) : i] if i else chain[-units_ahead:]
        module.set_modules_to_backward_prefetch([m for m in reversed(behind) if m is not root])


def describe_units(model: nn.Module) -> tuple[Unit, ...]:
    """The units of a sharded model, in module order, for planning and reports."""
    names = {module: name for name, module in model.named_modules()}
    parameter_names = {p: n for n, p in model.named_parameters()}
    units = []
    for index, group in enumerate(fsdp_groups(model)):
        params = group.fsdp_params
        learning = set(trainable(group))
        units.append(
            Unit(
                index=index,
                name=group_name(group, names) or "root",
                parameters=tuple(parameter_names.get(p.sharded_param, "?") for p in params),
                numel=sum(p._orig_size.numel() for p in params),
                sharded_numel=sum(p.padded_sharded_param_size.numel() for p in params),
                trainable_numel=sum(p._orig_size.numel() for p in params if p in learning),
            )
        )
    return tuple(units)


# -- weights before sharding --


def _own_tensors(module: nn.Module, stops: set[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """(owner, name, tensor) of parameters and buffers below ``module`` that lie in no other group, each once."""
    found: dict[int, tuple[nn.Module, str, torch.Tensor]] = {}
    pending = [module]
    while pending:
        owner = pending.pop(0)
        tensors = itertools.chain(owner.named_parameters(recurse=False), owner.named_buffers(recurse=False))
        for name, tensor in tensors:
            found.setdefault(id(tensor), (owner, name, tensor))
        pending += [child for child in owner.children() if child not in stops]
    return list(found.values())


def _check_meta(model: nn.Module) -> None:
    helpless = sorted(
        {
            type(m).__name__
            for m in model.modules()
            if any(t.is_meta for t in itertools.chain(m.parameters(recurse=False), m.buffers(recurse=False)))
            and not callable(getattr(m, "reset_parameters", None))
        }
    )
    if helpless:
        raise ConfigError(
            f"these modules are on the meta device and have no reset_parameters() to initialize themselves: "
            f"{', '.join(helpless)}. Add that method, or build the model off the meta device."
        )


def _materialize(owner: nn.Module, device: torch.device, moved: dict[nn.Parameter, nn.Parameter | None]) -> None:
    """Give a module's own meta tensors memory and initialize them.

    ``moved`` has what each tied weight became, so that it stays tied; None until one of its owners came by.
    """
    tensors = itertools.chain(owner.parameters(recurse=False), owner.buffers(recurse=False))
    if not any(tensor.is_meta for tensor in tensors):
        return
    for name, parameter in list(owner.named_parameters(recurse=False)):
        if parameter.is_meta:
            whole = moved.get(parameter)
            if whole is None:
                data = torch.empty_like(parameter, device=device)
                whole = nn.Parameter(data, requires_grad=parameter.requires_grad)
                if parameter in moved:
                    moved[parameter] = whole
            setattr(owner, name, whole)
    for name, buffer in list(owner.named_buffers(recurse=False)):
        if buffer.is_meta:
            owner._buffers[name] = torch.empty_like(buffer, device=device)
    owner.reset_parameters()


def _convert_own(module: nn.Module, stops: set[nn.Module], precision: str) -> None:
    """Convert what this group will shard, and the buffers beside it."""
    owners = dict.fromkeys(owner for owner, _, _ in _own_tensors(module, stops))
    for owner in owners:
        convert_weights(owner, precision)


@torch.no_grad()
def _start_equal(module: nn.Module, stops: set[nn.Module], mesh: DeviceMesh) -> None:
    """Give every rank rank 0's weights. Equal weights (the usual case: one seed) cost one small all-reduce."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or mesh.size() != dist.get_world_size():
        return
    tensors = [t for _, _, t in _own_tensors(module, stops) if t.numel()]
    if not tensors:
        return
    if mesh.device_type == "cpu":
        checksum = 0
        for tensor in tensors:
            checksum = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy(), checksum)
        bounds = torch.tensor([checksum, -checksum])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        if bounds[0] == -bounds[1]:
            return
    for tensor in tensors:
        dense = tensor.detach().to(mesh.device_type).contiguous()
        dist.broadcast(dense, src=0)
        tensor.copy_(dense)
