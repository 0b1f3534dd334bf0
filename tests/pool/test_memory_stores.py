"""Device and host stores: exact sizes, views, caps, what forked children see."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import warnings
import weakref
from pathlib import Path

import numpy
import pytest
import torch

from memwall_strategy.core.block import Block, Kind, Tier
from memwall_strategy.core.errors import BlockError, ConfigError, PoolFull
from memwall_strategy.pool import host as host_module
from memwall_strategy.pool import numa as numa_module
from memwall_strategy.pool import probe as probe_module
from memwall_strategy.pool import store as store_module
from memwall_strategy.pool.arena import Region
from memwall_strategy.pool.device import ENGINE, DeviceStore
from memwall_strategy.pool.extent import extent_of
from memwall_strategy.pool.host import HostStore
from memwall_strategy.pool.mapping import Mapping
from memwall_strategy.pool.numa import Node, bind, nodes
from memwall_strategy.pool.store import Copier
from memwall_strategy.pool.table import AddressTable

KIB = 1024
PAGE = mmap.PAGESIZE
MAP_FIXED_NOREPLACE = 0x100000
"""From Linux's ``mman.h``; the mmap module has no name for it."""


def block(name: str) -> Block:
    return Block("u", name, Kind.EXP_AVG)


def mapped(address: int) -> dict[str, int]:
    """Bytes of the mapping at an address, as the kernel counts them."""
    found = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            low, high = int(span[1], 16), int(span[2], 16)
            inside = low <= address < high
            if inside:
                found["Span"] = high - low
        elif inside and (size := re.match(r"(\w+):\s+(\d+) kB", line)):
            found[size[1]] = int(size[2]) * KIB
    return found


def not_forked() -> tuple[int, int]:
    """Bytes mapped, and bytes resident, in all mappings that children do not get: the pool's."""
    mapped_bytes = resident = span = rss = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            span = int(bounds[2], 16) - int(bounds[1], 16)
        elif size := re.match(r"Rss:\s+(\d+) kB", line):
            rss = int(size[1]) * KIB
        elif line.startswith("VmFlags:") and " dc " in f"{line} ":
            mapped_bytes, resident = mapped_bytes + span, resident + rss
    return mapped_bytes, resident


@pytest.mark.parametrize("asked", [PAGE, 3 * PAGE, 1_000_001, 3 * 1024 * KIB + 5])
def test_host_bytes_resident_are_bytes_of_the_arena(asked):
    """Case 3: no rounding up to powers of two; every page is there from the start, and none beyond."""
    gc.collect()
    before = not_forked()
    table = AddressTable()
    store = HostStore(table, asked)
    after = not_forked()
    assert table.capacity_bytes(Tier.HOST) == store.mapped_bytes == asked // PAGE * PAGE
    assert (after[0] - before[0], after[1] - before[1]) == (store.mapped_bytes, store.mapped_bytes)
    store.close()
    gc.collect()
    assert not_forked() == before


def test_a_mapping_has_its_exact_size_and_goes_with_its_last_tensor():
    mapping = Mapping(37 * PAGE, touch=True)
    before = mapped(mapping.address)
    assert before["Rss"] >= 37 * PAGE and "dc" in _flags(mapping.address)
    tensor, address, alive = mapping.bytes[5:], mapping.address, weakref.ref(mapping)
    del mapping
    gc.collect()
    assert alive() is None
    assert tensor.numel() == 37 * PAGE - 5 and int(tensor.sum()) == 0, "a view keeps the memory"
    assert mapped(address)
    with pytest.raises(ValueError, match="whole pages"):
        Mapping(PAGE + 1)
    assert Mapping(0).bytes.numel() == 0


def _flags(address: int) -> str:
    text = Path("/proc/self/smaps").read_text().splitlines()
    inside = False
    for line in text:
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line
    return ""


