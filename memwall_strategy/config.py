"""Configuration: one frozen dataclass per pillar, one docstring per field, checked when made.

Stdlib only, so that a wrong option is found before torch is imported and before any process starts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from fractions import Fraction
from typing import Any

from memwall_strategy.core.errors import ConfigError, nearest

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?i?b?)\s*$", re.IGNORECASE)
_FACTOR = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("", 1000), ("ib", 1024), ("i", 1024))
}
_ENDLESS_BYTES = 2**62
"""More than any device has; exact as a float."""

RETAIN = ("auto", "none", "all")
"""Values of ``PoolConfig.retain``."""

ACTIVATIONS = ("auto", "keep", "offload", "recompute", "selective")
"""Values of ``PoolConfig.activations``; of a unit all but the first."""

OPTIMIZER_ON = ("auto", "device", "host")
"""Values of ``PoolConfig.optimizer_on``."""

MASTERS = ("none", "float32")
"""Values of ``PoolConfig.master``."""

GRADIENTS = ("device", "host")
"""Values of ``PoolConfig.gradients``."""

Size = str | int | float
"""``"512MiB"``, ``"8GB"``, an int of bytes, or a float in (0, 1]: that fraction of what is there."""

PER_RANK = ("device_budget", "host_budget", "disk_budget")
"""Fields of ``PoolConfig`` that may differ by rank."""

RankSizes = Size | tuple[Size, ...]
"""One size for every rank, or one entry per rank, in the order of the ranks."""


def parse_size(value: Size, *, option: str, available_bytes: int | None = None) -> int:
    """Return a size in bytes.

    Args:
        value: see ``Size``.
        option: name of the option, for the error.
        available_bytes: what there is; needed for fractions and, when given, the upper bound.

    Raises:
        ConfigError: not a size, negative, a fraction of something unknown, or more than there is.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{option}={value!r} is not a size. Write it as '512MiB', '8GiB', bytes, or a fraction.")
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None or match[2].lower() not in _FACTOR:
            raise ConfigError(f"{option}={value!r} is not a size. Write it as '512MiB', '8GiB', bytes, or a fraction.")
        if "." in match[1] and not match[2]:
            value = float(match[1])
        else:
            value = int(Fraction(match[1]) * _FACTOR[match[2].lower()])
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise ConfigError(f"{option}={value} is a fraction outside (0, 1]. For bytes write an int or '{value}GiB'.")
        if available_bytes is None:
            raise ConfigError(f"{option}={value} is a fraction of memory whose size is not known here. Write bytes.")
        value = int(value * available_bytes)
    if value < 0:
        raise ConfigError(f"{option}={value} is negative.")
    if available_bytes is not None and value > available_bytes:
        raise ConfigError(
            f"{option}={format_size(value)} is above the {format_size(available_bytes)} that are there. "
            f"Lower it, or give a fraction such as {option}=0.9."
        )
    return value


def format_size(size_bytes: float) -> str:
    """Write bytes for people: ``1536 -> '1.5 KiB'``."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024 or suffix == "GiB":
            return f"{size_bytes:.0f} B" if suffix == "B" else f"{size_bytes:.1f} {suffix}"
        size_bytes /= 1024
    raise AssertionError("unreachable")


def _unknown_option(owner: str, name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"{owner} has no option {name!r}.{nearest(name, known)} Known options: {', '.join(sorted(known))}."
    )


def _names_its_options(cls: type) -> type:
    """A misspelt keyword is a ``ConfigError`` with the nearest option, not Python's ``TypeError``."""
    plain, known = cls.__init__, {f.name for f in fields(cls)}

    @functools.wraps(plain)
    def __init__(self: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise _unknown_option(cls.__name__, name, known)
        plain(self, **options)

    cls.__init__ = __init__
    return cls


def _check_bool(owner: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), bool):
            raise ConfigError(f"{_where(owner, name)}={getattr(owner, name)!r} must be true or false.")


def _check_int(owner: object, name: str, lowest: int) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f"{_where(owner, name)}={value!r} must be a whole number of at least {lowest}.")


