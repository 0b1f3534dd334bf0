"""What a plan is made from: the model, the cluster, the optimizer, the precision and the budgets, as plain data.

The classes hold names, shapes and dtype names only, so a plan for a thousand cards costs milliseconds on a laptop.
``ModelSpec.from_module`` and ``OptimizerSpec.from_optimizer`` read them from live objects, on the meta device or not;
they touch public attributes only and never allocate.

A parameter is sharded as FSDP2 does it: along dim 0 in pieces of ``ceil(rows / ranks)`` rows, every rank's piece
padded to that size, the last ranks' pieces short or empty.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memwall_strategy.core.errors import ConfigError, nearest

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element, by the dtype's name without ``torch.``."""

ROOT = "root"
"""Name of the unit that holds what no other unit holds."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, e.g. ``"bfloat16" -> 2``."""
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not known to the planner.{nearest(dtype, ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter, tied ones once.

    Attributes:
        name: fully qualified.
        shape: of the whole parameter.
        dtype: it is stored in, by name.
        trainable: whether it receives a gradient and an optimizer state.
        used_before: for the root's parameters: used before the units, so the first unit's inputs need a gradient.
        used_after: for the root's parameters: used after the units (a head, perhaps a tied one), so its gradient comes
            first in backward and lives until the end of it.
        keeps_dtype: belongs to a module with running statistics, which no precision converts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    used_before: bool = True
    used_after: bool = False
    keeps_dtype: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def padded_numel(self, ranks: int) -> int:
        """Elements of the piece that every rank stores and communicates, padding included."""
        return self._rows_numel(-(-self._rows // ranks))

    def local_numel(self, ranks: int, rank: int) -> int:
        """Elements of the given rank's piece without padding: what its optimizer state holds."""
        piece = -(-self._rows // ranks)
        return self._rows_numel(max(0, min(piece, self._rows - rank * piece)))

    @property
    def _rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def _rows_numel(self, rows: int) -> int:
        return rows * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit: the parameters that are gathered and reduced together.

    Attributes:
        name: fully qualified name of the module, or ``"root"``.
        parameters: in the order of definition.
    """

    name: str
    parameters: tuple[ParameterSpec, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters of the unit."""
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        units: in the order in which forward runs them, without the root.
        root: what no unit holds; None where the units hold everything. A model with several roots (a LightningModule
            with several networks) is planned as if they were one: an upper bound.
        buffers: module buffers, which every rank holds whole.
    """

    units: tuple[UnitSpec, ...]
    root: UnitSpec | None = None
    buffers: tuple[ParameterSpec, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(p.numel for p in self.parameters)

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """All parameters, units first."""
        return tuple(p for unit in self.every_unit for p in unit.parameters)

    @property
    def every_unit(self) -> tuple[UnitSpec, ...]:
        """The units, and the root behind them where there is one."""
        return self.units if self.root is None else (*self.units, self.root)

    @classmethod
    def from_module(
        cls, module: Any, unit_names: Iterable[str] = (), *, host_modules: Iterable[str] = ()
    ) -> ModelSpec:
        """Read a model before it is sharded.

        Args:
            module: a ``torch.nn.Module``, on meta or any device, not yet sharded.
            unit_names: fully qualified names of the modules that become units, in forward order. Where one unit
                contains another, the inner one holds its own parameters. Empty: everything is in the root.
            host_modules: names of the modules that run on the host; the device holds nothing of them.

        Raises:
            ConfigError: a name that is no module of the model, or a model that is sharded already.
        """
        names = list(unit_names)
        known = {name for name, _ in module.named_modules()}
        for name in names:
            if name not in known:
                raise ConfigError(f"unit {name!r} is no module of {type(module).__name__}.{nearest(name, known)}")
        depth_first = sorted(names, key=lambda name: -name.count("."))
        fixed = {name for name, child in module.named_modules() if getattr(child, "running_mean", None) is not None}
        before, after = _used_around_units(module, names)
        elsewhere = tuple(f"{name}." for name in host_modules)
        held: dict[str, list[ParameterSpec]] = {name: [] for name in [*names, ROOT]}
        for name, parameter in module.named_parameters():  # tied parameters come once, under their first name
            if hasattr(parameter, "placements"):
                raise ConfigError(f"parameter {name!r} is sharded already. Call ModelSpec.from_module before sharding.")
            if name.startswith(elsewhere):
                continue
            owner = next((unit for unit in depth_first if name.startswith(f"{unit}.")), ROOT)
            held[owner].append(
                ParameterSpec(
                    name=name,
                    shape=tuple(parameter.shape),
                    dtype=dtype_name(parameter.dtype),
                    trainable=parameter.requires_grad,
                    used_before=owner == ROOT and name in before,
                    used_after=owner == ROOT and name in after,
                    keeps_dtype=name.rpartition(".")[0] in fixed,
                )
            )
        return cls(
            units=tuple(UnitSpec(name, tuple(held[name])) for name in names if held[name]),
            root=UnitSpec(ROOT, tuple(held[ROOT])) if held[ROOT] else None,
            buffers=tuple(
                ParameterSpec(
                    name, tuple(b.shape), dtype_name(b.dtype), False, keeps_dtype=name.rpartition(".")[0] in fixed
                )
                for name, b in module.named_buffers()
                if not name.startswith(elsewhere)
            ),
        )


def _used_around_units(module: Any, unit_names: list[str]) -> tuple[set[str], set[str]]:
    """Names of the root's parameters that forward uses before the units, and of those that it uses after them.

    The order of definition is taken for the order of use. A tied head is defined after the units under a second name,
    or, when it reads the table in ``forward``, not at all: where no matrix is defined after the units, the matrices
    before them are taken for tied. That errs to the safe side: their gradient is planned to live longer.
    """
    first_name: dict[int, str] = {}
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    seen_unit = False
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(id(parameter), name)
        if any(name.startswith(f"{unit}.") for unit in unit_names):
            seen_unit = True
        else:
            (after if seen_unit else before)[first] = len(parameter.shape)
    has_head = any(dims > 1 for dims in after.values())
    tied = set() if has_head or not seen_unit else {name for name, dims in before.items() if dims > 1}
    return set(before), set(after) | tied


def dtype_name(dtype: Any) -> str:
    """``torch.bfloat16 -> "bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The ranks and what each holds.

    Attributes:
        world: number of ranks.
        replicate: replicas; weights are sharded over ``world / replicate`` ranks.
        device_bytes: memory of one rank's device; None where it is not known.
    """

    world: int
    replicate: int = 1
    device_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.world < 1 or self.replicate < 1 or self.world % self.replicate:
            raise ConfigError(
                f"replicate={self.replicate} must divide the {self.world} ranks. Choose a divisor of {self.world}."
            )

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of the weights."""
        return self.world // self.replicate


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of one rank.

    Attributes:
        device_bytes: most bytes on the device; None: all that the cluster's device has.
    """

    device_bytes: int | None = None


PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    """Dtypes by name.

    Attributes:
        name: as the trainer calls it.
        storage: of the sharded weights; None: as the model has them.
        compute: of the gathered weights and of the gradients that backward makes; None: as stored.
        reduce: of the gradients in communication; None: as computed.
    """

    name: str
    storage: str | None = None
    compute: str | None = None
    reduce: str | None = None

    @classmethod
    def named(cls, name: str) -> PrecisionSpec:
        """The trainer's precisions; gradients are always reduced in float32.

        Raises:
            ConfigError: a precision that memwall does not have.
        """
        match name:
            case "32-true":
                return cls(name)
            case "bf16-true":
                return cls(name, storage="bfloat16", compute="bfloat16", reduce="float32")
            case "bf16-mixed":
                return cls(name, compute="bfloat16", reduce="float32")
            case "16-mixed":
                return cls(name, compute="float16", reduce="float32")
            case _:
                raise ConfigError(
                    f"precision={name!r} is not one of {', '.join(PRECISIONS)}.{nearest(name, PRECISIONS)}"
                )


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The state that an optimizer keeps for each parameter it steps.

    Attributes:
        name: of the optimizer.
        like: state key -> dtype name, or None for the parameter's own: tensors of the parameter's shape.
        scalar_bytes: bytes of the state tensors whose size does not depend on the parameter (step counters).
        master: it steps a float32 copy of each coarser weight, which is part of the state.
    """

    name: str
    like: Mapping[str, str | None] = field(default_factory=dict)
    scalar_bytes: int = 0
    master: bool = False

    def state_of(self, stored: str) -> dict[str, str]:
        """State key -> dtype name, of a parameter that is stored in dtype ``stored``."""
        fine = self.needs_master(stored)
        own = {key: dtype or ("float32" if fine else stored) for key, dtype in self.like.items()}
        return own | ({"master": "float32"} if fine else {})

    def needs_master(self, stored: str) -> bool:
        """Whether a parameter in this dtype has a float32 copy."""
        return self.master and stored in ("bfloat16", "float16")

    @classmethod
    def named(cls, name: str, *, momentum: float = 0.0, amsgrad: bool = False) -> OptimizerSpec:
        """torch's optimizers with their default options.

        Raises:
            ConfigError: an optimizer that is not listed; ``from_optimizer`` reads any other from the object.
        """
        step_bytes = ITEM_BYTES["float32"]  # torch keeps a float32 counter a parameter
        moments = {"exp_avg": None, "exp_avg_sq": None}
        match name.lower():
            case "adamw" | "adam":
                return cls(name, moments | ({"max_exp_avg_sq": None} if amsgrad else {}), step_bytes)
            case "sgd":
                return cls(name, {"momentum_buffer": None} if momentum else {})
            case "adagrad":
                return cls(name, {"sum": None}, step_bytes)
            case "rmsprop":
                return cls(name, {"square_avg": None} | ({"momentum_buffer": None} if momentum else {}), step_bytes)
            case "adamax":
                return cls(name, {"exp_avg": None, "exp_inf": None}, step_bytes)
            case _:
                known = ("adamw", "adam", "sgd", "adagrad", "rmsprop", "adamax")
                raise ConfigError(
                    f"optimizer {name!r} is not one of {', '.join(known)}.{nearest(name, known)} "
                    "Pass OptimizerSpec.from_optimizer(optimizer) for any other."
                )

    @classmethod
    def from_optimizer(cls, optimizer: Any) -> OptimizerSpec:
        """Read any torch optimizer's state from one step of its class, with its options, on two throw-away matrices.

        The optimizer itself, its parameters and its state are not touched.

        Raises:
            ConfigError: state of a size that is neither the parameter's nor constant, or a class whose constructor
                needs more than its defaults.
        """
        import torch

        accepted = inspect.signature(type(optimizer).__init__).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        found: list[tuple[dict[str, str], int]] = []
        for shape in _PROBE_SHAPES:
            parameter = torch.nn.Parameter(torch.zeros(shape))
            parameter.grad = torch.zeros(shape)
            try:
                probe = type(optimizer)([parameter], **options)
            except TypeError as error:
                raise ConfigError(
                    f"the state of {type(optimizer).__name__} cannot be read: {error}. "
                    "Pass OptimizerSpec(name, like=..., scalar_bytes=...) with its state tensors."
                ) from error
            probe.step()
            tensors = {k: v for k, v in probe.state[parameter].items() if isinstance(v, torch.Tensor)}
            like = {k: dtype_name(v.dtype) for k, v in tensors.items() if tuple(v.shape) == shape}
            found.append((like, sum(v.numel() * v.element_size() for k, v in tensors.items() if k not in like)))
        if found[0] != found[1]:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps state whose size is neither the parameter's nor constant. "
                "Pass OptimizerSpec(name, like=..., scalar_bytes=...) with the nearest description."
            )
        like, scalar_bytes = found[0]
        own = {key: None if dtype == "float32" else dtype for key, dtype in like.items()}
        return cls(type(optimizer).__name__, own, scalar_bytes)


_PROBE_SHAPES = ((4, 6), (3, 10))
"""Two matrices without a common dimension: state that matches both has the parameter's shape."""
