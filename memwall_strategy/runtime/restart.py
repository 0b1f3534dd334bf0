"""A rank that runs out of memory in a step: all ranks agree, make room, and begin the step anew; nobody waits for ever.

``StepRestart.protect`` runs what a step does up to its last gradient. When an allocation fails in it, on one rank or
several, in a unit or on a lane,

1. the rank leaves a note in the job's store (what it asked for, in which phase of which step) and reports the failure,
   which ends the collectives that the others wait in; these leave a note too;
2. everybody reads every note. All could begin the step anew: they do. Any could not (another error, another step, a
   run of the optimizer that had begun): all of them raise one ``RankOutOfMemory``;
3. the engine is reset, the step's gradients are dropped, new inner groups are built, and the pool lets things give way
   once (``pool.escalate``). If that frees nothing the second time in a step, all ranks raise ``RankOutOfMemory``;
4. random states and buffers are set back to the step's beginning, and the whole step is computed again, earlier
   micro-batches included, so that every gradient counts once and the result is the undisturbed one to the last bit.

It costs a copy of the random states (and of small buffers) a step, and whatever the front end keeps of earlier
micro-batches; at a restart, their computation once more. What a forward leaves elsewhere (a user's own counters, a
print) happens again.

Any other error of one rank is told to the others too, as it is: see ``tell_peers``. Where groups are not swappable
(NCCL by default, ``resilience.enabled=false``) nobody can be told; then the others end by their own timeout.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from memwall_strategy.core.block import Phase
from memwall_strategy.core.errors import CollectiveError, PeerLost, RankOutOfMemory, TransferError
from memwall_strategy.engine.out_of_memory import asked_bytes, out_of_memory
from memwall_strategy.engine.step_marks import BufferMark, modules_with_buffers
from memwall_strategy.engine.swap_group import configure, group_health, peer_lost, peer_notes, report_failure
from memwall_strategy.telemetry.events import EventKind, Events

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime

T = TypeVar("T")

_NOTES, _ENDED = "restart", "ended"

_SETTLE_S = 0.2
"""Before the groups are cut: what this rank has sent may still reach the others, so that they are in the same step."""

_TOGETHER_S = 2.0
"""How long a rank whose error ends its step waits whether all others met one too: then nobody is left waiting."""

_JOIN_S = 120.0
"""How long the ranks, which have agreed just now, wait for each other to build new groups."""

_REMEDIES = (
    "Use a smaller micro-batch with more accumulation, pool.activations='recompute', or a pool.device_budget below "
    "what the device has, so that the pool makes room before it is short."
)

_OPTIMIZER = "the optimizer had begun to step, and weights may have changed already. Resume from the last checkpoint"


class StepRestart:
    """What becomes of a step of ``runtime`` in which a rank fails."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._modules: list[nn.Module] | None = None
        self._buffers: BufferMark | None = None
        self._restarts = 0
        self.broke_in: Phase | None = None
        """The phase that an error broke."""

    @property
    def enabled(self) -> bool:
        """Whether a step can begin anew: this process is alone, or can reach the others without collectives."""
        return self._runtime.config.resilience.enabled and (_alone() or peer_notes() is not None)

    def begin(self) -> None:
        """A step begins, or begins anew."""
        self.broke_in = None
        if self.enabled:
            if self._modules is None:
                self._modules = modules_with_buffers(self._runtime.model)
            self._buffers = BufferMark(self._modules)

    def end(self) -> None:
        """The step ended well."""
        self._buffers, self._restarts = None, 0

    # -- around what may fail --

    def protect(
        self,
        work: Callable[[], T],
        again: Callable[[], None],
        refused: Callable[[], str] = lambda: "",
        *,
        stepping: bool = False,
    ) -> T:
        """Run ``work``; where a rank runs out of memory, make room and run ``again``, then ``work``, once more.

        Args:
            work: up to the step's last gradient, or a part of that.
            again: brings random states, and the micro-batches before ``work``, to where they were.
            refused: why the step cannot be computed again, or an empty string.
            stepping: ``work`` runs inside an optimizer's ``step``, as its closure.

        Raises:
            RankOutOfMemory: it cannot begin anew; on all ranks.
            Exception: what ``work`` raises otherwise.
        """
        repeats = False
        while True:
            try:
                if repeats:
                    again()
                return work()
            except Exception as error:
                if not self._concerns(error):
                    raise
                failed = error
                traceback.clear_frames(error.__traceback__)  # they hold the activations
            self._recover(failed, self._why_not(refused()), stepping)
            del failed
            repeats = True

    @contextmanager
    def named(self, refused: str = _OPTIMIZER) -> Iterator[None]:
        """Around what cannot be run again: all ranks raise ``RankOutOfMemory`` where one runs out of memory."""
        try:
            yield
        except Exception as error:
            if not self._concerns(error):
                raise
            self._recover(error, refused)

    def tell_peers(self, error: BaseException) -> None:
        """This rank leaves its step, or its run, with ``error``: others must not wait for it.

        Where all ranks leave at about the same time nobody waits, and the groups stay as they are; else their
        collectives raise a ``CollectiveError`` that quotes ``error``.
        """
        notes = peer_notes()
        if notes is None or _alone() or not self._runtime.config.resilience.enabled:
            return
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        try:
            if not _tripped():
                topic = notes.numbered(_ENDED)
                notes.write(topic, text)
                if len(notes.all_within(topic, _TOGETHER_S)) == notes.world:
                    return
            notes.write(_NOTES, self._note(None, f"it met {text}"))
            if not _tripped():
                report_failure(text)
        except dist.DistError as unreachable:  # the store went with its host: the others learn that by themselves
            error.add_note(f"the other ranks could not be told: {unreachable}")

    # -- agreement --

    def _concerns(self, error: Exception) -> bool:
        """Whether ``error`` is a shortage of memory on this rank, or comes from another rank's."""
        if isinstance(error, RankOutOfMemory) or not self.enabled:
            return False
        if out_of_memory(error) is not None:
            return True
        verdict = error if isinstance(error, CollectiveError) else peer_lost()
        if not isinstance(verdict, CollectiveError):
            return False
        notes = peer_notes()
        try:
            return notes is not None and any(note["text"] for note in notes.read(_NOTES, verdict.ranks).values())
        except dist.DistError:  # the store went with its host: the verdict on that is the error to raise
            return False

    def _why_not(self, refused: str) -> str:
        if not refused and self._buffers is None:
            return "no step had begun"
        if not refused and (name := self._buffers.changed_for_good()):
            return f"buffer {name!r} is too large to be kept for a restart, and the forward had changed it"
        return refused

    def _note(self, shortage: BaseException | None, refused: str) -> dict[str, Any]:
        text = "" if shortage is None else str(shortage).split("\n")[0] or type(shortage).__name__
        return {
            "text": text, "asked": 0 if shortage is None else asked_bytes(shortage), "refused": refused,
            "step": self._runtime.steps, "phase": str(self.broke_in or Phase.IDLE),
        }  # fmt: skip

    def _recover(self, error: Exception, refused: str, stepping: bool = False) -> None:
        """Agree with the others and bring everything to the step's beginning.

        Raises:
            RankOutOfMemory: the step cannot begin anew.
            PeerLost, CollectiveError: there is nobody to agree with any more.
        """
        start = time.monotonic()
        found = self._agree(out_of_memory(error), refused)
        short = {rank: note for rank, note in found.items() if note["text"]}
        first = next(iter(short.values()))
        self._tell(tuple(short), first)
        refusals = {rank: note["refused"] for rank, note in found.items() if note["refused"]}
        if not refusals and len({note["step"] for note in found.values()}) > 1:
            steps = ", ".join(f"rank {rank} in {note['step']}" for rank, note in found.items())
            refusals = {next(iter(short)): f"the ranks were in different steps ({steps}). Resume from a checkpoint"}
        if refusals:
            rank = min(refusals, key=lambda each: (each not in short, each))
            self._give_up(short, f"The step cannot begin anew: on rank {rank}, {refusals[rank]}.", error)
        self._reset(error)
        own = found[self._rank]
        freed_bytes = self._make_room(max(1, own["asked"]) if own["text"] else 0, stepping)
        self._restarts += 1
        if self._restarts > 1 and not freed_bytes:
            self._give_up(short, "Nothing is left that could give way.", error)
        self._buffers.restore()
        runtime = self._runtime
        runtime.begin_step()
        runtime.events.emit(
            EventKind.STEP_RESTARTED, ranks=tuple(short), freed_bytes=freed_bytes, restarts=self._restarts,
            duration_s=time.monotonic() - start,
        )  # fmt: skip

    def _agree(self, shortage: BaseException | None, refused: str) -> dict[int, dict[str, Any]]:
        note = self._note(shortage, refused)
        if _alone():
            return {self._rank: note}
        notes = peer_notes()
        try:
            notes.write(_NOTES, note)
            if shortage is not None and not _tripped():
                time.sleep(_SETTLE_S)
                verdict = report_failure(f"out of memory in {note['phase']}: {note['text']}")
                if isinstance(verdict, PeerLost):
                    raise verdict from shortage
            return dict(sorted(notes.all(_NOTES, self._runtime.config.timeout_s).items()))
        except dist.DistError as unreachable:
            raise PeerLost(f"the job's store was lost while the ranks agreed: {unreachable}") from unreachable

    @property
    def _rank(self) -> int:
        return 0 if _alone() else dist.get_rank()

    def _give_up(self, short: dict[int, dict[str, Any]], why: str, error: Exception) -> NoReturn:
        rank, note = next(iter(short.items()))
        others = f" (so did ranks {', '.join(map(str, list(short)[1:]))})" if len(short) > 1 else ""
        raise RankOutOfMemory(
            f"rank {rank} ran out of memory{others} in phase {note['phase']!r} of step {note['step']}: {note['text']} "
            f"{why} {_REMEDIES}",
            ranks=tuple(short), phase=note["phase"], asked_bytes=note["asked"],
        ) from error  # fmt: skip

    # -- back to the step's beginning --

    def _reset(self, error: Exception) -> None:
        runtime, health = self._runtime, group_health()
        runtime.drop_step()
        for pillar in runtime.pillars:
            pillar.on_failure(runtime, error)
        gc.collect()
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        if not _alone():
            configure(health.epoch + 1, timeout_s=min(_JOIN_S, runtime.config.timeout_s))

    def _make_room(self, missing_bytes: int, stepping: bool) -> int:
        pool = self._runtime.pool
        return pool.escalate(missing_bytes, stepping=stepping) if pool is not None else 0

    def _tell(self, ranks: tuple[int, ...], first: dict[str, Any]) -> None:
        held: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        pool = self._runtime.pool
        for row in pool.table.to_records() if pool is not None else ():
            held[row["tier"]][row["kind"]] += row["bytes"]
        self._runtime.events.emit(
            EventKind.OUT_OF_MEMORY, ranks=ranks, phase=first["phase"], asked_bytes=first["asked"],
            held={tier: dict(kinds) for tier, kinds in held.items()}, message=first["text"],
        )  # fmt: skip


def tell_failure(events: Events, error: BaseException) -> None:
    """The events of an error that broke a step."""
    text = str(error)
    if isinstance(error, PeerLost):
        events.emit(EventKind.PEER_LOST, ranks=error.ranks, message=text)
    elif isinstance(error, CollectiveError):
        events.emit(EventKind.COLLECTIVE_FAILED, ranks=error.ranks, message=text)
    elif isinstance(error, TransferError):
        events.emit(EventKind.LANE_FAILED, error=type(error).__name__, message=text)
    events.emit(EventKind.STEP_ABORTED, error=type(error).__name__, message=text)


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _tripped() -> bool:
    health = group_health()
    return health.settling or health.error is not None
