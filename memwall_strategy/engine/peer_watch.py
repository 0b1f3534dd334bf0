"""Agreement on what went wrong: every rank raises the same error, naming the same lost peers, within a bounded time.

Each process has a listener: a thread that sleeps on its own connection to the job's store until somebody writes to this
rank's mailbox. When a collective fails on any rank, that rank

1. lets its groups issue nothing more, and writes what failed into the store (the first to write counts);
2. cuts its groups, which frees its own threads and makes its neighbours' collectives fail too;
3. writes to every mailbox, so that ranks busy elsewhere take part: each answers with how far it got;
4. accepts the verdict. One rank writes it (compare-and-set): who answered, whose process is gone, who stays silent.

Whoever is gone or silent was lost: ``PeerLost`` names them. If all answered, nobody was: ``CollectiveError`` says which
collective failed and who had not arrived. A rank whose process ended on this host is known to be gone at once, from the
process table; on another host it is silent, which takes ``grace_s`` to tell.

The store may die with the process that hosts it. Listeners notice that as a closed connection, and that process is
then the one that was lost. A process that ends in order says so first.

What it does not do: it sends no heartbeats, so a rank that merely hangs is noticed when a collective runs into the
group's timeout. It restarts nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from memwall_strategy.core.errors import CollectiveError, MemwallError, PeerLost
from memwall_strategy.engine.peer_notes import PeerNotes
from memwall_strategy.engine.peer_verdict import (
    REMEDY,
    Failure,
    Progress,
    Verdict,
    brief,
    has_ended,
    identity,
    judge,
)

DEFAULT_GRACE_S = 10.0
"""How long a rank may take to answer before it counts as silent; answering needs only its listener thread."""

_SLACK_S = 5.0
"""Allowance, beside the grace, for the store's own round trips and for others to read the verdict."""

_POLL_S = 0.02
_SLOW_POLL_S = 0.25  # stores other than TCPStore cannot wait without polling

_STORE_GONE_PAUSE_S = 1.0
"""After a closed store connection: time for collectives that are about to end well to do so."""

_IDLE = timedelta(days=20)
"""The listener's sleep. It is woken through its mailbox; a time-out of TCPStore would log a warning each time."""


class WatchedGroups(Protocol):
    """What the watch needs of this process's groups."""

    def retire(self) -> None:
        """Let no group issue another collective; returns at once."""

    def cut_retired(self) -> None:
        """Close the connections of what was retired."""

    def progress(self) -> Progress:
        """How far this process got on each group."""


@dataclass(slots=True)
class _Round:
    """One epoch's way from the first failure to the verdict."""

    started: bool = False
    settled: threading.Event = field(default_factory=threading.Event)
    verdict: Verdict | None = None

    def error(self) -> MemwallError:
        """A fresh instance for each raise: tracebacks of several threads must not mix."""
        return (PeerLost if self.verdict.lost else CollectiveError)(self.verdict.message, tuple(self.verdict.ranks))


