"""Token files: text read once into mapped memory, and shared by every rank and later run.

The cache folder has one folder per corpus, named by a hash of everything that the tokens depend on (which documents,
their sizes and times, the tokenizer, the split), so a changed text is another corpus. It holds ``train.bin`` and
``val.bin`` (tokens, little endian), ``train.ends`` and ``val.ends`` (where each document stops) and ``meta.json``.

Two processes that want the same corpus at once: one takes the file lock and builds in a folder beside the final one,
then renames it, which is atomic; the other waits for the lock, at most ``WAIT_S``, and finds the corpus built. The
kernel drops the lock of a killed builder, and the next one clears what it left.

Nothing is removed by itself: a run may have it mapped. The whole folder may be deleted while no run starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memwall_strategy.core.errors import ConfigError, MemwallError

from .build import FORMAT, OFFSET, make_encoder, write_tokens
from .corpus import SIDES, Corpus, find_corpus
from .options import TextOptions

WAIT_S = 600.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """A built corpus.

    Attributes:
        folder: where the token files are.
        meta: format, source, Python version, SHA-256 over names and contents, tokenizer and its vocabulary; documents,
            bytes and tokens of each side.
    """

    folder: Path
    meta: dict[str, Any]

    def tokens(self, side: str) -> np.ndarray:
        """The mapped, read-only tokens of ``train`` or ``val``."""
        return np.memmap(self.folder / f"{side}.bin", dtype=self.meta["dtype"], mode="r")

    def ends(self, side: str) -> np.ndarray:
        """For each document of the side, the number of tokens up to and with its end token."""
        return np.fromfile(self.folder / f"{side}.ends", dtype=OFFSET)


def default_cache_dir() -> Path:
    """The user's cache folder for memwall."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memwall"


def ensure_tokens(options: TextOptions, *, wait_s: float = WAIT_S) -> TokenFiles:
    """Return the corpus of these options, building it when it is not cached.

    Raises:
        ConfigError: no text, less than one sequence on either side, unreadable files, unwritable cache, a missing
            package.
        MemwallError: another process held the lock for ``wait_s``.
    """
    corpus = find_corpus(options)
    cache = Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir()
    folder = cache / "tokens" / _key(corpus, options)
    try:
        built = _load(folder)
        if built is None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_suffix(".lock"), wait_s):
                built = _load(folder) or _build(folder, corpus, options)
    except OSError as error:
        raise ConfigError(
            f"paths.cache_dir={cache} cannot be used ({error.strerror or error}). "
            "Name a folder that can be written: paths.cache_dir=/path/with/room."
        ) from error
    _check_length(built, options)
    return built


def _key(corpus: Corpus, options: TextOptions) -> str:
    parts: list[Any] = [FORMAT, options.val_fraction]
    if options.tokenizer is not None:
        from .hf import tokenizer_fingerprint

        parts += [tokenizer_fingerprint(options.tokenizer), options.encoding]
    try:
        parts.append(corpus.fingerprint())
    except OSError as error:
        raise ConfigError(f"data.files: {error.filename} cannot be read ({error.strerror}). Leave it out.") from error
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _load(folder: Path) -> TokenFiles | None:
    """The corpus in ``folder``, or None when there is none or its sizes are not those it was built with."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        item_bytes = np.dtype(meta["dtype"]).itemsize
        whole = all(
            (folder / f"{side}.bin").stat().st_size == meta[f"{side}_tokens"] * item_bytes
            and (folder / f"{side}.ends").stat().st_size == meta[f"{side}_documents"] * OFFSET.itemsize
            for side in SIDES
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # not there, or not what was written there
        return None
    return TokenFiles(folder, meta) if whole else None


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    deadline = time.monotonic() + wait_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() > deadline:
                raise MemwallError(
                    f"Another process has been building the token cache {path.with_suffix('')} for {wait_s:.0f} s. "
                    "Wait for it, or name another folder: paths.cache_dir=..."
                )
            time.sleep(_POLL_S)
        yield


def _build(folder: Path, corpus: Corpus, options: TextOptions) -> TokenFiles:
    before = corpus.fingerprint()
    building = folder.with_suffix(".building")
    for left_over in (building, folder):  # of a killed builder, or a corpus whose sizes are wrong
        shutil.rmtree(left_over, ignore_errors=True)
    building.mkdir()
    try:
        meta = write_tokens(building, corpus, make_encoder(options), options)
        if corpus.fingerprint() != before:
            raise ConfigError("The text changed while it was read. Start again when nobody writes to it any more.")
        (building / "meta.json").write_text(json.dumps(meta, indent=1))
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        corpus.close()
    return TokenFiles(folder, meta)


def _check_length(built: TokenFiles, options: TextOptions) -> None:
    """Each side must hold one sequence and the token that follows it."""
    option = "data.dataset" if options.dataset is not None else "data.files"
    if not any(built.meta[f"{side}_tokens"] for side in SIDES):
        named = options.dataset or ", ".join(options.files) or "the standard library"
        raise ConfigError(f"{option}: {named} holds no text (zero tokens). Name text that is not empty.")
    needed = options.seq_len + 1 if options.pack else 2
    for side in SIDES:
        tokens = built.meta[f"{side}_tokens"]
        if tokens < needed:
            more = "raise data.val_fraction, " if side == "val" else ""
            raise ConfigError(
                f"data.seq_len={options.seq_len}: the {'validation' if side == 'val' else 'training'} text has only "
                f"{tokens} tokens, shorter than one sequence and its next token. "
                f"Lower data.seq_len, {more}or name more text in {option}."
            )
