"""The pool as a pillar: what the optimizers' state needs, where it rests, and what paging it costs.

With no ``device_budget`` everything rests on the device and the pool only keeps the books. With one, the state gets
what the budget leaves beside the step's own peak (weights, gradients, what is gathered and reduced), which the planner
knows before the first step; the rest of it goes to the host and then to disk, and is paged unit by unit.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from memwall_strategy.config import PoolConfig, format_size, parse_size
from memwall_strategy.core.block import Kind, Tier
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.core.lane import Lane
from memwall_strategy.core.pillar import BasePillar
from memwall_strategy.engine.capacity import available_device_bytes
from memwall_strategy.engine.optimizer_parts import needs_master
from memwall_strategy.planner import Budgets, ClusterSpec, OptimizerSpec, plan
from memwall_strategy.planner.memory_plan import schedule_of
from memwall_strategy.pool.activations import Activations
from memwall_strategy.pool.arena import PAGE_BYTES, BookedArena, aligned
from memwall_strategy.pool.device import ENGINE, DeviceStore
from memwall_strategy.pool.disk import CHUNK_BYTES, WORKERS, DiskStore
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.master_copies import scratch_bytes
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.pooled_optimizer import PooledOptimizer, pool_optimizer
from memwall_strategy.pool.probe import unused_memory_bytes
from memwall_strategy.pool.replacing import BESIDE, States, host_room, is_current, place_anew, share_of, tell
from memwall_strategy.pool.state_homes import group_bytes
from memwall_strategy.pool.state_pager import PageIn, StatePager
from memwall_strategy.pool.state_placement import Room, StatePlacement, place_state, slot_bytes
from memwall_strategy.pool.store import Store
from memwall_strategy.pool.table import AddressTable

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime

_STATE_KINDS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.OPTIMIZER)
_SMALL_STATE_BYTES = 64
"""Room for each parameter's step counter and the like, which is never paged."""


