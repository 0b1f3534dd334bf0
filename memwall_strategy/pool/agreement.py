"""What all ranks decide together: one number, the highest of all, and one error where any rank has one.

Over the default process group, on the training thread: lanes have groups of their own, so nothing is mixed up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from memwall_strategy.core.errors import ConfigError, MemwallError, PoolFull


class Agreement:
    """All ranks of the default process group; this process alone where there is none.

    Args:
        device: that collectives of the group work on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return not dist.is_initialized() or dist.get_world_size() == 1

    def highest(self, *values: int) -> tuple[int, ...]:
        """Of each value the highest that any rank has: one small all-reduce, on every rank."""
        if self.alone:
            return values
        shared = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return tuple(shared.tolist())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; for what is rare."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def fail_together(self, error: MemwallError | None) -> None:
        """Raise where any rank has an error: on each the first rank's that has one, named by its rank.

        Raises:
            PoolFull: that rank's error is one.
            ConfigError: it is another.
        """
        if self.alone:
            if error is not None:
                raise error
            return
        if not self.highest(int(error is not None))[0]:
            return
        own = None if error is None else (str(error), isinstance(error, PoolFull), getattr(error, "missing_bytes", 0))
        found = self.gather(own)
        rank = next(number for number, each in enumerate(found) if each is not None)
        text, full, missing_bytes = found[rank]
        if full:
            raise PoolFull(f"rank {rank}: {text}", tier="device", owner=rank, missing_bytes=missing_bytes) from error
        raise ConfigError(f"rank {rank}: {text}") from error
