"""What can be set about the text. Stdlib only: checked before torch is imported."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from memwall_strategy.core.errors import ConfigError

BYTE_VALUES = 256
DOCUMENT_END = 256
"""The one special token of text as bytes; it follows each document."""

VOCAB = BYTE_VALUES + 1
"""Token values of text as bytes."""

PADDING = -1
"""Fills the rest of a sequence where documents are not packed; no token, never trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """Which text is read, and how it is cut into batches."""

    files: tuple[str, ...] = ()
    """Text files, folders or patterns (``docs/**/*.md``) to train on. Empty: the sources of Python's standard library
    and the prose of its documentation topics, which every Python has."""

    dataset: str | None = None
    """Folder of a Hugging Face dataset (``save_to_disk``), or one of its parquet, json or csv files or folders, instead
    of files. Needs the extra hf."""

    text_field: str = "text"
    """The dataset's column that holds the text."""

    tokenizer: str | None = None
    """Folder or ``tokenizer.json`` of a Hugging Face tokenizer. None: a token is a byte. Needs the extra hf."""

    encoding: str = "utf-8"
    """Of files, where a tokenizer reads them; bytes as tokens need none."""

    seq_len: int = 256
    """Tokens of one sequence."""

    batch_size: int = 8
    """Sequences of one micro-batch on one rank."""

    pack: bool = True
    """Documents follow each other through the sequences, an end token after each: attention sees the end of the
    document before, as in GPT-2's training. false: a sequence holds one document, or a part of one, and is padded;
    nothing is seen across documents, and padding is not trained on."""

    shuffle: bool = True
    """Training sequences in a new random order each epoch."""

    val_fraction: float = 0.05
    """Share of the documents that is kept for validation; a file belongs to one side only."""

    workers: int = 0
    """Processes that load batches on each rank. 0: the training process itself (the text is mapped memory)."""

    cache_dir: str | None = None
    """Where token files are kept between runs. None: ``$XDG_CACHE_HOME/memwall`` or ``~/.cache/memwall``."""

    def __post_init__(self) -> None:
        if isinstance(self.files, str):
            object.__setattr__(self, "files", (self.files,))
        object.__setattr__(self, "files", tuple(str(name) for name in self.files))
        for name, lowest in (("seq_len", 1), ("batch_size", 1), ("workers", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ConfigError(f"data.{name}={value!r} must be a whole number of at least {lowest}.")
        if not 0.0 < self.val_fraction < 1.0:
            raise ConfigError(f"data.val_fraction={self.val_fraction!r} must lie between 0 and 1, such as 0.05.")
        for name in ("pack", "shuffle"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"data.{name}={getattr(self, name)!r} must be true or false.")
        if self.dataset is not None and self.files:
            raise ConfigError("data.files and data.dataset are both set. Name the text by one of them.")
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise ConfigError(
                f"data.encoding={self.encoding!r} is not an encoding that Python knows. Use utf-8 or latin-1."
            ) from error

    @property
    def from_library(self) -> bool:
        """Whether the text is the standard library."""
        return not self.files and self.dataset is None
