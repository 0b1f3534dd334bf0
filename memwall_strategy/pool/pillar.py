"""The pool as a pillar: what the optimizers' state needs, where it rests, and what paging it costs.

With no ``device_budget`` everything rests on the device and the pool only keeps the books. With one, the state gets
what the budget leaves beside the step's own peak (weights, gradients, what is gathered and reduced), which the planner
knows before the first step; the rest of it goes to the host and then to disk, and is paged unit by unit.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from memwall_strategy.config import OverlapConfig, PoolConfig, format_size
from memwall_strategy.core.block import Block, Tier
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.core.lane import Lane
from memwall_strategy.core.pillar import BasePillar
from memwall_strategy.engine.optimizer_parts import needs_master
from memwall_strategy.planner.beside import steps_in_backward
from memwall_strategy.pool.activation_relief import OffloadRelief, RecomputeRelief
from memwall_strategy.pool.activations import Activations
from memwall_strategy.pool.agreement import Agreement
from memwall_strategy.pool.beside import SMALL_STATE_BYTES, bytes_beside_state
from memwall_strategy.pool.buffer_relief import BufferRelief
from memwall_strategy.pool.escalation import Escalation
from memwall_strategy.pool.gradients import HostGradients
from memwall_strategy.pool.host_units import HostUnits
from memwall_strategy.pool.phases import Phases
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer, pool_optimizer
from memwall_strategy.pool.probe import unused_memory_bytes
from memwall_strategy.pool.replacing import (
    States,
    book_beside,
    goes_elsewhere,
    host_room,
    is_current,
    move,
    place_anew,
    replace_together,
    rest,
    share_of,
    tell,
)  # fmt: skip
from memwall_strategy.pool.reserve import Reserve
from memwall_strategy.pool.retention import Retention
from memwall_strategy.pool.state_pager import PageIn, StatePager
from memwall_strategy.pool.state_placement import Room, StatePlacement, place_state
from memwall_strategy.pool.state_relief import StateRelief
from memwall_strategy.pool.store import Store
from memwall_strategy.pool.table import AddressTable
from memwall_strategy.pool.tiers import Tiers
from memwall_strategy.telemetry.events import EventKind

if TYPE_CHECKING:
    from memwall_strategy.pool.pool import Pool
    from memwall_strategy.runtime.runtime import Runtime


class PoolPillar(BasePillar):
    """Places and pages the state of the run's optimizers, and holds every step against the budget.

    Args:
        config: the pool's options.

    Attributes:
        table: every pooled block of this rank and where it is.
        pagers: one for each optimizer whose state is booked or paged.
        activations: what each unit does with its activations.
        gradients: those that rest on the host between micro-batches.
        host_units: what modules that run on the host hold there.
        second_buffers: those of the overlap, as far as the budget has room.
        retention: units whose gathered weights stay on the device.
        phases: how far training is, which the mapping follows.
        reserve: the part of the budget that is kept free; ``lend`` lends it.
        escalation: what gives way when a step is short, and in which order.
        tiers: the open tiers.
        states: what the optimizers keep, as last placed.
        beside_bytes: what a step needs on the device beside the state, as planned; 0 without a budget.
        trainable: ids of the weights whose gradients the last placement has room for.
    """

    name = "pool"

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.table = AddressTable()
        self.pagers: list[StatePager] = []
        self.reserve = Reserve()
        self.tiers = Tiers(config, self.reserve)
        self.activations = Activations(config, self.tiers.for_activations)
        self.gradients = HostGradients(config.gradients == "host")
        self.host_units = HostUnits()
        self.escalation = Escalation(self.reserve)
        self.second_buffers = BufferRelief()
        self.retention = Retention(config, lambda: self.table, self._planned_room)
        self.phases = Phases(config, self.retention)
        self.states: States | None = None
        self.beside_bytes = 0
        self.trainable: set[int] = set()
        self._chosen: set[str] = set()
        self._state = StateRelief(self._placed_in, self._move_state)
        self._runtime: Runtime | None = None
        self._agreement = Agreement(torch.device("cpu"))
        self._optimizers: list[Optimizer] = []
        self._entries = 0
        self._figures: dict[str, float] = {}
        self._budget_bytes: int | None = None

    @property
    def budgeted(self) -> bool:
        """Whether a budget limits what rests on the device."""
        return self._budget_bytes is not None

    @property
    def stores(self) -> dict[Tier, Store]:
        """The open tiers' stores; none where nothing is paged."""
        return self.tiers.stores

    @property
    def _pool(self) -> Pool | None:
        return self.tiers.pool

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
        self.retention.attach(runtime)
        self.phases.attach(runtime)
        self.escalation.add(self.retention, "gathered weights")
        self.second_buffers.attach(runtime)
        self.escalation.add(self.second_buffers, "second buffers")
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

    def escalate(self, missing_bytes: int, *, stepping: bool = False) -> int:
        """``Escalation.escalate``: let things give way between two steps, on all ranks together.

        Args:
            missing_bytes: on this rank.
            stepping: in the closure of an optimizer's ``step``. One that is not pooled will then step its state where
                it finds it, so the state stays where it is.
        """
        self._state.may_move = not stepping or all(isinstance(each, PooledOptimizer) for each in self._optimizers)
        try:
            return self.escalation.escalate(missing_bytes)
        finally:
            self._state.may_move = True

    def optimizers_ready(self, runtime: Runtime) -> None:
        """Place the state of ``runtime.optimizers``, and page what does not fit.

        Raises:
            ConfigError: it does not fit anywhere; says what is missing and which option helps. Where ranks have
                different budgets, all raise what the first of them has to say.
        """
        self.retention.start()
        self._release()
        self.table = AddressTable(self.table.rank)
        self._optimizers, self.trainable = list(runtime.optimizers), set()
        states = self.states = self.look(runtime)
        early = steps_in_backward(runtime.config.overlap)
        if early and (why := next((p.reason for p in states.parts if not p.alone), None)):
            raise ConfigError(f"overlap.optimizer_in_backward=true: {why}. Leave it out, or use AdamW, say.")

        def buffers() -> int:
            self.tiers.start(runtime, self.table)
            self.host_units.open(runtime, states.units, self.tiers)
            self.gradients.open(runtime, _unit_of(runtime), self.tiers)
            return self.second_buffers.fit(lambda overlap: self.place(runtime, states, overlap=overlap))

        def take_up() -> StatePlacement:
            placement = self.place(runtime, states)
            self._take_up(runtime, states, placement)
            return placement

        height = self.together(buffers)
        if runtime.budget_bytes is not None:
            self.second_buffers.start(*self._agreement.highest(height))
        placement = self.together(take_up)
        self.escalation.forget()
        self._state.start(placement, _flat(states))
        tell(self, runtime, placement, states)

    def together(self, do: Callable[[], Any]) -> Any:
        """What ``do`` returns; where there is a budget, which may differ, all ranks raise what the first has to say."""
        error: ConfigError | None = None
        done = None
        try:
            done = do()
        except ConfigError as refused:
            error = refused
        if self._runtime.budget_bytes is not None:
            self._agreement.fail_together(error)
        elif error is not None:
            raise error
        return done

    def look(self, runtime: Runtime) -> States:
        """What the optimizers keep now."""
        on_host = frozenset(runtime.host_modules)
        return States.of(self._optimizers, _unit_of(runtime), self.config, runtime.device, on_host=on_host)

    def place(
        self, runtime: Runtime, states: States, budget_bytes: int | None = None, overlap: OverlapConfig | None = None
    ) -> StatePlacement:
        """Where every block rests.

        Args:
            states: from ``look``.
            budget_bytes: most that the device may hold; ``pool.device_budget`` where None.
            overlap: with the second buffers of these options; with those that set-up left where None.
        """
        budget_bytes = self._budget_bytes = runtime.budget_bytes if budget_bytes is None else budget_bytes
        self.beside_bytes = 0
        if budget_bytes is None:
            return StatePlacement({b: Tier.DEVICE for unit in states.sizes() for b in unit})
        self.beside_bytes = bytes_beside_state(runtime, overlap or self.second_buffers.planned)
        device_bytes = budget_bytes - self.reserve.bytes - self.beside_bytes - _fixed_bytes(states)
        device_bytes -= self.retention.asked_bytes
        whole = [p.reason for p in states.parts if not p.alone]
        if sum(sum(unit.values()) for unit in states.sizes()) > device_bytes and whole:
            raise ConfigError(
                f"pool.device_budget={format_size(budget_bytes)} leaves {format_size(max(0, device_bytes))} for "
                f"optimizer state, which has to be paged, but {whole[0]}. Raise the budget, or use an optimizer that "
                "steps each parameter by itself, such as AdamW."
            )
        try:
            return self._placed(states, device_bytes)
        except ConfigError as error:
            if kept := self.retention.asked_bytes:
                raise ConfigError(f"pool.retain='all' keeps {format_size(kept)} of gathered weights; {error}") from None
            raise

    def _placed(self, states: States, device_bytes: int) -> StatePlacement:
        """The placement in so much room beside everything else."""
        units = self.config.optimizer_units
        host_bytes = max(0, host_room(self) - states.desk_bytes(units))
        return place_state(
            states.sizes(), Room(device_bytes, host_bytes, self.tiers.disk_budget_bytes()),
            slots=units * max(1, sum(1 for each in states.pageable if each)), at_home=states.flat_at_home(),
            split=not states.copies,
        )  # fmt: skip

    def _take_up(self, runtime: Runtime, states: States, placement: StatePlacement) -> None:
        """Open the tiers, each as large as what rests there, and let each optimizer's state go to its place."""
        if goes_elsewhere(placement):
            self.tiers.open_device()
            book_beside(self, self.beside_bytes)
            desk_bytes = states.desk_bytes(self.config.optimizer_units)
            self.tiers.make_room_for(states.sizes(), placement.homes, staging_bytes=desk_bytes)
        for index, (optimizer, its_units) in enumerate(zip(self._optimizers, states.units, strict=True)):
            lanes = self.lanes or (None, None)
            pager = StatePager(
                optimizer, its_units, share_of(self, placement, its_units), table=self.table, stores=self.stores,
                page_in=lanes[0], page_out=lanes[1], name=f"optimizer {index}", at_home=states.at_home[index],
            )  # fmt: skip
            self.pagers.append(pager)
            self.pool_optimizer(runtime, index, states)

    def pool_optimizer(self, runtime: Runtime, index: int, states: States) -> None:
        """Let an optimizer step unit by unit, where something asks for it."""
        pager, early = self.pagers[index], steps_in_backward(runtime.config.overlap)
        master = states.master and any(needs_master(p.dtype) for unit in pager.units for p in unit.parameters)
        if any(pager.homes.paged) or early or master:
            pool_optimizer(
                pager.optimizer, pager, in_backward=early, master=master, copies=states.copies,
                desks=self.config.optimizer_units, follow_groups=self.replace_state,
            )  # fmt: skip

    def replace_state(self, device_bytes: int | None = None) -> None:
        """Place the optimizers' state anew between two steps; see ``replacing.place_anew``.

        Args:
            device_bytes: most that the device may hold from now on; ``pool.device_budget`` where None.

        Raises:
            ConfigError: it does not fit; the state rests where it did.
        """
        self._state.start(place_anew(self, self._runtime, device_bytes), _flat(self.states))
        self.escalation.forget(self._state)

    def _planned_room(self) -> int | None:
        """Device bytes of this rank that neither the plan of a step nor the state takes; None without a budget."""
        if self._budget_bytes is None or self.states is None:
            return None
        left = self._budget_bytes - self.reserve.bytes - self.beside_bytes
        return left - _fixed_bytes(self.states) - self._state.held_bytes

    def _placed_in(self, device_bytes: int) -> StatePlacement:
        return self._placed(self.states, device_bytes)

    def _move_state(self, placement: StatePlacement) -> None:
        """Give the state other places between two steps."""
        rest(self)
        move(self, self._runtime, self.states, placement, EventKind.STATE_MOVED)
        if self._runtime.memory is not None:
            self._runtime.memory.refresh()

    # -- a step --

    def before_step(self, runtime: Runtime) -> None:
        """The first units' state comes in while the forward runs."""
        self.gradients.before_step(runtime)
        self.activations.before_step()
        if not is_current(self, runtime):
            self.retention.start()
            replace_together(self)
        self.phases.before_step()
        self.retention.before_step()
        if runtime.memory is not None:
            runtime.memory.deep = self.config.deep_accounting or (
                self.escalation.counts_sometimes and self.escalation.measures
            )
        for lane in self.lanes:
            lane.take_stats()
        if self.lanes:
            for pager in self.pagers:
                if isinstance(pager.optimizer, PooledOptimizer):
                    pager.optimizer.prefetch()

    def after_backward(self, runtime: Runtime) -> None:
        self.gradients.bring_back()
        self.retention.forget()
        self.phases.after_backward()

    def after_step(self, runtime: Runtime) -> None:
        entries = sum(len(state) for optimizer in self._optimizers for state in optimizer.state.values())
        if entries != self._entries:  # an optimizer that is not paged made state: book it
            self._entries = entries
            for pager in self.pagers:
                if not isinstance(pager.optimizer, PooledOptimizer):
                    pager.adopt()
        self.retention.after_step()
        self.phases.after_step()
        self._figures = self._measure()

    def _measure(self) -> dict[str, float]:
        figures = self.activations.take_figures() | self.retention.take_figures()
        figures |= {
            f"memwall/pool/{tier}_bytes": float(self.table.used_bytes(tier))
            for tier in (Tier.HOST, Tier.DISK)
            if (tier, self.table.rank) in self.table.tiers()
        }
        figures |= self.escalation.metrics() | self.second_buffers.metrics()
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
                if isinstance(pager.optimizer, PooledOptimizer):
                    pager.optimizer.unit_steps.forget()
                pager.forget()
        self.activations.forget()
        self.retention.forget()

    def metrics(self) -> dict[str, float]:
        return dict(self._figures)

    def state_dict(self) -> dict[str, Any]:
        state = self.phases.state_dict()
        return {"phases": state} if state else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "phases" in state:
            self.phases.load_state_dict(state["phases"])

    # -- the end --

    def close(self) -> None:
        self.activations.close()
        self.retention.close()
        self._release()

    def _release(self) -> None:
        """Give the tiers back; the state becomes ordinary tensors where there is memory for it."""
        self.gradients.close()
        self.host_units.close()
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
        self.tiers.close()


def _flat(states: States) -> dict[Block, int]:
    return {block: size for unit in states.sizes() for block, size in unit.items()}


def _fixed_bytes(states: States) -> int:
    """Of state that is never paged, and of memory that steps need beside."""
    return SMALL_STATE_BYTES * sum(len(u.parameters) for each in states.units for u in each) + states.scratch_bytes


def _unit_of(runtime: Runtime) -> Callable[[torch.Tensor], tuple[str, str]]:
    """Parameter -> (its unit, its name); what no unit holds steps with the root."""
    unit_of = {name: unit.name for unit in runtime.units for name in unit.parameters}
    names = {id(parameter): name for name, parameter in runtime.model.named_parameters()}

    def find(parameter: torch.Tensor) -> tuple[str, str]:
        name = names.get(id(parameter), f"parameter {id(parameter):#x}")
        return unit_of.get(name, "root"), name

    return find
