"""The private faces of FSDP2 that the engine relies on, gathered in one place.

``fully_shard`` keeps a state per module (``FSDPState``) and, per state, the parameters that are gathered and reduced
together (``FSDPParamGroup``). Public API reaches neither. What is used here is checked by ``tests/engine/test_fsdp.py``
so that a new torch version fails there, by name, and not in a training run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

__all__ = [
    "DDPMeshInfo",
    "FSDPMeshInfo",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "TrainingState",
    "all_gather_single",
    "fsdp_groups",
    "fsdp_roots",
    "fsdp_state",
    "fsdp_states",
    "reduce_scatter_single",
    "state_groups",
]

# torch 2.13 renamed the two; the old names warn there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def fsdp_state(module: nn.Module) -> FSDPState:
    """State of a module that ``fully_shard`` was applied to (private: ``FSDPModule._get_fsdp_state``)."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def fsdp_states(model: nn.Module) -> list[FSDPState]:
    """Every state below ``model``, in module order, each once (grouped modules share one)."""
    found = dict.fromkeys(fsdp_state(m) for m in model.modules() if isinstance(m, FSDPModule))
    return list(found)


def state_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """Parameter groups of a state: a list since torch 2.12, one or none before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group
        return [] if group is None else [group]
    return list(groups)


def fsdp_groups(model: nn.Module) -> Iterator[FSDPParamGroup]:
    """Every parameter group below ``model``."""
    for state in fsdp_states(model):
        yield from state_groups(state)


def fsdp_roots(model: nn.Module) -> list[nn.Module]:
    """The FSDP modules that are roots of their own iteration state: the outermost ones, and what was isolated below
    them (``engine.host_modules``)."""
    roots: dict[nn.Module, None] = {}

    def visit(module: nn.Module, below: bool) -> None:
        if isinstance(module, FSDPModule):
            if not below or fsdp_state(module)._is_root:  # None until somebody's first forward
                roots[module] = None
            below = True
        for child in module.children():
            visit(child, below)

    visit(model, False)
    return list(roots)


def own_states(root: nn.Module) -> list[FSDPState]:
    """States that share the iteration of ``root``, in module order; those of other roots below it are left out."""
    others = [other for other in fsdp_roots(root) if other is not root]
    foreign = {state for other in others for state in fsdp_states(other)}
    return [state for state in fsdp_states(root) if state not in foreign]


def init_root(module: nn.Module) -> None:
    """Make ``module`` the root of its iteration state now instead of at its first forward.

    A hook may run a child before the first step; FSDP2 would take that child for the root (private: ``_lazy_init``).
    """
    fsdp_state(module)._lazy_init()


def group_name(group: FSDPParamGroup, names: dict[nn.Module, str]) -> str:
    """Fully qualified name of the module(s) that the group belongs to."""
    return ", ".join(names.get(module, type(module).__name__) or "root" for module in group.modules)


def trainable(group: FSDPParamGroup) -> list[FSDPParam]:
    """Parameters of the group that get a gradient."""
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without autograd; a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
