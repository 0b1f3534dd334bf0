"""Sequences of the token files, as map-style datasets and a LightningDataModule.

Workers, shuffling and resuming are PyTorch's and memwall's: a map-style dataset under a plain DataLoader is all that
``runtime.data`` needs to go on in the middle of an epoch.
"""

from __future__ import annotations

import lightning.pytorch as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .cache import TokenFiles, ensure_tokens
from .options import PADDING, TextOptions


class _Sequences(Dataset[torch.Tensor]):
    """Cuts a mapped token file. Processes share its pages; pickling it (loader workers) copies only its name."""

    def __init__(self, files: TokenFiles, side: str, seq_len: int) -> None:
        self.files, self.side, self.seq_len = files, side, seq_len
        self._tokens: np.ndarray | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        """Tokens of one sequence: int64, ``(seq_len + 1,)``."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        if self._tokens is None:
            self._tokens = self.files.tokens(self.side)
        start, stop = self._span(index)
        row = np.full(self.seq_len + 1, PADDING, dtype=np.int64)
        row[: stop - start] = self._tokens[start:stop]
        return torch.from_numpy(row)

    def _span(self, index: int) -> tuple[int, int]:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tokens": None}


class PackedSequences(_Sequences):
    """Sequence ``i`` is tokens ``i * seq_len`` to ``(i + 1) * seq_len``, both included: inputs, and targets one later.

    Documents follow each other without padding, so every position is trained on; the last incomplete sequence is left
    out. A position may attend to the end of the document before its own.
    """

    def __init__(self, files: TokenFiles, side: str, seq_len: int) -> None:
        super().__init__(files, side, seq_len)
        self._length = max(0, (files.meta[f"{side}_tokens"] - 1) // seq_len)

    def _span(self, index: int) -> tuple[int, int]:
        start = index * self.seq_len
        return start, start + self.seq_len + 1


class DocumentSequences(_Sequences):
    """Each document by itself, in as many sequences as it takes, the last one padded with ``PADDING``.

    No position sees another document. Every token but each document's first is predicted once, its end token included.
    """

    def __init__(self, files: TokenFiles, side: str, seq_len: int) -> None:
        super().__init__(files, side, seq_len)
        self._ends = files.ends(side)
        lengths = np.diff(self._ends, prepend=0)
        self._sequences = np.cumsum(-(-(lengths - 1) // seq_len))  # up to and with each document
        self._length = int(self._sequences[-1]) if len(self._sequences) else 0

    def _span(self, index: int) -> tuple[int, int]:
        document = int(np.searchsorted(self._sequences, index, side="right"))
        first, begin = (int(self._sequences[document - 1]), int(self._ends[document - 1])) if document else (0, 0)
        start = begin + (index - first) * self.seq_len
        return start, min(start + self.seq_len + 1, int(self._ends[document]))


class TextData(L.LightningDataModule):
    """Training sequences in shuffled order, validation sequences in file order.

    Attributes:
        files: the token files, from ``setup`` on.
    """

    def __init__(self, options: TextOptions) -> None:
        super().__init__()
        self.options = options
        self.files: TokenFiles | None = None

    @property
    def padded(self) -> bool:
        """Whether sequences may hold padding, so that micro-batches differ in tokens."""
        return not self.options.pack

    @property
    def bytes_per_token(self) -> float:
        """Of the validation text; the end of a document counts as one byte and one token."""
        assert self.files is not None
        meta = self.files.meta
        return (meta["val_bytes"] + meta["val_documents"]) / meta["val_tokens"]

    def setup(self, stage: str) -> None:
        """Map the token files; every rank does, the first one builds them if nobody has."""
        if self.files is None:
            self.files = ensure_tokens(self.options)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return self._loader("train", shuffle=self.options.shuffle)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return self._loader("val", shuffle=False)

    def _loader(self, side: str, *, shuffle: bool) -> DataLoader[torch.Tensor]:
        assert self.files is not None, "Lightning calls setup before it asks for loaders"
        kind = PackedSequences if self.options.pack else DocumentSequences
        return DataLoader(
            kind(self.files, side, self.options.seq_len),
            batch_size=self.options.batch_size,
            shuffle=shuffle,
            drop_last=side == "train",  # every training micro-batch has the same shape
            num_workers=self.options.workers,
            persistent_workers=self.options.workers > 0,
        )


def text_data(**options: object) -> TextData:
    """Build from plain options, as a configuration file gives them."""
    return TextData(TextOptions(**options))  # type: ignore[arg-type]
