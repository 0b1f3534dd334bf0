"""Random histories of the address table, with real bytes, against a plain model.

Every arena is a bytearray. The model keeps, for each block, what was last written to it, and for each replica what it
held when it was copied. Whatever the table serves as readable must hold exactly the last whole write.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from memwall_strategy.core.block import Block, Kind, Placement, Tier
from memwall_strategy.core.errors import BlockError, PoolFull
from memwall_strategy.pool.arena import LARGE_BYTES, Arena
from memwall_strategy.pool.entry import Copy, Role
from memwall_strategy.pool.table import AddressTable

SIZES = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 4095, 4096, LARGE_BYTES]), st.integers(0, 5000))
WHICH = st.integers(0, 50)
TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.DISK])
CAPACITY = 2 * LARGE_BYTES + 24 * 1024
"""Room for two large blocks and a few small ones: a tier is full now and then."""


class Histories(RuleBasedStateMachine):
    @initialize(two_arenas=st.booleans(), reserve=st.sampled_from([0, 8192]))
    def open(self, two_arenas, reserve):
        self.table = AddressTable(rank=1)
        self.memory: dict[tuple[Tier, int, str], bytearray] = {}
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
            names = ["a", "b"] if two_arenas and tier is Tier.HOST else ["a"]
            self.table.open_tier(tier, CAPACITY * len(names), reserve_bytes=reserve)
            for name in names:
                self.table.add_arena(tier, name, Arena(CAPACITY))
                self.memory[tier, 1, name] = bytearray(CAPACITY)
        self.wrote: dict[Block, bytes | None] = {}  # None: nothing whole is there
        self.sizes: dict[Block, int] = {}
        self.open_copies: list[Copy] = []
        self.number = 0

    # -- bytes --

    def load(self, p: Placement) -> bytes:
        return bytes(self.memory[p.place][p.offset : p.offset + p.bytes])

    def store(self, p: Placement, content: bytes) -> None:
        assert len(content) == p.bytes
        self.memory[p.place][p.offset : p.offset + p.held_bytes] = content + b"\xee" * p.padding

    def fresh(self, nbytes: int) -> bytes:
        self.number += 1
        return random.Random(self.number).randbytes(nbytes)

    def busy(self, block: Block) -> bool:
        return any(copy.block == block for copy in self.open_copies)

    def room(self, tier: Tier, lend: bool) -> int:
        return self.table.free_bytes(tier, lend=lend)

    def pick(self, which: int) -> Block:
        return list(self.wrote)[which % len(self.wrote)]

    # -- rules --

    @rule(nbytes=SIZES, tier=TIERS, lend=st.booleans(), write=st.booleans())
    def allocate(self, nbytes, tier, lend, write):
        self.number += 1
        block, free = Block("unit", f"p{self.number}", Kind.EXP_AVG), self.room(tier, lend)
        try:
            placement = self.table.allocate(block, nbytes, tier, lend=lend)
        except PoolFull as error:
            assert error.missing_bytes == 0 or error.missing_bytes >= nbytes - free
            assert block not in self.table and self.room(tier, lend) == free
            return
        assert placement.bytes == nbytes and placement.held_bytes <= free
        self.wrote[block], self.sizes[block] = None, nbytes
        if write:
            self.write(block, False)

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=3), tier=TIERS)
    def allocate_group(self, sizes, tier):
        self.number += 1
        group = {Block("group", f"g{self.number}.{i}", Kind.MASTER): n for i, n in enumerate(sizes)}
        try:
            placed = self.table.allocate_group(group, tier)
        except PoolFull:
            assert not any(block in self.table for block in group)
            return
        assert {b: p.bytes for b, p in placed.items()} == group
        self.wrote.update(dict.fromkeys(group))
        self.sizes.update(group)

    @precondition(lambda self: self.wrote)
    @rule(which=WHICH, fails=st.sampled_from([False, False, True]))
    def write_to(self, which, fails):
        self.write(self.pick(which), fails)

    def write(self, block, fails):
        if self.busy(block):
            with pytest.raises(BlockError):
                self.table.begin_write(block)
            return
        before = self.table.locate(block).generation
        place = self.table.begin_write(block)
        content = self.fresh(self.sizes[block])
        self.store(place, content[: len(content) // 2] + b"\x00" * (len(content) - len(content) // 2))
        with pytest.raises(BlockError):
            self.table.readable(block)
        if fails:
            self.table.abort_write(block)
            self.wrote[block] = None
            return
        self.store(place, content)
        assert self.table.end_write(block).generation == before + 1
        self.wrote[block] = content

    @precondition(lambda self: self.wrote)
    @rule(which=WHICH, tier=TIERS, role=st.sampled_from(Role), lend=st.booleans())
    def begin_copy(self, which, tier, role, lend):
        block = self.pick(which)
        try:
            match role:
                case Role.MOVE:
                    copy = self.table.begin_move(block, tier, lend=lend)
                case Role.REPLICA:
                    copy = self.table.begin_replica(block, tier, lend=lend)
                case Role.REFRESH:
                    copy = self.table.begin_refresh(block, tier)
        except (PoolFull, BlockError):
            return
        if copy.source.generation:
            self.store(copy.target, self.load(copy.source))
        self.open_copies.append(copy)

    @precondition(lambda self: self.open_copies)
    @rule(which=WHICH, arrives=st.booleans())
    def end_copy(self, which, arrives):
        copy = self.open_copies.pop(which % len(self.open_copies))
        if not arrives:
            self.table.abort(copy)
            return
        placement = self.table.commit(copy)
        assert placement.place == copy.target.place and placement.generation == copy.source.generation
        if copy.role is Role.MOVE:
            assert self.table.locate(copy.block) == placement

    @precondition(lambda self: self.wrote)
    @rule(which=WHICH, tier=TIERS, rewrite=st.booleans())
    def replicate_at_once(self, which, tier, rewrite):
        """The whole way in one step, and a write that makes the replica stale."""
        block = self.pick(which)
        if self.wrote[block] is None or self.busy(block):
            return
        try:
            with self.table.replicate(block, tier) as copy:
                self.store(copy.target, self.load(copy.source))
        except (PoolFull, BlockError):
            return
        assert self.load(self.table.readable(block, tier=tier)) == self.wrote[block]
        if rewrite:
            self.write(block, False)

    @precondition(lambda self: self.wrote)
    @rule(which=WHICH, tier=TIERS)
    def promote(self, which, tier):
        block = self.pick(which)
        replicas = [p for p in self.table.replicas(block) if p.tier == tier]
        newest = self.table.locate(block).generation
        if len(replicas) != 1 or self.busy(block) or replicas[0].generation != newest:
            with pytest.raises(BlockError):
                self.table.promote(block, tier)
            return
        content = self.load(replicas[0])
        self.table.promote(block, tier)
        if self.wrote[block] is not None:
            assert content == self.wrote[block]
        self.wrote[block] = content  # a torn block has its last whole content again

    @precondition(lambda self: self.wrote)
    @rule(which=WHICH)
    def drop(self, which):
        block = self.pick(which)
        if self.busy(block):
            with pytest.raises(BlockError):
                self.table.drop(block)
            return
        self.table.drop(block)
        del self.wrote[block], self.sizes[block]

    @precondition(lambda self: not self.open_copies)
    @rule(tier=TIERS)
    def defragment(self, tier):
        moves = self.table.plan_defragment(tier, "a")
        memory = self.memory[tier, 1, "a"]
        for block, p, to in moves:
            memory[to : to + p.held_bytes] = memory[p.offset : p.offset + p.held_bytes]
            assert self.table.shift(block, p, to).offset == to < p.offset

    @rule(tier=TIERS, share=st.floats(0.5, 1.0))
    def resize(self, tier, share):
        capacity = int(CAPACITY * share)
        held = self.table.used_bytes(tier)
        reserve = sum(p.bytes for b, p in self.table if b.kind == Kind.RESERVE and p.tier == tier)
        try:
            self.table.resize_tier(tier, capacity_bytes=capacity)
        except PoolFull as error:
            assert error.missing_bytes == held - capacity > 0
        else:
            assert held <= capacity and reserve >= 0

    # -- what must always hold --

    @invariant()
    def consistent(self):
        if not hasattr(self, "table"):
            return
        self.table.check()
        assert {b for b, _ in self.table if b.kind != Kind.RESERVE} == set(self.wrote)
        for block, content in self.wrote.items():
            assert self.table.locate(block).bytes == self.sizes[block]
            if content is None:
                with pytest.raises(BlockError):
                    self.table.readable(block)
                continue
            for tier in (None, Tier.DEVICE, Tier.HOST, Tier.DISK):
                assert self.load(self.table.readable(block, tier=tier)) == content
        held = sum(p.held_bytes for p in self.every_copy())
        assert self.table.used_bytes() == held
        assert sum(balance.held_bytes for _, balance in self.table.balances()) == held

    def every_copy(self) -> list[Placement]:
        found = [self.table.locate(block) for block in self.wrote]
        found += [p for block in self.wrote for p in self.table.replicas(block)]
        return found + [copy.target for copy in self.open_copies if copy.role is not Role.REFRESH]


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
