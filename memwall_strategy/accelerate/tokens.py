"""Losses weighted by how many tokens (labels) they are the mean of: exact for unequal counts.

Every rank's mean loss is backpropagated times its count, divided by a reference: the count of all ranks in the step's
first micro-batch, so that magnitudes stay those of a mean. When the gradients are reduced, one factor turns the
reference into the count of all ranks and micro-batches. With one micro-batch a step the factor is one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from memwall_strategy.core.errors import ConfigError, MemwallError


class TokenWeights:
    """The counts of one step.

    Args:
        device: where the counts are summed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """A step ended or was dropped."""
        self._own, self._reference, self._micro_batches, self._counted = 0, 0.0, 0, None

    def weigh(self, loss: torch.Tensor, tokens: int | torch.Tensor | None) -> torch.Tensor:
        """The loss to backpropagate.

        Args:
            tokens: count of this rank's micro-batch; None where the step counts none.

        Raises:
            ConfigError: a negative count.
            MemwallError: some micro-batches of a step have a count and others have none.
        """
        if self._counted not in (None, tokens is not None):
            raise MemwallError(
                "acc.backward got tokens= in some micro-batches of a step and not in others. Pass it in all or in none."
            )
        self._counted = tokens is not None
        if tokens is None:
            return loss
        count = int(tokens)
        if count < 0:
            raise ConfigError(f"acc.backward(tokens={count}) is negative. Pass the number of labels that count.")
        self._own += count
        self._micro_batches += 1
        if self._micro_batches == 1:
            self._reference = float(max(1, self._sum(count)))
        if count == 0:  # the mean over nothing is not a number
            return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0
        return loss * (count * dist.get_world_size() / self._reference)

    def factor(self) -> float:
        """What the reduced gradients must be multiplied by now. Collective where a step has several micro-batches."""
        if not self._counted or self._micro_batches == 1:
            return 1.0
        total = float(max(1, self._sum(self._own)))
        factor, self._reference = self._reference / total, total
        return factor

    def _sum(self, count: int) -> int:
        if dist.get_world_size() == 1:
            return count
        summed = torch.tensor(count, dtype=torch.int64, device=self.device)
        dist.all_reduce(summed)
        return int(summed.item())
