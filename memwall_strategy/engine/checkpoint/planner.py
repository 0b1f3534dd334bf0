"""Which rank writes which block, and where its bytes come from.

Sharded tensors (DTensor) are DCP's business: each rank plans its own shard and replicas are written once. A plain
tensor is planned by the first rank alone: ranks may hold different values of it (running statistics), and a checkpoint
must not mix them.

Blocks are resolved one at a time, while they are written. For a save in the background ``stage`` first copies the
blocks of the final plan, that is what this rank will really write, into host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata, StorageReader
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from memwall_strategy.engine.checkpoint.paged import is_paged, resident
from memwall_strategy.engine.fsdp import local_tensor


class BlockSavePlanner(DefaultSavePlanner):
    """DCP's planner for flat state dicts of tensors.

    Args:
        paths: key -> nested path, recorded for readers that rebuild nested state dicts.
    """

    def __init__(self, paths: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.paths = paths
        self._staged: dict[MetadataIndex, Tensor] | None = None

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's shards and, on the first rank, the plain tensors."""
        mine = {k: v for k, v in self.state_dict.items() if self.is_coordinator or isinstance(v, DTensor)}
        self.plan = create_default_local_save_plan(mine, self.is_coordinator)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Write replicas once; describe all blocks."""
        plans, metadata = super().create_global_plan(all_plans)
        self.metadata = replace(metadata, planner_data=dict(self.paths))
        return plans, self.metadata

    def stage(self) -> int:
        """Copy every block of the final plan into host memory and let go of the originals; return the bytes."""
        self._staged = {item.index: self._block(item).to("cpu", copy=True) for item in self.plan.items}
        self.state_dict = {}
        return sum(block.nbytes for block in self._staged.values())

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return one block; a staged one is given away, so that its memory is free once it is written."""
        return self._block(write_item) if self._staged is None else self._staged.pop(write_item.index)

    def _block(self, item: WriteItem) -> Tensor:
        block = self.state_dict[item.index.fqn]
        if is_paged(block):
            return local_tensor(resident(block)).detach()
        return self.lookup_object(item.index).detach()


def read_into(reader: StorageReader, metadata: Metadata, targets: dict[str, Any]) -> None:
    """Read the blocks of a checkpoint into ``targets`` (key -> DTensor or plain tensor), in place, this rank's part.

    Keys and shapes must be known to match. ``reader`` must be set up.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, is_coordinator=False)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
