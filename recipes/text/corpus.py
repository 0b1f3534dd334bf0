"""What is read: a run's documents, told apart from how they become tokens."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from .options import TextOptions
from .sources import Document, find_documents, is_validation

SIDES = ("train", "val")


class Corpus(Protocol):
    """Documents, each on one side.

    Attributes:
        source: what it is, in words, for people.
    """

    source: str

    def fingerprint(self) -> list[Any]:
        """What the content depends on, found without reading it."""

    def names(self) -> Iterable[str]:
        """The documents' names, in order."""

    def documents(self) -> Iterator[Document]:
        """The documents, in order."""

    def side(self, name: str, val_fraction: float) -> str:
        """``train`` or ``val``."""

    def facts(self) -> dict[str, Any]:
        """What else the record of the corpus should say."""

    def close(self) -> None:
        """Let go of what reading it took."""


class FileCorpus:
    """The user's files, or the standard library."""

    def __init__(self, files: tuple[str, ...]) -> None:
        self.source = "files" if files else "standard library"
        self._library = not files
        self._found = find_documents(files)

    def fingerprint(self) -> list[Any]:
        python = [platform.python_version()] if self._library else []
        return [self.source, *python, *(document.fingerprint() for document in self._found.documents)]

    def names(self) -> Iterable[str]:
        return (document.name for document in self._found.documents)

    def documents(self) -> Iterator[Document]:
        return iter(self._found.documents)

    def side(self, name: str, val_fraction: float) -> str:
        return "val" if is_validation(name, val_fraction) else "train"

    def facts(self) -> dict[str, Any]:
        return {"binary_files_left_out": self._found.binaries} if self._found.binaries else {}

    def close(self) -> None:
        """Nothing is held."""


def find_corpus(options: TextOptions) -> Corpus:
    """The corpus of these options.

    Raises:
        ConfigError: there is none, or a package is missing.
    """
    if options.dataset is None:
        return FileCorpus(options.files)
    from .hf import DatasetCorpus

    return DatasetCorpus(options.dataset, options.text_field)
