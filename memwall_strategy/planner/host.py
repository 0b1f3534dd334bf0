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


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The host of one machine.

    Attributes:
        cores: that its ranks may keep busy together: what the CPU quota allows; None where it is not known.
        ranks: of this machine.
        threads: of each rank, where the user chose; None: its whole cores, at least one.
        link_bytes_per_s: that one device exchanges with the host, each way; None where it is not known.
    """

    cores: float | None = None
    ranks: int = 1
    threads: int | None = None
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, lowest in (("cores", 0.0), ("ranks", 1), ("threads", 1), ("link_bytes_per_s", 0.0)):
            value = getattr(self, name)
            if value is not None and (value < lowest or value == 0):
                raise ConfigError(f"HostSpec.{name}={value} must be above 0. For what is not known write None.")

    @property
    def rank_cores(self) -> float | None:
        """Cores that one rank keeps busy."""
        if self.cores is None:
            return None
        share = self.cores / self.ranks
        return min(share, self.threads or max(1, int(share)))


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
    cores = host.rank_cores
    seconds = None if cores is None else elements / (cores * ELEMENTS_PER_CORE_S[kernel])
    return HostArithmetic(elements, kernel, cores, host.cores, host.ranks, seconds)
