"""One optimizer step played through a ledger: what is alive at once, and the peak of each step phase.

The step follows FSDP2's own order of allocation and release, one unit at a time:

- forward of a unit: its shards are copied into one flat buffer, gathered there, and copied out into the gathered
  weights, flat and gathered alive together. The engine's synchronous path keeps the flat buffer until the next unit
  has copied out; the lanes' path drops it at once. After its forward a unit drops the gathered weights; the root
  keeps them until the end of backward;
- backward of a unit: gathered again (the next units' flat buffers are there already by prefetch), whole gradients grow
  beside the gathered weights, then these are dropped, the whole gradients are copied into the reduction's input,
  dropped, and the reduction's output becomes the sharded gradient;
- a unit that is retained stays gathered from its forward to its backward, and over the end of every micro-batch but the
  step's last one;
- where the next iteration begins early, the flat buffers that a forward would fill first are there from the step on;
- the reduction's inputs of at most ``reduce_buffers`` units are alive. On the lanes' path the play assumes the slowest
  link: no reduction ends before its buffer is needed, and the last ones of a micro-batch go on into the next forward.
  So the lanes' communication is an upper bound.

Not played: temporaries of single operations, of the optimizer and of the communication library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memwall_strategy.core.block import Kind, Phase


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Sizes of one unit on one rank, in bytes.

    Attributes:
        gathered: the whole weights, padded, in the dtype of the compute; the flat buffer is of the same size.
        cast: temporary of the conversion to the dtype of the compute; 0 where it is as stored.
        early_gradient: whole gradients that arrive when the unit's backward starts.
        late_gradient: the others; for all units but the root everything is late.
        whole_gradient: all of them in the dtype of the reduction, as they rest between micro-batches that are not
            reduced.
        whole_is_converted: whether that dtype is not the one that backward makes.
        reduce_input: of the reduction, padded.
        reduce_output: this rank's part of it.
        gradient: the sharded gradient, in the dtype of the weights.
        reduction_casts: whether the reduction's output is converted to become the gradient.
        waits: its backward ends only with the whole backward, since its inputs need no gradient.
    """

    gathered: int
    cast: int
    early_gradient: int
    late_gradient: int
    whole_gradient: int
    whole_is_converted: bool
    reduce_input: int
    reduce_output: int
    gradient: int
    reduction_casts: bool
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a step is run.

    Attributes:
        flats: whether there is a flat buffer (more than one rank shares the weights).
        prefetch: units gathered ahead; without lanes backward gathers at least one ahead, as the engine does.
        reduce_buffers: most reductions whose input is alive.
        lanes: gathers and reductions on lanes instead of the engine's own synchronous path.
        windows: bytes of this rank's share of shared windows, which stand for buffers; 0 without. Whether the ranks are
            on one host is not known here: counted is what takes more, the windows or the buffers.
        micro_batches: per optimizer step.
        keep_whole: reduce once per step and keep whole gradients between micro-batches.
        replicated: weights are replicated too, so unreduced shards wait for the last micro-batch.
        gradients_in_forward: the last step's gradients are alive in forward, as under Lightning, which sets them
            to None after the forward.
        gradients_on_host: between micro-batches the sharded gradients rest on the host; as many units as
            ``reduce_buffers`` may be on their way there.
        retained: the units, the root as the last of them, whose gathered weights stay.
        early: units, the root included, that are gathered for the next forward while the optimizer steps.
    """

    flats: bool
    prefetch: int
    reduce_buffers: int
    lanes: bool
    windows: int
    micro_batches: int
    keep_whole: bool
    replicated: bool
    gradients_in_forward: bool
    gradients_on_host: bool = False
    retained: frozenset[int] = frozenset()
    early: int = 0


@dataclass(slots=True)
class Ledger:
    """Live bytes per kind, and the highest total and the highest of each kind, per phase."""

    live: dict[str, int] = field(default_factory=dict)
    phase: Phase = Phase.IDLE
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    kind_peaks: dict[str, dict[str, int]] = field(default_factory=dict)

    def enter(self, phase: Phase) -> None:
        """Start a phase; what is alive counts in it from the first moment."""
        self.phase = phase
        self._note()

    def add(self, kind: str, size_bytes: int) -> None:
        """Book an allocation (positive) or a release (negative)."""
        self.live[kind] = self.live.get(kind, 0) + size_bytes
        if self.live[kind] < 0:
            raise AssertionError(f"the schedule released {-self.live[kind]} bytes of {kind} that it never allocated")
        if size_bytes > 0:
            self._note()

    def brief(self, kind: str, size_bytes: int) -> None:
        """Book something that is allocated and released before anything else happens."""
        self.add(kind, size_bytes)
        self.add(kind, -size_bytes)

    def move(self, source: str, target: str, size_bytes: int) -> None:
        """The same bytes under another kind."""
        self.live[source] -= size_bytes
        self.add(target, size_bytes)

    def _note(self) -> None:
        best = self.peaks.get(self.phase)
        if best is None or sum(self.live.values()) > sum(best.values()):
            self.peaks[self.phase] = dict(self.live)
        highest = self.kind_peaks.setdefault(self.phase, {})
        for kind, size_bytes in self.live.items():
            highest[kind] = max(highest.get(kind, 0), size_bytes)


class Step:
    """Plays optimizer steps of a model on one rank.

    Args:
        units: in forward order, without the root.
        root: None where no parameter is outside the units.
        resident: bytes per kind that stay from step to step, gradients excluded.
        activations: bytes that autograd saves, one entry a unit, then the root's.
    """

    def __init__(
        self,
        units: Sequence[UnitBytes],
        root: UnitBytes | None,
        resident: Mapping[str, int],
        activations: Sequence[int],
        schedule: Schedule,
    ) -> None:
        self.units, self.root, self.activations, self.schedule = list(units), root, list(activations), schedule
        self.ledger = Ledger(live=dict(resident))
        self._buffers = 0
        if schedule.windows:
            self.ledger.add(Kind.COMM, schedule.windows)
        self._flats: set[int] = set()
        self._whole: set[int] = set()
        self._held_flat = 0
        self._inputs: list[int] = []
        self._in_flight: list[tuple[int, bool]] = []
        self._converted = 0
        self._has_gradient: set[int] = set()
        self._leaving: list[int] = []
        self._has_whole: set[int] = set()
        self._has_partial: set[int] = set()
        self._last = False

    def play(self) -> Ledger:
        """Two steps: the second has everything that the first one leaves behind. Returns the second's ledger."""
        self._play_step()
        self.ledger.peaks, self.ledger.kind_peaks = {}, {}
        if not self.schedule.gradients_in_forward:
            self._drop_gradients()
        self._play_step()
        return self.ledger

    def _play_step(self) -> None:
        self.ledger.enter(Phase.IDLE)
        for micro_batch in range(self.schedule.micro_batches):
            self._last = micro_batch == self.schedule.micro_batches - 1
            self.ledger.enter(Phase.FORWARD)
            self._forward()
            if micro_batch == 0:
                self._drop_gradients()
            self.ledger.enter(Phase.BACKWARD)
            self._backward()
        self.ledger.enter(Phase.STEP)
        first = [] if self.root is None else [len(self.units)]
        for key in [*first, *range(len(self.units))][: self.schedule.early]:
            self._unshard(key)
        self.ledger.enter(Phase.IDLE)

    def _drop_gradients(self) -> None:
        for key in self._has_gradient:
            self.ledger.add(Kind.GRAD, -self._unit(key).gradient)
        self._has_gradient.clear()

    def _unit(self, key: int) -> UnitBytes:
        unit = self.root if key == len(self.units) else self.units[key]
        assert unit is not None
        return unit

    def _buffer(self, size_bytes: int) -> None:
        """A flat buffer comes, or goes (negative); windows stand for as many as they hold."""
        before = max(self._buffers, self.schedule.windows)
        self._buffers += size_bytes
        self.ledger.add(Kind.COMM, max(self._buffers, self.schedule.windows) - before)

    # -- gathering --

    def _unshard(self, key: int) -> None:
        unit = self._unit(key)
        if key in self._flats or key in self._whole or not self.schedule.flats:
            return
        self._buffer(unit.gathered)
        self.ledger.brief(Kind.COMM, unit.cast)
        self._flats.add(key)

    def _copy_out(self, key: int, forward: bool) -> None:
        if key in self._whole:
            return
        unit = self._unit(key)
        self.ledger.add(Kind.GATHERED, unit.gathered)
        self._whole.add(key)
        if forward:
            self._release_held_flat()  # the engine means to drop it before, but holds it until it returns
        if not self.schedule.flats:
            self.ledger.brief(Kind.COMM, unit.cast)
            return
        self._flats.discard(key)
        if forward and not self.schedule.lanes:
            self._held_flat = unit.gathered
        else:
            self._buffer(-unit.gathered)

    def _reshard(self, key: int) -> None:
        self.ledger.add(Kind.GATHERED, -self._unit(key).gathered)
        self._whole.discard(key)

    def _release_held_flat(self) -> None:
        self._buffer(-self._held_flat)
        self._held_flat = 0

    # -- forward and backward --

    def _forward(self) -> None:
        root = len(self.units)
        if self.root is not None:
            self._unshard(root)
            self._copy_out(root, forward=True)
        for ahead in range(min(self.schedule.prefetch, root)):
            self._unshard(ahead)
        for key in range(root):
            self._unshard(key)
            self._copy_out(key, forward=True)
            for ahead in range(key + 1, min(key + 1 + self.schedule.prefetch, root)):
                self._unshard(ahead)
            self.ledger.add(Kind.ACTIVATION, self.activations[key])
            if key not in self.schedule.retained:
                self._reshard(key)
        self._release_held_flat()
        if self.schedule.lanes:
            self._turn()
        self.ledger.add(Kind.ACTIVATION, self.activations[root])

    @property
    def _ahead_in_backward(self) -> int:
        return max(self.schedule.prefetch, 0 if self.schedule.lanes else 1)

    def _turn(self) -> None:
        """Gather what the backward starts with; lanes do so when the forward's last unit is through."""
        last = len(self.units) - 1
        for ahead in range(last, max(last - self._ahead_in_backward, -1), -1):
            self._unshard(ahead)

    def _backward(self) -> None:
        root, ahead_by = len(self.units), self._ahead_in_backward
        self._turn()
        if self.root is not None:
            self._new_gradient(root, self.root.early_gradient)
        self.ledger.add(Kind.ACTIVATION, -self.activations[root])
        waiting = []
        for key in reversed(range(root)):
            unit = self.units[key]
            self._unshard(key)
            self._copy_out(key, forward=False)
            for ahead in range(key - 1, max(key - 1 - ahead_by, -1), -1):
                self._unshard(ahead)
            self._new_gradient(key, unit.early_gradient + unit.late_gradient)
            self.ledger.add(Kind.ACTIVATION, -self.activations[key])
            if unit.waits:
                waiting.append(key)
            else:
                self._post_backward(key)
        if self.root is not None:
            self._new_gradient(root, self.root.late_gradient)
            self._post_backward(root)
        for key in waiting:
            self._post_backward(key)
        if self._last:
            self._finish_leaving()  # sums are waited for before they come back
        if self._last or self.schedule.gradients_on_host or not self.schedule.lanes:
            self._finish_reductions()  # on lanes the last few may go on into the next forward

    def _new_gradient(self, key: int, size_bytes: int) -> None:
        if key not in self._has_whole or self._unit(key).whole_is_converted:
            self.ledger.add(Kind.GRAD, size_bytes)  # else backward adds in place to what is there

    def _post_backward(self, key: int) -> None:
        unit = self._unit(key)
        if self._last or key not in self.schedule.retained:
            self._reshard(key)
        whole = unit.early_gradient + unit.late_gradient
        if self.schedule.keep_whole:
            first = key not in self._has_whole
            if unit.whole_is_converted and not (first and self._last):
                self.ledger.add(Kind.GRAD, -whole)  # converted, or added to what was converted before
                self.ledger.add(Kind.GRAD, unit.whole_gradient if first else 0)
                whole = unit.whole_gradient
            if not self._last:
                self._has_whole.add(key)
                return
            self._has_whole.discard(key)
        if not unit.reduce_input:
            return
        self._make_room()
        self._buffer(unit.reduce_input)
        self.ledger.add(Kind.GRAD, -whole)
        complete = self._last or not self.schedule.replicated
        self.ledger.add(self._output_kind, unit.reduce_output)
        if self.schedule.lanes:
            self._in_flight.append((key, complete))
        else:
            self._inputs.append(unit.reduce_input)
            self._end_reduction(key, complete)

    # -- reductions --

    def _make_room(self) -> None:
        """Wait until a further reduction may hold its input."""
        while len(self._inputs) >= self.schedule.reduce_buffers:
            self._buffer(-self._inputs.pop(0))
        while len(self._in_flight) >= self.schedule.reduce_buffers:
            self._end_first_in_flight()

    @property
    def _output_kind(self) -> str:
        """The lanes' outputs are gradients from the start; the engine's come from its communication's allocator."""
        return Kind.GRAD if self.schedule.lanes else Kind.COMM

    def _end_first_in_flight(self) -> None:
        key, complete = self._in_flight.pop(0)
        self._end_reduction(key, complete)
        self._buffer(-self._unit(key).reduce_input)

    def _end_reduction(self, key: int, complete: bool) -> None:
        """Turn the reduction's output into the sharded gradient, or into the part that waits for the replicas."""
        unit = self._unit(key)
        if not complete:
            if key in self._has_partial:
                self.ledger.add(self._output_kind, -unit.reduce_output)  # added to the part that is there
            else:
                self.ledger.move(self._output_kind, Kind.GRAD, unit.reduce_output)
                self._has_partial.add(key)
            return
        if unit.reduction_casts:
            self.ledger.add(Kind.GRAD, unit.gradient)
            if self.schedule.replicated and not self.schedule.lanes:
                self._converted += unit.reduce_output  # the engine holds what the replicas summed until backward ends
            else:
                self.ledger.add(self._output_kind, -unit.reduce_output)
        if key in self._has_partial:
            self.ledger.add(Kind.GRAD, -unit.reduce_output)
            self._has_partial.discard(key)
        if not unit.reduction_casts:
            self.ledger.move(self._output_kind, Kind.GRAD, unit.reduce_output)
        if self.schedule.gradients_on_host and not self._last:
            self._leave(unit.gradient)
            return
        if key in self._has_gradient:
            self.ledger.add(Kind.GRAD, -unit.gradient)  # added to the one that is there
        self._has_gradient.add(key)

    def _leave(self, size_bytes: int) -> None:
        """A gradient goes to the host; the slowest link is assumed: none ends before its turn is needed."""
        self._leaving.append(size_bytes)
        while len(self._leaving) > self.schedule.reduce_buffers:
            self.ledger.add(Kind.GRAD, -self._leaving.pop(0))

    def _finish_leaving(self) -> None:
        while self._leaving:
            self.ledger.add(Kind.GRAD, -self._leaving.pop(0))

    def _finish_reductions(self) -> None:
        while self._in_flight:
            self._end_first_in_flight()
        for size_bytes in self._inputs:
            self._buffer(-size_bytes)
        self.ledger.add(Kind.COMM, -self._converted)
        self._inputs.clear()
        self._converted = 0
