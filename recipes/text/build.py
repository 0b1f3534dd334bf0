"""Documents become token files: one pass, every byte read once."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .corpus import SIDES, Corpus
from .options import DOCUMENT_END, VOCAB, TextOptions
from .sources import Document, Piece

FORMAT = 2
OFFSET = np.dtype("<i8")


class Encoder(Protocol):
    """Turns a document's bytes into tokens.

    Attributes:
        vocab: token values; end: the one after each document; dtype: of the token file.
    """

    vocab: int
    end: int
    dtype: np.dtype

    def encode(self, name: str, pieces: Iterable[Piece]) -> Iterator[tuple[str, np.ndarray]]:
        """Tokens of one document's pieces, each with its side; an array may be overwritten by the next."""


class ByteEncoder:
    """A token is a byte, whatever the encoding."""

    vocab, end, dtype = VOCAB, DOCUMENT_END, np.dtype("<u2")

    def __init__(self) -> None:
        self._made = np.empty(0, dtype=self.dtype)

    def encode(self, name: str, pieces: Iterable[Piece]) -> Iterator[tuple[str, np.ndarray]]:
        for side, chunk in pieces:
            if len(self._made) < len(chunk):
                self._made = np.empty(len(chunk), dtype=self.dtype)
            made = self._made[: len(chunk)]
            np.copyto(made, np.frombuffer(chunk, dtype=np.uint8))
            yield side, made


def make_encoder(options: TextOptions) -> Encoder:
    """Bytes, or the user's tokenizer."""
    if options.tokenizer is None:
        return ByteEncoder()
    from .hf import TokenizerEncoder

    return TokenizerEncoder(options.tokenizer, "utf-8" if options.dataset is not None else options.encoding)


def write_tokens(folder: Path, corpus: Corpus, encoder: Encoder, options: TextOptions) -> dict[str, Any]:
    """Write ``train.bin``, ``val.bin`` (tokens) and ``train.ends``, ``val.ends`` (where each document stops).

    Returns:
        The record of the corpus: source, hash over names and contents, documents, bytes and tokens of each side.
    """
    sides = {corpus.side(name, options.val_fraction) for name in corpus.names()}
    cut_each = len(sides) < 2  # too few documents for a split by document: the end of each is validation
    digest = hashlib.sha256()
    nbytes, tokens = dict.fromkeys(SIDES, 0), dict.fromkeys(SIDES, 0)
    ends: dict[str, list[int]] = {side: [] for side in SIDES}
    end = np.array([encoder.end], dtype=encoder.dtype)
    with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
        out = {"train": train, "val": val}
        for document in corpus.documents():
            digest.update(document.name.encode() + b"\0")
            pieces = _pieces(document, corpus, options.val_fraction, cut_each)
            written = set()
            for side, made in encoder.encode(document.name, _watched(pieces, digest, nbytes)):
                out[side].write(made.data)
                tokens[side] += len(made)
                written.add(side)
            for side in sorted(written):
                out[side].write(end.data)
                tokens[side] += 1
                ends[side].append(tokens[side])
    for side in SIDES:
        np.asarray(ends[side], dtype=OFFSET).tofile(folder / f"{side}.ends")
    return {
        "format": FORMAT,
        "source": corpus.source,
        "python": platform.python_version(),
        "sha256": digest.hexdigest(),
        "tokenizer": options.tokenizer or "bytes",
        "vocab": encoder.vocab,
        "end": encoder.end,
        "dtype": encoder.dtype.str,
        "split": "end of each file" if cut_each else "by file",
        **{f"{side}_documents": len(ends[side]) for side in SIDES},
        **{f"{side}_bytes": nbytes[side] for side in SIDES},
        **{f"{side}_tokens": tokens[side] for side in SIDES},
        **corpus.facts(),
    }


def _watched(pieces: Iterable[Piece], digest: Any, nbytes: dict[str, int]) -> Iterator[Piece]:
    for side, chunk in pieces:
        digest.update(chunk)
        nbytes[side] += len(chunk)
        yield side, chunk


def _pieces(document: Document, corpus: Corpus, val_fraction: float, cut_each: bool) -> Iterator[Piece]:
    """The document's pieces with their side; cut, the last ``val_fraction`` of its bytes are validation."""
    side = corpus.side(document.name, val_fraction)
    left = document.size() - math.floor(document.size() * val_fraction) if cut_each else 0
    for chunk in document.chunks():
        if not chunk:
            continue
        if not cut_each:
            yield side, chunk
            continue
        if left > 0:
            yield "train", chunk[:left]
        if len(chunk) > left:
            yield "val", chunk[max(left, 0) :]
        left -= len(chunk)
