"""Packed sequences of the token files, as a map-style dataset and a LightningDataModule."""

from __future__ import annotations

import lightning.pytorch as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .cache import TokenFiles, ensure_tokens
from .options import TextOptions


class PackedSequences(Dataset[torch.Tensor]):
    """Sequence ``i`` is tokens ``i * seq_len`` to ``(i + 1) * seq_len``, both included: inputs, and targets one later.

    Documents follow each other without padding, so every position is trained on; the last incomplete sequence is left
    out. The file is mapped: processes share its pages, and pickling the dataset (loader workers) copies only its name.
    """

    def __init__(self, files: TokenFiles, side: str, seq_len: int) -> None:
        self.files, self.side, self.seq_len = files, side, seq_len
        self._tokens: np.ndarray | None = None
        self._length = max(0, (files.meta[f"{side}_tokens"] - 1) // seq_len)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        """Tokens of one sequence: int64, ``(seq_len + 1,)``."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        if self._tokens is None:
            self._tokens = self.files.tokens(self.side)
        start = index * self.seq_len
        return torch.from_numpy(self._tokens[start : start + self.seq_len + 1].astype(np.int64))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tokens": None}


class TextData(L.LightningDataModule):
    """Training sequences in shuffled order, validation sequences in file order."""

    def __init__(self, options: TextOptions) -> None:
        super().__init__()
        self.options = options
        self.files: TokenFiles | None = None

    def setup(self, stage: str) -> None:
        """Map the token files; every rank does, the first one builds them if nobody has."""
        if self.files is None:
            self.files = ensure_tokens(self.options)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return self._loader("val", shuffle=False)

    def _loader(self, side: str, *, shuffle: bool) -> DataLoader[torch.Tensor]:
        assert self.files is not None, "Lightning calls setup before it asks for loaders"
        return DataLoader(
            PackedSequences(self.files, side, self.options.seq_len),
            batch_size=self.options.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,  # every training micro-batch has the same shape
            num_workers=self.options.workers,
            persistent_workers=self.options.workers > 0,
        )


def text_data(**options: object) -> TextData:
    """Build from plain options, as a configuration file gives them."""
    return TextData(TextOptions(**options))  # type: ignore[arg-type]
