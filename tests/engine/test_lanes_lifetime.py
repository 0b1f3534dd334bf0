"""Lanes from set-up to the end: several models and fits, buffers in flight, transfers that fail or hang."""

from __future__ import annotations

import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from memwall_strategy.core.block import Kind
from memwall_strategy.core.errors import CollectiveError, TransferError
from memwall_strategy.engine import lanes as lanes_module
from memwall_strategy.engine.fsdp import state_groups
from memwall_strategy.engine.lanes import FsdpLanes
from memwall_strategy.engine.reset import reset_aborted_step
from memwall_strategy.engine.sharding import set_prefetch, shard_model
from tests.engine.lane_cases import (
    GPT,
    MLP,
    TIMEOUT_S,
    assert_close,
    assert_same,
    by_hand,
    by_user,
    full_gradients,
    gradients,
    mesh_of,
    sgd,
    sharded,
    train,
)
from tests.lightning.checks import on_ranks


class Buffers:
    """An account that watches how many buffers of one kind live at a time."""

    def __init__(self, kind):
        self.kind, self.most, self._live = kind, 0, set()

    def track(self, tensor, kind, module=None):
        address = tensor.untyped_storage().data_ptr()
        if kind == self.kind and address not in self._live:
            self._live.add(address)
            self.most = max(self.most, self.alive)
            weakref.finalize(tensor.untyped_storage(), self._live.discard, address)

    def add(self, *_, **__):
        """Windows are no buffers of their own."""

    remove = ignore = heed = add

    @property
    def alive(self):
        return len(self._live)


@on_ranks(2, "1", "2", "4", group="engine")
def test_no_more_whole_gradients_in_flight_than_buffers(here):
    """And none once the backward has returned."""
    buffers, account = int(here.case), Buffers(Kind.COMM)
    with sharded(
        lambda: GPT(layers=6), mesh_of(here, "2"), reduce_buffers=buffers, account=account, shared_memory=False
    ) as (model, _):
        for _ in range(2):
            model.loss(model.batch(here.rank)).backward()
            assert account.alive == 0
        assert 1 <= account.most <= buffers


@on_ranks(2, group="engine")
def test_held_micro_batches_keep_no_more_than_one(here):
    """Also where parameters without a gradient wait to hear whether another rank had one."""
    account, alive = Buffers(Kind.GRAD), []
    with sharded(MLP, mesh_of(here, "2"), account=account) as (model, lanes):
        for micro in range(6):
            model.branch = {0} if here.rank == 0 and micro in (1, 4) else set()
            with lanes.reducer.hold():
                model.loss(model.batch(here.rank + 10 * micro)).backward()
            lanes.reduce.drain()
            alive.append(account.alive)
        units = len(model.layers) + 1
        assert alive[0] >= units - 2  # up to two of them may still be on their way
        # Two on their way, and one that holds a first gradient (of the branch).
        assert max(alive) <= units + 3, f"gradients alive after each micro-batch: {alive}"
        lanes.reducer.finish()

        def losses(model, rank):
            for micro in range(6):
                model.branch = {0} if rank == 0 and micro in (1, 4) else set()
                yield model.loss(model.batch(rank + 10 * micro))

        assert_close(full_gradients(model), by_hand(MLP, here, losses))


@on_ranks(2, group="engine")
def test_two_models_in_one_process(here):
    """A generator and a critic, trained in turn: their lanes do not meet."""

    def run_pair(lanes):
        seen = []
        mesh = mesh_of(here, "2")
        with sharded(GPT, mesh, lanes=lanes) as (one, _), sharded(MLP, mesh, lanes=lanes) as (two, _):
            for step in range(2):
                a, b = one.loss(one.batch(here.rank + step)), two.loss(two.batch(here.rank + step))
                (a + b).backward()
                seen.append((a.detach(), b.detach(), gradients(one), gradients(two)))
                sgd(one)
                sgd(two)
        return seen

    assert_same(run_pair(True), run_pair(False))


