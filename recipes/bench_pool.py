"""What the pool's table, copies and disk tier cost, beside the plainest code that does the same.

    python -m recipes.bench_pool                        # all figures, under a minute
    python -m recipes.bench_pool table                  # one of: table, copies, disk
    python -m recipes.bench_pool disk --folder /scratch --repeats 20

- ``table``: operations per second of one thread with 10,000 blocks in the table.
- ``copies``: host to device and back through the tiers' interface, against ``memmove`` between the same addresses (on
  CUDA: against ``copy_`` on one stream). "by handle" is the same through the pool's lanes, from submission to wait.
- ``disk``: writes and reads of the disk tier, against one thread that moves 1 MiB at a time with O_DIRECT from
  page-aligned memory (as ``dd bs=1M oflag=direct`` does), in a file of its own in the same folder. "2000 small" are
  tensors of 1 to 200 bytes as one group; raw is one request of their bytes.

Pool and raw take turns; each figure is a median, the ratio that of the medians of time, with the quartiles of the
pairs beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from memwall_strategy.config import format_size
from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.pool import AddressTable, Arena, DeviceStore, DiskStore, HostStore, Pool
from memwall_strategy.pool.arena import PAGE_BYTES, aligned
from memwall_strategy.pool.disk_file import DiskFile
from memwall_strategy.pool.mapping import Mapping
from memwall_strategy.pool.probe import probe

MIB = 1024 * 1024
BLOCKS = 10_000
SIZES = (64 * 1024, MIB, 16 * MIB, 64 * MIB)
RAW_CHUNK_BYTES = MIB
JITTER_TURNS = 200


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def beside(name: str, nbytes: int, pool: Callable[[], object], raw: Callable[[], object], repeats: int) -> None:
    """Time both in turn, the order alternating, and print one line."""
    pool(), raw()  # pages, threads and streams
    pairs = []
    for turn in range(repeats):
        first, second = (pool, raw) if turn % 2 == 0 else (raw, pool)
        a, b = timed(first), timed(second)
        pairs.append((a, b) if turn % 2 == 0 else (b, a))
    ours, plain = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    low, _, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    print(
        f"{name:34} {format_size(nbytes):>10} {nbytes / ours / 1e9:8.2f} GB/s {nbytes / plain / 1e9:8.2f} GB/s raw"
        f"   time x{ours / plain:.2f} ({low:.2f}..{high:.2f})"
    )


def bench_table() -> None:
    """Operations per second with 10,000 blocks."""
    table, rng = AddressTable(), random.Random(0)
    for tier in (Tier.DEVICE, Tier.HOST):
        table.open_tier(tier, 1 << 40)
        table.add_arena(tier, "a", Arena(1 << 40))
    blocks = [Block(f"blocks.{i // 100}", f"p{i % 100}", Kind.EXP_AVG) for i in range(2 * BLOCKS)]
    sizes = [rng.randrange(1, MIB) for _ in blocks]
    for block, size in zip(blocks, sizes, strict=True):
        table.allocate(block, size, Tier.HOST)
    rng.shuffle(blocks)
    for block in blocks[BLOCKS:]:  # every other one at random: thousands of holes
        table.drop(block)
    live, fresh = blocks[:BLOCKS], blocks[BLOCKS : BLOCKS + BLOCKS // 2]

    def write(block: Block) -> None:
        table.begin_write(block)
        table.end_write(block)

    holes = len(table.plan_defragment(Tier.HOST, "a"))
    print(f"{len(table)} blocks, {holes} of them behind a hole; operations per second of one thread:")
    for name, some, run in (
        ("locate", live, table.locate),
        ("write (begin, end)", live, write),
        ("readable", live, table.readable),
        ("allocate", fresh, lambda block: table.allocate(block, 100_000, Tier.HOST)),
        ("drop", fresh, table.drop),
        ("move (begin, commit)", live[: BLOCKS // 2], lambda block: table.commit(table.begin_move(block, Tier.DEVICE))),
    ):
        seconds = timed(lambda some=some, run=run: [run(block) for block in some])
        print(f"  {name:22} {len(some) / seconds:12,.0f}")
    print(f"  {'check, all of it':22} {1 / timed(table.check):12,.1f}")


@contextmanager
def open_pool(folder: Path, device: str) -> Iterator[Pool]:
    table = AddressTable()
    host = HostStore(table, 160 * MIB, device=device)
    disk = DiskStore(table, 160 * MIB, folder, host=host)
    pool = Pool(table, [DeviceStore(table, 160 * MIB, device=device), host, disk])
    try:
        yield pool
    finally:
        pool.close()


def bench_copies(folder: Path, device: str, repeats: int) -> None:
    """Host to device and back at each size."""
    with open_pool(folder, device) as pool:
        for nbytes in SIZES:
            copies_of(pool, nbytes, repeats)


def copies_of(pool: Pool, nbytes: int, repeats: int) -> None:
    host, device = pool.stores[Tier.HOST], pool.stores[Tier.DEVICE]
    low, high = (Block("bench", str(tier), Kind.MASTER) for tier in (Tier.HOST, Tier.DEVICE))
    a = host.bytes_of(pool.allocate(low, nbytes, Tier.HOST))
    place = pool.allocate(high, nbytes, Tier.DEVICE)
    b = device.bytes_of(place)
    for block in (low, high):
        pool.write({block: torch.zeros(nbytes, dtype=torch.uint8)}).wait()
    there, back = raw_copy(b, a), raw_copy(a, b)
    beside("host to device", nbytes, lambda: device.write([(place, a)]), there, repeats)
    beside("device to host", nbytes, lambda: device.read([(place, a)]), back, repeats)

    def by_handle() -> None:
        pool.move([low], Tier.DEVICE).wait()
        pool.move([low], Tier.HOST).wait()

    beside("up and down, by handle", 2 * nbytes, by_handle, lambda: (there(), back()), repeats)
    pool.drop(high)
    pool.drop(low)


def raw_copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """The plainest copy that returns when the bytes are there."""
    if target.device.type == source.device.type == "cpu":
        return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    return copy


def bench_disk(folder: Path, device: str, repeats: int) -> None:
    """Disk tier at each size, and many small tensors."""
    with open_pool(folder, device) as pool:
        raw = DiskFile(folder, max(SIZES))
        if not raw.direct:
            print(f"through the page cache, both sides: {raw.why_buffered}")
        for nbytes in SIZES:
            disk_of(pool, raw, nbytes, repeats)
        small_of(pool, raw, repeats)
        raw.close()


def disk_of(pool: Pool, raw: DiskFile, nbytes: int, repeats: int) -> None:
    disk, host = pool.stores[Tier.DISK], pool.stores[Tier.HOST]
    block, memory = Block("bench", "disk", Kind.MASTER), Block("bench", "host", Kind.MASTER)
    place = pool.allocate(block, nbytes, Tier.DISK)
    source = host.bytes_of(pool.table.allocate(memory, nbytes, Tier.HOST, alignment=PAGE_BYTES)).random_()
    write, read = raw_io(raw, nbytes)
    beside("write", nbytes, lambda: disk.write([(place, source)]), write, repeats)
    beside("read", nbytes, lambda: disk.read([(place, source)]), read, repeats)
    if nbytes == MIB:
        crooked = torch.empty(nbytes + 8, dtype=torch.uint8)[8:]
        beside("write, memory not on a page", nbytes, lambda: disk.write([(place, crooked)]), write, repeats)
        beside("read, memory not on a page", nbytes, lambda: disk.read([(place, crooked)]), read, repeats)
        turns = [(timed(lambda: disk.read([(place, source)])), timed(read)) for _ in range(JITTER_TURNS)]
        for name, seconds in zip(("read", "raw read"), zip(*turns, strict=True), strict=True):
            cuts = statistics.quantiles(seconds, n=20)
            p50, p95 = cuts[9] * 1e6, cuts[18] * 1e6
            print(f"  {name} of 1 MiB: p50 {p50:.0f} us, p95 {p95:.0f} us, (p95 - p50)/p50 {(p95 - p50) / p50:.2f}")
    pool.drop(block)
    pool.drop(memory)


def small_of(pool: Pool, raw: DiskFile, repeats: int) -> None:
    disk = pool.stores[Tier.DISK]
    sizes = {Block("small", str(i), Kind.MASTER): 1 + i * 7 % 200 for i in range(2000)}
    places = pool.allocate_group(sizes, Tier.DISK)
    pairs = [(places[b], torch.zeros(n, dtype=torch.uint8)) for b, n in sizes.items()]
    held = sum(p.held_bytes for p in places.values())
    write, read = raw_io(raw, aligned(held, PAGE_BYTES))
    beside("write, 2000 small", held, lambda: disk.write(pairs), write, repeats)
    beside("read, 2000 small", held, lambda: disk.read(pairs), read, repeats)


def raw_io(file: DiskFile, nbytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Write and read of the file's first bytes, one thread, 1 MiB a request."""
    memory = memoryview(Mapping(nbytes, touch=True).bytes.numpy())

    def each(move: Callable[[memoryview, int], None]) -> Callable[[], None]:
        def run() -> None:
            for at in range(0, nbytes, RAW_CHUNK_BYTES):
                move(memory[at : at + RAW_CHUNK_BYTES], at)

        return run

    return each(file.write), each(file.read)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench_pool", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="table|copies|disk", help="figures to print (default: all)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the disk tier")
    parser.add_argument("--repeats", type=int, default=11, help="turns of each pair (at least 4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    options = parser.parse_args()
    if unknown := sorted(set(options.what) - {"table", "copies", "disk"}):
        parser.error(f"unknown figures {', '.join(unknown)}: choose from table, copies, disk")
    if options.repeats < 4:
        parser.error("--repeats must be at least 4")
    print(probe(options.folder, options.device))
    what = options.what or ["table", "copies", "disk"]
    if "table" in what:
        bench_table()
    if "copies" in what:
        bench_copies(options.folder, options.device, options.repeats)
    if "disk" in what:
        bench_disk(options.folder, options.device, options.repeats)


if __name__ == "__main__":
    main()
