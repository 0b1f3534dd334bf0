"""Token files: text read once into mapped memory, and shared by every rank and later run.

A token is one byte as ``uint16`` (little endian), or ``DOCUMENT_END``. The cache folder has one folder per corpus,
named by a hash of everything that the tokens depend on, holding ``train.bin``, ``val.bin`` and ``meta.json``.

Two processes that want the same corpus at once: one takes the file lock and builds in a folder beside the final one,
then renames it, which is atomic; the other waits for the lock, at most ``WAIT_S``, and finds the corpus built. The
kernel drops the lock of a killed builder, and the next one clears what it left.

Not done here: tokenizers other than bytes; noticing a file whose content changed while size and time stayed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memwall_strategy.core.errors import ConfigError, MemwallError

from .options import DOCUMENT_END, TextOptions
from .sources import Document, find_documents, is_validation

FORMAT = 1
TOKEN = np.dtype("<u2")
SIDES = ("train", "val")
WAIT_S = 600.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """A built corpus.

    Attributes:
        folder: where the token files are.
        meta: format, source, Python version, SHA-256 over names and contents, documents and tokens of each side.
    """

    folder: Path
    meta: dict[str, Any]

    def tokens(self, side: str) -> np.ndarray:
        """The mapped, read-only tokens of ``train`` or ``val``."""
        return np.memmap(self.folder / f"{side}.bin", dtype=TOKEN, mode="r")


def default_cache_dir() -> Path:
    """The user's cache folder for memwall."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memwall"


def ensure_tokens(options: TextOptions, *, wait_s: float = WAIT_S) -> TokenFiles:
    """Return the corpus of these options, building it when it is not cached.

    Raises:
        ConfigError: no text, less than one sequence on either side, unreadable files, unwritable cache.
        MemwallError: another process held the lock for ``wait_s``.
    """
    documents = find_documents(options.files)
    cache = Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir()
    key = _key(documents, options)
    folder = cache / "tokens" / key
    try:
        built = _load(folder)
        if built is None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_suffix(".lock"), wait_s):
                built = _load(folder) or _build(folder, documents, options)
    except OSError as error:
        raise ConfigError(
            f"paths.cache_dir={cache} cannot be used ({error.strerror or error}). "
            "Name a folder that can be written: paths.cache_dir=/path/with/room."
        ) from error
    _check_length(built, options)
    return built


def _key(documents: list[Document], options: TextOptions) -> str:
    try:
        parts = [FORMAT, platform.python_version(), options.val_fraction, [d.fingerprint() for d in documents]]
    except OSError as error:
        raise ConfigError(f"data.files: {error.filename} cannot be read ({error.strerror}). Leave it out.") from error
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _load(folder: Path) -> TokenFiles | None:
    """The corpus in ``folder``, or None when there is none or its sizes are not those it was built with."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        whole = all((folder / f"{s}.bin").stat().st_size == meta[f"{s}_tokens"] * TOKEN.itemsize for s in SIDES)
    except FileNotFoundError:
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


def _build(folder: Path, documents: list[Document], options: TextOptions) -> TokenFiles:
    building = folder.with_suffix(".building")
    for left_over in (building, folder):  # of a killed builder, or a corpus whose sizes are wrong
        shutil.rmtree(left_over, ignore_errors=True)
    building.mkdir()
    try:
        meta = _write(building, documents, options)
        (building / "meta.json").write_text(json.dumps(meta, indent=1))
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return TokenFiles(folder, meta)


def _write(folder: Path, documents: list[Document], options: TextOptions) -> dict[str, Any]:
    held_out = {d.name: is_validation(d.name, options.val_fraction) for d in documents}
    cut_each = len(set(held_out.values())) < 2  # too few files for a split by file: the end of each is validation
    digest = hashlib.sha256()
    tokens = dict.fromkeys(SIDES, 0)
    count = dict.fromkeys(SIDES, 0)
    end = np.array([DOCUMENT_END], dtype=TOKEN)
    with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
        out = {"train": train, "val": val}
        for document in documents:
            digest.update(document.name.encode() + b"\0")
            if cut_each:
                pieces = _cut(document, options.val_fraction)
            else:
                side = "val" if held_out[document.name] else "train"
                pieces = ((side, chunk) for chunk in document.chunks())
            written = set()
            for side, chunk in pieces:
                digest.update(chunk)
                out[side].write(np.frombuffer(chunk, dtype=np.uint8).astype(TOKEN).data)
                tokens[side] += len(chunk)
                written.add(side)
            for side in written:
                out[side].write(end.data)
                tokens[side] += 1
                count[side] += 1
    return {
        "format": FORMAT,
        "source": "files" if options.files else "standard library",
        "python": platform.python_version(),
        "sha256": digest.hexdigest(),
        "split": "end of each file" if cut_each else "by file",
        **{f"{side}_{what}": n[side] for side in SIDES for what, n in (("documents", count), ("tokens", tokens))},
    }


def _cut(document: Document, val_fraction: float) -> Iterator[tuple[str, bytes]]:
    """The document's pieces, the last ``val_fraction`` of its bytes as validation."""
    left = document.size() - math.floor(document.size() * val_fraction)
    for chunk in document.chunks():
        if left > 0:
            yield "train", chunk[:left]
        if len(chunk) > left:
            yield "val", chunk[max(left, 0) :]
        left -= len(chunk)


def _check_length(built: TokenFiles, options: TextOptions) -> None:
    """Each side must hold one sequence and the token that follows it."""
    if not any(built.meta[f"{side}_tokens"] for side in SIDES):
        named = ", ".join(options.files) or "the standard library"
        raise ConfigError(f"data.files: {named} holds no text (zero tokens). Name files that are not empty.")
    for side in SIDES:
        tokens = built.meta[f"{side}_tokens"]
        if tokens < options.seq_len + 1:
            more = "raise data.val_fraction, " if side == "val" else ""
            raise ConfigError(
                f"data.seq_len={options.seq_len}: the {'validation' if side == 'val' else 'training'} text has only "
                f"{tokens} tokens, shorter than one sequence and its next token. "
                f"Lower data.seq_len, {more}or name more text in data.files."
            )
