"""Placing the optimizers' state: what there is to place, and placing it anew between two steps.

Anew means: parameters joined (``add_param_group``) or left, weights were frozen or unfrozen, so that a step needs more
or less beside the state, or the device has another room for it. Blocks go from home to home, one at a time; what stays
where it is is not touched. Tiers that were not needed before are opened, the host tier is extended; the disk tier's
file keeps the size that it was made with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from memwall_strategy.config import PoolConfig
from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.optimizer_parts import Parts, probe
from memwall_strategy.planner.specs import ModelSpec, UnitSpec
from memwall_strategy.pool.arithmetic import staging_on_host, units_at_home
from memwall_strategy.pool.device import ENGINE
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.master_copies import scratch_bytes
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer
from memwall_strategy.pool.slots import SLOT_UNIT
from memwall_strategy.pool.state_fields import UnitState, covers, unit_states
from memwall_strategy.pool.state_placement import StatePlacement
from memwall_strategy.telemetry.events import EventKind

if TYPE_CHECKING:
    from memwall_strategy.pool.pillar import PoolPillar
    from memwall_strategy.runtime.runtime import Runtime


BESIDE = Block("engine", "weights, gradients, gathered and in flight", "step peak")
"""What a step needs on the device beside the optimizer's state, as planned; booked for as long as the pool pages."""


@dataclass(frozen=True, slots=True)
class States:
    """What the optimizers keep, an entry for each optimizer.

    Attributes:
        parts: what ``probe`` found.
        units: their parameters and state by unit.
        pageable: the same, without units that run on the host; nothing where an optimizer cannot be stepped in parts.
        at_home: names of the units that may be stepped where their state rests on the host.
        master: coarse weights have float32 copies.
        copies: units on the host are stepped on copies, since the weights are on another device.
    """

    parts: list[Parts]
    units: list[list[UnitState]]
    pageable: list[list[UnitState]]
    at_home: list[frozenset[str]]
    master: bool
    copies: bool

    @classmethod
    def of(
        cls, optimizers: Sequence[Optimizer], unit_of: Any, config: PoolConfig, device: torch.device,
        *, on_host: frozenset[str] = frozenset(),
    ) -> States:  # fmt: skip
        """Look at the optimizers of a run; ``on_host`` names the units that run on the host.

        Raises:
            ConfigError: master copies, or arithmetic on the host, for an optimizer that has neither.
        """
        master = config.master != "none"
        parts = [probe(optimizer, master=master) for optimizer in optimizers]
        if master and (why := next((p.reason for p in parts if not p.alone), None)):
            raise ConfigError(f"pool.master={config.master!r}: {why}. Set pool.master='none', or use AdamW, say.")
        units = [unit_states(o, p, unit_of) for o, p in zip(optimizers, parts, strict=True)]
        for unit in (unit for each in units for unit in each):
            unit.on_host = unit.name in on_host
        pageable = [
            [unit for unit in each if not unit.on_host] if p.alone else [] for each, p in zip(units, parts, strict=True)
        ]
        where = "device" if config.device_budget is None else config.optimizer_on
        at_home = units_at_home(optimizers, pageable, device, where=where)
        return cls(parts, units, pageable, at_home, master, device.type != "cpu")

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of float32 gradients, see ``master_copies``."""
        return sum(scratch_bytes(each) for each in self.pageable) if self.master else 0

    def desk_bytes(self, desks: int) -> int:
        """Host bytes of all desks, at most."""
        if not self.copies:
            return 0
        pairs = zip(self.pageable, self.at_home, strict=True)
        return sum(staging_on_host(each, names, master=self.master, desks=desks) for each, names in pairs)

    def sizes(self) -> list[dict[Block, int]]:
        """Bytes of the blocks of every pageable unit, one optimizer behind the other."""
        return [unit.sizes() for each in self.pageable for unit in each]

    def flat_at_home(self) -> set[int]:
        """Indices of ``at_home`` in the list of all pageable units, one optimizer behind the other."""
        flat = [unit.name in names for each, names in zip(self.pageable, self.at_home, strict=True) for unit in each]
        return {index for index, there in enumerate(flat) if there}


def is_current(pillar: PoolPillar, runtime: Runtime) -> bool:
    """Whether the state is placed for the parameters that there are, and for gradients of those that train.

    A weight that trained once counts from then on: where optimizers take turns (GANs) the room does not change each
    step, and it is not given back when a weight is frozen.
    """
    if pillar.budgeted and not trainable_of(runtime) <= pillar.trainable:
        return False
    return all(covers(pager.units, pager.optimizer) for pager in pillar.pagers)


def trainable_of(runtime: Runtime) -> set[int]:
    """Ids of the weights that train now."""
    return {id(parameter) for parameter in runtime.model.parameters() if parameter.requires_grad}


def place_anew(pillar: PoolPillar, runtime: Runtime, device_bytes: int | None = None) -> StatePlacement:
    """Place the state of all optimizers anew; nothing may be stepping.

    Args:
        pillar: whose.
        runtime: of the run.
        device_bytes: most that the device may hold, ``pool.device_budget`` where None.

    Returns:
        The placement.

    Raises:
        ConfigError: it does not fit anywhere; says what is missing and which option helps. The state rests where it
            did.
    """
    rest(pillar)
    if runtime.model_spec is not None:
        seen = pillar.trainable | trainable_of(runtime)
        runtime.model_spec = _with_trainable(runtime.model_spec, runtime.model, seen)
    states = pillar.look(runtime)
    placement = pillar.place(runtime, states, device_bytes)
    move(pillar, runtime, states, placement)
    pillar.states = states
    return placement


def replace_together(pillar: PoolPillar) -> None:
    """``PoolPillar.replace_state`` on all ranks, with fewer second buffers where some rank has no room otherwise.

    Raises:
        ConfigError: it does not fit with the fewest, either; the same on every rank.
    """
    while True:
        try:
            pillar.together(pillar.replace_state)
            return
        except ConfigError:
            if not pillar.budgeted or not pillar.second_buffers.leaner():
                raise


def rest(pillar: PoolPillar) -> None:
    """Wait until nothing of the state is on its way."""
    for pager in pillar.pagers:
        if isinstance(pager.optimizer, PooledOptimizer):
            pager.optimizer.unit_steps.rest()


def move(
    pillar: PoolPillar,
    runtime: Runtime,
    states: States,
    placement: StatePlacement,
    kind: EventKind = EventKind.STATE_PLACED,
) -> None:
    """Bring every block to its place; nothing may be stepping, or on its way.

    Raises:
        ConfigError, PoolFull: a tier has no room for it; the state rests where it did.
    """
    tiers = pillar.tiers
    pages = goes_elsewhere(placement)
    before = book_beside(pillar, None)
    try:
        if pages:
            desks = sum(p.held_bytes for b, p in pillar.table if b.unit == SLOT_UNIT and ".desk" in b.parameter)
            desk_bytes = max(0, states.desk_bytes(pillar.config.optimizer_units) - desks)
            tiers.open_device()
            tiers.make_room_for(states.sizes(), placement.homes, staging_bytes=desk_bytes)
        for index, pager in enumerate(list(pillar.pagers)):
            its = share_of(pillar, placement, states.units[index])
            options = {"at_home": states.at_home[index], "make_room": tiers.make_room}
            pager.attach(pillar.stores, pillar.lanes)
            if isinstance(pager.optimizer, PooledOptimizer):
                pager.optimizer.replace_state(states.units[index], its, **options)
            else:
                pager.replace(states.units[index], its, **options)
                pillar.pool_optimizer(runtime, index, states)
    except BaseException:
        book_beside(pillar, before)
        raise
    book_beside(pillar, pillar.beside_bytes if pages else None)
    tell(pillar, runtime, placement, states, kind)


def _with_trainable(spec: ModelSpec, model: torch.nn.Module, seen: set[int]) -> ModelSpec:
    """The spec with the weights that train, or did."""
    trains = {name: id(parameter) in seen for name, parameter in model.named_parameters(remove_duplicate=False)}

    def renew(unit: UnitSpec) -> UnitSpec:
        return replace(
            unit, parameters=tuple(replace(p, trainable=trains.get(p.name, p.trainable)) for p in unit.parameters)
        )

    return replace(
        spec, units=tuple(renew(unit) for unit in spec.units), root=renew(spec.root) if spec.root is not None else None
    )


def goes_elsewhere(placement: StatePlacement) -> bool:
    """Whether some state rests off the device."""
    return any(home is not Tier.DEVICE for home in placement.homes.values())


def share_of(pillar: PoolPillar, placement: StatePlacement, units: Sequence[UnitState]) -> StatePlacement:
    """One optimizer's part of the placement of all."""
    homes = {b: placement.homes.get(b, Tier.DEVICE) for unit in units for b in unit.fields}
    pages = placement.slots and any(home is not Tier.DEVICE for home in homes.values())
    return StatePlacement(homes, pillar.config.optimizer_units if pages else 0, placement.slot_bytes)


