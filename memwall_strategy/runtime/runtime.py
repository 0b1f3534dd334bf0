"""The runtime that every front end drives.

``Runtime.step`` is the whole of one optimizer step, in order; a plain training loop calls it. Trainers own their loop:
the Lightning strategy and the others call the same few methods (``begin_step``, ``micro_batch``, ``gradients_ready``,
``before_optimizer``, ``end_step``) from their hooks, in the same order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from memwall_strategy.config import MemwallConfig
from memwall_strategy.core.block import Kind, Phase
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.core.lane import Lane, Span
from memwall_strategy.core.pillar import Pillar
from memwall_strategy.core.unit import Unit
from memwall_strategy.engine.capacity import share_cores
from memwall_strategy.engine.clip import clip_grad_norm, clip_grad_value
from memwall_strategy.engine.fresh import keep_fresh
from memwall_strategy.engine.fsdp import fsdp_roots
from memwall_strategy.engine.host_modules import find_host_modules, without_host
from memwall_strategy.engine.inference import gather_outside_inference_mode
from memwall_strategy.engine.lanes import FsdpLanes
from memwall_strategy.engine.memory import MemoryAccount
from memwall_strategy.engine.precision import canonical_precision, compute_dtype, mixed_precision_policy
from memwall_strategy.engine.processes import set_dumpable
from memwall_strategy.engine.reset import reset_aborted_step
from memwall_strategy.engine.second_buffers import SecondBuffers
from memwall_strategy.engine.sharding import describe_units, is_sharded, set_prefetch, shard_model
from memwall_strategy.engine.step_marks import RngMark
from memwall_strategy.engine.units import plan_sharding, recomputes_itself
from memwall_strategy.planner import ModelSpec
from memwall_strategy.pool.budget import agreed_device_budget_bytes
from memwall_strategy.pool.pillar import PoolPillar
from memwall_strategy.runtime.input_clock import InputClock
from memwall_strategy.runtime.meter import StepMeter
from memwall_strategy.runtime.restart import StepRestart, tell_failure
from memwall_strategy.runtime.spans import SpanKeeper
from memwall_strategy.telemetry.events import EventKind, Events


class Runtime:
    """One model on its way through training.

    Args:
        config: what is switched on.
        mesh: the data-parallel mesh, from ``engine.sharding.data_parallel_mesh``.
        precision: see ``engine.precision``.
        pillars: in the order in which they act.
        input_clock: what the trainer waits for batches inside of; None: a new one.
        events: where the runtime tells what happens; None: an emitter of its own.

    Attributes:
        input_clock: see ``runtime.input_clock``; where nobody uses it, the wait for input is not among the metrics.
        events: the emitter, for pillars, front ends and whoever wants to listen.
        model: the sharded model, after ``setup``.
        host_modules: name -> module of what runs on the host.
        optimizers: after ``add_optimizers``.
        model_spec: the model as the planner sees it; None where its owner sharded it.
        units: what was sharded.
        micro_batches: most micro-batches of a step, as far as the front end knows; 2 stands for many.
        pool: the pool's pillar, with its address table ``pool.table``; None with ``pool.enabled=false``.
        second_buffers: how many the engine has; None where overlap is off.
        restart: what becomes of a step in which a rank fails.
        total_steps: optimizer steps that the whole run takes, where the front end knows; None: open.
        losses: of the micro-batches of the present step, detached, as far as they were told.
        lanes: name -> Lane; empty where communication is the engine's own.
        memory: the account of live bytes; None with ``pool.enabled=false``.
        kind_peaks: phase -> kind -> most bytes held in any step that ended; activations in deep mode only.
        steps: optimizer steps that ended.
        recomputes_itself: the model brings its own activation checkpointing (Hugging Face).
    """

    def __init__(
        self,
        config: MemwallConfig,
        *,
        mesh: DeviceMesh,
        precision: str = "32-true",
        pillars: Iterable[Pillar] = (),
        events: Events | None = None,
        input_clock: InputClock | None = None,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.precision = canonical_precision(precision)
        self.pool = PoolPillar(config.pool) if config.pool.enabled else None
        self.pillars: list[Pillar] = [*([self.pool] if self.pool is not None else []), *pillars]
        self.events = Events(dist.get_rank() if dist.is_initialized() else 0) if events is None else events
        self.events.step = 0
        self.input_clock = input_clock if input_clock is not None else InputClock()
        self.device = torch.device(
            mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None
        )
        share_cores()
        self.model: nn.Module | None = None
        self.model_spec: ModelSpec | None = None
        self.host_modules: dict[str, nn.Module] = {}
        self.optimizers: list[Optimizer] = []
        self.units: tuple[Unit, ...] = ()
        self.memory: MemoryAccount | None = None
        self.budget_bytes: int | None = None
        self.kind_peaks: dict[Phase, dict[Kind, int]] = {}
        self.steps = 0
        self.recomputes_itself = False
        self.micro_batches = 2
        self.total_steps: int | None = None
        self.losses: list[torch.Tensor] = []
        self.second_buffers: SecondBuffers | None = None
        self._fsdp_lanes: FsdpLanes | None = None
        self._roots: list[nn.Module] = []
        self._meter = StepMeter(self.device, compute_dtype(self.precision), world=mesh.size())
        self._in_step = False
        self._sync = (True, True)
        self._spans = SpanKeeper(self._all_lanes, always=config.overlap.trace)
        self._last: dict[str, float] = {}
        self.restart = StepRestart(self)

    # -- set-up --

    def setup(self, model: nn.Module, *, split: bool = False) -> nn.Module:
        """Shard ``model`` unless its owner did, start the lanes and the account; return it.

        Args:
            split: its ``forward`` is not what runs (a LightningModule); see ``engine.units.plan_sharding``.
        """
        if self.config.pool.enabled:
            self.budget_bytes = agreed_device_budget_bytes(self.config.pool, self.device)
        self.recomputes_itself = recomputes_itself(model)
        if is_sharded(model):
            if self.config.pool.host_modules:
                raise ConfigError(
                    "pool.host_modules, but the model came sharded by its own configure_model. Let memwall shard it."
                )
            keep_fresh(model)
        else:
            self.host_modules = find_host_modules(model, self.config.pool.host_modules)
            self.model_spec = self._look_at(model, split)
            shard_model(
                model, self.mesh, precision=self.precision, unit_classes=self.config.unit_classes, split=split,
                host=self.host_modules,
            )  # fmt: skip
        self.model = model
        self.units = describe_units(model)
        self._roots = fsdp_roots(model)
        gather_outside_inference_mode(model)
        if self.config.pool.enabled:
            deep, host = self.config.pool.deep_accounting, tuple(self.host_modules.values())
            self.memory = MemoryAccount(self.device, deep=deep, host_modules=host)
        self._start_overlap()
        if self.memory is not None:
            self.memory.attach(model)  # after the lanes: it wraps what they put on the engine's groups
        self._meter.look_at(model)
        for pillar in self.pillars:
            pillar.attach(self)
        self.events.emit(
            EventKind.RUN_STARTED, ranks=self.mesh.size(), device=str(self.device), precision=self.precision,
            units=len(self.units), budget_bytes=self.budget_bytes,
        )  # fmt: skip
        return model

    def _look_at(self, model: nn.Module, split: bool) -> ModelSpec:
        low = mixed_precision_policy(self.precision).param_dtype is not None
        plan = plan_sharding(model, unit_classes=self.config.unit_classes, split=split, low_precision=low)
        units = without_host(plan, self.host_modules).units
        return ModelSpec.from_module(model, [name for name, _ in units], host_modules=self.host_modules)

    def _start_overlap(self) -> None:
        overlap = self.config.overlap
        if not overlap.enabled:
            return
        if overlap.non_dumpable:
            set_dumpable(False)
        if self.device.type == "cpu":
            if overlap.lanes:
                set_prefetch(self.model, overlap.prefetch)
                self._fsdp_lanes = FsdpLanes(
                    self.model,
                    prefetch=overlap.prefetch,
                    reduce_buffers=overlap.reduce_buffers,
                    timeout_s=self.config.timeout_s,
                    trace=overlap.trace,
                    account=self.memory,
                    early=overlap.next_iteration_early,
                    shared_memory=overlap.shared_memory,
                )
                self.second_buffers = SecondBuffers(self.model, self._fsdp_lanes)
            return
        if overlap.shared_memory is True:
            raise ConfigError("overlap.shared_memory=true is for ranks on CPU; on CUDA NCCL does it. Use auto.")
        self.second_buffers = SecondBuffers(self.model, None)  # CUDA: the engine overlaps by streams
        self.second_buffers.use(prefetch=overlap.prefetch, reduce_buffers=overlap.reduce_buffers, early=False)

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Tell the runtime which optimizers step the model (again after they were made anew).

        Raises:
            ConfigError: one that flattens all parameters into one vector, which shards on several ranks cannot be.
        """
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS) and self.mesh.size() > 1:
                raise ConfigError(
                    "torch.optim.LBFGS flattens all parameters into one vector, which cannot be done with weights "
                    "sharded over several ranks. Use an optimizer that steps each parameter by itself, such as AdamW."
                )
        if self.memory is not None:
            self.memory.attach(self.model, self.optimizers)
        for pillar in self.pillars:
            pillar.optimizers_ready(self)
        if self._fsdp_lanes is not None:
            self._fsdp_lanes.watch_steps(self.optimizers)

    @property
    def lanes(self) -> dict[str, Lane]:
        """The lanes by name."""
        lanes = self._fsdp_lanes
        return {} if lanes is None else {lanes.gather.name: lanes.gather, lanes.reduce.name: lanes.reduce}

    def _all_lanes(self) -> list[Lane]:
        input_lane = [self.input_clock.lane] if self.input_clock.lane is not None else []
        return [*self.lanes.values(), *(self.pool.lanes if self.pool is not None else ()), *input_lane]

    # -- one step --

    def begin_batch(self) -> None:
        """A micro-batch comes: tokens that are told after the optimizer stepped in it belong to its steps."""
        self._meter.begin_batch()
        self.begin_step()

    def step(
        self,
        micro_batches: Sequence[Any],
        loss_of: Callable[[Any], torch.Tensor | dict[str, Any]],
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> torch.Tensor:
        """One optimizer step over ``micro_batches``; the order of everything that happens in a step.

        Args:
            micro_batches: equally weighted; every rank passes the same number.
            loss_of: runs the forward of one micro-batch and returns its mean loss, or ``{"loss", "tokens"}``.
            clip_norm, clip_value: clip the reduced gradients before the optimizer.

        Returns:
            The mean loss of this rank's micro-batches, detached.
        """
        if not micro_batches:
            raise ConfigError("a step needs at least one micro-batch; the loader gave none. Check the data set's size.")
        self.begin_step()
        try:
            total = self.restart.protect(lambda: self._gradients_of(micro_batches, loss_of), RngMark().restore)
            with self.restart.named():
                self.gradients_ready()
                if clip_norm is not None:
                    clip_grad_norm(self.model.parameters(), clip_norm)
                if clip_value is not None:
                    clip_grad_value(self.model.parameters(), clip_value)
                self.before_optimizer()
                with self.phase(Phase.STEP):
                    optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        except BaseException as error:
            self.abort_step(error)
            raise
        self.end_step()
        return total

    def _gradients_of(self, micro_batches: Sequence[Any], loss_of: Callable[[Any], Any]) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(micro_batches):
            with self.micro_batch(last=i == len(micro_batches) - 1, observed=False):
                with self.phase(Phase.FORWARD):
                    loss = self.count(loss_of(batch)) / len(micro_batches)
                with self.phase(Phase.BACKWARD):
                    loss.backward()
            total += loss.detach()
        self.land_gradients()
        return total

    def begin_step(self) -> None:
        """Start an optimizer step; does nothing when one is under way (its first micro-batch started it)."""
        if self._in_step:
            return
        self._in_step = True
        if self._fsdp_lanes is None or not self._fsdp_lanes.next_iteration_began:  # what that moved is this step's
            for lane in self.lanes.values():
                lane.take_stats()  # of an evaluation between two steps
        self._meter.begin()
        self.restart.begin()
        for pillar in self.pillars:
            pillar.before_step(self)

    @contextmanager
    def micro_batch(self, *, last: bool, observed: bool = True) -> Iterator[None]:
        """Around forward and backward of one micro-batch.

        Args:
            last: the optimizer steps after it. Otherwise gradients are reduced no further than they must: in the rack
                only (``accumulate="sharded"``), or not at all (``"whole"``).
            observed: somebody may look at the gradients before the next micro-batch. False lets reductions of this
                micro-batch go on into the next forward.
        """
        before = self._sync
        self._set_sync(last or self.config.accumulate == "sharded", last)
        rest = self.pool is not None and self.pool.gradients.active and not last
        hold = self._fsdp_lanes is not None and not (last or observed or rest)  # each leaves in its own backward
        try:
            with (
                self.pool.retention.micro_batch(last=last, observed=observed) if self.pool else nullcontext(),
                self._fsdp_lanes.reducer.hold() if hold else nullcontext(),
                self.pool.gradients.resting() if rest else nullcontext(),
            ):
                yield
        finally:
            self._set_sync(*before)  # of the micro-batch that this one is run again for

    def _set_sync(self, gradients: bool, replicas: bool) -> None:
        self._sync = (gradients, replicas)
        for root in self._roots:
            root.set_requires_gradient_sync(gradients)
            root.set_requires_all_reduce(replicas)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Mark what the training thread does, for the account and the trace."""
        start = time.perf_counter()
        try:
            if self.memory is None:
                yield
            else:
                saved = self.memory.saved_activations() if phase is Phase.FORWARD else nullcontext()
                with self.memory.phase(phase), saved:
                    yield
        except BaseException:
            self.restart.broke_in = self.restart.broke_in or phase
            raise
        finally:
            self._spans.add(phase.value, start)

    def count(self, output: Any) -> torch.Tensor | None:
        """Return the loss of a step's output and note the tokens it stands for, if it says so.

        In manual optimization the optimizer has stepped by then; the figures of that step are put right.
        """
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.losses.append(loss.detach())
        if isinstance(output, dict):
            tokens = output.get("tokens")
            if tokens is not None and self._in_step:
                self._meter.add_tokens(int(tokens))
            elif tokens is not None:
                self._last |= self._meter.add_late_tokens(int(tokens))
        return loss

    def land_gradients(self) -> None:
        """Wait until every gradient of this step is reduced and in place."""
        if self._fsdp_lanes is not None:
            self._fsdp_lanes.reducer.finish()

    def gradients_ready(self) -> None:
        """Every gradient of this step is reduced and in place: nothing is in flight any more."""
        self.land_gradients()
        for pillar in self.pillars:
            pillar.after_backward(self)

    def before_optimizer(self) -> None:
        """Clipping is done; the optimizer steps next."""
        for pillar in self.pillars:
            pillar.before_optimizer(self)

    def end_step(self) -> None:
        """The weights are those of the next step: take the figures of this one."""
        self._in_step = False
        self.restart.end()
        self.steps += 1
        self.events.step = self.steps
        stats = {name: lane.take_stats() for name, lane in self.lanes.items()}
        self._spans.collect()
        copied_s = self._fsdp_lanes.reducer.copies.take() if self._fsdp_lanes is not None else 0.0
        paging_s = sum(lane.exposed_s for lane in self.pool.lanes) if self.pool is not None else 0.0
        self._last = self._meter.end(stats, self.input_clock.take(), copied_s=copied_s, other_waits_s=paging_s)
        self._last |= self.input_clock.take_lane()
        if self.memory is not None:
            self._last |= self._memory_metrics()
            self._keep_peaks()
        if self._fsdp_lanes is not None:
            # Before anything that may raise: a rank that pages has begun already, and would wait for the others.
            self._fsdp_lanes.step_ended()
        if self.memory is not None:
            if self.budget_bytes is not None:
                self.pool.escalation.hold()
            self.memory.reset_peak()
        for pillar in self.pillars:
            pillar.after_step(self)
        self.losses.clear()

    def _keep_peaks(self) -> None:
        for phase, kinds in self.memory.kind_peaks().items():
            kept = self.kind_peaks.setdefault(phase, {})
            for kind, nbytes in kinds.items():
                kept[kind] = max(nbytes, kept.get(kind, 0))

    def abort_step(self, error: BaseException) -> None:
        """Bring engine and pillars back to rest after ``error`` broke a step; gradients of the step are dropped."""
        if self.model is not None:
            tell_failure(self.events, error)
            self.restart.tell_peers(error)
        self.drop_step()
        if self.model is not None:
            for pillar in self.pillars:
                pillar.on_failure(self, error)

    def drop_step(self) -> None:
        """Bring the engine back to rest in the middle of a step and drop its gradients, as before loading a state."""
        self._in_step = False
        self.losses.clear()
        self._meter.abort()
        if self.model is None:
            return
        reset_aborted_step(self.model, self._fsdp_lanes)
        if self.pool is not None:
            self.pool.gradients.drop()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.memory is not None:
            self.memory.refresh()

    def use_peak_flops(self, flops: float) -> None:
        """Take MFU over a described device's operations per second, not over what this one is measured to reach."""
        self._meter.use_peak(flops)

    # -- what others read --

    def metrics(self) -> dict[str, float]:
        """Figures of the last step, by the names of ``telemetry.names``."""
        merged = dict(self._last)
        for pillar in self.pillars:
            merged |= pillar.metrics()
        return merged

    def _memory_metrics(self) -> dict[str, float]:
        held, peak = self.memory.device_bytes, self.memory.peak_bytes
        figures = {"memwall/pool/device_bytes": float(held), "memwall/pool/device_peak_bytes": float(peak)}
        if self.budget_bytes:
            figures["memwall/pool/utilization"] = peak / self.budget_bytes
        return figures

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides model, optimizers and data."""
        return {"steps": self.steps, "pillars": {p.name: state for p in self.pillars if (state := p.state_dict())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` returned; pillars that were not there then start fresh."""
        self.steps = self.events.step = int(state["steps"])
        for pillar in self.pillars:
            if pillar.name in state["pillars"]:
                pillar.load_state_dict(state["pillars"][pillar.name])

    # -- traces --

    def start_trace(self) -> float:
        """Keep spans of the lanes and of the training thread's phases from now on; return now (perf_counter)."""
        return self._spans.start()

    def stop_trace(self, since_s: float) -> list[Span]:
        """The spans that began since then, in ``time.perf_counter`` seconds; ``overlap.trace`` alone keeps others."""
        return self._spans.stop(since_s)

    def write_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the recorded transfers as a Chrome trace (load it in chrome://tracing or Perfetto).

        Raises:
            ConfigError: nothing was recorded because ``overlap.trace`` is off.
        """
        return self._spans.write(path, self.events.rank)

    def close(self) -> None:
        """End threads, lanes and hooks; the model stays a plain FSDP2 model. Idempotent."""
        for pillar in self.pillars:
            pillar.close()
        if self.memory is not None:
            self.memory.detach()  # before the lanes: the last to wrap is the first to let go
        if self._fsdp_lanes is not None:
            self._fsdp_lanes.close()
            self._fsdp_lanes = None
