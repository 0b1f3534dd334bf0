"""What the optimizer's arithmetic takes on the host: from its elements, and the cores that a rank may keep busy.

Ranks of one machine share its cores, within the quota of their control group; a rank uses whole threads, so that a
fraction of a core that is left over stays idle. The rates are of torch 2.13's AdamW in float32 on x86-64 servers, one
thread a core; other optimizers of the same shape (two moments) differ by tens of percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from memwall_strategy.core.errors import ConfigError

ELEMENTS_PER_CORE_S = {"fused": 0.95e9, "loop": 0.31e9, "foreach": 0.2e9}
"""Weights that one core steps per second: 1.9, 0.62 and 0.41 thousand million on two cores, by how AdamW is made
(``fused=True``; torch's default on CPU; ``foreach=True``)."""

KERNEL_BYTES = 28
"""What AdamW reads and writes for each float32 weight: three tensors both ways, the gradient once."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The host of one machine.

    Attributes:
        cores: that its ranks may keep busy together: what the CPU quota allows; None where it is not known.
        ranks: of this machine.
        threads: of each rank, where the user chose; None: its whole cores, at least one.
        link_bytes_per_s: that one device exchanges with the host, each way; None where it is not known.
        memory_bytes_per_s: that all its cores together read and write; None: the cores are the limit.
    """

    cores: float | None = None
    ranks: int = 1
    threads: int | None = None
    link_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("cores", "ranks", "threads", "link_bytes_per_s", "memory_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"HostSpec.{name}={value} must be above 0. For what is not known write None.")

    @property
    def rank_cores(self) -> float | None:
        """Cores that one rank keeps busy."""
        if self.cores is None:
            return None
        share = self.cores / self.ranks
        return min(share, self.threads or max(1, int(share)))

    def elements_per_s(self, kernel: str = "fused") -> float | None:
        """Weights that one rank steps per second.

        Args:
            kernel: a key of ``ELEMENTS_PER_CORE_S``.
        """
        if (cores := self.rank_cores) is None:
            return None
        rate = cores * ELEMENTS_PER_CORE_S[kernel]
        if self.memory_bytes_per_s is None:
            return rate
        return min(rate, self.memory_bytes_per_s / self.ranks / KERNEL_BYTES)


@dataclass(frozen=True, slots=True)
class HostArithmetic:
    """The optimizer's arithmetic on one rank's host.

    Attributes:
        elements: weights that it steps there in each step.
        kernel: ``fused``, ``loop`` or ``foreach``.
        cores: that it keeps busy; ranks: of the machine, which share ``machine_cores``.
        seconds: of each step, if nothing else uses the cores; None where they are not known.
    """

    elements: int
    kernel: str
    cores: float | None
    machine_cores: float | None
    ranks: int
    seconds: float | None

    def text(self) -> str:
        """One line for the table."""
        what = f"optimizer on the host: {self.elements:,} elements a step and rank ({self.kernel})"
        if self.seconds is None:
            return f"{what}; how long that takes is not known: set hardware.host_cores"
        sharing = "alone" if self.ranks == 1 else f"{self.ranks} ranks share them"
        return (
            f"{what}, about {self.seconds:.3g} s on {self.cores:.3g} of the machine's {self.machine_cores:.3g} cores "
            f"({sharing})"
        )


def host_arithmetic(elements: int, host: HostSpec, kernel: str = "fused") -> HostArithmetic:
    """Predict what stepping so many weights on the host takes.

    Args:
        elements: of one rank.
        host: of its machine.
        kernel: a key of ``ELEMENTS_PER_CORE_S``.
    """
    rate = host.elements_per_s(kernel)
    seconds = None if rate is None else elements / rate
    return HostArithmetic(elements, kernel, host.rank_cores, host.cores, host.ranks, seconds)
