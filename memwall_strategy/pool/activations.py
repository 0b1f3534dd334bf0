"""What each unit does with its activations between forward and backward, decided per unit and changed between steps.

- ``keep``: as torch does it.
- ``offload``: they rest on the host (``activation_pager``).
- ``recompute``: only the unit's arguments are kept; its forward runs again in backward.
- ``selective``: as ``recompute``, but results of matrix products and attention are kept. torch lets such a graph be
  differentiated once only, ``retain_graph`` or not.

Units may also recompute together: only the arguments of the first one of them are kept. ``sqrt_plan`` cuts n units
into about sqrt(n) segments of sqrt(n), so that what is alive at a time grows with sqrt(n) and not with n (Chen et al.
2016, arXiv:1604.06174): the arguments of each segment and the activations of one. Each unit still runs forward once
more; under FSDP2 a unit that is not the last of its segment is gathered once more.

Losses and gradients are those of ``keep``, to the last bit where the arithmetic is deterministic. ``recompute`` of
several units gathers weights, so every rank must ask for the same segments; everything else may differ between ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from torch import nn

from memwall_strategy.config import PoolConfig
from memwall_strategy.core.errors import ConfigError, PoolFull, nearest
from memwall_strategy.engine.recompute import Segment, recompute
from memwall_strategy.engine.unit_forward import UnitForward, refuse_compiled, switchable_units
from memwall_strategy.pool.activation_pager import ActivationPager
from memwall_strategy.pool.pool import Pool
from memwall_strategy.telemetry.events import EventKind, Events

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime


class Mode(StrEnum):
    """What a unit does with its activations."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    SELECTIVE = "selective"


