"""A stand-in for copies to a device: what nobody handed over is not there yet."""

from __future__ import annotations

import threading
from typing import Any

import torch

from memwall_strategy.runtime.input_lane import leaves


class Standin:
    """Moves batches into memory of its own, which is NaN, or -1, until it was handed over.

    Attributes:
        copied: names of the threads that copied a batch, one entry a batch.
        handed: batches handed over so far.
    """

    made: Standin | None = None

    def __init__(self, device: torch.device) -> None:
        type(self).made = self
        self.copied: list[str] = []
        self.handed = 0
        self.changed = threading.Condition()

    def copy(self, move: Any, batch: Any) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
        contents: list[tuple[torch.Tensor, torch.Tensor]] = []
        moved = _replaced(move(batch), contents)
        with self.changed:
            self.copied.append(threading.current_thread().name)
            self.changed.notify_all()
        return moved, contents

    def hand_over(self, batch: Any, mark: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        there = {id(leaf) for leaf in leaves(batch)}
        for place, content in mark:
            assert id(place) in there, "leaves found every tensor that was moved"
            place.copy_(content)
        self.handed += 1

    def wait_for_copies(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.copied) >= count, 60), self.copied


def _replaced(batch: Any, contents: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(batch, torch.Tensor):
        place = torch.full_like(batch, float("nan") if batch.is_floating_point() else -1)
        contents.append((place, batch))
        return place
    if isinstance(batch, dict):
        return type(batch)((key, _replaced(value, contents)) for key, value in batch.items())
    if isinstance(batch, list):
        return [_replaced(each, contents) for each in batch]
    return batch
