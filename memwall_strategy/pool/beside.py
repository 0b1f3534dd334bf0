"""What a run needs on the device beside its optimizers' state, and the least budget that it can have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwall_strategy.config import OverlapConfig
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner import ClusterSpec
from memwall_strategy.planner.beside import bytes_beside
from memwall_strategy.planner.buffers import buffer_ladder
from memwall_strategy.pool.master_copies import scratch_bytes
from memwall_strategy.pool.state_placement import slot_bytes

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime

SMALL_STATE_BYTES = 64
"""Room for each parameter's step counter and the like, which is never paged."""


def bytes_beside_state(runtime: Runtime, overlap: OverlapConfig | None = None) -> int:
    """Most device bytes that a step needs beside the optimizer's state, on this rank, as planned.

    Args:
        runtime: of the run.
        overlap: with these options; None: the run's own.

    Raises:
        ConfigError: the model came sharded, so that the plan does not know it.
    """
    spec = runtime.model_spec
    if spec is None:
        raise ConfigError(
            "pool.device_budget pages optimizer state by a plan of the model, and this model came sharded by its own "
            "configure_model. Let memwall shard it, or leave pool.device_budget out."
        )
    return bytes_beside(
        spec,
        ClusterSpec(world=runtime.mesh.size(), replicate=runtime.config.replicate),
        precision=runtime.precision,
        accumulate=runtime.micro_batches,
        accumulate_how=runtime.config.accumulate,
        overlap=overlap or runtime.config.overlap,
        gradients=runtime.config.pool.gradients,
        device_type=runtime.device.type,
    )


def needed_device_bytes(runtime: Runtime, *, fewest_buffers: bool = False) -> int:
    """The least ``pool.device_budget`` of this rank, activations left out: no optimizer state rests on the device, it
    only passes through.

    Args:
        runtime: of the run.
        fewest_buffers: with as few second buffers as can be, not with those that the options ask for.
    """
    pool = runtime.pool
    units = [unit for pager in pool.pagers for unit in pager.units if not unit.on_host]
    slots = pool.config.optimizer_units * sum(1 for pager in pool.pagers if pager.units)
    widest = max((slot_bytes(list(unit.sizes().values())) for unit in units), default=0)
    small = sum(SMALL_STATE_BYTES * len(unit.parameters) for unit in units)
    scratch = sum(scratch_bytes(pager.units) for pager in pool.pagers) if pool.config.master != "none" else 0
    overlap = runtime.config.overlap
    rung = buffer_ladder(overlap, runtime.device.type)[-1 if fewest_buffers else 0]
    return bytes_beside_state(runtime, rung.within(overlap)) + slots * widest + small + scratch
