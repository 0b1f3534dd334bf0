"""What the table knows of one block: its copies, their state, and the bytes under way to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memwall_strategy.core.block import Block, Placement, Tier


class Content(StrEnum):
    """State of a block's authoritative copy."""

    EMPTY = "empty"
    WHOLE = "whole"
    WRITING = "writing"
    TORN = "torn"


class Role(StrEnum):
    """What a copy becomes when it is committed."""

    MOVE = "move"
    REPLICA = "replica"
    REFRESH = "refresh"


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes under way from ``source`` to ``target``; see ``AddressTable.commit``."""

    block: Block
    role: Role
    source: Placement
    target: Placement


@dataclass(slots=True)
class Entry:
    """What the table knows of one block."""

    authority: Placement
    content: Content
    replicas: dict[tuple[Tier, int, str], Placement]
    pending: list[Copy]
    before: Content = Content.EMPTY
    """State before the write that is under way."""

    def copies(self) -> list[tuple[str, Placement]]:
        """Every region that is held for the block, each with its role."""
        incoming = [(str(c.role), c.target) for c in self.pending if c.role is not Role.REFRESH]
        return [("authority", self.authority), *(("replica", p) for p in self.replicas.values()), *incoming]
