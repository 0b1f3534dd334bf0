"""Agreement among the ranks of a job: what fails on one rank raises the same error on all.

Every exchange runs a function on each rank, brings the results to the first rank, lets it decide, and hands each rank
its reply. A failure anywhere, the deciding included, travels as text, so that an exception that cannot be pickled
does no harm, and no rank is left waiting for another that has already given up.

The messages use a process group of their own: a save in the background must not mix with training's collectives.
Without ``torch.distributed``, or in a job of one rank, everything runs in place and nothing is sent.

It does not survive a lost rank: the wait ends with the group's timeout (gloo notices a closed connection at once) and
the error says so.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from memwall_strategy.core.errors import CheckpointError, MemwallError, PeerLost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
R = TypeVar("R")

_OK, _FAILED = "ok", "failed"


class Ranks:
    """The ranks that write or read one checkpoint together.

    Args:
        group: the process group for the messages; None for a job of one rank.
        timeout_s: the group's timeout, for the text of errors.
        undo: runs on the first rank when an exchange failed, before any rank raises.
    """

    def __init__(self, group: ProcessGroup | None, timeout_s: float, undo: Callable[[], object] | None = None) -> None:
        self.group, self.timeout_s, self.undo = group, timeout_s, undo
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.is_first = self.rank == 0
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    def exchange(self, what: str, local: Callable[[], T], decide: Callable[[list[T]], list[R]]) -> R:
        """Run ``local`` on every rank and ``decide`` on the first with all results; return this rank's reply.

        Args:
            what: the activity, for errors: "writing checkpoint X".

        Raises:
            CheckpointError: on every rank, with the same text, when any rank failed.
            PeerLost: a rank is gone.
        """
        mine, cause = _attempt(local)
        everyone: list[Any] = [None] * self.world_size
        if self.group is None:
            everyone = [mine]
        else:
            gathered = everyone if self.is_first else None
            self._send(what, lambda: dist.gather_object(mine, gathered, dst=self._first, group=self.group))
        replies: list[Any] = [None] * self.world_size
        if self.is_first:
            failed = {rank: text for rank, (verdict, text) in enumerate(everyone) if verdict == _FAILED}
            if not failed:
                decision, cause = _attempt(lambda: decide([value for _, value in everyone]))
                if decision[0] == _OK:
                    replies = [(_OK, reply) for reply in decision[1]]
                else:
                    failed = {0: decision[1]}
            if failed:
                replies = [(_FAILED, self._sentence(what, failed) + self._undone())] * self.world_size
        if self.group is None:
            reply = replies[0]
        else:
            box: list[Any] = [None]
            given = replies if self.is_first else None
            self._send(what, lambda: dist.scatter_object_list(box, given, src=self._first, group=self.group))
            reply = box[0]
        if reply[0] == _FAILED:
            raise CheckpointError(reply[1]) from cause
        return reply[1]

    def undoing(self, undo: Callable[[], object]) -> Ranks:
        """The same ranks, with something to undo on failure."""
        return Ranks(self.group, self.timeout_s, undo)

    def agree(self, what: str, local: Callable[[], T]) -> T:
        """Run ``local`` on every rank and return this rank's result; raise on all when it fails on any."""
        mine: list[T] = []
        self.exchange(what, lambda: mine.append(local()), lambda results: [None] * len(results))
        return mine[0]

    def first(self, what: str, local: Callable[[], T]) -> T:
        """Run ``local`` on the first rank only and return its result on all."""
        run = local if self.is_first else (lambda: None)
        return self.exchange(what, run, lambda results: [results[0]] * self.world_size)

    def _sentence(self, what: str, failed: dict[int, str]) -> str:
        if self.world_size == 1:
            return f"{what} failed: {failed[0]}"
        rank, text = min(failed.items())
        others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
        return f"{what} failed on rank {rank}{others}: {text}"

    def _undone(self) -> str:
        if self.undo is None:
            return ""
        (verdict, text), _ = _attempt(self.undo)
        return f" Cleaning up failed too: {text}" if verdict == _FAILED else ""

    def _send(self, what: str, collective: Callable[[], None]) -> None:
        try:
            collective()
        except MemwallError:
            raise
        except RuntimeError as error:
            raise CheckpointError(
                f"{what} stopped: another rank was lost or did not answer within {self.timeout_s:.0f} s. Nothing was "
                "committed; the last whole checkpoint stands. Look at the other ranks' output."
            ) from error


def message_group(timeout_s: float) -> ProcessGroup | None:
    """Make a gloo group over all ranks for checkpoint messages alone (collective); None in a job of one rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def _attempt(run: Callable[[], T]) -> tuple[tuple[str, Any], Exception | None]:
    try:
        return (_OK, run()), None
    except PeerLost:
        raise
    except Exception as error:  # noqa: BLE001 - told to every rank and raised there, never swallowed
        return (_FAILED, _describe(error)), error


def _describe(error: BaseException) -> str:
    """The text of an error; where an operating system's error lies beneath it, that one (torch.save hides it)."""
    if isinstance(error, MemwallError):
        return str(error)
    beneath: BaseException | None = error
    while beneath is not None and not isinstance(beneath, OSError):
        beneath = beneath.__cause__ or beneath.__context__
    found = beneath or error
    return f"{type(found).__name__}: {found}"