class PoolPillar(BasePillar):
    """Places and pages the state of the run's optimizers.

    Args:
        config: the pool's options.

    Attributes:
        table: every pooled block of this rank and where it is.
        pagers: one for each optimizer whose state is booked or paged.
        activations: what each unit does with its activations.
        trainable: ids of the weights whose gradients the last placement has room for.
        staging_bytes: of slots and scratch memory, as the run's account has them.
    """

    name = "pool"

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.table = AddressTable()
        self.pagers: list[StatePager] = []
        self.activations = Activations(config, self._room_for_activations)
        self._runtime: Runtime | None = None
        self._pool: Pool | None = None
        self._optimizers: list[Optimizer] = []
        self._entries = 0
        self._figures: dict[str, float] = {}
        self._budget_bytes: int | None = None
        self.staging_bytes = 0
        self.trainable: set[int] = set()

    @property
    def budgeted(self) -> bool:
        """Whether a budget limits what rests on the device."""
        return self._budget_bytes is not None

    @property
    def stores(self) -> dict[Tier, Store]:
        """The open tiers' stores; none where nothing is paged."""
        return self._pool.stores if self._pool is not None else {}

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that page; none where nothing is paged."""
        return (self._pool.page_in, self._pool.page_out) if self._pool is not None else ()

    # -- set-up --

    def attach(self, runtime: Runtime) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.table = AddressTable(rank)
        self._runtime = runtime
        self.activations.attach(runtime)

    def set_activations(self, modes: Mapping[str, str] = {}, *, together: Sequence[Sequence[str]] = ()) -> None:
        """``Activations.set``: what units do with their activations, from the next step on."""
        self.activations.set(modes, together)

    def optimizers_ready(self, runtime: Runtime) -> None:
        """Place the state of ``runtime.optimizers``, and page what does not fit.

        Raises:
            ConfigError: it does not fit anywhere; says what is missing and which option helps.
        """
        self._release()
        self.table = AddressTable(self.table.rank)
        self._optimizers, self.trainable = list(runtime.optimizers), set()
        states = self._states(runtime)
        early = _steps_in_backward(runtime)
        if early and (why := next((p.reason for p in states.parts if not p.alone), None)):
            raise ConfigError(f"overlap.optimizer_in_backward=true: {why}. Leave it out, or use AdamW, say.")
        placement, beside_bytes = self._place(runtime, states)
        if all(home is Tier.DEVICE for home in placement.homes.values()):
            self.table.open_tier(Tier.DEVICE, self._budget_bytes or available_device_bytes(runtime.device))
            self.table.add_arena(Tier.DEVICE, ENGINE, BookedArena())
        else:
            self._pool = self._open(runtime, placement, states, beside_bytes)
        for index, (optimizer, its_units) in enumerate(zip(self._optimizers, states.units, strict=True)):
            lanes = self.lanes or (None, None)
            pager = StatePager(
                optimizer, its_units, share_of(self, placement, its_units), table=self.table, stores=self.stores,
                page_in=lanes[0], page_out=lanes[1], name=f"optimizer {index}", at_home=states.at_home[index],
            )  # fmt: skip
            self.pagers.append(pager)
            self._pool_optimizer(runtime, index, states)
        if self._pool is not None:
            self._take_stores(runtime, self._pool.stores)
        tell(self, runtime, placement, states)

    def _states(self, runtime: Runtime) -> States:
        return States.of(self._optimizers, _unit_of(runtime), self.config, runtime.device)

    def _pool_optimizer(self, runtime: Runtime, index: int, states: States) -> None:
        """Let an optimizer step unit by unit, where something asks for it."""
        pager, early = self.pagers[index], _steps_in_backward(runtime)
        pages = any(pager.homes.paged)
        master = states.master and any(needs_master(p.dtype) for unit in pager.units for p in unit.parameters)
        if pages or early or master:
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
        place_anew(self, self._runtime, device_bytes)

    def _take_stores(self, runtime: Runtime, stores: dict[Tier, Store]) -> None:
        """Keep stores that were opened or extended; their memory is the pool's account's affair."""
        if self._pool is None:
            trace = runtime.config.overlap.trace
            self._pool = Pool(self.table, list(stores.values()), timeout_s=runtime.config.timeout_s, record_spans=trace)
        self._pool.stores.update(stores)
        if runtime.memory is not None:
            for storage in (storage for store in stores.values() for storage in store.storages()):
                runtime.memory.ignore(storage)

    def _place(
        self,
        runtime: Runtime,
        states: States,
        budget_bytes: int | None = None,
    ) -> tuple[StatePlacement, int]:
        """Where every block rests, and the device bytes that the step needs beside the state."""
        pageable, units, parts = states.pageable, states.units, states.parts
        flat = [unit.sizes() for each in pageable for unit in each]
        everything = StatePlacement({b: Tier.DEVICE for unit in flat for b in unit})
        self._budget_bytes = runtime.budget_bytes if budget_bytes is None else budget_bytes
        if self._budget_bytes is None:
            return everything, 0
        beside_bytes = bytes_beside_state(runtime)
        whole = [p.reason for p in parts if not p.alone]
        fixed = sum(_SMALL_STATE_BYTES * len(unit.parameters) for each in units for unit in each) + states.scratch_bytes
        device_bytes = self._budget_bytes - beside_bytes
        needed = sum(sum(unit.values()) for unit in flat)
        if needed + fixed > device_bytes and whole:
            raise ConfigError(
                f"pool.device_budget={format_size(self._budget_bytes)} leaves {format_size(max(0, device_bytes))} for "
                f"optimizer state, which has to be paged, but {whole[0]}. Raise the budget, or use an optimizer that "
                "steps each parameter by itself, such as AdamW."
            )
        paging = sum(1 for each in pageable if each)
        host_bytes = host_room(self) - states.desk_bytes(self.config.optimizer_units)
        room = Room(device_bytes, max(0, host_bytes), self._disk_bytes(), fixed)
        placement = place_state(
            flat, room, slots=self.config.optimizer_units * max(1, paging),
            at_home=states.flat_at_home(), split=not states.copies,
        )  # fmt: skip
        return placement, beside_bytes

    def _host_bytes(self, held_bytes: int = 0) -> int:
        unused = unused_memory_bytes() + held_bytes
        budget = self.config.host_budget
        return unused if budget is None else parse_size(budget, option="pool.host_budget", available_bytes=unused)

    def _disk_bytes(self) -> int:
        if self.config.disk_path is not None and not Path(self.config.disk_path).is_dir():
            raise ConfigError(f"pool.disk_path={self.config.disk_path} is no folder here. Make it, or name another.")
        return parse_size(self.config.disk_budget, option="pool.disk_budget", available_bytes=2**62)

    def _open(
        self, runtime: Runtime, placement: StatePlacement, states: States, beside_bytes: int
    ) -> Pool:
        """Open the tiers, each as large as what rests there."""
        groups = dict.fromkeys((Tier.HOST, Tier.DISK), 0)
        for unit in (unit for each in states.pageable for unit in each):
            for tier in groups:
                sizes = [size for block, size in unit.sizes().items() if placement.homes[block] is tier]
                groups[tier] += group_bytes(sizes)
        timeout_s = runtime.config.timeout_s
        stores: list[Store] = [DeviceStore(self.table, self._budget_bytes, device=runtime.device)]
        try:
            self.table.book(BESIDE, beside_bytes, Tier.DEVICE, 0, arena=ENGINE)
            staging = (WORKERS + 1) * CHUNK_BYTES if groups[Tier.DISK] else 0
            staging += states.desk_bytes(self.config.optimizer_units)
            if groups[Tier.HOST] + staging:
                stores.append(HostStore(self.table, _pages(groups[Tier.HOST]) + staging, device=runtime.device))
            if groups[Tier.DISK]:
                stores.append(DiskStore(self.table, _pages(groups[Tier.DISK]), self._folder(), host=stores[1]))
        except BaseException:
            self.table.drop(BESIDE)
            for store in reversed(stores):
                store.close()
            raise
        return Pool(self.table, stores, timeout_s=timeout_s, record_spans=runtime.config.overlap.trace)

    def _room_for_activations(self) -> Pool:
        """The pool, its host tier as large as ``host_budget`` lets it be; mapped once, between two steps."""
        runtime, table = self._runtime, self.table
        host = self.stores.get(Tier.HOST)
        held = host.mapped_bytes if isinstance(host, HostStore) else 0
        more = self._host_bytes(held) - held
        added: list[torch.UntypedStorage] = []
        if isinstance(host, HostStore):
            if more > 0:
                before = list(host.storages())
                host.extend(more)
                added = [s for s in host.storages() if all(s is not old for old in before)]
        else:
            host = HostStore(table, more, device=runtime.device)
            added = list(host.storages())
            if self._pool is None:
                trace = runtime.config.overlap.trace
                self._pool = Pool(table, [host], timeout_s=runtime.config.timeout_s, record_spans=trace)
            else:
                self._pool.stores[Tier.HOST] = host
        if runtime.memory is not None:
            for storage in added:
                runtime.memory.ignore(storage)
        return self._pool

    def _folder(self) -> Path:
        if self.config.disk_path is None:
            raise ConfigError("pool.disk_budget is set, but not where: set pool.disk_path to a folder on a local disk.")
        return Path(self.config.disk_path)

    # -- a step --

    def before_step(self, runtime: Runtime) -> None:
        """The first units' state comes in while the forward runs."""
        self.activations.before_step()
        if not is_current(self, runtime):
            self.replace_state()
        if self._pool is not None:
            self._pool.page_in.take_stats()
            self._pool.page_out.take_stats()
            for pager in self.pagers:
                if isinstance(pager.optimizer, PooledOptimizer):
                    pager.optimizer.prefetch()

    def after_step(self, runtime: Runtime) -> None:
        entries = sum(len(state) for optimizer in self._optimizers for state in optimizer.state.values())
        if entries != self._entries:  # an optimizer that is not paged made state: book it
            self._entries = entries
            for pager in self.pagers:
                if not isinstance(pager.optimizer, PooledOptimizer):
                    pager.adopt()
        self._figures = self._measure()

    def _measure(self) -> dict[str, float]:
        figures = self.activations.take_figures()
        figures |= {
            f"memwall/pool/{tier}_bytes": float(self.table.used_bytes(tier))
            for tier in (Tier.HOST, Tier.DISK)
            if (tier, self.table.rank) in self.table.tiers()
        }
        if self._pool is None:
            return figures
        page_in, page_out = self._pool.page_in.take_stats(), self._pool.page_out.take_stats()
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
        self.pagers, self._optimizers, self.staging_bytes = [], [], 0
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def bytes_beside_state(runtime: Runtime) -> int:
    """Most device bytes that a step needs beside the optimizer's state, on this rank, as planned.

    Raises:
        ConfigError: the model came sharded, so that the plan does not know it.
    """
    spec = runtime.model_spec
    if spec is None:
        raise ConfigError(
            "pool.device_budget pages optimizer state by a plan of the model, and this model came sharded by its own "
            "configure_model. Let memwall shard it, or leave pool.device_budget out."
        )
    overlap, mesh = runtime.config.overlap, runtime.mesh
    early = _steps_in_backward(runtime)
    made = plan(
        spec,
        ClusterSpec(world=mesh.size(), replicate=runtime.config.replicate),
        Budgets(),
        optimizer=OptimizerSpec("none"),
        precision=runtime.precision,
        accumulate=min(runtime.micro_batches, 2),  # in a second one, gradients of an earlier one are there too
        accumulate_how=runtime.config.accumulate,
        **schedule_of(overlap, runtime.device.type),
        gradients_in_forward=not early,
        rank=0,
    )
    if not early or runtime.micro_batches > 1:
        return made.peak_bytes
    # Units let go of their gradients as they step: one lands while those still on the reduce lane are on their way.
    whole = made.resident.get(Kind.GRAD, 0)
    alive = max(unit.sharded_numel for unit in runtime.units) * (overlap.reduce_buffers + 1) * 4
    return max(
        sum(kinds.values()) - max(0, kinds.get(Kind.GRAD, 0) - min(whole, alive)) for kinds in made.peaks.values()
    )