def _check_choice(owner: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in allowed:
        raise ConfigError(
            f"{_where(owner, name)}={value!r} is not one of {', '.join(allowed)}.{nearest(str(value), allowed)}"
        )


def check_entries(pool: PoolConfig, world: int) -> None:
    """A list of sizes must have one entry per rank.

    Raises:
        ConfigError: one has another length.
    """
    for name in PER_RANK:
        value = getattr(pool, name)
        if isinstance(value, tuple) and len(value) != world:
            raise ConfigError(
                f"pool.{name}={list(value)} has {len(value)} entries for {world} ranks. Give one entry for each rank, "
                "in their order, or one size for all."
            )


def _check_sizes(owner: object, name: str) -> list[int]:
    """Check a ``RankSizes`` (a list becomes a tuple); each entry in bytes, none where it is not set."""
    value = getattr(owner, name)
    if isinstance(value, list):
        value = tuple(value)
        object.__setattr__(owner, name, value)
    if value is None:
        return []
    if value == ():
        raise ConfigError(f"{_where(owner, name)}=[] is a list without an entry. Give one size, or one for each rank.")
    entries = value if isinstance(value, tuple) else (value,)
    return [parse_size(each, option=_where(owner, name), available_bytes=_ENDLESS_BYTES) for each in entries]


def _where(owner: object, name: str) -> str:
    group = type(owner).__name__.removesuffix("Config").lower()
    return name if group == "memwall" else f"{group}.{name}"


@_names_its_options
@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Memory: what the run may hold, and how closely it is watched."""

    enabled: bool = True
    """Count live bytes per kind and step phase and hold them against the budget."""

    device_budget: RankSizes | None = None
    """Most bytes that a rank may hold for the model on its device: weights, gradients, optimizer state, gathered
    weights, buffers, communication buffers and, where they are measured, activations. A list gives each rank its own.
    Set-up fails by name when the model cannot fit; a step that passes the budget makes the next ones hold less (see
    ``activations``), and stops the run where nothing is left to free. None: all that is there."""

    host_budget: RankSizes | None = None
    """Most bytes of host memory that a rank may take for what does not fit on its device; a list: one entry per rank.
    Only what is needed is mapped. None: the rank's share of what is unused, within the container's limit."""

    disk_budget: RankSizes = 0
    """Most bytes on disk for what fits neither on device nor host; a list: one entry per rank; needs ``disk_path``.
    The file has no name and is gone with the process. Five staging buffers of 1 MiB on the host come with it, beside
    ``host_budget``."""

    reserve: Size = 0
    """Part of ``device_budget`` that is kept free, as a visible block: ``runtime.pool.reserve.lend`` lends it to second
    buffers, snapshots and migration, and a step that is short gets it first. A fraction is one of the budget."""

    disk_path: str | None = None
    """A folder on a local disk."""

    optimizer_units: int = 2
    """Units whose optimizer state may be on the device at a time while it is paged: one steps, the others come and go.
    More hide slower transfers and take more of ``device_budget``."""

    optimizer_on: str = "auto"
    """Where units are stepped whose optimizer state rests on the host: ``device`` pages the state in and out;
    ``host`` leaves it there, so that gradients go down and new weights come up instead (on CPU nothing moves at all);
    ``auto`` takes the cheaper by the rates measured at set-up. On CPU all give the same bits; on CUDA only ``device``
    gives those of the unpaged run, the host's kernels round otherwise."""

    master: str = "none"
    """``float32``: the optimizer steps a float32 copy of each bfloat16 or float16 weight (``bf16-true``), and the
    weight is rounded from it, so that small updates add up. Copies are optimizer state: counted, paged and saved."""

    activations: str = "auto"
    """What every unit does with its activations between forward and backward: ``keep``; ``offload`` to the host tier
    (needs ``host_budget``); ``recompute``; ``selective``: recompute all but matrix products and attention; ``auto``:
    keep, and where a step passes ``device_budget``, first page out optimizer state, then recompute, then offload, which
    makes room for second buffers too. To
    know, ``auto`` with a budget counts activations in the first steps and every 50th (saved-tensor hooks, a few percent
    of such a step); the other values count them with ``deep_accounting`` only. ``runtime.pool.set_activations`` mixes
    them."""

    retain: str = "auto"
    """Units whose gathered weights stay on the device from forward to backward, and from one micro-batch of a step to
    the next: ``none``; ``all``; ``auto``: as many as ``device_budget`` leaves room for (none without a budget).
    ``runtime.pool.retention.set`` names them one by one."""

    phases: bool = True
    """Follow the training phase (warmup, steady, converging): while training converges, room that retention leaves
    holds whole gradients, which are reduced once a step. Needs ``device_budget`` and several micro-batches a step.
    False: the mapping of the first step for good."""

    phase_window: int = 20
    """Optimizer steps after which the training phase is judged."""

    host_modules: tuple[str, ...] = ()
    """Modules that run on the host, by name (``"net.embedding"``) or class: their weights, gradients and optimizer
    state rest there, sharded over the ranks' hosts, and are gathered, computed with and stepped there; inputs and
    outputs are carried over. Exact. Their bytes count against ``host_budget`` and not against ``device_budget``."""

    gradients: str = "device"
    """Where gradients rest between the micro-batches of a step: ``device``, or ``host``: each unit's reduced gradient
    is added to a sum on the host and let go, and the last micro-batch brings the sums back. Takes as many bytes of
    ``host_budget`` as a rank's gradients have; ``parameter.grad`` is None between micro-batches. The arithmetic is
    that of ``device`` to the last bit."""

    deep_accounting: bool = False
    """Also count the activations that autograd saves (saved-tensor hooks; for planning, costs a few percent)."""

    def __post_init__(self) -> None:
        _check_bool(self, "enabled", "phases", "deep_accounting")
        _check_choice(self, "retain", RETAIN)
        _check_int(self, "phase_window", 4)
        # How much there is is not known yet; whatever it is, a value must be a size, or a fraction in (0, 1].
        _check_sizes(self, "device_budget")
        _check_sizes(self, "host_budget")
        if any(_check_sizes(self, "disk_budget")) and self.disk_path is None:
            raise ConfigError(
                f"pool.disk_budget={self.disk_budget!r} says how much, not where. Set pool.disk_path to a folder on a "
                "local disk."
            )
        if parse_size(self.reserve, option="pool.reserve", available_bytes=_ENDLESS_BYTES) and (
            self.device_budget is None
        ):
            raise ConfigError(
                f"pool.reserve={self.reserve!r} is a part of pool.device_budget, which is not set. Set that too."
            )
        _check_int(self, "optimizer_units", 2)
        _check_choice(self, "optimizer_on", OPTIMIZER_ON)
        _check_choice(self, "master", MASTERS)
        if self.activations not in ACTIVATIONS:
            raise ConfigError(
                f"pool.activations={self.activations!r} is not one of {', '.join(ACTIVATIONS)}."
                f"{nearest(str(self.activations), ACTIVATIONS)}"
            )
        if isinstance(self.host_modules, str) or not isinstance(self.host_modules, Iterable):
            raise ConfigError(f"pool.host_modules={self.host_modules!r} must be a sequence of names or classes.")
        names = tuple(m if isinstance(m, str) else getattr(m, "__name__", repr(m)) for m in self.host_modules)
        object.__setattr__(self, "host_modules", names)
        if names and not self.enabled:
            raise ConfigError("pool.host_modules needs the pool. Set pool.enabled=true, or leave it out.")
        _check_choice(self, "gradients", GRADIENTS)
        if self.gradients == "host" and not self.enabled:
            raise ConfigError("pool.gradients='host' needs the pool. Set pool.enabled=true, or leave it out.")
        if self.activations == "offload" and self.host_budget is None:
            raise ConfigError(
                "pool.activations='offload' takes host memory, but how much depends on the batch. Set "
                "pool.host_budget, e.g. '8GiB', or use pool.activations='recompute'."
            )


@_names_its_options
@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapConfig:
    """Communication in the shadow of compute."""

    enabled: bool = True
    """Off: the engine's own schedule, untouched."""

    lanes: bool = True
    """On CPU/gloo, run all-gathers and reduce-scatters on lanes of their own instead of on the training thread. On
    CUDA the engine's streams do this; the option then only sets the number of reduction buffers."""

    prefetch: int = 1
    """How many units ahead weights are gathered, in forward and in backward. With lanes, in the order in which units
    really run; above 1 it is the most, and each unit goes as far ahead as the first steps' times ask for. Fewer where
    ``pool.device_budget`` has no room for them and nothing else can give way; so with ``reduce_buffers``."""

    reduce_buffers: int = 2
    """Most units whose gradients may be in flight at a time; each holds one unit's whole gradient."""

    shared_memory: bool | str = "auto"
    """Between ranks of one host, lanes gather and reduce through shared memory instead of gloo's sockets. ``auto``:
    every sharded group whose ranks are all on one host (one boot, one network namespace, one user); ``true``: refused
    where a group is not; ``false``: never. Linux on x86-64. With more than two shards, sums are made in another order
    than gloo's, so last bits may differ. Holds ``prefetch + 2`` units' gathered weights for all ranks of the host
    together, and ``reduce_buffers`` units' gradients for each."""

    non_dumpable: bool = False
    """Keep other processes of the same user out of this one's memory, windows included, as far as the kernel can
    (PR_SET_DUMPABLE). Its price: no debugger or profiler can attach, no core is dumped, and files under /proc/self
    belong to root, which some tools need."""

    optimizer_in_backward: bool = False
    """Each unit steps inside the backward, as soon as its gradients are there, and lets go of them: less memory for
    gradients, and optimizer state is paged in the shadow of the backward. Lightning's automatic optimization, one
    micro-batch a step; refused with clipping, a gradient scaler, or a hook between backward and step."""

    next_iteration_early: bool = True
    """With lanes: gather the first units' new weights as soon as they are stepped, for the next forward. An edit in
    between, even through ``.data``, is found by comparing bits and gathered anew."""

    trace: bool = False
    """Keep every transfer's start and end for ``Runtime.write_trace``."""

    def __post_init__(self) -> None:
        _check_bool(
            self, "enabled", "lanes", "non_dumpable", "optimizer_in_backward", "next_iteration_early", "trace"
        )
        _check_int(self, "prefetch", 0)
        _check_int(self, "reduce_buffers", 1)
        if self.shared_memory != "auto" and not isinstance(self.shared_memory, bool):
            raise ConfigError(f"overlap.shared_memory={self.shared_memory!r} must be auto, true or false.")
        if self.shared_memory is True and self.enabled and not self.lanes:
            raise ConfigError("overlap.shared_memory=true works on the lanes. Set overlap.lanes=true, or use auto.")


@_names_its_options
@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyConfig:
    """Links and balance. Not part of this version: ``enabled=True`` is refused."""

    enabled: bool = False
    """Measure links and balance micro-batches by them."""

    def __post_init__(self) -> None:
        _refuse_future(
            self,
            "measurement of links with balance of micro-batches",
            "replicate=N for sharding inside racks of equal size",
        )


@_names_its_options
@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Dynamic clustering by gradient activity. Not part of this version: ``enabled=True`` is refused."""

    enabled: bool = False
    """Cluster units by activity and treat clusters differently."""

    def __post_init__(self) -> None:
        _refuse_future(self, "dynamic clustering", "cluster.enabled=false")


def _refuse_future(owner: object, what: str, instead: str) -> None:
    _check_bool(owner, "enabled")
    if owner.enabled:  # type: ignore[attr-defined]
        raise ConfigError(f"{_where(owner, 'enabled')}=true: {what} is not in this version. Use {instead}.")


@_names_its_options
@dataclass(frozen=True, kw_only=True, slots=True)
class ResilienceConfig:
    """Faults as normal events."""

    enabled: bool = True
    """Off: the engine's own process groups and errors, untouched."""

    swappable_groups: bool | None = None
    """Use process groups whose inner group can be replaced, so that a lost peer raises one sticky ``PeerLost`` on
    every rank instead of a hang. None: on with gloo, off with NCCL (where it has not run on real cards yet)."""

    def __post_init__(self) -> None:
        _check_bool(self, "enabled")
        if self.swappable_groups is not None:
            _check_bool(self, "swappable_groups")


ACCUMULATE = ("sharded", "whole")
CHECKPOINT_FORMATS = ("sharded", "full")


@_names_its_options
@dataclass(frozen=True, kw_only=True, slots=True)
class MemwallConfig:
    """Everything that can be set, one part per pillar."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    """Memory."""

    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    """Lanes and prefetch."""

    topology: TopologyConfig = field(default_factory=TopologyConfig)
    """Links and balance."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Activity of units."""

    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """Faults."""

    replicate: int = 1
    """Number of replicas (HSDP): weights are sharded over world / replicate ranks, gradients summed over replicas."""

    unit_classes: tuple[str, ...] = ()
    """Names of the module classes that become units. Empty: a Hugging Face model's ``_no_split_modules``, else the
    longest repeated ``ModuleList``."""

    accumulate: str = "sharded"
    """How gradients rest between micro-batches: ``sharded`` reduces in the rack each micro-batch and across replicas
    once (least memory); ``whole`` keeps each rank's whole gradient and reduces once (least communication)."""

    checkpoint: str = "sharded"
    """``sharded``: a folder with one file per rank, loadable at another world size. ``full``: one file on rank 0."""

    async_checkpoint: bool = False
    """Write sharded checkpoints in the background; holds one copy of the rank's shards in host memory meanwhile."""

    timeout_s: float = 1800.0
    """Longest wait of any collective or lane, in seconds."""

    def __post_init__(self) -> None:
        _check_int(self, "replicate", 1)
        _check_choice(self, "accumulate", ACCUMULATE)
        _check_choice(self, "checkpoint", CHECKPOINT_FORMATS)
        _check_bool(self, "async_checkpoint")
        if isinstance(self.unit_classes, str) or not isinstance(self.unit_classes, Iterable):
            raise ConfigError(f"unit_classes={self.unit_classes!r} must be a sequence of class names or classes.")
        names = tuple(c if isinstance(c, str) else getattr(c, "__name__", repr(c)) for c in self.unit_classes)
        object.__setattr__(self, "unit_classes", names)
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not number or not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds.")
        if self.async_checkpoint and self.checkpoint == "full":
            raise ConfigError("async_checkpoint=true needs checkpoint='sharded'; a full file is written at once.")
        for part in fields(self):
            if part.name in _PARTS and not isinstance(getattr(self, part.name), _PARTS[part.name]):
                raise ConfigError(
                    f"{part.name}={getattr(self, part.name)!r} must be a {_PARTS[part.name].__name__}. "
                    f"Write {part.name}={_PARTS[part.name].__name__}(...)."
                )
        if self.overlap.enabled and self.overlap.optimizer_in_backward and not self.pool.enabled:
            raise ConfigError(
                "overlap.optimizer_in_backward=true steps through the pool. Set pool.enabled=true, or leave it out."
            )
        if self.pool.gradients == "host":
            self._check_host_gradients()

    def _check_host_gradients(self) -> None:
        met = {
            "accumulate='whole' (gradients are reduced after the last micro-batch only)": self.accumulate == "whole",
            f"replicate={self.replicate} (sums wait for the other replicas inside the engine)": self.replicate > 1,
            "overlap.optimizer_in_backward=true (units step before sums are whole)": (
                self.overlap.enabled and self.overlap.optimizer_in_backward
            ),
        }
        if reason := next((reason for reason, holds in met.items() if holds), None):
            raise ConfigError(f"pool.gradients='host' and {reason} cannot go together. Take one of them out.")


_PARTS: dict[str, type] = {
    "pool": PoolConfig,
    "overlap": OverlapConfig,
    "topology": TopologyConfig,
    "cluster": ClusterConfig,
    "resilience": ResilienceConfig,
}


def config_from(options: Mapping[str, Any], *, owner: str = "MemwallStrategy") -> MemwallConfig:
    """Build a ``MemwallConfig`` from keywords or nested mappings (as Hydra gives them).

    Raises:
        ConfigError: an unknown option, with the nearest known one, or a value that its field refuses.
    """
    return _build(MemwallConfig, options, owner)


def _build(cls: type, options: Mapping[str, Any], where: str) -> Any:
    known = {f.name for f in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise _unknown_option(where, name, known)
        part = _PARTS.get(name) if cls is MemwallConfig else None
        if part is not None and not is_dataclass(value):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}={value!r} must be a {part.__name__} or a mapping of its options.")
            value = _build(part, value, part.__name__)
        elif isinstance(value, list):
            value = tuple(value)
        values[name] = value
    return cls(**values)
