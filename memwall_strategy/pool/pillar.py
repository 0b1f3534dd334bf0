"""The pool as a pillar: what the optimizers' state needs, where it rests, and what paging it costs.

With no ``device_budget`` everything rests on the device and the pool only keeps the books. With one, the state gets
what the budget leaves beside the step's own peak (weights, gradients, what is gathered and reduced), which the planner
knows before the first step; the rest of it goes to the host and then to disk, and is paged unit by unit.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from memwall_strategy.config import PoolConfig, format_size
from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.core.lane import Lane
from memwall_strategy.core.pillar import BasePillar
from memwall_strategy.engine.optimizer_parts import Parts, probe
from memwall_strategy.planner.beside import steps_in_backward
from memwall_strategy.pool.activation_relief import OffloadRelief, RecomputeRelief
from memwall_strategy.pool.activations import Activations
from memwall_strategy.pool.agreement import Agreement
from memwall_strategy.pool.beside import SMALL_STATE_BYTES, bytes_beside_state
from memwall_strategy.pool.device import ENGINE
from memwall_strategy.pool.escalation import Escalation
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer, pool_optimizer, unit_states
from memwall_strategy.pool.probe import unused_memory_bytes
from memwall_strategy.pool.reserve import Reserve
from memwall_strategy.pool.state_pager import PageIn, StatePager, UnitState
from memwall_strategy.pool.state_placement import Room, StatePlacement, place_state
from memwall_strategy.pool.state_relief import StateRelief
from memwall_strategy.pool.store import Store
from memwall_strategy.pool.table import AddressTable
from memwall_strategy.pool.tiers import Tiers
from memwall_strategy.telemetry.events import EventKind

if TYPE_CHECKING:
    from memwall_strategy.pool.pool import Pool
    from memwall_strategy.runtime.runtime import Runtime

BESIDE = Block("engine", "weights, gradients, gathered and in flight", "step peak")
"""What a step needs on the device beside the optimizer's state, as planned; booked for as long as the pool pages."""

_STATE_KINDS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.OPTIMIZER)