def needed_device_bytes(runtime: Runtime) -> int:
    """The least ``pool.device_budget`` of this rank: no optimizer state rests on the device, it only passes through."""
    pool = runtime.pool
    units = [unit for pager in pool.pagers for unit in pager.units]
    slots = pool.config.optimizer_units * sum(1 for pager in pool.pagers if pager.units)
    widest = max((slot_bytes(list(unit.sizes().values())) for unit in units), default=0)
    small = sum(_SMALL_STATE_BYTES * len(unit.parameters) for unit in units)
    scratch = sum(scratch_bytes(pager.units) for pager in pool.pagers) if pool.config.master != "none" else 0
    return bytes_beside_state(runtime) + slots * widest + small + scratch


def _steps_in_backward(runtime: Runtime) -> bool:
    return runtime.config.overlap.enabled and runtime.config.overlap.optimizer_in_backward


def _unit_of(runtime: Runtime) -> Callable[[torch.Tensor], tuple[str, str]]:
    """Parameter -> (its unit, its name); what no unit holds steps with the root."""
    unit_of = {name: unit.name for unit in runtime.units for name in unit.parameters}
    names = {id(parameter): name for name, parameter in runtime.model.named_parameters()}

    def find(parameter: torch.Tensor) -> tuple[str, str]:
        name = names.get(id(parameter), f"parameter {id(parameter):#x}")
        return unit_of.get(name, "root"), name

    return find


def _pages(nbytes: int) -> int:
    return aligned(nbytes, PAGE_BYTES)
