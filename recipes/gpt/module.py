"""The training module: loss, what is logged, optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as L
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

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

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        """Mean loss of the micro-batch, and the number of tokens that it is the mean of."""
        loss = self._loss(batch)
        self.log("train/loss", loss)  # this rank's: a sum over ranks would cost a collective each step
        return {"loss": loss, "tokens": batch[:, 1:].numel()}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch))
        # A token is a byte; the ends of documents are counted as bytes too.
        self.log("val/bits_per_byte", loss / math.log(2), sync_dist=True, batch_size=len(batch))

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
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def gpt(*, optimizer: OptimizerFactory, scheduler: SchedulerFactory, **options: Any) -> GPTModule:
    """Build from plain options, as a configuration file gives them."""
    return GPTModule(GPTOptions(**options), optimizer, scheduler)
