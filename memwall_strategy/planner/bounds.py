"""The least time of one optimizer step on a described machine: arithmetic at its peak, bytes at its links' rates.

A lower bound, not a prediction: no kernel reaches the peak, no collective the link's rate, and latency, the optimizer,
input and everything that is neither a matrix product nor a collective are left out. Compute and communication overlap,
so the step cannot be shorter than the longer of the two.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from memwall_strategy.planner.specs import ClusterSpec, ModelSpec, PrecisionSpec, UnitSpec, item_bytes

_PASSES = 3
"""Forward once, backward twice: for its input and for the weights."""


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One kind of machine.

    Attributes:
        name: what it is called.
        peak_flops: operations per second of one device in the run's precision; None where it is not known.
        link_bytes_per_s: what one device receives from others of its machine.
        network_bytes_per_s: what one device receives from other machines.
        devices_per_machine: devices that share the fast links; None: all.
    """

    name: str
    peak_flops: float | None = None
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    devices_per_machine: int | None = None

    def rate(self, ranks: int) -> float | None:
        """Bytes per second of a collective over so many neighbouring ranks: that of its slowest link."""
        inside = self.devices_per_machine is None or ranks <= self.devices_per_machine
        return self.link_bytes_per_s if inside else self.network_bytes_per_s


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What one rank must do in one optimizer step, and the least time it takes; None for what is not known.

    Attributes:
        hardware: name of the machine.
        flops: operations of matrix products and attention; peak_flops: per second, at most; compute_s: their quotient.
        received_bytes: weights gathered and gradients reduced; bytes_per_s: of the slowest link that they cross.
        communication_s: their quotient.
    """

    hardware: str
    flops: float | None
    peak_flops: float | None
    compute_s: float | None
    received_bytes: int
    bytes_per_s: float | None
    communication_s: float | None

    def text(self) -> str:
        """One line for the table."""
        compute = communication = None
        if self.compute_s is not None:
            compute = f"compute {self.compute_s:.3g} s ({self.flops:.3g} operations at {self.peak_flops:.3g}/s)"
        if self.communication_s is not None:
            rate = f"{self.received_bytes:.3g} bytes at {self.bytes_per_s:.3g}/s"
            communication = f"communication {self.communication_s:.3g} s ({rate})"
        known = [part for part in (compute, communication) if part]
        least = f": a step takes at least {', and '.join(known)}, overlapped" if known else ": no rates are known"
        return f"hardware {self.hardware}{least}"


def gpt_flops(*, layers: int, hidden: int, vocabulary: int, mlp_ratio: int, sequence: int, samples: int) -> float:
    """Operations of forward and backward of a GPT on so many sequences, without recomputation.

    Matrix products of every block and of the head, and the two products of attention, which count whole although the
    mask makes half of them needless: as torch's counter does.
    """
    weights = layers * (4 + 2 * mlp_ratio) * hidden**2 + vocabulary * hidden
    attention = layers * 2 * sequence * hidden
    return 2.0 * _PASSES * (weights + attention) * sequence * samples


def bound_step(
    hardware: HardwareSpec,
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    precision: str,
    flops: float | None,
    accumulate: int,
    accumulate_how: str,
    retained: Collection[str] = (),
) -> StepBounds:
    """The bounds of one rank's optimizer step.

    Args:
        flops: of one rank's step, all its micro-batches; None where they are not known.
        accumulate, accumulate_how, retained: as for ``plan``.
    """
    ranks, replicas = cluster.shard_ranks, cluster.replicate
    types = PrecisionSpec.named(precision)
    gathers = 0
    for unit in model.every_unit:  # for the forward, and again for the backward; a root's stay in between
        times = 1 if unit.name in retained else accumulate * (1 if unit is model.root else 2)
        gathers += times * _bytes(unit, types.compute or types.storage)
    reductions = sum(_bytes(unit, types.reduce, trainable=True) for unit in model.every_unit)
    share = (ranks - 1) / ranks
    reduced = reductions * (accumulate if accumulate_how == "sharded" else 1)
    in_shards = int(share * (gathers + reduced))
    across = int(2 * (replicas - 1) / replicas * reductions / ranks)  # replicas sum what each rank holds, once a step
    shard_rate, world_rate = hardware.rate(ranks), hardware.rate(cluster.world)
    seconds = _over(in_shards, shard_rate), _over(across, world_rate)
    known = in_shards + across > 0 and None not in seconds
    slowest = min((rate for rate, n in ((shard_rate, in_shards), (world_rate, across)) if n and rate), default=None)
    return StepBounds(
        hardware=hardware.name,
        flops=flops,
        peak_flops=hardware.peak_flops,
        compute_s=flops / hardware.peak_flops if flops and hardware.peak_flops else None,
        received_bytes=in_shards + across,
        bytes_per_s=slowest if known else None,
        communication_s=sum(seconds) if known else None,
    )


def _over(nbytes: int, rate: float | None) -> float | None:
    return 0.0 if not nbytes else None if rate is None else nbytes / rate


def _bytes(unit: UnitSpec, dtype: str | None, *, trainable: bool = False) -> int:
    return sum(p.numel * item_bytes(dtype or p.dtype) for p in unit.parameters if p.trainable or not trainable)
