"""Recognising that torch, or Python, ran out of memory, and how much was asked for.

CUDA raises ``torch.OutOfMemoryError``; the CPU allocator a plain ``RuntimeError``, known by its words
(``c10/core/impl/alloc_cpu.cpp``); Python itself ``MemoryError``. A lane chains what its transfer met.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from memwall_strategy.core.errors import MemwallError

_CPU_WORDS = ("not enough memory: you tried to allocate", "can't allocate memory: you tried to allocate")

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)?")

_UNITS = {None: 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def out_of_memory(error: BaseException) -> BaseException | None:
    """The shortage of memory behind ``error``: itself, or what caused it; None where it is something else."""
    return next((each for each in _chain(error) if _is_shortage(each)), None)


def asked_bytes(error: BaseException) -> int:
    """Bytes that the allocation which failed asked for; 0 where the error does not say."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, MemwallError) or not isinstance(error, RuntimeError):
        return False  # memwall's own errors may quote another rank's
    return any(words in str(error) for words in _CPU_WORDS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
