"""The elastic reserve: a part of the device's budget that is kept free, and lent for a while.

In the table it is one block of kind ``reserve``, at no address. A loan shrinks it by its bytes and books these under
the borrower's name, so that ordinary blocks have the room they had; closing the loan undoes both.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import ConfigError, PoolFull
from memwall_strategy.pool.arena import BookedArena
from memwall_strategy.pool.table import AddressTable
from memwall_strategy.telemetry.events import EventKind, Events

LOANS = "loans"
"""Arena of the device tier in which loans are booked."""

STEP = "the step"
"""Borrower of what a step takes that needs more than the rest of the budget."""


class Loan:
    """Bytes of the reserve that somebody may use until ``close``; also a context manager."""

    def __init__(self, block: Block, nbytes: int, offset: int, give_back: Callable[[Loan], None]) -> None:
        self.block, self.bytes, self.offset, self._give_back = block, nbytes, offset, give_back
        self.open = True

    def close(self) -> None:
        """Give the bytes back. Idempotent."""
        if self.open:
            self.open = False
            self._give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Reserve:
    """The reserve of this rank's device tier. As a relief it lends itself to the step, first of all.

    Attributes:
        bytes: its size.
        loans: those that are open.
    """

    name = "reserve"
    remedy = ""
    alike = False
    """Each rank lends what it misses itself."""

    def __init__(self) -> None:
        self.bytes = 0
        self.loans: list[Loan] = []
        self._table: AddressTable | None = None
        self._events: Events | None = None
        self._number = self._end = 0
        self._steps: list[Loan] = []

    def attach(self, table: AddressTable, nbytes: int, events: Events) -> None:
        """Keep ``nbytes`` of the open device tier free; loans that are open stay so.

        Raises:
            ConfigError: less than what is lent.
        """
        self._table, self._events, self.bytes = table, events, nbytes
        if (lent := sum(loan.bytes for loan in self.loans)) > nbytes:
            raise ConfigError(f"pool.reserve={format_size(nbytes)} is below the {format_size(lent)} that are lent.")
        table.add_arena(Tier.DEVICE, LOANS, BookedArena())
        table.resize_tier(Tier.DEVICE, reserve_bytes=nbytes - lent)
        for loan in self.loans:
            self._book(loan)

    def detach(self) -> None:
        """Before the device tier closes; loans stay open and are booked again by ``attach``."""
        if self._table is not None:
            for loan in self.loans:
                self._table.drop(loan.block)
            self._table.resize_tier(Tier.DEVICE, reserve_bytes=0)
            self._table = None

    def end_steps(self) -> None:
        """While detached: what steps borrowed is theirs no more; they are placed anew."""
        self.loans = [loan for loan in self.loans if loan not in self._steps]
        self._steps = []

    @property
    def lent_bytes(self) -> int:
        """Bytes that are lent."""
        return sum(loan.bytes for loan in self.loans)

    @property
    def free_bytes(self) -> int:
        """Bytes that are not."""
        return self.bytes - self.lent_bytes

    def lend(self, what: str, nbytes: int) -> Loan:
        """Lend a part of it.

        Args:
            what: who borrows and for what; as reports name it.
            nbytes: how much; 0 is allowed.

        Returns:
            The loan; close it, or use it in a ``with``.

        Raises:
            PoolFull: it is not there; nothing changed.
        """
        if nbytes < 0:
            raise ValueError(f"a loan of {nbytes} bytes")
        if self._table is None:
            raise self._refused(what, nbytes, 0)
        with self._table.frozen():
            if nbytes > self.free_bytes:
                raise self._refused(what, nbytes, self._table.rank)
            self._number += 1
            loan = Loan(Block("reserve", f"{what} #{self._number}", Kind.LENT), nbytes, self._end, self._close)
            self._end += nbytes  # offsets are never used again: loans are no memory of their own
            self._table.resize_tier(Tier.DEVICE, reserve_bytes=self.free_bytes - nbytes)
            self._book(loan)
            self.loans.append(loan)
        self._events.emit(EventKind.RESERVE_LENT, what=what, bytes=nbytes, left_bytes=self.free_bytes)
        return loan

    def _refused(self, what: str, nbytes: int, rank: int) -> PoolFull:
        missing = nbytes - self.free_bytes
        return PoolFull(
            f"device tier of rank {rank}: {what} asks the reserve for {format_size(nbytes)}, of its "
            f"{format_size(self.bytes)} {format_size(self.lent_bytes)} are lent; {format_size(missing)} "
            f"({missing} bytes) are missing. Raise pool.reserve, or close a loan first.",
            tier=Tier.DEVICE, owner=rank, missing_bytes=missing,
        )  # fmt: skip

    def _book(self, loan: Loan) -> None:
        self._table.book(loan.block, loan.bytes, Tier.DEVICE, loan.offset, arena=LOANS)

    def _close(self, loan: Loan) -> None:
        if loan not in self.loans:  # it ended with its step, or with the pool
            return
        self.loans.remove(loan)
        if self._table is None:
            return
        with self._table.frozen():
            self._table.drop(loan.block)
            self._table.resize_tier(Tier.DEVICE, reserve_bytes=self.free_bytes)
        what = loan.block.parameter.rpartition(" #")[0]
        self._events.emit(EventKind.RESERVE_RETURNED, what=what, bytes=loan.bytes, left_bytes=self.free_bytes)

    # -- as a relief --

    def relieve(self, missing_bytes: int) -> int:
        """Lend the step what it misses, as far as it goes."""
        lent = min(missing_bytes, self.free_bytes) if self._table is not None else 0
        if lent > 0:
            self._steps.append(self.lend(STEP, lent))
        return max(0, lent)

    def restore(self, room_bytes: int) -> int:
        """Take the step's last loan back where it fits into the room."""
        if not self._steps or self._steps[-1].bytes > room_bytes:
            return 0
        loan = self._steps.pop()
        loan.close()
        return loan.bytes
