"""Blocks (what is placed) and placements (where it is)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a block holds. Optimizer states that are not listed use their own state key as kind."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    OPTIMIZER = "optimizer"
    """Any other optimizer state, summed."""
    ACTIVATION = "activation"
    GATHERED = "gathered"
    COMM = "comm"
    """Buffers in flight on a lane: all-gather outputs, reduce-scatter inputs and outputs."""
    BUFFER = "buffer"
    """Module buffers (running statistics, position tables)."""
    REPLICA = "replica"
    SNAPSHOT = "snapshot"
    STAGING = "staging"
    """Aligned buffers that direct I/O passes through."""
    RESERVE = "reserve"
    """What is left of a tier's elastic reserve: bytes kept free, at no address."""
    LENT = "lent"
    """What is lent of it, under the borrower's name."""


class Tier(StrEnum):
    """A physical medium."""

    DEVICE = "device"
    PEER = "peer"
    HOST = "host"
    DISK = "disk"


class Phase(StrEnum):
    """Where in a step the training thread is."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Block:
    """One logical tensor of one rank: the address is (unit, parameter, kind)."""

    unit: str
    parameter: str
    kind: str

    def __str__(self) -> str:
        return f"{self.unit}/{self.parameter}/{self.kind}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a block is.

    Attributes:
        tier: the medium.
        owner: global rank whose memory holds the bytes.
        arena: name of the arena within the tier (``"torch"`` where torch's own allocator holds it).
        offset: first byte within the arena; the address where torch's allocator holds it.
        bytes: length in bytes.
        generation: grows by one each time the content is replaced; 0: nothing was written yet.
        padding: bytes after the block that are held with it, for alignment.
    """

    tier: Tier
    owner: int
    arena: str
    offset: int
    bytes: int
    generation: int = 0
    padding: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that the arena holds for the block."""
        return self.bytes + self.padding

    @property
    def place(self) -> tuple[Tier, int, str]:
        """Tier, owner and arena: a block has at most one copy in each."""
        return self.tier, self.owner, self.arena