def host_room(pillar: PoolPillar) -> int:
    """Host bytes that optimizer state may take, what it has now included."""
    host, table = pillar.stores.get(Tier.HOST), pillar.table
    if not isinstance(host, HostStore):
        return pillar.tiers.host_budget_bytes()
    state = sum(p.held_bytes for b, p in table if p.tier is Tier.HOST and any(pager.owns(b) for pager in pillar.pagers))
    engines = sum(p.bytes for _, p in table if p.tier is Tier.HOST and p.arena == ENGINE)  # beside what is mapped
    others = table.used_bytes(Tier.HOST) - table.used_bytes(Tier.HOST, kind=Kind.STAGING) - state - engines
    return pillar.tiers.host_budget_bytes(host.mapped_bytes) - others


def tell(
    pillar: PoolPillar,
    runtime: Runtime,
    placement: StatePlacement,
    states: States,
    kind: EventKind = EventKind.STATE_PLACED,
) -> None:
    """After a placement: the event, and the account's share of slots and scratch memory."""
    pillar.trainable |= trainable_of(runtime)
    sizes = {block: size for each in states.units for unit in each for block, size in unit.sizes().items()}
    bytes_in = {t: sum(sizes[b] for b, home in placement.homes.items() if home is t) for t in Tier}
    runtime.events.emit(
        kind, device_bytes=bytes_in[Tier.DEVICE], host_bytes=bytes_in[Tier.HOST],
        disk_bytes=bytes_in[Tier.DISK], slots=placement.slots, slot_bytes=placement.slot_bytes,
    )  # fmt: skip
    pillar.tiers.count_staging()


def book_beside(pillar: PoolPillar, nbytes: int | None) -> int | None:
    """Book what a step needs beside the state, None for nothing; returns what was booked."""
    table = pillar.table
    before = table.locate(BESIDE).bytes if BESIDE in table else None
    if before is not None:
        table.drop(BESIDE)
    if nbytes is not None:
        table.book(BESIDE, nbytes, Tier.DEVICE, 0, arena=ENGINE)
    return before