class PeerWatch:
    """This process's part in the agreement.

    Args:
        store: the job's store; the watch makes connections of its own.
        session: number of the job's default group within this store, so that a later one finds no stale keys; None
            takes the session that the other ranks are in.
        rank, world: this process's global rank and their number.
        grace_s: see ``DEFAULT_GRACE_S``.
    """

    def __init__(
        self, store: dist.Store, groups: WatchedGroups, *, session: int | None, rank: int, world: int, grace_s: float
    ) -> None:
        self.rank, self.world, self.grace_s = rank, world, grace_s
        self.epoch = 0
        self._groups = groups
        self._lock = threading.Lock()
        self._rounds: dict[int, _Round] = {}
        self._notes: PeerNotes | None = None
        self._stopping = threading.Event()
        root = _root_of(store)
        self._is_tcp = isinstance(root, dist.TCPStore)
        # Private: nothing but TCPStore's repr says whether this process runs the server.
        self._hosts_store = self._is_tcp and "server=<nullptr>" not in repr(root)
        self._store_host: int | None = None
        self._store_left = self._store_gone = False
        # A TCPStore serves one call at a time: the sleeping listener and torch's own waits each need a connection.
        talk, ears = store.clone(), store.clone()
        self.session = int(talk.get("memwall-session")) if session is None else session
        talk.set("memwall-session", str(self.session))
        self._talk = dist.PrefixStore(f"memwall-watch/{self.session}", talk)
        self._ears = dist.PrefixStore(f"memwall-watch/{self.session}", ears)
        self._introduce()
        if self._hosts_store:
            self._talk.set("host", str(rank))
        self._listener = threading.Thread(target=self._listen, name="memwall-peer-watch", daemon=True)
        self._listener.start()

    # -- queries --

    def tripped(self, epoch: int) -> bool:
        """Whether a failure was noticed in ``epoch``, whether or not the verdict is there."""
        with self._lock:
            return epoch in self._rounds

    def error(self) -> MemwallError | None:
        """The verdict on the present epoch, or None. Never waits."""
        with self._lock:
            found = self._rounds.get(self.epoch)
        return found.error() if found is not None and found.settled.is_set() else None

    def notes(self) -> PeerNotes:
        """What the ranks write to each other in the present epoch."""
        if self._notes is None or self._notes.epoch != self.epoch:
            store = dist.PrefixStore(f"{self.epoch}/notes", self._talk)
            self._notes = PeerNotes(store, epoch=self.epoch, rank=self.rank, world=self.world, gone=self._gone)
        return self._notes

    # -- life --

    def connected(self) -> None:
        """The first group stands, so every rank has introduced itself: remember who hosts the store."""
        if self._talk.check(["host"]):
            self._store_host = int(self._talk.get("host"))

    def begin(self, epoch: int, timeout_s: float) -> None:
        """Enter ``epoch``, a new one, and return when every rank has; leaves the former epoch's failure behind.

        Raises:
            PeerLost: a rank did not come within ``timeout_s``.
        """
        with self._lock:
            self.epoch = epoch
        try:
            self._introduce()
            self._talk.set(f"{epoch}/entered/{self.rank}", "")
            self._ring([self.rank])  # a failure of this epoch may have been reported before we entered it
            everyone = [f"{epoch}/entered/{rank}" for rank in range(self.world)]
            deadline = time.monotonic() + timeout_s
            while not self._talk.check(everyone):
                if self.tripped(epoch) or time.monotonic() > deadline:
                    waited = f"not every rank entered epoch {epoch} within {timeout_s:.0f} s"
                    raise self.fail(epoch, self.failure("configure", waited))
                time.sleep(_POLL_S)
            self.connected()
        except dist.DistError as error:
            raise self.fail(epoch, self.failure("configure", brief(error))) from error

    def stop(self) -> None:
        """Say goodbye and end the listener. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._store_left or self._store_gone:  # talking to a store that is not there would log a warning
            self._listener.join(_STORE_GONE_PAUSE_S)  # a thread still in C++ when the interpreter ends would abort it
            return
        with contextlib.suppress(dist.DistError):  # it goes just now: then nobody can be told
            self._introduce(left=True)
            if self._hosts_store:
                self._talk.set("host-left", "")
                self._ring(range(self.world))
                others = [f"goodbye/{rank}" for rank in range(self.world) if rank != self.rank]
                self._wait_for(others, 0.0 if self.error() is not None else _SLACK_S)
                self._listener.join(_SLACK_S)
            else:
                self._ring([self.rank])
                self._listener.join(_SLACK_S)
                self._talk.set(f"goodbye/{self.rank}", "")  # last: the host may take the store away from now on
        self._listener.join(_STORE_GONE_PAUSE_S)  # also where the store went half way through: see above

    # -- failure --

    def failure(self, what: str, detail: str, group: str = "", group_ranks: tuple[int, ...] = ()) -> Failure:
        """A ``Failure`` that this rank noticed."""
        return Failure(rank=self.rank, what=what, group=group, group_ranks=group_ranks, detail=detail)

    def fail(self, epoch: int, failure: Failure | None) -> MemwallError:
        """Take part in the verdict on ``epoch`` and return the error to raise; bounded by the grace and some slack.

        Args:
            failure: what this rank noticed, or None where another rank reported.
        """
        with self._lock:
            if epoch != self.epoch and epoch not in self._rounds:
                return CollectiveError(f"{failure}: it was in flight when this process called configure().")
            first = epoch not in self._rounds
            this = self._rounds.setdefault(epoch, _Round())
        if first:
            self._groups.retire()
            threading.Thread(
                target=self._agree, args=(epoch, this, failure), name="memwall-verdict", daemon=True
            ).start()
        limit_s = self.grace_s + 2 * _SLACK_S
        if not this.settled.wait(limit_s):
            self._store_gone = True
            self._groups.cut_retired()
            self._settle_without_store(this, failure, f"did not answer within {limit_s:.0f} s")
        return this.error()

    def _agree(self, epoch: int, this: _Round, failure: Failure | None) -> None:
        try:
            if self._store_gone:
                raise dist.DistNetworkError(failure.detail if failure is not None else "connection closed")
            if failure is not None:
                self._talk.compare_set(f"{epoch}/failed", "", json.dumps(asdict(failure)))
            self._talk.set(f"{epoch}/report/{self.rank}", json.dumps(self._groups.progress()))
            self._groups.cut_retired()
            if failure is not None:
                self._ring(range(self.world))
            verdict = self._find_verdict(epoch)
            self._talk.set(f"{epoch}/read/{self.rank}", "")
            if self._hosts_store:  # this process may end as soon as it has the error: let the others read first
                self._wait_for([f"{epoch}/read/{rank}" for rank in verdict.answered], _SLACK_S)
            self._settle(this, verdict)
        except dist.DistError as error:
            self._store_gone = True
            self._groups.cut_retired()
            self._settle_without_store(this, failure, f"cannot be reached ({brief(error)})")

    def _find_verdict(self, epoch: int) -> Verdict:
        key = f"{epoch}/verdict"
        if self._talk.compare_set(f"{epoch}/decider", "", str(self.rank)) != str(self.rank).encode():
            self._wait_for([key], self.grace_s + _SLACK_S)
        if not self._talk.check([key]):  # this rank decides, or the one that should have is gone
            self._talk.compare_set(key, "", json.dumps(asdict(self._decide(epoch))))
        return Verdict(**json.loads(self._talk.get(key)))

    def _decide(self, epoch: int) -> Verdict:
        reports: dict[int, Progress] = {}
        lost: dict[int, str] = {}
        deadline = time.monotonic() + self.grace_s
        while missing := set(range(self.world)) - set(reports) - set(lost):
            late = time.monotonic() > deadline
            for rank in missing:
                key = f"{epoch}/report/{rank}"
                if self._talk.check([key]):
                    reports[rank] = json.loads(self._talk.get(key))
                    continue
                member = self._member(rank)
                if member is not None and member["epoch"] > epoch:
                    reports[rank] = {}  # it went on, and left this epoch behind
                elif why := self._gone(rank):
                    lost[rank] = why
                elif late:
                    lost[rank] = f"it did not answer within {self.grace_s:.0f} s"
            time.sleep(_POLL_S)
        failure = Failure(**json.loads(self._talk.get(f"{epoch}/failed")))
        return judge(failure, reports, lost, self.world)

    def _settle_without_store(self, this: _Round, failure: Failure | None, why: str) -> None:
        ranks = () if self._store_host in (None, self.rank) else (self._store_host,)
        whose = f", hosted by the process of rank {ranks[0]}," if ranks else ""
        left = " That process had ended its process group." if self._store_left else ""
        met = f" Met when {failure}." if failure is not None else ""
        self._settle(this, Verdict(True, ranks, f"the job's store{whose} {why}.{left}{met} {REMEDY}", ()))

    def _settle(self, this: _Round, verdict: Verdict) -> None:
        with self._lock:
            if not this.settled.is_set():
                this.verdict = verdict
                this.settled.set()

    # -- the listener --

    def _listen(self) -> None:
        mailbox = f"mail/{self.rank}"
        while True:
            try:
                came = self._mail_came(mailbox)
                if self._stopping.is_set():
                    return
                if not came:
                    continue
                self._ears.delete_key(mailbox)  # before reading the facts: a later fact rings again
                epoch = self.epoch
                failed = self._ears.check([f"{epoch}/failed"])
                if not failed and self._ears.check(["host-left"]):
                    self._store_left = True
                    self._ears.set(f"goodbye/{self.rank}", "")
                    return  # no more news will come
            except dist.DistError as error:
                if not self._stopping.wait(_STORE_GONE_PAUSE_S):
                    self._store_gone = True
                    self.fail(self.epoch, self.failure("waiting for news", brief(error)))
                return
            if failed:
                self.fail(epoch, None)

    def _mail_came(self, mailbox: str) -> bool:
        if not self._is_tcp:
            self._stopping.wait(_SLOW_POLL_S)
            return self._ears.check([mailbox])
        with contextlib.suppress(dist.DistStoreError):  # the idle sleep itself ran out
            self._ears.wait([mailbox], _IDLE)
            return True
        return False

    # -- the store --

    def _member(self, rank: int) -> dict[str, Any] | None:
        return json.loads(self._talk.get(f"member/{rank}")) if self._talk.check([f"member/{rank}"]) else None

    def _gone(self, rank: int) -> str:
        """Why this rank takes part no more, or an empty string."""
        member = self._member(rank)
        if member is None:
            return ""
        if member["left"]:
            return "it had ended its process group"
        return f"its process {member['pid']} ended" if has_ended(member) else ""

    def _introduce(self, *, left: bool = False) -> None:
        self._talk.set(f"member/{self.rank}", json.dumps({**identity(), "epoch": self.epoch, "left": left}))

    def _ring(self, ranks: Iterable[int]) -> None:
        keys = [f"mail/{rank}" for rank in ranks]
        self._talk.multi_set(keys, [""] * len(keys))

    def _wait_for(self, keys: list[str], timeout_s: float) -> None:
        """Return when all keys are there or the time is over. Polls: a time-out of TCPStore would log a warning."""
        deadline = time.monotonic() + timeout_s
        while not self._talk.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _root_of(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