def test_a_forked_child_neither_gets_nor_loses_the_memory():
    """It holds no copy of the pages, and dropping its references unmaps nothing that it may have put there."""
    mapping = Mapping(64 * PAGE, touch=True)
    address, tensor = mapping.address, mapping.bytes
    del mapping
    child = os.fork()
    if child == 0:
        gone = not mapped(address)
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        put = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 3, flags, -1, ctypes.c_long(0))
        del tensor
        gc.collect()
        os._exit(0 if gone and put == address and mapped(address) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 * 64 * PAGE


@pytest.mark.parametrize("make", [DeviceStore, HostStore])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (7, 3)), (torch.bfloat16, (5,)), (torch.float64, ()), (torch.int8, (0, 4)), (torch.bool, (3,)),
        (torch.complex128, (2, 2)), (torch.int64, (1,)),
    ],
)  # fmt: skip
def test_views_and_copies_of_every_shape(make, dtype, shape):
    table = AddressTable()
    store = make(table, 64 * KIB)
    table.allocate(block("before"), 65, store.tier)
    value = (torch.randn(shape) * 9).to(dtype)
    placement = table.allocate(block("x"), value.nbytes, store.tier)
    store.write([(placement, value)])
    view = store.view(placement, dtype, shape)
    assert torch.equal(view, value) and view.dtype == dtype and view.shape == value.shape
    view.copy_(torch.ones(shape).to(dtype))
    out = torch.empty(shape, dtype=dtype)
    store.read([(placement, out)])
    assert torch.equal(out, torch.ones(shape).to(dtype)), "the view is the block's memory"
    with pytest.raises(BlockError, match="a view of shape"):
        store.view(placement, dtype, (*shape, 2) if value.nbytes else (1,))
    for name in ("before", "x"):
        table.drop(block(name))
    store.close()
    store.close()


def test_tensors_that_do_not_fit_are_refused():
    table = AddressTable()
    store = HostStore(table, 64 * KIB)
    placement = table.allocate(block("x"), 48, Tier.HOST)
    for wrong, says in (
        (torch.zeros(4, 3).t(), "not contiguous"),
        (torch.zeros(11), "44 bytes for a block of 48"),
        (torch.zeros(4, 3).to_sparse(), "not contiguous"),
        (torch.zeros(6, dtype=torch.complex64).conj(), "lazy view"),
        (torch.zeros(12, device="meta"), "no memory here"),
    ):
        with pytest.raises(BlockError, match=says):
            store.write([(placement, wrong)])
    store.write([(placement, torch.zeros(12, requires_grad=True))])
    assert extent_of(torch.zeros(0, 3)).nbytes == 0
    table.drop(block("x"))
    store.close()


def test_a_snapshot_does_not_alias_what_it_was_taken_of():
    """Case 10."""
    table = AddressTable()
    store = HostStore(table, 64 * KIB)
    live = torch.arange(10.0)
    placement = table.allocate(Block("u", "w", Kind.SNAPSHOT), 40, Tier.HOST)
    store.write([(placement, live)])
    live.zero_()
    assert torch.equal(store.view(placement, torch.float32, (10,)), torch.arange(10.0))
    table.drop(Block("u", "w", Kind.SNAPSHOT))
    store.close()


def test_the_device_cap_counts_what_the_engine_holds():
    table = AddressTable()
    store = DeviceStore(table, 64 * KIB, reserve_bytes=8 * KIB)
    weights = torch.zeros(10_000)
    table.book(Block("u", "w", Kind.PARAM), weights.nbytes, Tier.DEVICE, weights.data_ptr(), arena=ENGINE)
    with pytest.raises(PoolFull, match=r"pool\.device_budget"):
        table.allocate(block("x"), 20 * KIB, Tier.DEVICE)
    table.allocate(block("x"), 20 * KIB, Tier.DEVICE, lend=True)
    table.check()
    with pytest.raises(BlockError, match="still holds"):
        store.close()
    table.drop(block("x"))
    table.drop(Block("u", "w", Kind.PARAM))
    store.close()


def test_trim_gives_free_device_pages_back_and_no_others():
    table = AddressTable()
    store = DeviceStore(table, 1024 * KIB)
    a, b = (table.allocate(block(name), 300 * KIB, Tier.DEVICE) for name in "ab")
    for place in (a, b):
        store.bytes_of(place).fill_(9)
    address = store.bytes_of(b).data_ptr()
    table.drop(block("a"))
    before = mapped(address)["Rss"]
    assert store.trim() >= 300 * KIB
    assert before - mapped(address)["Rss"] >= 300 * KIB
    assert int(store.bytes_of(b).min()) == 9
    table.drop(block("b"))
    store.close()


def test_more_host_memory_than_is_unused_is_refused_at_set_up(monkeypatch):
    monkeypatch.setattr(host_module, "unused_memory_bytes", lambda: 100 * KIB)
    table = AddressTable()
    with pytest.raises(ConfigError, match=r"pool\.host_budget=200\.0 KiB is above the 100\.0 KiB"):
        HostStore(table, 200 * KIB)
    assert table.tiers() == []


