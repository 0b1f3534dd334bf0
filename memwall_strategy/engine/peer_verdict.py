"""The words of a verdict: what failed, which processes are gone, and the one message that every rank raises.

Pure functions and the process table; talking to the other ranks is ``peer_watch``'s part.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

Progress = dict[str, tuple[int, str]]
"""For each group, by name: collectives issued so far, and the last one's name."""

STICKY = "Every later collective raises this error again."
REMEDY = f"{STICKY} Resume from the last checkpoint."


@dataclass(frozen=True, slots=True)
class Failure:
    """What the first rank to notice saw; travels through the store as JSON."""

    rank: int
    """Global rank that noticed."""

    what: str
    """The collective, e.g. ``"allreduce"``; empty where the rank itself gave up."""

    group: str
    """Name of the group, or an empty string where no group was involved."""

    group_ranks: tuple[int, ...]
    """Global ranks of that group."""

    detail: str
    """The backend's own message, one line, or why the rank gave up."""

    def __str__(self) -> str:
        if not self.what:
            return f"rank {self.rank} gave up: {self.detail}"
        where = f" on group {self.group!r} (ranks {joined(self.group_ranks)})" if self.group else ""
        return f"{self.what}{where} failed on rank {self.rank}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks agree on; travels through the store as JSON."""

    lost: bool
    """Whether ranks were lost, or all are alive."""

    ranks: tuple[int, ...]
    """Ranks that were lost; with nobody lost, those that had not arrived or gave up."""

    message: str
    """Text of the error."""

    answered: tuple[int, ...]
    """Ranks that took part and will read the verdict."""


def judge(failure: Failure, reports: dict[int, Progress], lost: dict[int, str], world: int) -> Verdict:
    """The verdict on ``failure``.

    Args:
        reports: progress of each rank that answered.
        lost: why, for each rank that did not.
    """
    answered = tuple(sorted(reports))
    if lost:
        names = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(lost.items()))
        message = f"{len(lost)} of {world} ranks lost ({names}). Met first when {failure}. {REMEDY}"
        return Verdict(True, tuple(sorted(lost)), message, answered)
    if not failure.what:
        return Verdict(False, (failure.rank,), f"{failure}. All {world} ranks are alive. {STICKY}", answered)
    behind, why = _who_is_behind(failure, reports)
    message = (
        f"{failure}, though all {world} ranks are alive. {why} Look for code that only some ranks run, or for ranks "
        f"that are slower than the group's timeout allows. {STICKY}"
    )
    return Verdict(False, behind, message, answered)


def _who_is_behind(failure: Failure, reports: dict[int, Progress]) -> tuple[tuple[int, ...], str]:
    members = [rank for rank in failure.group_ranks if rank in reports and failure.group in reports[rank]]
    issued = {rank: reports[rank][failure.group][0] for rank in members}
    most = max(issued.values(), default=0)
    behind = tuple(rank for rank in members if issued[rank] < most)
    if behind:
        counts = joined(issued[rank] for rank in behind)
        return behind, f"Not arrived: rank {joined(behind)} (collective {counts} of {most})."
    called = {rank: reports[rank][failure.group][1] for rank in members}
    if len(set(called.values())) > 1:
        return (), f"The ranks called different collectives ({joined(f'rank {r}: {n}' for r, n in called.items())})."
    return (), "All its ranks had arrived." if members else ""


def brief(error: BaseException) -> str:
    """The first line of a backend's message, without source paths and advice."""
    line = re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", str(error).strip().split("\n")[0])
    return line.split(". This is typically caused")[0].split(" Did the remote server")[0].rstrip(".") or repr(error)


def joined(values: Iterable[object]) -> str:
    """The values with commas between."""
    return ", ".join(map(str, values))


# -- the process table --


def identity() -> dict[str, str | int]:
    """This process, so that others on the same host can tell whether it still runs; elsewhere ``host`` is empty."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return {"host": "", "pid": os.getpid(), "born": ""}
    host = f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return {"host": host, "pid": os.getpid(), "born": _state_and_birth(os.getpid())[1]}


def has_ended(member: dict[str, str | int]) -> bool:
    """Whether the process with this ``identity`` is known to have ended; False where it cannot be seen from here."""
    if not member["host"] or member["host"] != identity()["host"]:
        return False
    state, born = _state_and_birth(int(member["pid"]))
    return state in ("", "Z", "X") or born != member["born"]


def _state_and_birth(pid: int) -> tuple[str, str]:
    """State and start time of a process, see proc_pid_stat(5); empty where there is none."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]
