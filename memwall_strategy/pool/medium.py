"""One tier of one rank: its capacity, its reserve, its arenas, and who is told what when it is full."""

from __future__ import annotations

from collections.abc import Sequence

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Block, Tier
from memwall_strategy.core.errors import BlockError, PoolFull
from memwall_strategy.pool.arena import BookedArena, Region, Regions

OPTION = {
    Tier.DEVICE: "pool.device_budget",
    Tier.PEER: "pool.host_budget of that rank",
    Tier.HOST: "pool.host_budget",
    Tier.DISK: "pool.disk_budget",
}
"""Which option makes a tier larger."""

BELOW = {Tier.DEVICE: Tier.HOST, Tier.PEER: Tier.HOST, Tier.HOST: Tier.DISK}
"""Where blocks go that a tier has no room for."""


class Medium:
    """Room in one tier of one rank.

    The reserve is a number of bytes that ordinary blocks may not use, at no fixed address: whatever is held beyond
    ``capacity - reserve`` is lent, and is back as soon as as many bytes are freed, whoever frees them.

    Args:
        tier: the medium.
        owner: global rank whose memory it is.
        capacity_bytes: most bytes that all arenas may hold together, padding included.
        reserve_bytes: part of it that only borrowers get.
    """

    def __init__(self, tier: Tier, owner: int, capacity_bytes: int, reserve_bytes: int = 0) -> None:
        self.tier, self.owner = tier, owner
        self.capacity_bytes, self.reserve_bytes = capacity_bytes, reserve_bytes
        self.arenas: dict[str, Regions] = {}
        self.held_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Bytes of the reserve that borrowers hold."""
        return max(0, self.held_bytes - (self.capacity_bytes - self.reserve_bytes))

    def free_bytes(self, *, lend: bool = False) -> int:
        """Bytes that may still be held; with ``lend`` the reserve counts."""
        return max(0, self.capacity_bytes - (0 if lend else self.reserve_bytes) - self.held_bytes)

    def allocate(
        self,
        block: Block,
        nbytes: int,
        arenas: Sequence[str] | None,
        alignment: int | None,
        lend: bool,
        *,
        pad: bool = True,
    ) -> tuple[str, Region]:
        """A region in the first of ``arenas`` (all of them where None) that has room; for the rest see ``Arena``.

        Raises:
            PoolFull: no room, or none in one piece.
        """
        candidates = self._candidates(arenas)
        for name in candidates:
            held = self.arenas[name].held(nbytes, alignment, pad=pad)
            if held > self.free_bytes(lend=lend):
                continue
            region = self.arenas[name].allocate(nbytes, alignment, pad=pad)
            if region is not None:
                self.held_bytes += region.bytes
                return name, region
        held = min(self.arenas[name].held(nbytes, alignment, pad=pad) for name in candidates)
        raise self._full(block, held, candidates, lend)

    def book(self, block: Block, nbytes: int, arena: str, offset: int) -> Region:
        """Note bytes that somebody else allocated; they count against the capacity and may not lend.

        Raises:
            PoolFull: the capacity does not allow them.
            BlockError: the address is booked already.
        """
        self._candidates([arena])
        booked = self.arenas[arena]
        if not isinstance(booked, BookedArena):
            raise BlockError(f"block {block}: arena {arena!r} of the {self.tier} tier hands out its own addresses")
        if nbytes > self.free_bytes():
            raise self._full(block, nbytes, [arena], False)
        try:
            region = booked.book(offset, nbytes)
        except ValueError as error:
            raise BlockError(f"block {block}: {error} in arena {arena!r} of the {self.tier} tier") from None
        self.held_bytes += region.bytes
        return region

    def free(self, arena: str, offset: int, held_bytes: int) -> None:
        """Take a region back."""
        if held_bytes:
            self.arenas[arena].free(offset)
            self.held_bytes -= held_bytes

    def resize(self, capacity_bytes: int, reserve_bytes: int) -> None:
        """Set capacity and reserve, as a quota or a phase changes them.

        Raises:
            PoolFull: more is held than the new capacity.
        """
        if not 0 <= reserve_bytes <= capacity_bytes:
            raise BlockError(
                f"{self.tier} tier of rank {self.owner}: a reserve of {format_size(reserve_bytes)} in a capacity of "
                f"{format_size(capacity_bytes)}. Lower pool.reserve."
            )
        if (over := self.held_bytes - capacity_bytes) > 0:
            raise PoolFull(
                f"{self.tier} tier of rank {self.owner}: {format_size(self.held_bytes)} are held, "
                f"{format_size(over)} ({over} bytes) more than the new capacity of {format_size(capacity_bytes)}. "
                "Page blocks out first.",
                tier=self.tier,
                owner=self.owner,
                missing_bytes=over,
            )
        self.capacity_bytes, self.reserve_bytes = capacity_bytes, reserve_bytes

    def _candidates(self, arenas: Sequence[str] | None) -> Sequence[str]:
        names = list(self.arenas) if arenas is None else arenas
        unknown = [name for name in names if name not in self.arenas]
        if unknown or not names:
            raise BlockError(
                f"the {self.tier} tier of rank {self.owner} has no arena {unknown or ''}, only {sorted(self.arenas)}"
            )
        return names

    def _full(self, block: Block, held: int, candidates: Sequence[str], lend: bool) -> PoolFull:
        free = self.free_bytes(lend=lend)
        missing = max(0, held - free)
        where = f"{self.tier} tier of rank {self.owner}"
        option = OPTION[self.tier]
        if missing:
            reserve = self.reserve_bytes - self.lent_bytes
            kept = f", {format_size(reserve)} of it kept as reserve" if reserve and not lend else ""
            message = (
                f"{where}: no room for block {block}: it holds {format_size(held)}, {format_size(free)} of "
                f"{format_size(self.capacity_bytes)} are free{kept}; "
                f"{format_size(missing)} ({missing} bytes) are missing."
            )
            below = BELOW.get(self.tier)
            remedy = f"Raise {option}" + (f", or give {OPTION[below]} the room to page blocks out." if below else ".")
        else:
            hole = max((self.arenas[name].largest_hole_bytes or 0 for name in candidates), default=0)
            message = (
                f"{where}: no room for block {block} in one piece: it holds {format_size(held)}, the longest free "
                f"stretch is {format_size(hole)} although {format_size(free)} are free in all."
            )
            remedy = f"Defragment the tier, or raise {option}."
        return PoolFull(f"{message} {remedy}", tier=self.tier, owner=self.owner, missing_bytes=missing)
