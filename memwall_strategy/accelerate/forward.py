"""Around a prepared model's forward: the step begins, its phase is marked, precision is the policy's alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn

from memwall_strategy.core.block import Phase
from memwall_strategy.runtime import Runtime


class ForwardScope:
    """Hooks on one model.

    In mixed precision autocast is off inside the model, because FSDP2's policy casts already, and low-precision outputs
    come back in fp32, as from Accelerate's own models, so that losses are taken in fp32.

    Args:
        failed: called with what the forward raised.
    """

    def __init__(
        self, model: nn.Module, runtime: Runtime, *, mixed: bool, failed: Callable[[BaseException], None]
    ) -> None:
        self.runtime, self.mixed, self.failed = runtime, mixed, failed
        self.in_flight = False
        """A forward for training has run since the last step."""
        self._scope: ExitStack | None = None
        self._raised_before: BaseException | None = None
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),  # before the engine's own hook
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._close()  # of a forward that a KeyboardInterrupt ended
        if module.training and torch.is_grad_enabled():
            self.runtime.begin_step()
            self.in_flight = True
        self._raised_before = sys.exception()
        self._scope = ExitStack()
        self._scope.enter_context(self.runtime.phase(Phase.FORWARD))
        if self.mixed:
            self._scope.enter_context(torch.autocast(self.runtime.device.type, enabled=False))

    def _leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        self._close()
        # Always-called hooks run inside torch's own handler when the forward raised.
        raised, before, self._raised_before = sys.exception(), self._raised_before, None
        if raised is not None and raised is not before:
            self.failed(raised)
            return None
        return convert_to_fp32(output) if self.mixed else None

    def _close(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()

    def remove(self) -> None:
        """Take the hooks away."""
        self._close()
        for handle in self._handles:
            handle.remove()
