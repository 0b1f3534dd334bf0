"""How fast text is read in: ``python -m memwall_strategy.recipes.text.bench [--mb 1000] [--folder DIR] [--repeats 3]``.

Writes a text of that size (the standard library's, over and over) into a temporary folder, reads it into a fresh token
cache there, and removes both. The rate is bytes of text over the time of ``ensure_tokens``, from the call to the
renamed cache: reading, hashing, splitting, writing two bytes a token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from .cache import ensure_tokens
from .options import TextOptions
from .sources import find_documents

_MB = 1_000_000


def write_text(path: Path, size_bytes: int) -> None:
    """A file of that many bytes of Python sources."""
    library = b"\n".join(bytes(chunk) for document in find_documents(()).documents for chunk in document.chunks())
    with path.open("wb") as file:
        left = size_bytes
        while left > 0:
            file.write(library[:left])
            left -= len(library)


def read_in(text: Path, folder: Path) -> tuple[float, int]:
    """Seconds for a fresh cache in ``folder``, and the tokens in it."""
    start = time.perf_counter()
    built = ensure_tokens(TextOptions(files=(str(text),), cache_dir=str(folder)))
    seconds = time.perf_counter() - start
    return seconds, built.meta["train_tokens"] + built.meta["val_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000, help="size of the text in 10^6 bytes")
    parser.add_argument("--folder", type=Path, default=None, help="where to write: the disk that is measured")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rates = []
    with tempfile.TemporaryDirectory(prefix="memwall-bench-", dir=given.folder) as folder:
        text = Path(folder) / "text.txt"
        write_text(text, given.mb * _MB)
        os.sync()  # what is still to be written of the text must not be counted with the tokens
        for repeat in range(given.repeats):
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                seconds, tokens = read_in(text, Path(cache))
            rates.append(given.mb / seconds)
            rate = f"{tokens:,} tokens in {seconds:.2f} s: {rates[-1]:.0f} MB/s"
            print(f"run {repeat + 1}: {given.mb} MB, {rate}", flush=True)
    print(f"median {statistics.median(rates):.0f} MB/s, lowest {min(rates):.0f} MB/s over {given.repeats} runs")


if __name__ == "__main__":
    main()
