"""The training module: loss, what is logged, optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..text.options import PADDING
from .model import GPT
from .options import GPTOptions

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
SchedulerFactory = Callable[..., LRScheduler]


class GPTModule(L.LightningModule):
    """Trains a GPT to predict the next token.

    Args:
        options: the model's sizes.
        optimizer: takes parameter groups, returns the optimizer. Matrices and tables decay, vectors do not.
        scheduler: takes the optimizer and ``total_steps``, returns a schedule that is advanced every step.
    """

    def __init__(self, options: GPTOptions, optimizer: OptimizerFactory, scheduler: SchedulerFactory) -> None:
        super().__init__()
        self.options = options
        self.model = GPT(options)
        self._optimizer, self._scheduler = optimizer, scheduler
        self._padded, self._bytes_per_token = False, 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def setup(self, stage: str) -> None:
        """Ask the data what its tokens are."""
        data = getattr(self.trainer, "datamodule", None)
        self._padded = getattr(data, "padded", False)
        self._bytes_per_token = getattr(data, "bytes_per_token", 1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        """Mean loss of the micro-batch, and the number of tokens that it is the mean of.

        Where padding makes micro-batches of unequal numbers of tokens, the ranks' losses are weighted by these, so that
        every token of all ranks counts the same.
        """
        loss, tokens = self._loss(batch), self._tokens(batch)
        self.log("train/loss", loss)  # this rank's: a sum over ranks would cost a collective each step
        if self._padded:
            mean = self.trainer.strategy.reduce(torch.tensor(float(tokens), device=self.device), reduce_op="mean")
            loss = loss * (tokens / mean)
        return {"loss": loss, "tokens": tokens}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss, tokens = self._loss(batch), self._tokens(batch)
        bits = loss / math.log(2) / self._bytes_per_token
        self.log("val/loss", loss, sync_dist=True, batch_size=tokens)
        self.log("val/bits_per_byte", bits, sync_dist=True, batch_size=tokens)

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = self._optimizer(groups)
        schedule = self._scheduler(optimizer, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: Tensor) -> Tensor:
        """Mean over the tokens that are predicted."""
        # Padding comes last, so under the causal mask nothing that counts sees the token that stands in for it.
        logits = self.model(batch[:, :-1].clamp(min=0))
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), ignore_index=PADDING)

    def _tokens(self, batch: Tensor) -> int:
        """How many tokens are predicted; known without looking at the batch where nothing is padded."""
        targets = batch[:, 1:]
        return int((targets != PADDING).sum()) if self._padded else targets.numel()


def gpt(*, optimizer: OptimizerFactory, scheduler: SchedulerFactory, **options: Any) -> GPTModule:
    """Build from plain options, as a configuration file gives them."""
    return GPTModule(GPTOptions(**options), optimizer, scheduler)