class PoolPillar(BasePillar):
    """Places and pages the state of the run's optimizers, and holds every step against the budget.

    Args:
        config: the pool's options.

    Attributes:
        table: every pooled block of this rank and where it is.
        pagers: one for each optimizer whose state is booked or paged.
        activations: what each unit does with its activations.
        reserve: the part of the budget that is kept free; ``lend`` lends it.
        escalation: what gives way when a step is short, and in which order.
    """

    name = "pool"

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.table = AddressTable()
        self.pagers: list[StatePager] = []
        self.reserve = Reserve()
        self._tiers = Tiers(config, self.reserve)
        self.activations = Activations(config, self._tiers.for_activations)
        self.escalation = Escalation(self.reserve)
        self._chosen: set[str] = set()
        self._state = StateRelief(self._placed_in, self._move_state)
        self._runtime: Runtime | None = None
        self._agreement = Agreement(torch.device("cpu"))
        self._optimizers: list[Optimizer] = []
        self._parts: list[Parts] = []
        self._entries = 0
        self._figures: dict[str, float] = {}
        self._beside_bytes = self._fixed_bytes = 0

    @property
    def stores(self) -> dict[Tier, Store]:
        """The open tiers' stores; none where nothing is paged."""
        return self._tiers.stores

    @property
    def _pool(self) -> Pool | None:
        return self._tiers.pool

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that page; none where nothing is paged."""
        return (self._pool.page_in, self._pool.page_out) if self._pool is not None else ()

    # -- set-up --

    def attach(self, runtime: Runtime) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.table = AddressTable(rank)
        self._runtime, self._agreement = runtime, Agreement(runtime.device)
        self._chosen.clear()
        auto = self.config.activations == "auto"
        sometimes = auto and runtime.budget_bytes is not None and not self.config.deep_accounting
        self.escalation.attach(runtime, self._agreement, counts_sometimes=sometimes)
        self.escalation.add(self._state, "optimizer state")
        if sometimes and runtime.memory is not None:
            runtime.memory.deep = True  # it may be from now on: units that recompute note what they hold
        self.activations.attach(runtime)
        if auto:
            recompute = RecomputeRelief(self.activations, self._least, lambda: self._chosen)
            offload = OffloadRelief(self.activations, self._least, lambda: self._chosen, lambda: recompute.kept_bytes)
            self.escalation.add(recompute, "recompute")
            self.escalation.add(offload, "offload")

    def _least(self, value: int) -> int:
        return -self._agreement.highest(-value)[0]

    def set_activations(self, modes: Mapping[str, str] = {}, *, together: Sequence[Sequence[str]] = ()) -> None:
        """``Activations.set``: what units do with their activations, from the next step on. Named units stay so: no
        shortage changes them."""
        self.activations.set(modes, together)
        self._chosen |= {*modes, *(name for segment in together for name in segment)}

    def escalate(self, missing_bytes: int) -> int:
        """``Escalation.escalate``: let things give way between two steps, on all ranks together."""
        return self.escalation.escalate(missing_bytes)

    def optimizers_ready(self, runtime: Runtime) -> None:
        """Place the state of ``runtime.optimizers``, and page what does not fit.

        Raises:
            ConfigError: it does not fit anywhere; says what is missing and which option helps. Where ranks have
                different budgets, all raise what the first of them has to say.
        """
        self._release()
        self.table = AddressTable(self.table.rank)
        self._optimizers = list(runtime.optimizers)
        self._parts = parts = [probe(optimizer) for optimizer in self._optimizers]
        if steps_in_backward(runtime.config.overlap) and (why := next((p.reason for p in parts if not p.alone), None)):
            raise ConfigError(f"overlap.optimizer_in_backward=true: {why}. Leave it out, or use AdamW, say.")
        names = _unit_of(runtime)
        units = [unit_states(o, p, names) for o, p in zip(self._optimizers, parts, strict=True)]
        error: ConfigError | None = None
        try:
            self._tiers.start(runtime, self.table)
            placement = self._place(runtime, units)
            self._take_up(units, placement)
        except ConfigError as refused:
            error = refused
        if runtime.budget_bytes is not None:
            self._agreement.fail_together(error)
        elif error is not None:
            raise error
        self.escalation.forget()
        self._state.start(placement, _sizes(self._pageable()))
        self._tell(EventKind.STATE_PLACED, placement, _sizes(units))

    def _pageable(self) -> list[list[UnitState]]:
        """Of each optimizer the units whose state can be paged."""
        return [pager.units if p.alone else [] for pager, p in zip(self.pagers, self._parts, strict=True)]

    def _place(self, runtime: Runtime, units: Sequence[Sequence[UnitState]]) -> StatePlacement:
        """Where every block rests."""
        pageable = [list(each) if p.alone else [] for each, p in zip(units, self._parts, strict=True)]
        flat = [unit.sizes() for each in pageable for unit in each]
        budget_bytes = runtime.budget_bytes
        self._beside_bytes = self._fixed_bytes = 0
        if budget_bytes is None:
            return StatePlacement({b: Tier.DEVICE for unit in flat for b in unit})
        self._beside_bytes = bytes_beside_state(runtime)
        self._fixed_bytes = sum(SMALL_STATE_BYTES * len(unit.parameters) for each in units for unit in each)
        device_bytes = budget_bytes - self.reserve.bytes - self._beside_bytes - self._fixed_bytes
        whole = [p.reason for p in self._parts if not p.alone]
        if sum(sum(unit.values()) for unit in flat) > device_bytes and whole:
            raise ConfigError(
                f"pool.device_budget={format_size(budget_bytes)} leaves {format_size(max(0, device_bytes))} for "
                f"optimizer state, which has to be paged, but {whole[0]}. Raise the budget, or use an optimizer that "
                "steps each parameter by itself, such as AdamW."
            )
        return self._placed(pageable, device_bytes)

    def _placed(self, pageable: Sequence[Sequence[UnitState]], device_bytes: int) -> StatePlacement:
        """The placement in so much room beside everything else."""
        room = Room(device_bytes, self._tiers.host_budget_bytes(self._host_held()), self._tiers.disk_budget_bytes())
        slots = self.config.optimizer_units * max(1, sum(1 for each in pageable if each))
        return place_state([unit.sizes() for each in pageable for unit in each], room, slots=slots)

    def _host_held(self) -> int:
        return self.table.capacity_bytes(Tier.HOST) if Tier.HOST in self.stores else 0

    def _placed_in(self, device_bytes: int) -> StatePlacement:
        return self._placed(self._pageable(), device_bytes)

    def _take_up(self, units: Sequence[Sequence[UnitState]], placement: StatePlacement) -> None:
        """Open the tiers, each as large as what rests there, and let each optimizer's state go to its place."""
        early = steps_in_backward(self._runtime.config.overlap)
        self._open(units, placement)
        for index, (optimizer, its_units) in enumerate(zip(self._optimizers, units, strict=True)):
            pager = self._pager(index, optimizer, its_units, placement)
            self.pagers.append(pager)
            if pager.placement.slots or early:
                pool_optimizer(optimizer, pager, in_backward=early)
        self._tiers.count_staging()

    def _open(self, units: Sequence[Sequence[UnitState]], placement: StatePlacement) -> None:
        if placement.slots == 0:
            return
        self._tiers.open_device()
        if BESIDE not in self.table:
            free = self.table.free_bytes(Tier.DEVICE)
            self.table.book(BESIDE, min(self._beside_bytes, free), Tier.DEVICE, 0, arena=ENGINE)
        homes = {b: placement.homes.get(b, Tier.DEVICE) for each in units for unit in each for b in unit.fields}
        self._tiers.make_room_for([unit.sizes() for each in units for unit in each], homes)

    def _pager(
        self, index: int, optimizer: Optimizer, units: Sequence[UnitState], placement: StatePlacement
    ) -> StatePager:
        lanes = self.lanes or (None, None)
        return StatePager(
            optimizer, units, self._share(units, placement), table=self.table, stores=self.stores, page_in=lanes[0],
            page_out=lanes[1], name=f"optimizer {index}",
        )  # fmt: skip

    def _share(self, units: Sequence[UnitState], placement: StatePlacement) -> StatePlacement:
        """An optimizer's part of the placement of all."""
        homes = {b: placement.homes.get(b, Tier.DEVICE) for unit in units for b in unit.fields}
        pages = any(home is not Tier.DEVICE for home in homes.values())
        return StatePlacement(homes, self.config.optimizer_units if pages else 0, placement.slot_bytes)

    def _move_state(self, placement: StatePlacement) -> None:
        """Give the state other places between two steps."""
        early = steps_in_backward(self._runtime.config.overlap)
        for pager in self.pagers:
            pager.rest()
        units = [pager.units for pager in self.pagers]
        anew = placement.slots > 0 and Tier.DEVICE not in self.stores
        if anew:  # nothing was paged so far: take the books of the device tier anew
            for pager in self.pagers:
                pager.close(keep=True)
        self._open(units, placement)
        for index, (optimizer, pager) in enumerate(zip(self._optimizers, list(self.pagers), strict=True)):
            its, pooled = self._share(pager.units, placement), isinstance(optimizer, PooledOptimizer)
            if pooled and pager.placement.slots:
                pager.replace(pager.units, its, make_room=self._tiers.make_room)
                if its.slots or early:
                    continue
                optimizer.unpool(keep=True)
            elif not its.slots and not anew:
                continue  # nothing of it was paged, and nothing is
            elif not anew:
                pager.close(keep=True)
            fresh = self.pagers[index] = self._pager(index, optimizer, pager.units, placement)
            if isinstance(optimizer, PooledOptimizer):  # it steps inside the backward
                optimizer.pager = fresh
                fresh.adopt()
            elif its.slots:
                pool_optimizer(optimizer, fresh)
            else:
                fresh.adopt()
        if placement.slots == 0 and BESIDE in self.table:
            self.table.drop(BESIDE)
        self._tiers.count_staging()
        if self._runtime.memory is not None:
            self._runtime.memory.refresh()
        self._tell(EventKind.STATE_MOVED, placement, _sizes(units))

    def _tell(self, kind: EventKind, placement: StatePlacement, sizes: Mapping[Block, int]) -> None:
        bytes_in = {t: sum(sizes[b] for b, home in placement.homes.items() if home is t) for t in Tier}
        self._runtime.events.emit(
            kind, device_bytes=bytes_in[Tier.DEVICE], host_bytes=bytes_in[Tier.HOST], disk_bytes=bytes_in[Tier.DISK],
            slots=placement.slots, slot_bytes=placement.slot_bytes,
        )  # fmt: skip

    # -- a step --

    def before_step(self, runtime: Runtime) -> None:
        """The first units' state comes in while the forward runs."""
        self.activations.before_step()
        if runtime.memory is not None:
            runtime.memory.deep = self.config.deep_accounting or (
                self.escalation.counts_sometimes and self.escalation.measures
            )
        for lane in self.lanes:
            lane.take_stats()
        if self.lanes:
            for pager in self.pagers:
                if pager.placement.slots:
                    pager.optimizer.prefetch()

    def after_step(self, runtime: Runtime) -> None:
        entries = sum(len(state) for optimizer in self._optimizers for state in optimizer.state.values())
        if entries != self._entries:  # an optimizer that is not paged made state: book it
            self._entries = entries
            for pager in self.pagers:
                if not pager.placement.slots:
                    pager.adopt()
        self._figures = self._measure()

    def _measure(self) -> dict[str, float]:
        figures = self.activations.take_figures()
        figures |= {
            f"memwall/pool/{tier}_bytes": float(self.table.used_bytes(tier))
            for tier in (Tier.HOST, Tier.DISK)
            if (tier, self.table.rank) in self.table.tiers()
        }
        figures |= self.escalation.metrics()
        if not self.lanes:
            return figures
        page_in, page_out = (lane.take_stats() for lane in self.lanes)
        figures["memwall/pool/page_in_s"] = page_in.busy_s
        figures["memwall/pool/page_out_s"] = page_out.busy_s
        figures["memwall/pool/exposed_s"] = page_in.exposed_s + page_out.exposed_s
        if times := sorted(each.seconds for pager in self.pagers for each in pager.history):
            middle = statistics.median(times)
            figures["memwall/pool/access_p50_s"] = middle
            figures["memwall/pool/access_jitter"] = (times[int(0.95 * (len(times) - 1))] - middle) / middle
        return figures

    def take_pages(self) -> list[PageIn]:
        """Every page-in since the last call, oldest first; the figures of ``metrics`` start anew."""
        pages = [page for pager in self.pagers for page in pager.history]
        for pager in self.pagers:
            pager.history.clear()
        return pages

    def on_failure(self, runtime: Runtime, error: BaseException) -> None:
        if self._pool is not None:
            self._pool.reset()
            for pager in self.pagers:
                pager.forget()
        self.activations.forget()

    def metrics(self) -> dict[str, float]:
        return dict(self._figures)

    # -- the end --

    def close(self) -> None:
        self.activations.close()
        self._release()

    def _release(self) -> None:
        """Give the tiers back; the state becomes ordinary tensors where there is memory for it."""
        self.activations.close_room()
        open_tiers = {tier for tier, _ in self.table.tiers()}
        paged = sum(self.table.used_bytes(tier) for tier in open_tiers & {Tier.HOST, Tier.DISK})
        keep = paged <= unused_memory_bytes()
        lost = "" if keep else f"there is no memory for its {format_size(paged)}"
        for pager in self.pagers:
            if not isinstance(pager.optimizer, PooledOptimizer):
                pager.close(keep=True)  # nothing of it is paged
                continue
            try:
                pager.optimizer.unpool(keep=keep)
            except MemwallError as error:  # a medium that failed, or fails now
                lost = str(error)
                pager.optimizer.unpool(keep=False)
        if lost:
            warnings.warn(
                f"optimizer state that rested off the device is gone with the pool: {lost}. The run's checkpoints hold "
                "it; load one before you train on with this optimizer.",
                stacklevel=2,
            )
        self.pagers, self._optimizers = [], []
        self._tiers.close()


def _sizes(units: Sequence[Sequence[UnitState]]) -> dict[Block, int]:
    return {block: size for each in units for unit in each for block, size in unit.sizes().items()}


def _unit_of(runtime: Runtime) -> Callable[[torch.Tensor], tuple[str, str]]:
    """Parameter -> (its unit, its name); what no unit holds steps with the root."""
    unit_of = {name: unit.name for unit in runtime.units for name in unit.parameters}
    names = {id(parameter): name for name, parameter in runtime.model.named_parameters()}

    def find(parameter: torch.Tensor) -> tuple[str, str]:
        name = names.get(id(parameter), f"parameter {id(parameter):#x}")
        return unit_of.get(name, "root"), name

    return find
