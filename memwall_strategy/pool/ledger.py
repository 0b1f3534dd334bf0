"""The ledger: what is held, exactly, by rank, tier and kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memwall_strategy.core.block import Tier

Account = tuple[int, Tier, str]
"""Owner, tier, kind."""


@dataclass(slots=True)
class Balance:
    """What one account holds: copies of blocks, their bytes, and the padding that alignment adds to these."""

    blocks: int = 0
    bytes: int = 0
    padding_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.bytes + self.padding_bytes


class Ledger:
    """Balances, kept as blocks come and go; every question costs as many steps as there are accounts."""

    def __init__(self) -> None:
        self._balances: dict[Account, Balance] = {}

    def add(self, owner: int, tier: Tier, kind: str, nbytes: int, padding: int, sign: int = 1) -> None:
        """Book one copy of a block in (``sign`` 1) or out (-1)."""
        account = (owner, tier, str(kind))
        balance = self._balances.get(account)
        if balance is None:
            balance = self._balances[account] = Balance()
        balance.blocks += sign
        balance.bytes += sign * nbytes
        balance.padding_bytes += sign * padding
        if balance.blocks == 0:
            del self._balances[account]

    def total(self, *, tier: Tier | None = None, owner: int | None = None, kind: str | None = None) -> Balance:
        """The sum over every account that matches."""
        out = Balance()
        for (its_owner, its_tier, its_kind), balance in self._balances.items():
            if tier in (None, its_tier) and owner in (None, its_owner) and kind in (None, its_kind):
                out.blocks += balance.blocks
                out.bytes += balance.bytes
                out.padding_bytes += balance.padding_bytes
        return out

    def items(self) -> Iterator[tuple[Account, Balance]]:
        """Every account that holds something."""
        return iter(sorted(self._balances.items()))
