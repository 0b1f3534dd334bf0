"""Everything that ``memwall-train`` can be told, one dataclass a group, one docstring a field. Stdlib only.

These are the schemas that Hydra composes and the objects that check the values. Model and data have theirs beside
their recipe, the pillars have theirs in ``memwall_strategy.config``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memwall_strategy.config import Size, parse_size
from memwall_strategy.core.errors import ConfigError, nearest

ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
CLIPPING = ("norm", "value")
DEVICES = ("cpu", "cuda")
_ENDLESS_BYTES = 2**62
"""More than any device has."""


def _whole_number(option: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f"{option}={value!r} must be a whole number of at least {lowest}.")


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option}={value!r} is not one of {', '.join(allowed)}.{nearest(str(value), allowed)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerOptions:
    """Lightning's Trainer: where and how long."""

    accelerator: str = "auto"
    """Kind of device: auto, cpu, cuda."""

    devices: int | str = "auto"
    """Processes on this machine, one a device; on cpu they share the cores. auto: every device, on cpu one process."""

    num_nodes: int = 1
    """Machines that take part; on more than one, start the command through torchrun or Slurm on each."""

    precision: str = "32-true"
    """32-true, bf16-true, bf16-mixed or 16-mixed."""

    max_steps: int = -1
    """Optimizer steps of the run. -1: as max_epochs says."""

    max_epochs: int = -1
    """Times through the training text. -1: as max_steps says."""

    max_time: str | None = None
    """Stop after this long, as DD:HH:MM:SS. None: no limit."""

    accumulate_grad_batches: int = 1
    """Micro-batches of one optimizer step."""

    gradient_clip_val: float | None = None
    """Largest gradient norm (or value). None: no clipping."""

    gradient_clip_algorithm: str = "norm"
    """Clip by the global norm, or each value."""

    val_check_interval: int | float | None = None
    """Validate every so many micro-batches (a whole number), or this share of an epoch. None: as
    check_val_every_n_epoch says."""

    check_val_every_n_epoch: int | None = 1
    """Validate at the end of every so many epochs. null: val_check_interval counts on across epochs."""

    limit_train_batches: int | float = 1.0
    """Micro-batches of an epoch: a whole number, or a share."""

    limit_val_batches: int | float = 1.0
    """Micro-batches of a validation: a whole number, or a share."""

    num_sanity_val_steps: int = 0
    """Validation micro-batches before the first step."""

    log_every_n_steps: int = 1
    """Steps between two rows of metrics.csv."""

    deterministic: bool = False
    """Refuse operations whose result can differ from run to run."""

    detect_anomaly: bool = False
    """Find the operation that made a NaN; slow."""

    def __post_init__(self) -> None:
        _one_of("trainer.accelerator", self.accelerator, ACCELERATORS)
        _one_of("trainer.precision", self.precision, PRECISIONS)
        _one_of("trainer.gradient_clip_algorithm", self.gradient_clip_algorithm, CLIPPING)
        if isinstance(self.devices, str) and self.devices != "auto":
            raise ConfigError(f"trainer.devices={self.devices!r} must be a whole number of at least 1, or auto.")
        if isinstance(self.devices, int):
            _whole_number("trainer.devices", self.devices, 1)
        for name in ("num_nodes", "accumulate_grad_batches", "log_every_n_steps"):
            _whole_number(f"trainer.{name}", getattr(self, name), 1)
        for name in ("max_steps", "max_epochs"):
            if getattr(self, name) != -1:
                _whole_number(f"trainer.{name}", getattr(self, name), 1)
        if self.max_steps == self.max_epochs == -1 and self.max_time is None:
            raise ConfigError(
                "Nothing says when the run ends: trainer.max_steps, trainer.max_epochs and trainer.max_time are all "
                "unset. Set one, such as trainer.max_steps=1000."
            )
        if self.gradient_clip_val is not None and self.gradient_clip_val <= 0:
            raise ConfigError(
                f"trainer.gradient_clip_val={self.gradient_clip_val} must be above 0. For no clipping write null."
            )
        for name in ("limit_train_batches", "limit_val_batches", "val_check_interval"):
            value = getattr(self, name)
            if value is not None and (value < 0 or (isinstance(value, float) and value > 1.0)):
                raise ConfigError(
                    f"trainer.{name}={value} is neither a whole number of micro-batches nor a share between 0 and 1."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWOptions:
    """AdamW."""

    lr: float = 1e-3
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decay of matrices and tables; vectors (norms, biases) do not decay."""

    fused: bool = True
    """torch's fused kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDOptions:
    """Stochastic gradient descent."""

    lr: float = 0.1
    """Peak learning rate."""

    momentum: float = 0.0
    """Share of the last update that is kept."""

    weight_decay: float = 0.0
    """Decay of matrices and tables; vectors (norms, biases) do not decay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CosineOptions:
    """Warm-up, then half a cosine down."""

    warmup_steps: int = 20
    """Steps of the linear rise."""

    final_factor: float = 0.1
    """Learning rate at the end, over the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantOptions:
    """Warm-up, then no change."""

    warmup_steps: int = 20
    """Steps of the linear rise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathsOptions:
    """Where files go."""

    root: str = "runs"
    """Folder of all runs; a run gets root/name/date_time."""

    run_folder: str | None = None
    """This run's folder, instead of root/name/date_time."""

    cache_dir: str | None = None
    """Where token files are kept between runs. None: $XDG_CACHE_HOME/memwall or ~/.cache/memwall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareOptions:
    """The machine that the plan and the MFU are for; what is null is found or measured on this one."""

    name: str = "local"
    """What it is called in the plan."""

    device: str | None = None
    """cpu or cuda. None: what trainer.accelerator finds here."""

    device_memory: Size | None = None
    """Memory of one device: the plan's limit, and what a fraction in pool.device_budget is a fraction of. None: as
    found here, shared by the ranks."""

    fp32_flops: float | None = None
    """Operations per second of one device in fp32 products. None: measured in the run; no compute time is planned."""

    bf16_flops: float | None = None
    """The same in bf16."""

    fp16_flops: float | None = None
    """The same in fp16."""

    link_bytes_per_s: float | None = None
    """Bytes that one device receives per second from others of its machine. None: no communication time is planned."""

    network_bytes_per_s: float | None = None
    """Bytes that one device receives per second from other machines."""

    devices_per_machine: int | None = None
    """Devices that share the fast links. None: all of them."""

    host_cores: float | None = None
    """CPU cores of one machine, which its ranks share. None: as found here, within the CPU quota, where the plan is for
    this machine."""

    host_link_bytes_per_s: float | None = None
    """Bytes that one device exchanges with the host per second, each way. None: measured in the run; which units step
    on the host is then not planned."""

    host_memory_bytes_per_s: float | None = None
    """Bytes that all cores of one machine together read and write per second. None: its cores are the limit."""

    def __post_init__(self) -> None:
        if self.device is not None:
            _one_of("hardware.device", self.device, DEVICES)
        if self.device_memory is not None:
            if isinstance(self.device_memory, float):
                raise ConfigError(
                    f"hardware.device_memory={self.device_memory} is a fraction; it says how much there is. "
                    "Write a size, such as hardware.device_memory=80GiB."
                )
            if not parse_size(self.device_memory, option="hardware.device_memory", available_bytes=_ENDLESS_BYTES):
                raise ConfigError("hardware.device_memory=0 leaves no room. Write a size, or null for what is here.")
        for name in (
            "fp32_flops", "bf16_flops", "fp16_flops", "link_bytes_per_s", "network_bytes_per_s", "host_cores",
            "host_link_bytes_per_s", "host_memory_bytes_per_s",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"hardware.{name}={value} must be above 0. For what is not known write null.")
        if self.devices_per_machine is not None:
            _whole_number("hardware.devices_per_machine", self.devices_per_machine, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointsOptions:
    """What is saved, and when. The state at the end of a run is always saved."""

    enabled: bool = True
    """false: save nothing."""

    every_n_steps: int | None = None
    """Write last.ckpt anew every so many steps. None: after each validation."""

    keep_best: int = 1
    """Most checkpoints kept beside the last: those with the lowest validation loss. 0: none; -1: all."""

    def __post_init__(self) -> None:
        if self.every_n_steps is not None:
            _whole_number("checkpoints.every_n_steps", self.every_n_steps, 1)
        _whole_number("checkpoints.keep_best", self.keep_best, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimOptions:
    """One promise of a recipe, and the figure of summary.json that it is held against."""

    what: str
    """The promise in words."""

    figure: str
    """Name of the figure in summary.json."""

    at_most: float | None = None
    """Largest value that keeps the promise."""

    at_least: float | None = None
    """Smallest value that keeps the promise."""

    how: str = ""
    """How the figure is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """A run."""

    name: str = "train"
    """Names the run folder's parent."""

    seed: int = 0
    """Of weights, dropout and the order of the data."""

    ckpt_path: str | None = None
    """Go on from this checkpoint; last: the newest whole one of this run folder, or of the runs of this name."""

    progress_every_n_steps: int = 10
    """Steps between two lines of progress where there is no terminal for a bar."""

    checkpoints: CheckpointsOptions = field(default_factory=CheckpointsOptions)
    """What is saved, and when."""

    claims: tuple[ClaimOptions, ...] = ()
    """Promises of this recipe, shown beside what was measured."""

    def __post_init__(self) -> None:
        _whole_number("seed", self.seed, 0)
        _whole_number("progress_every_n_steps", self.progress_every_n_steps, 1)
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ConfigError(f"name={self.name!r} must be a folder's name, such as name=first_try.")
