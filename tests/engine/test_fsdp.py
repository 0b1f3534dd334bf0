"""The private faces of FSDP2 that the engine relies on: each name, and that overrides on an instance are called.

When a new torch fails here, the name in the failing test's id is what changed.
"""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives, _fsdp_common

from memwall_strategy.engine.fsdp import (
    DDPMeshInfo,
    FSDPMeshInfo,
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    TrainingState,
    all_gather_single,
    fsdp_groups,
    fsdp_roots,
    fsdp_state,
    fsdp_states,
    group_name,
    local_tensor,
    reduce_scatter_single,
    state_groups,
    trainable,
)
from tests.engine.lane_cases import GPT, MLP, mesh_of, sharded
from tests.lightning.checks import on_ranks

# -- names, without any process group --


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((FSDPModule, n) for n in ("_get_fsdp_state", "set_modules_to_forward_prefetch", "set_requires_all_reduce")),
        *((FSDPState, n) for n in ("_lazy_init", "_root_pre_forward", "_root_post_backward_final_callback")),
        *((FSDPParamGroup, n) for n in ("unshard", "wait_for_unshard", "reshard", "post_forward", "post_backward")),
        *((FSDPParamGroup, n) for n in ("_to_sharded", "_init_mp_dtypes", "is_sharded", "is_unsharded")),
        *((FSDPParamGroup, n) for n in ("_reduce_scatter_process_group", "_all_reduce_process_group")),
        *((FSDPParam, n) for n in ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed")),
        *((FSDPParam, n) for n in ("unsharded_accumulated_grad_data", "unsharded_grad_data", "to_sharded_dtensor")),
        *((TrainingState, n) for n in ("IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD")),
        *((_fsdp_common, n) for n in ("_get_dim0_padded_size", "is_bw")),
        (distributed_c10d, "_process_group_name"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_a_private_name_is_there(owner, name):
    assert hasattr(owner, name)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (
            _fsdp_collectives._get_gradient_divide_factors,
            ["reduce_scatter_group", "all_reduce_group", "reduce_dtype", "device_type", "factor",
             "force_sum_reduction_for_comms"],
        ),
        (
            _fsdp_collectives.foreach_reduce_scatter_copy_in,
            ["unsharded_grads", "reduce_scatter_input", "world_size"],
        ),
        (_fsdp_api.AllGather.__call__, ["self", "output_tensor", "input_tensor", "group", "async_op"]),
        (_fsdp_api.AllGather.allocate, ["self", "size", "dtype", "device"]),
        (FSDPParamGroup.unshard, ["self", "async_op"]),
        (FSDPParamGroup.post_forward, ["self", "module", "input", "output"]),
        (FSDPState._root_pre_forward, ["self", "module", "args", "kwargs"]),
        (distributed_c10d._process_group_name, ["ranks", "use_hashed_name"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)  # fmt: skip
def test_a_private_function_takes_what_the_engine_passes(function, parameters):
    assert list(inspect.signature(function).parameters) == parameters


# -- attributes of instances --

STATE = ("_state_ctx", "_comm_ctx", "_is_root", "_training_state", "_modules", "_states_to_forward_prefetch")
CONTEXT = ("iter_forward_root", "all_states", "post_backward_final_callback_queued")
GROUP = (
    *("modules", "fsdp_params", "mesh_info", "post_forward_mesh_info", "device", "device_handle", "_training_state"),
    *("_all_gather_comm", "unshard_async_op", "_all_gather_result", "reduce_grads", "all_reduce_grads"),
    *("reshard_after_backward", "gradient_divide_factor", "force_sum_reduction_for_comms", "_all_reduce_hook"),
    *("_reduce_dtype", "_orig_dtype", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"),
    *("_partial_reduce_output", "_post_forward_indices"),
)
PARAM = (
    *("sharded_param", "_unsharded_param", "unsharded_accumulated_grad", "sharded_size", "contiguous_sharded_stride"),
    *("fsdp_placement", "_orig_size", "padded_sharded_param_size"),
)


@on_ranks(2, *(f"{owner} {n}" for owner, names in
               (("state", STATE), ("context", CONTEXT), ("group", GROUP), ("param", PARAM)) for n in names),
          group="engine")  # fmt: skip
def test_an_instance_has(here):
    owner, name = here.case.split()
    if "sample" not in here.kept:
        with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
            model.loss(model.batch(here.rank)).backward()
        state = fsdp_state(model)
        group = state_groups(state)[0]
        here.kept["sample"] = {
            "state": state, "context": state._state_ctx, "group": group, "param": group.fsdp_params[0],
        }  # fmt: skip
    assert hasattr(here.kept["sample"][owner], name)


@on_ranks(2, group="engine")
def test_meshes_know_their_groups(here):
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
        info = next(fsdp_groups(model)).mesh_info
        assert isinstance(info, FSDPMeshInfo)
        assert not isinstance(info, DDPMeshInfo)
        assert (info.shard_mesh_size, info.shard_process_group.size()) == (2, 2)
    with sharded(GPT, mesh_of(here, "2x1"), lanes=False) as (model, _):
        info = next(fsdp_groups(model)).mesh_info
        assert isinstance(info, DDPMeshInfo)
        assert (info.shard_mesh_size, info.replicate_process_group.size()) == (1, 2)


# -- overrides on an instance are what FSDP2 calls --


@on_ranks(2, group="engine")
def test_overrides_on_an_instance_are_called(here):
    called = []

    def note(owner, name):
        inner = getattr(owner, name)

        def outer(*args, **named):
            called.append(name)
            return inner(*args, **named)

        setattr(owner, name, outer)

    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
        state = fsdp_state(model)
        group = state_groups(fsdp_state(model.blocks[1]))[0]
        for name in ("unshard", "wait_for_unshard", "post_forward", "post_backward", "reshard", "_to_sharded"):
            note(group, name)
        note(state, "_root_pre_forward")
        note(state, "_root_post_backward_final_callback")
        model.loss(model.batch(here.rank)).backward()
    assert set(called) == {
        "unshard", "wait_for_unshard", "post_forward", "post_backward", "reshard", "_to_sharded", "_root_pre_forward",
        "_root_post_backward_final_callback",
    }  # fmt: skip


@on_ranks(2, group="engine")
def test_an_iteration_starts_where_no_forward_root_is_set(here):
    seen = []
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
        state = fsdp_state(model)
        model.blocks[0].register_forward_hook(lambda *_: seen.append(state._state_ctx.iter_forward_root is state))
        model.loss(model.batch(here.rank)).backward()
        assert seen == [True]
        assert state._state_ctx.iter_forward_root is None


@on_ranks(2, group="engine")
def test_a_gather_result_knows_its_work_and_event(here):
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
        model.loss(model.batch(here.rank)).backward()
        group = state_groups(fsdp_state(model.blocks[0]))[0]
        model.blocks[0].unshard(async_op=True)
        assert {"all_gather_work", "all_gather_event", "all_gather_output"} <= set(group._all_gather_result._fields)
        model.blocks[0].reshard()
        group._all_gather_result = None


@on_ranks(2, group="engine")
def test_the_name_of_a_new_group_comes_from_the_replaced_function(here):
    mesh_of(here, "2")
    derive = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *unused, **named: "memwall-named"
    try:
        made = dist.new_group([0, 1], use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = derive
    assert made.group_name == "memwall-named"


def test_post_accumulate_hooks_rest_where_the_lanes_look():
    weight, seen = nn.Parameter(torch.ones(2)), []
    assert not getattr(weight, "_post_accumulate_grad_hooks", None)
    weight.register_post_accumulate_grad_hook(seen.append)
    (hook,) = weight._post_accumulate_grad_hooks.values()
    hook(weight)
    assert seen[0] is weight


@on_ranks(2, group="engine")
def test_the_collectives_work_and_do_not_warn(here):
    group = mesh_of(here, "2").get_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gathered, reduced = torch.empty(4), torch.empty(2)
        all_gather_single(gathered, torch.full((2,), float(here.rank)), group=group)
        reduce_scatter_single(reduced, torch.arange(4.0), op=dist.ReduceOp.SUM, group=group)
    assert gathered.tolist() == [0, 0, 1, 1]
    assert reduced.tolist() == ([0, 2] if here.rank == 0 else [4, 6])


# -- the helpers themselves --


@on_ranks(2, group="engine")
def test_states_groups_and_roots(here):
    pair = nn.ModuleDict()
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (one, _), sharded(MLP, mesh_of(here, "2"), lanes=False) as (
        two, _,
    ):  # fmt: skip
        pair["one"], pair["two"] = one, two
        assert fsdp_roots(pair) == [one, two]
        assert fsdp_roots(one) == [one]
        states = fsdp_states(pair)
        assert [s._modules[0] for s in states] == [one, *one.blocks, two, *two.layers]
        assert len(list(fsdp_groups(pair))) == len(states) == 8
        names = {module: name for name, module in one.named_modules()}
        assert [group_name(g, names) for g in fsdp_groups(one)] == ["root", "blocks.0", "blocks.1", "blocks.2"]
        group = state_groups(states[1])[0]
        assert len(trainable(group)) == len(group.fsdp_params) == 12
        one.blocks[0].up.weight.requires_grad_(False)
        assert len(trainable(group)) == 11
        assert local_tensor(one.head.weight).shape == (15 if here.rank == 0 else 14, 10)
        plain = torch.ones(3)
        assert local_tensor(plain) is plain


def test_a_torch_with_one_group_a_state_is_read_as_well():
    """torch before 2.12."""

    class Old:
        _fsdp_param_group = None

    assert state_groups(Old()) == []
    Old._fsdp_param_group = "group"
    assert state_groups(Old()) == ["group"]
