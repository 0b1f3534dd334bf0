"""The pool on one CUDA card: torch's allocator under a cap, a registered host arena, copies that wait for kernels."""

from __future__ import annotations

import pytest
import torch

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import PoolFull
from memwall_strategy.pool.device import DeviceStore
from memwall_strategy.pool.disk import DiskStore
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.pool import Pool
from memwall_strategy.pool.probe import probe
from memwall_strategy.pool.table import AddressTable

pytestmark = pytest.mark.requires_cuda(1)

MIB = 1024 * 1024
SIZES = [0, 1, 63, 64, 65, 4097, 300_001, 8 * MIB + 3]


@pytest.fixture
def pool(tmp_path):
    table = AddressTable()
    host = HostStore(table, 64 * MIB, device="cuda")
    disk = DiskStore(table, 64 * MIB, tmp_path, host=host)
    made = Pool(table, [DeviceStore(table, 32 * MIB, device="cuda"), host, disk], timeout_s=60)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def block(name: object) -> Block:
    return Block("u", str(name), Kind.EXP_AVG)


def test_every_route_keeps_every_byte(pool):
    values = {block(i): torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(SIZES)}
    pool.allocate_group({b: t.numel() for b, t in values.items()}, Tier.HOST)
    pool.write(values)
    for tier in (Tier.DEVICE, Tier.DISK, Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.HOST, Tier.DEVICE):
        pool.move(values, tier)
        for device in ("cpu", "cuda"):
            got = {b: torch.full_like(t, 7, device=device) for b, t in values.items()}
            pool.read(got).wait(60)
            assert all(torch.equal(got[b].cpu(), values[b]) for b in values)
        pool.table.check()


def test_the_host_arena_is_page_locked_and_no_longer_afterwards(pool):
    assert probe(device="cuda").why_no_registration == ""
    pool.allocate(block("w"), 4 * MIB, Tier.HOST)
    view = pool.view(block("w"), torch.float32, (MIB,))
    assert view.is_pinned()
    pool.close()
    assert not view.is_pinned()


def test_copies_wait_for_what_the_compute_stream_was_given(pool):
    """A long kernel writes the source after the submitting thread has long gone on."""
    pool.allocate(block("w"), 4 * MIB, Tier.DEVICE)
    view = pool.view(block("w"), torch.float32, (MIB,))
    slow = torch.ones(4096, 4096, device="cuda")
    with pool.updating([block("w")]):
        for _ in range(50):
            slow = slow @ slow
        view.fill_(3.0)
    pool.move([block("w")], Tier.HOST).wait(60)
    assert torch.equal(pool.view(block("w"), torch.float32, (MIB,)), torch.full((MIB,), 3.0))


def test_the_cap_is_torch_memory_and_freed_memory_is_torchs_again(pool):
    before = torch.cuda.memory_allocated()
    pool.allocate(block("w"), 16 * MIB, Tier.DEVICE)
    assert torch.cuda.memory_allocated() - before == pool.table.used_bytes(Tier.DEVICE) == 16 * MIB
    with pytest.raises(PoolFull, match=r"pool\.device_budget"):
        pool.allocate(block("x"), 16 * MIB + 1, Tier.DEVICE)
    pool.drop(block("w"))
    assert torch.cuda.memory_allocated() == before
