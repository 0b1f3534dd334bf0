"""Which documents there are, and on which side of the split each falls.

The default text needs no download: the ``.py`` files of Python's standard library (tests left out), and the English
prose of ``pydoc_data.topics``, one document a topic. The user's text is files, folders and patterns. A document's side
is decided by the hash of its name: relative to the library, to the folder, or to the part of the pattern before its
first wildcard. So it is the same on every machine and from every working folder, whatever the order of the files.

Files are read as they are, whatever their encoding: a token is a byte. A binary file (one with a zero byte in its first
8 KiB) is refused where it was named or matched a pattern, and left out, and counted, where a folder was named.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memwall_strategy.core.errors import ConfigError

_NOT_TEXT = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib-dynload", "config"}
)
_TOPICS = Path("pydoc_data/topics.py")
_CHUNK_BYTES = 1 << 19
"""Small enough that text and tokens stay in a core's cache."""
Piece = tuple[str, memoryview]
"""The side that a part of a document is on, and its bytes."""

_LOOKED_AT_BYTES = 8192
"""Of each file of the user's, to tell text from what is not."""


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
        """What tells, without reading the content, that it has changed: name, size and times of writing and of any
        other change, which programs that set the former cannot set."""
        if self.path is None:
            return [self.name, hashlib.sha256(self.text).hexdigest()]
        return [self.name, *file_fingerprint(self.path)]

    def size(self) -> int:
        """Length of the content in bytes."""
        return len(self.text) if self.path is None else self.path.stat().st_size

    def chunks(self) -> Iterator[memoryview]:
        """The content, in pieces of at most 512 KiB; each is overwritten by the next.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.path is None:
            yield memoryview(self.text)
            return
        whole = memoryview(bytearray(_CHUNK_BYTES))
        try:
            with self.path.open("rb", buffering=0) as file:
                while count := file.readinto(whole):
                    yield whole[:count]
        except OSError as error:
            raise ConfigError(f"data.files: {self.path} cannot be read ({error.strerror}). Leave it out.") from error


def file_fingerprint(path: Path) -> list[object]:
    """Path, size and times of a file."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@dataclass(slots=True)
class Found:
    """The documents of a run, sorted by name, and how many binary files were left out of folders."""

    documents: list[Document] = field(default_factory=list)
    binaries: int = 0


def find_documents(files: tuple[str, ...]) -> Found:
    """The documents of the user's files, or of the standard library when there are none.

    Raises:
        ConfigError: a name or pattern that means no text file, a file that cannot be read, or no library sources.
    """
    found = Found()
    if files:
        _user_files(files, found)
    else:
        found.documents += [*_library_sources(), *_library_topics()]
        if not found.documents:
            raise ConfigError(
                f"data.files is empty and this Python keeps no library sources under {_library()}. "
                "Name your own text: data.files=[path/to/text.txt]."
            )
    found.documents.sort(key=lambda document: (document.name, str(document.path)))
    return found


def _user_files(patterns: tuple[str, ...], found: Found) -> None:
    seen: set[Path] = set()

    def add(name: str, path: Path) -> None:
        path = path.resolve()
        if path not in seen:
            seen.add(path)
            found.documents.append(Document(Path(name).as_posix(), path))

    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            _folder(pattern, Path(expanded), found, add)
            continue
        if os.path.lexists(expanded):
            base, names = os.path.dirname(expanded), [expanded]
        else:
            base = _before_wildcards(expanded)
            names = sorted(name for name in glob.glob(expanded, recursive=True) if not os.path.isdir(name))
        if not names:
            raise ConfigError(
                f"data.files={pattern!r} matches no file (looked from {os.getcwd()}). "
                "Correct the path, or write a pattern such as 'docs/**/*.txt' for the files of a folder."
            )
        for name in names:
            if _is_binary(pattern, Path(name)):
                raise ConfigError(
                    f"data.files={pattern!r}: {name} is not text (it holds zero bytes). Leave it out, or name the text "
                    "by a narrower pattern such as 'docs/**/*.txt'."
                )
            add(os.path.relpath(name, base or "."), Path(name))


def _folder(pattern: str, root: Path, found: Found, add: Callable[[str, Path], None]) -> None:
    """Every text file under a folder, hidden ones left out; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"data.files={pattern!r}: the folder {error.filename} cannot be read ({error.strerror}). "
            "Give this user the right to, or name the files that can be."
        ) from error

    before = len(found.documents)
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or not path.is_file():
                continue
            if _is_binary(pattern, path):
                found.binaries += 1
            else:
                add(path.relative_to(root).as_posix(), path)
    if len(found.documents) == before:
        raise ConfigError(
            f"data.files={pattern!r} is a folder without a text file (hidden and binary files are left out). "
            "Name a folder that holds text."
        )


def _before_wildcards(pattern: str) -> str:
    """``docs/**/*.md`` -> ``docs``."""
    parts = Path(pattern).parts
    plain = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return str(Path(*parts[:plain])) if plain else ""


def _is_binary(pattern: str, path: Path) -> bool:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"data.files={pattern!r}: {path} is a device or a pipe. Name ordinary files.")
        with path.open("rb", buffering=0) as file:
            return b"\0" in file.read(_LOOKED_AT_BYTES)
    except OSError as error:
        raise ConfigError(
            f"data.files={pattern!r}: {path} cannot be read ({error.strerror}). "
            "Give this user the right to, or leave it out."
        ) from error


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
