"""Gathered weights that stay on the device while there is room: fewer gathers for the bytes that they take.

A retained unit is gathered once a step, where FSDP2 gathers it twice in each of the k micro-batches of a step: it stays
from forward to backward (``engine.retention``), and from one micro-batch to the next (``engine.kept``). While it is
there each of its weights is a block of kind ``gathered`` in the address table, booked at the address and with the bytes
that the engine allocated. Arithmetic and its order are those of FSDP2: losses are equal to the last bit.

What room there is beyond that may hold whole gradients: a unit whose gradients rest unreduced until the last
micro-batch is reduced once a step, not k times (what ``accumulate="whole"`` does for all units). Retention comes first,
since a byte of room saves 2k - 1 gathered bytes as a retained weight, but only k - 1 reduced ones as a gradient. Whole
gradients change the order of sums, so that losses agree but for rounding; they are used while training converges only
(``pool.phases``), and only where nobody looks at gradients between micro-batches.

All ranks decide the same: from bytes that are equal everywhere, and the smallest room of any rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

from memwall_strategy.config import PoolConfig, format_size
from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import ConfigError, nearest
from memwall_strategy.engine import agreement
from memwall_strategy.engine.capacity import available_device_bytes
from memwall_strategy.engine.retention import Piece, RetainedUnit, Retainer
from memwall_strategy.pool.arena import BookedArena
from memwall_strategy.pool.device import ENGINE
from memwall_strategy.pool.escalation import FIRST_STEPS
from memwall_strategy.pool.table import AddressTable
from memwall_strategy.telemetry.events import EventKind
from memwall_strategy.telemetry.names import DEVICE_PEAK_BYTES

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class UnitRoom:
    """What a unit would take of the room.

    Attributes:
        name: of the unit.
        gathered_bytes: its gathered weights, retained.
        gradient_bytes: its whole gradients; 0 where it has none.
        stays: the engine keeps its weights from forward to backward anyway (a root): less is saved by retaining them.
    """

    name: str
    gathered_bytes: int
    gradient_bytes: int
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Shares:
    """Who gets room: names of units in module order."""

    retained: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


def share_room(
    units: Sequence[UnitRoom], room_bytes: int, *, retained: Collection[str] | None = None, accumulate: bool = False
) -> Shares:
    """Give the room away: to gathered weights first, then to whole gradients.

    The last units come first: a gather at the very start of a backward has the least to hide behind.

    Args:
        units: in module order.
        room_bytes: what the device has left, on the rank that has least.
        retained: fixed beforehand; their bytes come out of the room. None: as many as fit.
        accumulate: whether whole gradients may have a share.
    """
    chosen = set() if retained is None else set(retained)
    left = room_bytes - sum(unit.gathered_bytes for unit in units if unit.name in chosen)
    if retained is None:
        last_first = list(reversed(units))
        for unit in sorted(last_first, key=lambda unit: unit.stays):
            if unit.gathered_bytes <= left:
                chosen.add(unit.name)
                left -= unit.gathered_bytes
    whole = set()
    for unit in reversed(units) if accumulate else ():
        if 0 < unit.gradient_bytes <= left:
            whole.add(unit.name)
            left -= unit.gradient_bytes
    return Shares(
        tuple(unit.name for unit in units if unit.name in chosen),
        tuple(unit.name for unit in units if unit.name in whole),
    )


class Retention:
    """The units' switches; one of the ways to make room (``pool.relief.Relief``).

    Args:
        config: the pool's options.
        table: gives the table of the present run, where gathered weights are booked.
        planned: gives what the plan leaves of this rank's budget; None without a budget.
    """

    name = "gathered weights that stay"
    remedy = ""
    """When this has nothing left to give, there is nothing left that an option of it could change."""

    def __init__(
        self, config: PoolConfig, table: Callable[[], AddressTable], planned: Callable[[], int | None]
    ) -> None:
        self._config, self._table, self._planned = config, table, planned
        self._runtime: Runtime | None = None
        self._retainer: Retainer | None = None
        self._asked: tuple[str, ...] | None = None
        """What the user, or ``retain``, asked for; None: as room allows."""
        self._room_bytes: int | None = None
        self._watched = self._highest_bytes = 0
        self._accumulate = False
        self._withheld: dict[str, None] = {}
        """Units that ``relieve`` took the room of, the first one first."""
        self._present = Shares()
        self._held_bytes = self._peak_bytes = 0

    # -- set-up --

    def attach(self, runtime: Runtime) -> None:
        """Find the units of ``runtime.model``, and take up the config."""
        self.close()
        self._runtime = runtime
        self._retainer = Retainer(runtime.model, runtime.units, self)
        self._asked = {"all": self.units, "none": (), "auto": None}[self._config.retain]
        self.start()

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, in module order."""
        return tuple(dict.fromkeys(unit.unit.name for unit in self._units))

    @property
    def retained(self) -> tuple[str, ...]:
        """Units whose gathered weights stay in the present step."""
        return self._present.retained

    @property
    def whole(self) -> tuple[str, ...]:
        """Units whose gradients rest whole between the micro-batches of the present step."""
        return self._present.whole

    @property
    def asked_bytes(self) -> int:
        """Device bytes that were asked for by name, to be kept free by whoever places other things."""
        return sum(unit.gathered_bytes for unit in self._rooms() if unit.name in (self._asked or ()))

    def set(self, units: Collection[str]) -> None:
        """Retain these units, and no others, from the next step on. Every rank calls it, with the same units.

        Raises:
            ConfigError: an unknown unit, other units on another rank, or more than the budget leaves room for.
        """
        if isinstance(units, str):
            raise ConfigError(f"retention.set({units!r}) takes a collection of names. Write [{units!r}].")
        for name in units:
            if name not in self.units:
                raise ConfigError(
                    f"retention: {name!r} is no unit.{nearest(str(name), self.units)} Units are: "
                    f"{', '.join(self.units) or 'none'}."
                )
        asked = tuple(name for name in self.units if name in set(units))
        if not agreement.alike(self._runtime.mesh, zlib.crc32("\n".join(asked).encode())):
            raise ConfigError(
                f"retention.set was asked for {', '.join(asked) or 'no unit'} on this rank and for others on another. "
                "Gathers are collectives: pass the same units on every rank."
            )
        needed = sum(unit.gathered_bytes for unit in self._rooms() if unit.name in asked)
        planned = self._planned()
        room = None if planned is None else agreement.smallest(self._runtime.mesh, planned)
        if room is not None and needed > room:
            raise ConfigError(
                f"retention: {', '.join(asked)} take {format_size(needed)} gathered, and pool.device_budget leaves "
                f"{format_size(max(0, room))}. Retain fewer units, or raise pool.device_budget."
            )
        self._asked, self._withheld = asked, {}

    def start(self) -> None:
        """Other things are placed anew: what room there is will be seen in the next steps."""
        self.forget()
        self._room_bytes, self._withheld = None, {}
        self._watched = self._highest_bytes = 0

    def after_step(self) -> None:
        """In the first steps, see how much of the budget they leave; collective at the end of that.

        What counts is the least of all ranks, of what they left and of what the plan leaves at most.
        """
        planned = self._planned()
        if planned is None or self._watched >= FIRST_STEPS:
            return
        self._watched += 1
        runtime = self._runtime
        self._highest_bytes = max(self._highest_bytes, int(runtime.metrics()[DEVICE_PEAK_BYTES]))
        if self._watched == FIRST_STEPS:
            # What is retained by name was in those peaks; it comes out of the room once.
            seen = runtime.pool.escalation.limit_bytes - self._highest_bytes + self.asked_bytes
            self._room_bytes = agreement.smallest(runtime.mesh, min(planned, seen))

    def accumulate(self, whole: bool) -> None:
        """Whether whole gradients may have what retention leaves, from the next step on."""
        self._accumulate = whole

    # -- relief --

    def relieve(self, missing_bytes: int) -> int:
        """Let go of whole gradients, then of gathered weights, the first unit first, until enough is freed."""
        freed = 0
        wanted, rooms = self._wanted(), self._rooms()
        taken = [(f"whole {unit.name}", unit.gradient_bytes) for unit in rooms if unit.name in wanted.whole]
        taken += [(unit.name, unit.gathered_bytes) for unit in rooms if unit.name in wanted.retained]
        for name, nbytes in taken:
            if freed >= missing_bytes:
                break
            if nbytes:
                self._withheld[name] = None
                freed += nbytes
        return freed

    def restore(self, room_bytes: int) -> int:
        """Retain again what ``relieve`` let go of, the last first, as far as the room goes."""
        sizes = {unit.name: unit.gathered_bytes for unit in self._rooms()}
        sizes |= {f"whole {unit.name}": unit.gradient_bytes for unit in self._rooms()}
        taken = 0
        for name in reversed(list(self._withheld)):
            if taken + sizes[name] > room_bytes:
                break
            taken += sizes[name]
            del self._withheld[name]
        return taken

    # -- a step --

    def before_step(self) -> None:
        """Put the switches where they were asked to be."""
        self._peak_bytes = self._held_bytes
        wanted = self._wanted()
        if wanted == self._present:
            return
        self._open_table()
        if wanted.retained != self._present.retained:
            self._retainer.set(wanted.retained)
        self._present = wanted
        rooms = self._rooms()
        self._runtime.events.emit(
            EventKind.RETENTION_CHANGED, units=list(wanted.retained), whole_gradients=list(wanted.whole),
            gathered_bytes=sum(unit.gathered_bytes for unit in rooms if unit.name in wanted.retained),
            gradient_bytes=sum(unit.gradient_bytes for unit in rooms if unit.name in wanted.whole),
            room_bytes=self._room_bytes,
        )  # fmt: skip

    def _wanted(self) -> Shares:
        asked = self._asked
        if asked is None and self._room_bytes is None:
            return Shares()
        accumulate = self._accumulate and self._room_bytes is not None and self._runtime.micro_batches > 1
        accumulate = accumulate and self._runtime.config.accumulate == "sharded"
        accumulate = accumulate and self._config.gradients == "device"  # on the host they rest reduced
        shares = share_room(self._rooms(), self._room_bytes or 0, retained=asked, accumulate=accumulate)
        return Shares(
            tuple(name for name in shares.retained if name not in self._withheld),
            tuple(name for name in shares.whole if f"whole {name}" not in self._withheld),
        )

    @contextmanager
    def micro_batch(self, *, last: bool, observed: bool) -> Iterator[None]:
        """Around forward and backward; see ``Runtime.micro_batch``, which turns every reduction on again after it."""
        if last or self._present == Shares():
            yield
            return
        if not observed:
            for unit in self._units:
                if unit.unit.name in self._present.whole and isinstance(unit.module, FSDPModule):
                    unit.module.set_requires_gradient_sync(False, recurse=False)
        with self._retainer.window():
            yield

    def forget(self) -> None:
        """The weights change now, or the step was aborted: let go of what earlier micro-batches left."""
        if self._retainer is not None:
            self._retainer.forget()

    def take_figures(self) -> dict[str, float]:
        """Metrics of the step that ends."""
        return {"memwall/pool/retained_bytes": float(self._peak_bytes)} if self._present.retained else {}

    def close(self) -> None:
        """Every unit as the engine has it."""
        if self._retainer is not None:
            self._retainer.close()
        self._retainer, self._present = None, Shares()

    # -- what the engine holds (``engine.retention.Holder``) --

    def gathered(self, unit: str, pieces: Sequence[Piece]) -> None:
        """Book gathered weights where the engine has just allocated them."""
        for piece in pieces:
            block = Block(unit, piece.parameter, Kind.GATHERED)
            self._table().book(block, piece.bytes, Tier.DEVICE, piece.address, arena=ENGINE)
            self._held_bytes += piece.bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)

    def released(self, unit: str, pieces: Sequence[Piece]) -> None:
        """Drop the blocks of weights that the engine has just freed."""
        for piece in pieces:
            block = Block(unit, piece.parameter, Kind.GATHERED)
            if block in self._table():  # booking it may have failed for want of room
                self._table().drop(block)
                self._held_bytes -= piece.bytes

    # -- inside --

    @property
    def _units(self) -> list[RetainedUnit]:
        if self._retainer is None:
            return []
        on_host = self._runtime.host_modules  # they take nothing of the device
        return [unit for unit in self._retainer.units if unit.unit.name not in on_host]

    def _rooms(self) -> list[UnitRoom]:
        found: dict[str, UnitRoom] = {}
        for unit in self._units:
            name, stays = unit.unit.name, unit.stays_anyway
            before = found.get(name, UnitRoom(name, 0, 0))
            gathered, gradient = unit.gathered_bytes, unit.whole_gradient_bytes
            found[name] = UnitRoom(name, before.gathered_bytes + gathered, before.gradient_bytes + gradient, stays)
        return list(found.values())

    def _open_table(self) -> None:
        table = self._table()
        if (Tier.DEVICE, table.rank) not in table.tiers():  # no optimizer was placed: a loop of the user's own
            capacity = self._runtime.budget_bytes or available_device_bytes(self._runtime.device)
            table.open_tier(Tier.DEVICE, capacity)
            table.add_arena(Tier.DEVICE, ENGINE, BookedArena())
