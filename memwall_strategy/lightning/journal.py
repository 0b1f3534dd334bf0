"""What a step's micro-batches were, so that they can be run again under Lightning's loop.

The loop moves on to the next batch after each micro-batch of an accumulated step; where the step has to begin anew, the
earlier ones are run again from here, outside the loop. It costs references to the step's batches until it ends.

Run again: ``training_step`` and the backward with its hooks (``on_before_backward``, ``on_after_backward``; for the
micro-batch that was broken ``on_before_zero_grad`` too). Not again: hooks around a batch, and what ``training_step``
logged: of the calls of ``self.log`` that a micro-batch makes, each counts the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memwall_strategy.engine.step_marks import RngMark


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch of the step under way."""

    start: RngMark = field(default_factory=RngMark)
    """Random states before its ``training_step``."""

    observed: bool = True
    """See ``Runtime.micro_batch``."""

    step_args: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    """Arguments of the strategy's ``training_step``."""

    backward_args: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    """Arguments of the strategy's ``backward`` beside the loss."""

    weight: float = 1.0
    """Of the batch."""

    logged: int = 0
    """Calls of ``log`` that count."""


class Journal:
    """The micro-batches of the step under way.

    Args:
        module: whose calls of ``log`` are counted.

    Attributes:
        current: the micro-batch that runs; None between two.
    """

    def __init__(self, module: Any) -> None:
        self.current: MicroBatch | None = None
        self._logger = module
        self._micro_batches: list[MicroBatch] = []
        self._skip = 0
        self._log = module.log
        module.log = self._count_log

    def begin(self, *, observed: bool) -> MicroBatch:
        """A micro-batch begins."""
        self.current = MicroBatch(observed=observed)
        self._micro_batches.append(self.current)
        self._skip = 0
        return self.current

    def end_step(self) -> None:
        """The step ended, well or not."""
        self._micro_batches.clear()
        self.current = None
        self._skip = 0

    def run_again(self, run: Callable[[MicroBatch], None]) -> None:
        """Run the micro-batches before the current one; then all is as it was before that one."""
        *earlier, current = self._micro_batches
        for micro_batch in earlier:
            self._start(micro_batch)
            run(micro_batch)
        self._start(current)

    def close(self) -> None:
        """Give the module its ``log`` back."""
        self.end_step()
        self._logger.__dict__.pop("log", None)

    def _start(self, micro_batch: MicroBatch) -> None:
        self.current, self._skip = micro_batch, micro_batch.logged
        micro_batch.start.restore()

    def _count_log(self, *args: Any, **options: Any) -> None:
        if self._skip:
            self._skip -= 1
            return
        self._log(*args, **options)
        if self.current is not None:
            self.current.logged += 1


def loss_in(output: torch.Tensor | Mapping[str, Any], micro_batches: int) -> torch.Tensor:
    """The loss of a ``training_step``'s output as Lightning's closure takes it."""
    return (output["loss"] if isinstance(output, Mapping) else output) / micro_batches