@on_ranks(2, group="engine")
def test_lanes_then_plain_then_lanes_again(here):
    expected = []
    with sharded(GPT, mesh_of(here, "2"), lanes=False) as (model, _):
        for fit in range(3):
            expected.append(train(model, 1, seed=here.rank + fit))
    with sharded(GPT, mesh_of(here, "2")) as (model, _lanes):
        first = train(model, 1, seed=here.rank)
    before = threading.active_count()
    second = train(model, 1, seed=here.rank + 1)
    set_prefetch(model, 1)
    again = FsdpLanes(model, prefetch=1, reduce_buffers=1, timeout_s=TIMEOUT_S)
    third = train(model, 1, seed=here.rank + 2)
    again.close()
    assert_same([first, second, third], expected)
    assert threading.active_count() == before
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            for group in state_groups(module._get_fsdp_state()):
                assert "post_backward" not in vars(group)


@on_ranks(2, group="engine")
def test_members_of_different_numbers_of_groups(here):
    """Process groups of other people, on one rank only, must not keep the lanes' groups from meeting."""
    if here.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    leased = [FsdpLanes(m, prefetch=0, reduce_buffers=1, timeout_s=TIMEOUT_S) for m in _several(here, 3)]
    for lanes in leased:
        lanes.close()
    made = dist.distributed_c10d._world.pg_map
    count = len(made)
    for lanes in [FsdpLanes(m, prefetch=0, reduce_buffers=1, timeout_s=TIMEOUT_S) for m in _several(here, 3)]:
        lanes.close()
    assert len(made) == count, "the groups of models that are gone are used again"


def _several(here, count):
    for _ in range(count):
        with sharded(MLP, mesh_of(here, "2"), lanes=False) as (model, _):
            yield model


@on_ranks(2, group="engine")
def test_a_failing_gather_is_named(here):
    with sharded(GPT, mesh_of(here, "2"), prefetch=1, shared_memory=False) as (model, lanes):
        expected = model.loss(model.batch(here.rank)).detach()
        gather, calls = lanes_module.all_gather, []

        def unplugged(*args, **named):
            calls.append(1)
            if len(calls) == 3:  # the root's, that of blocks.0, then this
                raise OSError("unplugged")
            return gather(*args, **named)

        with mock.patch.object(lanes_module, "all_gather", unplugged):
            named = r"lane 'gather': all-gather of unit 'blocks\.1' failed: OSError: unplugged"
            with pytest.raises(TransferError, match=named):
                model.loss(model.batch(here.rank))
        reset_aborted_step(model, lanes)
        lanes.gather.drain()
        assert_same(model.loss(model.batch(here.rank)).detach(), expected)


@on_ranks(2, "shared", "gloo", group="engine-hang")
def test_a_hanging_peer_is_named_in_time(here):
    """Nobody waits for ever, neither for the gather nor for the end of the lanes."""
    torch.manual_seed(11)
    model = GPT()
    shard_model(model, mesh_of(here, "2"), precision="32-true")
    lanes = FsdpLanes(model, prefetch=0, reduce_buffers=1, timeout_s=TIMEOUT_S, shared_memory=here.case == "shared")
    model.loss(model.batch(here.rank)).backward()
    dist.barrier()
    lanes.gather.timeout_s = lanes.reduce.timeout_s = 0.5
    if here.rank == 0:
        error, named = {
            "shared": (CollectiveError, "all-gather .* failed: rank 1 had not arrived in time"),
            "gloo": (TransferError, r"lane 'gather': all-gather of unit 'root' did not end within"),
        }[here.case]
        with pytest.raises(error, match=named):
            model.loss(model.batch(here.rank))
        lanes.close()
    (here.folder / str(here.rank)).touch()
    while not (here.folder / "0").exists():  # the other rank stays alive, and silent
        time.sleep(0.02)
    if here.rank != 0:
        lanes.close()


@on_ranks(2, group="engine-again")
def test_lanes_over_a_default_group_made_anew(here):
    """As in a notebook: the groups of the old default group are gone with it."""
    found = []
    for i in range(2):
        dist.init_process_group("gloo", init_method=f"file://{here.folder}/store-{i}", rank=here.rank, world_size=2)
        with sharded(GPT, mesh_of(here, "2")) as (model, _):
            found.append(train(model, 1, seed=here.rank))
        dist.destroy_process_group()
        here.kept.clear()
    assert_same(*found)


@on_ranks(2, group="engine-again")
def test_a_user_who_gives_reductions_a_group_of_their_own(here):
    if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        return  # torch before 2.13

    def prepare(model, mesh):
        fully_shard(model, mesh=mesh)
        model.set_separate_reduce_scatter_group()

    assert_same(by_user(here, True, prepare), by_user(here, False, prepare))
