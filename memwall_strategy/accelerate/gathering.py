"""Gathering over ranks where the last step of a pass gives them unequal numbers of samples."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor

from memwall_strategy.engine.accelerate_bridge import active_loader


class GatherMethods:
    """``gather`` and ``gather_for_metrics``: each sample once, in the order of the data."""

    def gather(self, tensor: Any) -> Any:
        """Concatenate over ranks; in the last, uneven step of a pass ranks may give different numbers of rows."""
        if self._uneven() is None:
            return super().gather(tensor)
        return recursively_apply(self._gather_rows, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As ``gather``, without what a rank repeated so that all ranks make the same steps."""
        own_samples = self._uneven()
        if own_samples is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        repeats = own_samples[self.process_index] == 0
        if use_gather_object or not _all_tensors(input_data):
            return gather_object(input_data[:0] if repeats and isinstance(input_data, list) else input_data)
        return recursively_apply(lambda rows: self._gather_rows(rows, drop=repeats), input_data)

    def _uneven(self) -> list[int] | None:
        own_samples = getattr(active_loader(self), "own_samples", None)
        return None if own_samples is None or len(set(own_samples)) == 1 else own_samples

    def _gather_rows(self, rows: Tensor, *, drop: bool = False) -> Tensor:
        if rows.dim() == 0:
            return super().gather(rows)
        if drop:
            rows = rows[:0]
        counts = super().gather(torch.tensor([len(rows)], device=self.device)).tolist()
        if len(set(counts)) == 1:
            return super().gather(rows)
        most = max(counts)
        padded = torch.cat([rows, rows.new_zeros((most - len(rows), *rows.shape[1:]))])
        whole = super().gather(padded)
        return torch.cat([part[:count] for part, count in zip(whole.split(most), counts, strict=True)])


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