def sqrt_plan(units: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Cut units into about sqrt(n) segments whose lengths differ by at most one; each recomputes together.

    Args:
        units: names in the order in which forward runs them.
    """
    if not units:
        return ()
    count = math.isqrt(len(units) - 1) + 1  # rounded up
    bounds = [len(units) * i // count for i in range(count + 1)]
    return tuple(tuple(units[low:high]) for low, high in itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True)
class _Choice:
    modes: dict[str, Mode] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()


class Activations:
    """The units' switches.

    Args:
        config: the pool's options.
        open_room: gives the pool, its host tier open for activations; called between two steps, when first needed.
    """

    def __init__(self, config: PoolConfig, open_room: Callable[[], Pool]) -> None:
        self._config, self._open_room = config, open_room
        self._model: nn.Module | None = None
        self._modules: dict[str, nn.Module] = {}
        self._forwards: dict[str, UnitForward] = {}
        self._recomputes_itself = False
        self._events: Events | None = None
        self._note: Callable[[Any], None] | None = None
        self._wanted = self._present = _Choice()
        self._pager: ActivationPager | None = None
        self._segment: weakref.ref[Segment] | None = None
        self._recomputed_units = 0
        self._told_full = False

    def attach(self, runtime: Runtime) -> None:
        """Find the units of ``runtime.model``, and take up the config.

        Raises:
            ConfigError: it asks for something that a unit cannot do, or there is no unit.
        """
        self.close()
        spec = runtime.model_spec
        self._model, self._events = runtime.model, runtime.events
        names = [unit.name for unit in spec.units] if spec is not None else None
        self._modules = switchable_units(runtime.model, names)
        self._recomputes_itself = runtime.recomputes_itself
        self._note = runtime.memory.note_activation if runtime.memory is not None else None
        if self._config.activations in ("auto", "keep"):
            return
        if not self._modules:
            raise ConfigError(
                f"pool.activations={self._config.activations!r}, but {type(runtime.model).__name__} has no unit: it is "
                "sharded as a whole. Name the classes of its blocks with unit_classes=(...)."
            )
        self.set(dict.fromkeys(self._modules, self._config.activations))

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, in module order."""
        return tuple(self._modules)

    @property
    def modes(self) -> dict[str, Mode]:
        """Unit -> what it does in the present step; units that recompute together are ``recompute``."""
        return {name: self._present.modes.get(name, Mode.KEEP) for name in self._modules}

    @property
    def wanted_modes(self) -> dict[str, Mode]:
        """Unit -> what it does from the next step on."""
        return {name: self._wanted.modes.get(name, Mode.KEEP) for name in self._modules}

    def refusal(self, units: Sequence[str], mode: Mode) -> str:
        """Why these units cannot do this; empty where they can."""
        try:
            for name in units:
                self._check(name, mode)
        except ConfigError as error:
            return str(error)
        return ""

    def set(self, modes: Mapping[str, str], together: Sequence[Sequence[str]] = ()) -> None:
        """Choose what units do from the next step on; those that are not named stay as they are.

        Args:
            modes: unit -> a ``Mode``.
            together: segments that recompute together, each in forward order, e.g. from ``sqrt_plan``. Where the model
                does not hand one unit's output to the next as it is, a segment ends there.

        Raises:
            ConfigError: an unknown unit or mode, a unit named twice, a unit inside a compiled region, no
                ``host_budget`` to offload to, or a model that recomputes by itself.
        """
        segments = tuple(tuple(segment) for segment in together)
        members = [name for segment in segments for name in segment]
        for name in (*modes, *members):
            if name not in self._modules:
                raise ConfigError(
                    f"activations: {name!r} is no unit.{nearest(name, self._modules)} Units are: "
                    f"{', '.join(self._modules) or 'none'}."
                )
        if twice := {name for name in members if members.count(name) > 1 or name in modes}:
            raise ConfigError(f"activations: {', '.join(sorted(twice))} is named twice. Give each unit one mode.")
        for name, mode in modes.items():
            if mode not in tuple(Mode):
                raise ConfigError(
                    f"activations: unit {name!r} cannot be {mode!r}, only {', '.join(Mode)}.{nearest(mode, Mode)}"
                )
        asked = {name: Mode(mode) for name, mode in modes.items()} | dict.fromkeys(members, Mode.RECOMPUTE)
        for name, mode in asked.items():
            self._check(name, mode)
        kept = [s for s in self._wanted.together if not set(s) & set(asked)]
        broken = {name for s in self._wanted.together if set(s) & set(asked) for name in s}
        now = {n: m for n, m in self._wanted.modes.items() if n not in asked} | asked
        # What is left of a segment that lost a unit recomputes by itself.
        assert broken <= set(now)
        self._wanted = _Choice({n: m for n, m in now.items() if m is not Mode.KEEP}, (*kept, *segments))

    def _check(self, name: str, mode: Mode) -> None:
        if mode is Mode.KEEP:
            return
        if self._recomputes_itself:
            raise ConfigError(
                f"activations of unit {name!r} cannot be {mode.value!r}: the model recomputes them by itself. Call "
                "model.gradient_checkpointing_disable(), or leave pool.activations at 'auto'."
            )
        if mode is Mode.OFFLOAD and self._config.host_budget is None:
            raise ConfigError(
                f"activations of unit {name!r} cannot be 'offload' without a limit: how much host memory that takes "
                "depends on the batch. Set pool.host_budget, e.g. '8GiB', or use 'recompute'."
            )
        refuse_compiled(self._model, name, mode)

    # -- a step --

    def before_step(self) -> None:
        """Put the switches where they were asked to be, and give back what nobody waits for."""
        self._recomputed_units = 0
        if self._pager is not None:
            self._pager.drop_dead()
            self._pager.take_sent_bytes()
        for name, mode in self._wanted.modes.items():
            refuse_compiled(self._model, name, mode)  # it may have been compiled since
        if self._wanted == self._present and (self._pager is not None or not self._offloads(self._wanted)):
            return
        if self._offloads(self._wanted) and self._pager is None:
            self._pager = ActivationPager(self._open_room(), note=self._note, full=self._full)
        self._place()

    @staticmethod
    def _offloads(choice: _Choice) -> bool:
        return Mode.OFFLOAD in choice.modes.values()

    def _place(self) -> None:
        segment_of = {name: segment for segment in self._wanted.together for name in segment}
        for name, module in self._modules.items():
            mode = self._wanted.modes.get(name, Mode.KEEP)
            forward = self._forwards.get(name)
            if mode is Mode.KEEP:
                if forward is not None:
                    forward.way = None
                continue
            if forward is None:
                forward = self._forwards[name] = UnitForward(name, module)
            if mode is Mode.OFFLOAD:
                forward.way = self._pager.run
            elif name in segment_of:
                forward.way = functools.partial(self._run_together, segment_of[name])
            else:
                forward.way = functools.partial(
                    recompute, selective=mode is Mode.SELECTIVE, again=self._again, note=self._note
                )
        if self._wanted != self._present:
            self._events.emit(
                EventKind.ACTIVATIONS_CHANGED, units={n: str(m) for n, m in self._wanted.modes.items()},
                together=[list(segment) for segment in self._wanted.together],
            )  # fmt: skip
        self._present = self._wanted

    def _run_together(
        self, names: tuple[str, ...], unit: UnitForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        segment = self._segment() if self._segment is not None else None
        if segment is None or not segment.accepts(unit, args, kwargs):
            segment = Segment(names[names.index(unit.name) :], again=self._again, note=self._note)
            self._segment = weakref.ref(segment)  # it lives as long as what autograd saved in it
        return segment.run(unit, args, kwargs)

    def _again(self, units: int) -> None:
        self._recomputed_units += units

    def _full(self, unit: str, error: PoolFull) -> None:
        if self._config.activations != "auto":
            raise PoolFull(
                f"activations of unit {unit!r} do not fit on the host: {error} Or offload fewer units, or use "
                "pool.activations='recompute'.",
                tier=error.tier, owner=error.owner, missing_bytes=error.missing_bytes,
            ) from error  # fmt: skip
        if not self._told_full:
            self._told_full = True
            self._events.emit(EventKind.ACTIVATIONS_KEPT, unit=unit, message=str(error))

    def take_figures(self) -> dict[str, float]:
        """Metrics of the step that ends; what nobody waits for any more is given back."""
        figures: dict[str, float] = {}
        if self._pager is not None:
            self._pager.drop_dead()
            figures["memwall/pool/offloaded_bytes"] = float(self._pager.take_sent_bytes())
        if self._recomputed_units or {Mode.RECOMPUTE, Mode.SELECTIVE} & set(self._present.modes.values()):
            figures["memwall/pool/recomputed_units"] = float(self._recomputed_units)
        return figures

    def forget(self) -> None:
        """After a step was aborted and the pool's lanes were reset."""
        self._segment = None
        if self._pager is not None:
            self._pager.forget()

    def close_room(self) -> None:
        """Before the pool closes; ``before_step`` opens it again where units offload."""
        if self._pager is not None:
            for forward in self._forwards.values():
                if forward.way == self._pager.run:
                    forward.way = None
            self._pager.close()
            self._pager = None

    def close(self) -> None:
        """Give every unit its ``forward`` back."""
        self.close_room()
        for forward in self._forwards.values():
            forward.remove()
        self._forwards.clear()
        self._wanted = self._present = _Choice()
        self._segment = None
