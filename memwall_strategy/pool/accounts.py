"""The accounts under the address table: open tiers, what each rank, tier and kind holds, what is free and lent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.core.errors import BlockError
from memwall_strategy.pool.arena import Arena, Region, Regions
from memwall_strategy.pool.ledger import Account, Balance, Ledger
from memwall_strategy.pool.medium import Medium

RESERVE = Block("pool", "reserve", Kind.RESERVE)
"""Under this block a tier's reserve appears in reports; its placement has no address."""


class Accounts:
    """Tiers of one or several ranks with exact accounts; the table adds which block is where.

    Args:
        rank: global rank whose blocks these are; the owner where none is given.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._lock = threading.RLock()
        self._media: dict[tuple[Tier, int], Medium] = {}
        self._ledger = Ledger()

    # -- tiers --

    def open_tier(self, tier: Tier, capacity_bytes: int, *, owner: int | None = None, reserve_bytes: int = 0) -> None:
        """Let ``owner`` hold up to ``capacity_bytes`` in ``tier``, ``reserve_bytes`` of them for borrowers only.

        Raises:
            BlockError: it is open already, or the reserve is above the capacity.
        """
        owner = self.rank if owner is None else owner
        with self._lock:
            if (tier, owner) in self._media:
                raise BlockError(f"the {tier} tier of rank {owner} is open already")
            medium = Medium(tier, owner, capacity_bytes)
            medium.resize(capacity_bytes, reserve_bytes)
            self._media[tier, owner] = medium

    def add_arena(self, tier: Tier, name: str, arena: Regions, *, owner: int | None = None) -> None:
        """Add an arena, which must be empty, to an open tier.

        Raises:
            BlockError: the tier is not open, or has an arena of that name.
        """
        with self._lock:
            medium = self._medium(tier, owner)
            if name in medium.arenas:
                raise BlockError(f"the {tier} tier of rank {medium.owner} has an arena {name!r} already")
            medium.arenas[name] = arena

    def close_tier(self, tier: Tier, *, owner: int | None = None) -> None:
        """Forget a tier.

        Raises:
            BlockError: it still holds blocks.
        """
        with self._lock:
            medium = self._medium(tier, owner)
            kept = [kind for (who, its, kind), _ in self._ledger.items() if (its, who) == (tier, medium.owner)]
            if kept:
                raise BlockError(
                    f"the {tier} tier of rank {medium.owner} still holds blocks of kind {', '.join(kept)}. "
                    "Move or drop them first."
                )
            del self._media[medium.tier, medium.owner]

    def resize_tier(
        self,
        tier: Tier,
        *,
        capacity_bytes: int | None = None,
        reserve_bytes: int | None = None,
        owner: int | None = None,
    ) -> None:
        """Change a tier's capacity or reserve; None leaves it.

        Raises:
            PoolFull: more is held than the new capacity; nothing changed.
            BlockError: the reserve would be above the capacity.
        """
        with self._lock:
            medium = self._medium(tier, owner)
            medium.resize(
                medium.capacity_bytes if capacity_bytes is None else capacity_bytes,
                medium.reserve_bytes if reserve_bytes is None else reserve_bytes,
            )

    def tiers(self) -> list[tuple[Tier, int]]:
        """Every open tier with its owner."""
        return list(self._media)

    # -- what is held and what is free --

    def used_bytes(self, tier: Tier | None = None, *, owner: int | None = None, kind: str | None = None) -> int:
        """Bytes held, padding included; replicas count under the kind ``replica``."""
        return self.balance(tier, owner=owner, kind=kind).held_bytes

    def balance(self, tier: Tier | None = None, *, owner: int | None = None, kind: str | None = None) -> Balance:
        """Copies, bytes and padding, over every rank, tier and kind that matches; the reserve is in none."""
        with self._lock:
            return self._ledger.total(tier=tier, owner=owner, kind=kind)

    def balances(self) -> list[tuple[Account, Balance]]:
        """Every account that holds something: (owner, tier, kind), and what it holds."""
        with self._lock:
            return [(account, replace(balance)) for account, balance in self._ledger.items()]

    def capacity_bytes(self, tier: Tier, *, owner: int | None = None) -> int:
        """Most bytes that a tier may hold."""
        return self._medium(tier, owner).capacity_bytes

    def free_bytes(self, tier: Tier, *, owner: int | None = None, lend: bool = False) -> int:
        """Bytes that a tier may still hold, not necessarily in one piece; with ``lend`` the reserve counts."""
        return self._medium(tier, owner).free_bytes(lend=lend)

    def lent_bytes(self, tier: Tier, *, owner: int | None = None) -> int:
        """Bytes of a tier's reserve that are lent."""
        return self._medium(tier, owner).lent_bytes

    def fragmentation(self, tier: Tier, arena: str, *, owner: int | None = None) -> float:
        """Share of an arena's free bytes outside its largest hole; 0.0 for one without addresses of its own."""
        with self._lock:
            regions = self._medium(tier, owner).arenas[arena]
            return regions.fragmentation if isinstance(regions, Arena) else 0.0

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While the body runs no other thread changes the table."""
        with self._lock:
            yield

    def _medium(self, tier: Tier, owner: int | None) -> Medium:
        owner = self.rank if owner is None else owner
        medium = self._media.get((tier, owner))
        if medium is None:
            known = ", ".join(f"{its} of rank {who}" for its, who in self._media) or "none"
            raise BlockError(f"the {tier} tier of rank {owner} is not open; open are: {known}")
        return medium

    def _booked(self, medium: Medium, arena: str, region: Region, nbytes: int, kind: str) -> Placement:
        padding = region.bytes - nbytes
        self._ledger.add(medium.owner, medium.tier, kind, nbytes, padding)
        return Placement(medium.tier, medium.owner, arena, region.offset, nbytes, 0, padding)

    def _release(self, placement: Placement, kind: str) -> None:
        self._media[placement.tier, placement.owner].free(placement.arena, placement.offset, placement.held_bytes)
        self._ledger.add(placement.owner, placement.tier, kind, placement.bytes, placement.padding, -1)

    def _reserves(self) -> list[tuple[Block, Placement]]:
        return [
            (RESERVE, Placement(m.tier, m.owner, "", 0, m.reserve_bytes - m.lent_bytes))
            for m in self._media.values()
            if m.reserve_bytes
        ]
