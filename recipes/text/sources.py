"""Which documents there are, and on which side of the split each falls.

The default text needs no download: the ``.py`` files of Python's standard library (tests left out), and the English
prose of ``pydoc_data.topics``, one document a topic. A document's side is decided by the hash of its name relative to
the library (or as the user wrote it), so it is the same on every machine with that Python, whatever the file order.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memwall_strategy.core.errors import ConfigError

_NOT_TEXT = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib-dynload", "config"}
)
_TOPICS = Path("pydoc_data/topics.py")
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        name: relative path, with ``/``; what the split is decided by.
        path: the file; None for a document that is held in ``text``.
        text: the content where there is no file of its own.
    """

    name: str
    path: Path | None = None
    text: bytes = b""

    def fingerprint(self) -> list[object]:
        """What tells, without reading the content, that it has changed: name and size, and for a file its time."""
        if self.path is None:
            return [self.name, hashlib.sha256(self.text).hexdigest()]
        status = self.path.stat()
        return [self.name, str(self.path), status.st_size, status.st_mtime_ns]

    def size(self) -> int:
        """Length of the content in bytes."""
        return len(self.text) if self.path is None else self.path.stat().st_size

    def chunks(self) -> Iterator[bytes]:
        """The content, in pieces of at most 16 MiB.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.path is None:
            yield self.text
            return
        try:
            with self.path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise ConfigError(f"data.files: {self.path} cannot be read ({error.strerror}). Leave it out.") from error


def find_documents(files: tuple[str, ...]) -> list[Document]:
    """The documents of the user's files, or of the standard library when there are none, sorted by name.

    Raises:
        ConfigError: a pattern matches nothing, a file cannot be read, or this Python has no library sources.
    """
    documents = [*_user_files(files)] if files else [*_library_sources(), *_library_topics()]
    if not documents:
        raise ConfigError(
            f"data.files is empty and this Python keeps no library sources under {_library()}. "
            "Name your own text: data.files=[path/to/text.txt]."
        )
    return sorted(documents, key=lambda document: document.name)


def _user_files(patterns: tuple[str, ...]) -> Iterator[Document]:
    seen: set[Path] = set()
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        names = [expanded] if os.path.lexists(expanded) else sorted(glob.glob(expanded, recursive=True))
        matches = [name for name in names if not os.path.isdir(name)]
        if not matches:
            raise ConfigError(
                f"data.files={pattern!r} matches no file (looked from {os.getcwd()}). "
                "Correct the path, or write a pattern such as 'docs/**/*.txt' for the files of a folder."
            )
        for name in matches:
            path = Path(name).resolve()
            if path in seen:
                continue
            seen.add(path)
            if not os.access(path, os.R_OK):
                raise ConfigError(f"data.files={name!r} cannot be read. Give this user the right to, or leave it out.")
            yield Document(Path(name).as_posix(), path)


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library_sources() -> Iterator[Document]:
    root = _library()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_TEXT and not name.startswith("config-")]
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(root)
            if name.endswith(".py") and relative != _TOPICS and os.access(path, os.R_OK):
                yield Document(relative.as_posix(), path)


def _library_topics() -> Iterator[Document]:
    if not (_library() / _TOPICS).exists():
        return
    from pydoc_data.topics import topics

    for topic, text in topics.items():
        yield Document(f"{_TOPICS.with_suffix('').as_posix()}/{topic}", text=text.encode())


def is_validation(name: str, val_fraction: float) -> bool:
    """Whether the document of that name is kept for validation."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < val_fraction * 2**64