def test_one_arena_for_each_node_in_proportion_to_its_memory(monkeypatch):
    bound = []
    monkeypatch.setattr(host_module, "bind", lambda address, nbytes, node: bound.append((nbytes, node)))
    table = AddressTable()
    store = HostStore(table, 100 * PAGE + 7, on=[Node(0, 3 << 30), Node(2, 1 << 30)])
    assert bound == [(75 * PAGE, 0), (25 * PAGE, 2)]
    a = table.allocate(block("a"), 75 * PAGE, Tier.HOST)
    b = table.allocate(block("b"), 25 * PAGE, Tier.HOST)
    assert (a.arena, b.arena) == ("node0", "node2")
    store.bytes_of(a).fill_(1)
    store.bytes_of(b).fill_(2)
    assert int(store.bytes_of(a).sum()) == a.bytes
    for name in "ab":
        table.drop(block(name))
    store.close()


def test_a_node_that_cannot_be_bound_leaves_nothing_open():
    table = AddressTable()
    with pytest.raises(ConfigError, match="NUMA node 900"):
        HostStore(table, 10 * PAGE, on=[Node(0, 1 << 30), Node(900, 1 << 30)])
    assert table.tiers() == []
    store = HostStore(table, 10 * PAGE)
    store.close()


def test_where_binding_is_forbidden_one_arena_is_made_and_it_is_said_once(monkeypatch):
    def refuse(address, nbytes, node):
        raise ConfigError("memory cannot be bound: not permitted")

    monkeypatch.setattr(numa_module, "bind", refuse)
    monkeypatch.setattr(host_module, "nodes", lambda: [Node(0, 1 << 30), Node(1, 1 << 30)])
    monkeypatch.setattr(probe_module, "_told", set())
    for turn in range(2):
        table = AddressTable()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            store = HostStore(table, 10 * PAGE)
        assert [("not permitted" in str(w.message)) for w in said] == ([True] if turn == 0 else [])
        assert table.allocate(block("all"), 10 * PAGE, Tier.HOST).arena == "node0"
        table.drop(block("all"))
        store.close()


def test_the_nodes_of_this_machine():
    found = nodes()
    assert found and all(node.memory_bytes > 0 for node in found)
    mapping = Mapping(PAGE)
    try:
        bind(mapping.address, PAGE, found[0].index)
    except ConfigError as error:
        assert "mbind" in str(error)  # a container that forbids it says so
    mapping.bytes.fill_(1)


def test_nodes_are_read_from_what_the_kernel_shows(tmp_path):
    for index, kib in ((0, 1024), (1, 0), (10, 2048)):
        (tmp_path / f"node{index}").mkdir()
        (tmp_path / f"node{index}" / "meminfo").write_text(f"Node {index} MemTotal:       {kib} kB\n")
    (tmp_path / "status").write_text("Name: x\nMems_allowed_list:\t0-1,4,9-10\n")
    (tmp_path / "less").write_text("Mems_allowed_list:\t10\n")
    assert nodes(tmp_path, tmp_path / "less") == [Node(10, 2048 * KIB)]
    assert nodes(tmp_path, tmp_path / "status") == nodes(tmp_path, tmp_path / "nowhere")
    assert nodes(tmp_path, tmp_path / "status") == [Node(0, 1024 * KIB), Node(10, 2048 * KIB)]
    assert len(nodes(tmp_path / "nowhere")) == 1


def test_a_shift_of_overlapping_bytes_keeps_them():
    table = AddressTable()
    store = HostStore(table, 64 * KIB)
    table.allocate(block("a"), 64, Tier.HOST)
    p = table.allocate(block("b"), 10 * KIB, Tier.HOST)
    value = torch.from_numpy(numpy.random.default_rng(0).integers(0, 256, 10 * KIB, dtype=numpy.uint8))
    store.write([(p, value)])
    table.drop(block("a"))
    ((it, placement, to),) = table.plan_defragment(Tier.HOST, "node0")
    store.shift("node0", Region(placement.offset, placement.held_bytes), to)
    assert torch.equal(store.bytes_of(table.shift(it, placement, to)), value)
    table.drop(block("b"))
    store.close()


def test_what_goes_on_on_both_sides_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    copies = []
    real = ctypes.memmove
    monkeypatch.setattr(store_module.ctypes, "memmove", lambda to, at, n: copies.append(n) or real(to, at, n))
    spans = [(0, 0, 10), (10, 10, 20), (30, 40, 10), (40, 30, 10), (50, 40, 10), (60, 60, 0), (70, 70, 30)]
    whole_to, whole_at = extent_of(target), extent_of(source)
    Copier().copy((whole_to.part(to, to + n), whole_at.part(at, at + n)) for to, at, n in spans)
    assert copies == [30, 10, 20, 0, 30]
    expected = torch.zeros(100, dtype=torch.uint8)
    for to, at, n in spans:
        expected[to : to + n] = source[at : at + n]
    assert torch.equal(target, expected)
