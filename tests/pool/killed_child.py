"""What the tests of killed processes run: a pool under steady traffic until somebody ends it.

    python -m tests.pool.killed_child FOLDER ROUNDS

Forks one child a round, lets it work for a random while, kills it with SIGKILL and prints how many instants found it
in set-up and how many at work.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.pool.device import DeviceStore
from memwall_strategy.pool.disk import DiskStore
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.table import AddressTable

MIB = 1024 * 1024
LONGEST_S = 0.15


def work(folder: Path, ready: int) -> None:
    """Open, close and use pools for ever."""
    while True:
        table = AddressTable()
        host = HostStore(table, 4 * MIB)
        disk = DiskStore(table, 8 * MIB, folder, host=host, chunk_bytes=64 * 1024)
        pool = Pool(table, [DeviceStore(table, 2 * MIB), host, disk])
        os.write(ready, b".")
        blocks = [Block("u", str(i), Kind.EXP_AVG) for i in range(6)]
        pool.allocate_group(dict.fromkeys(blocks, 100_001), Tier.HOST)
        pool.write({b: torch.ones(100_001, dtype=torch.uint8) for b in blocks})
        for turn in range(6):
            pool.move(blocks, (Tier.DISK, Tier.DEVICE, Tier.HOST)[turn % 3])
        pool.drain()
        pool.close()


def main(folder: Path, rounds: int) -> None:
    rng, at_work = random.Random(4), 0
    for _ in range(rounds):
        read, write = os.pipe()
        os.set_blocking(read, False)
        child = os.fork()
        if child == 0:
            try:
                work(folder, write)
            finally:
                os._exit(1)
        os.close(write)
        time.sleep(rng.uniform(0.0, LONGEST_S))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"
        with contextlib.suppress(BlockingIOError):  # nothing was written yet: it never left set-up
            at_work += bool(os.read(read, 1))
        os.close(read)
        left = list(folder.iterdir())
        assert not left, left
    print(rounds - at_work, at_work)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
