"""Hugging Face datasets and tokenizers from local paths; the network is never asked.

Both packages are in the extra ``hf`` and are imported only where text has to be read in: a cached corpus needs neither.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from memwall_strategy.core.errors import ConfigError, nearest

from .sources import Document, Piece, file_fingerprint, is_validation

_READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
"""Suffix of a data file -> the reader of ``datasets.load_dataset``."""

_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)(?![a-z])")
_VALIDATION = ("validation", "valid", "val", "dev")
_ROWS_AT_ONCE = 1000
_PIECE_CHARACTERS = 1 << 18
"""A document is tokenized in pieces of at most this, cut after a line's end where there is one."""


def require(package: str, option: str) -> None:
    """Refuse an option whose package is missing.

    Raises:
        ConfigError: the package is not installed; it names the extra that brings it.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{option} needs the package {package}, which is not installed: pip install 'memwall[hf]'.")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Whatever is imported and asked inside stays on this machine."""
    before = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    os.environ |= dict.fromkeys(before, "1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class DatasetCorpus:
    """A dataset's rows, each a document. Its own validation split is used where it has one; other splits are not read.

    Args:
        path: of a dataset or of data files, see ``TextOptions.dataset``.
        field: the column that holds the text.
    """

    source = "dataset"

    def __init__(self, path: str, field: str) -> None:
        self._given, self._field = path, field
        self._path = Path(path).expanduser().resolve()
        if not self._path.exists():
            raise ConfigError(
                f"data.dataset={path!r}: there is no such file or folder. Name a local copy (dataset.save_to_disk, or "
                "parquet, json or csv files); nothing is downloaded."
            )
        self._saved = (self._path / "dataset_dict.json").is_file() or (self._path / "state.json").is_file()
        self._files = self._data_files()
        if not self._files:
            raise ConfigError(
                f"data.dataset={path!r} holds no dataset: neither what dataset.save_to_disk writes, nor a file that "
                f"ends in {', '.join(_READERS)}. Name the folder that does."
            )
        require("datasets", f"data.dataset={path!r}")
        self._splits: dict[str, Any] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def _data_files(self) -> list[Path]:
        if self._path.is_file():
            return [self._path] if self._path.suffix in _READERS else []
        files = sorted(p for p in self._path.rglob("*") if p.is_file())
        return files if self._saved else [p for p in files if p.suffix in _READERS and not p.name.startswith(".")]

    def fingerprint(self) -> list[Any]:
        return [self.source, self._field, *(file_fingerprint(path) for path in self._files)]

    def names(self) -> Iterable[str]:
        return (f"{split}/{row}" for split, rows in self._load().items() for row in range(len(rows)))

    def documents(self) -> Iterator[Document]:
        for split, rows in self._load().items():
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                texts = rows[start : start + _ROWS_AT_ONCE][self._field]
                for row, text in enumerate(texts, start):
                    yield Document(f"{split}/{row}", text=(text or "").encode("utf-8", "surrogatepass"))

    def side(self, name: str, val_fraction: float) -> str:
        if len(self._load()) > 1:
            return "train" if name.startswith("train/") else "val"
        return "val" if is_validation(name, val_fraction) else "train"

    def facts(self) -> dict[str, Any]:
        own = {"split": "the dataset's own"} if len(self._load()) > 1 else {}
        return {"dataset": str(self._path), "rows": {split: len(rows) for split, rows in self._load().items()}, **own}

    def close(self) -> None:
        """Let go of the rows, and of what reading them wrote."""
        self._splits = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _load(self) -> dict[str, Any]:
        """``train``, and ``val`` where the dataset has one -> rows."""
        if self._splits is not None:
            return self._splits
        with offline():
            import datasets

            datasets.disable_progress_bars()
            try:
                found = self._read(datasets)
            except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
                reason = str(error.__cause__ or error).splitlines()[0]
                raise ConfigError(
                    f"data.dataset={self._given!r} cannot be read as a dataset ({reason}). "
                    "Name a folder that dataset.save_to_disk wrote, or whole parquet, json or csv files."
                ) from error
        train = next((found[name] for name in ("train", *found) if name in found), None)
        val = next((found[name] for name in _VALIDATION if name in found), None)
        self._splits = {"train": train} if val is None or val is train else {"train": train, "val": val}
        for rows in self._splits.values():
            self._check_column(rows)
        return self._splits

    def _read(self, datasets: Any) -> dict[str, Any]:
        if self._saved:
            loaded = datasets.load_from_disk(str(self._path))
            return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        self._scratch = tempfile.TemporaryDirectory(prefix="memwall-dataset-")
        splits: dict[str, list[Path]] = {}
        for path in self._files:
            named = _SPLIT.match(path.stem)
            splits.setdefault(named[1] if named else "train", []).append(path)
        return {
            split: datasets.load_dataset(
                _READERS[paths[0].suffix],
                data_files=[str(p) for p in paths if p.suffix == paths[0].suffix],
                split="train",
                cache_dir=self._scratch.name,
            )
            for split, paths in splits.items()
        }

    def _check_column(self, rows: Any) -> None:
        columns = rows.column_names
        if self._field not in columns:
            raise ConfigError(
                f"data.text_field={self._field!r} is no column of the dataset.{nearest(self._field, columns)} "
                f"There are: {', '.join(columns)}."
            )
        kind = getattr(rows.features[self._field], "dtype", None)
        if kind not in ("string", "large_string"):
            held = kind or "no plain values"
            raise ConfigError(f"data.text_field={self._field!r} holds {held}, not text. Name another.")


class TokenizerEncoder:
    """A Hugging Face tokenizer.

    Args:
        path: its folder, or its ``tokenizer.json``.
        encoding: of the documents' bytes.

    Attributes:
        vocab: token values, the end token's included.
        end: the token after each document: the tokenizer's own end of sequence, else one more.
    """

    def __init__(self, path: str, encoding: str) -> None:
        self._given, self._encoding = path, encoding
        self._path = _tokenizer_path(path)
        with offline():
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            try:
                if self._path.is_file():
                    self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self._path))
                else:
                    self._tokenizer = AutoTokenizer.from_pretrained(str(self._path), local_files_only=True)
            except Exception as error:
                raise _unreadable(path, error) from error
        size, own = len(self._tokenizer), self._tokenizer.eos_token_id
        self.end = size if own is None else own
        self.vocab = max(size, self.end + 1)
        self.dtype = np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")

    def encode(self, name: str, pieces: Iterable[Piece]) -> Iterator[tuple[str, np.ndarray]]:
        """Tokens of one document's pieces, each with its side.

        Raises:
            ConfigError: the bytes are not text in this encoding.
        """
        # One decoder for both sides: a character that a cut divides goes to the second.
        decoder = codecs.getincrementaldecoder(self._encoding)()
        side, text, read = "", "", 0
        for piece_side, chunk in pieces:
            if side and piece_side != side:
                yield side, self._tokens(text)
                text = ""
            side = piece_side
            text += self._decoded(decoder, name, bytes(chunk), read, final=False)
            read += len(chunk)
            while len(text) > _PIECE_CHARACTERS:
                cut = text.rfind("\n", 0, _PIECE_CHARACTERS) + 1 or _PIECE_CHARACTERS
                yield side, self._tokens(text[:cut])
                text = text[cut:]
        text += self._decoded(decoder, name, b"", read, final=True)
        if text:
            yield side, self._tokens(text)

    def _decoded(self, decoder: codecs.IncrementalDecoder, name: str, chunk: bytes, read: int, *, final: bool) -> str:
        try:
            return decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"data.encoding={self._encoding}: the document {name} is not {self._encoding} text (near byte "
                f"{read + error.start:,}: {error.reason}). Name its encoding, such as data.encoding=latin-1, or leave "
                "the file out."
            ) from error

    def _tokens(self, text: str) -> np.ndarray:
        ids = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=self.dtype)


def _tokenizer_path(path: str) -> Path:
    where = Path(path).expanduser().resolve()
    if not where.exists():
        raise ConfigError(
            f"data.tokenizer={path!r}: there is no such file or folder. Name a local copy (what "
            "tokenizer.save_pretrained writes); nothing is downloaded."
        )
    require("transformers", f"data.tokenizer={path!r}")
    return where


def tokenizer_values(path: str) -> int | None:
    """How many token values a tokenizer has, without loading all of transformers; None where only that could tell.

    Raises:
        ConfigError: there is no tokenizer, or a file that cannot be read as one.
    """
    where = _tokenizer_path(path)
    file = where if where.is_file() else where / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"data.tokenizer={path!r} cannot be read as a tokenizer ({str(error).splitlines()[0]}). "
        "Name a folder that tokenizer.save_pretrained wrote."
    )


def tokenizer_fingerprint(path: str) -> list[Any]:
    """What a tokenizer's tokens depend on, found without loading it.

    Raises:
        ConfigError: there is none, or the package is missing.
    """
    where = _tokenizer_path(path)
    files = [where] if where.is_file() else sorted(p for p in where.glob("*") if p.is_file())
    return [version("transformers"), *(file_fingerprint(file) for file in files)]
