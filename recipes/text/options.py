"""What can be set about the text. Stdlib only: checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from memwall_strategy.core.errors import ConfigError

BYTE_VALUES = 256
DOCUMENT_END = 256
"""The one special token; it follows each document."""

VOCAB = BYTE_VALUES + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """Which text is read, and how it is cut into batches."""

    files: tuple[str, ...] = ()
    """Text files or patterns (``docs/**/*.md``) to train on. Empty: the sources of Python's standard library and the
    prose of its documentation topics, which every Python has."""

    seq_len: int = 256
    """Tokens of one sequence. A token is one byte, or the end of a document."""

    batch_size: int = 8
    """Sequences of one micro-batch on one rank."""

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
