"""The life cycle that every pillar follows; the Runtime calls it in the order of the methods below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from memwall_strategy.runtime.runtime import Runtime


@runtime_checkable
class Pillar(Protocol):
    """One concern of memwall (pool, cluster, overlap, topology, resilience), switched by its config.

    Pillars do not know each other; they meet in the Runtime. ``BasePillar`` gives every method a body that does
    nothing, so a pillar states only what it does.
    """

    name: str

    def attach(self, runtime: Runtime) -> None: ...

    def optimizers_ready(self, runtime: Runtime) -> None: ...

    def before_step(self, runtime: Runtime) -> None: ...

    def after_backward(self, runtime: Runtime) -> None: ...

    def before_optimizer(self, runtime: Runtime) -> None: ...

    def after_step(self, runtime: Runtime) -> None: ...

    def on_failure(self, runtime: Runtime, error: BaseException) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class BasePillar:
    """A pillar that does nothing. Subclasses override the moments they care about."""

    name = "base"

    def attach(self, runtime: Runtime) -> None:
        """Called once, when model and mesh exist."""

    def optimizers_ready(self, runtime: Runtime) -> None:
        """Called when ``runtime.optimizers`` exist, and again when they were made anew."""

    def before_step(self, runtime: Runtime) -> None:
        """Called before the first micro-batch of an optimizer step."""

    def after_backward(self, runtime: Runtime) -> None:
        """Called when every gradient of the optimizer step is reduced and in place."""

    def before_optimizer(self, runtime: Runtime) -> None:
        """Called after clipping, just before the optimizer steps."""

    def after_step(self, runtime: Runtime) -> None:
        """Called when the weights are those of the next step."""

    def on_failure(self, runtime: Runtime, error: BaseException) -> None:
        """Called on every rank when the step was aborted; the engine's own state is already clean."""

    def metrics(self) -> dict[str, float]:
        """Figures of the last step under the names of the interface."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for this pillar to go on as if nothing had happened."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` returned."""

    def close(self) -> None:
        """Free threads, memory and files. Called once; must not raise because of an earlier failure."""
