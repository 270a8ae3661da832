"""The block allocator against a simple model of it: random owners allocate, fork, write and free blocks."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("hypothesis")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slimkv.cache import BlockAllocator
from slimkv.errors import OutOfPagesError


class Owners(RuleBasedStateMachine):
    """Sequences own lists of blocks; a block is free exactly when no list contains it."""

    @initialize(count=st.integers(0, 12))
    def start(self, count):
        self.allocator = BlockAllocator(count)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        free = self.allocator.free_blocks
        if count > free:
            with pytest.raises(OutOfPagesError):
                self.allocator.allocate(count)
            return
        blocks = self.allocator.allocate(count)
        in_use = {b for held in self.owned for b in held}
        assert len(set(blocks)) == count
        assert not in_use & set(blocks)
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def fork(self, data):
        blocks = data.draw(st.sampled_from(self.owned))
        self.allocator.share(blocks)
        self.owned.append(list(blocks))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.allocator.free(self.owned.pop(index))

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data())
    def write(self, data):
        blocks = data.draw(st.sampled_from([held for held in self.owned if held]))
        index = data.draw(st.integers(0, len(blocks) - 1))
        others = sum(held.count(blocks[index]) for held in self.owned) - 1
        if others and not self.allocator.free_blocks:
            with pytest.raises(OutOfPagesError):
                self.allocator.writable(blocks[index])
            return
        block, copy = self.allocator.writable(blocks[index])
        assert copy == (others > 0)
        assert copy == (block != blocks[index])
        blocks[index] = block

    @rule(extra=st.integers(0, 3))
    def grow(self, extra):
        self.allocator.grow(self.allocator.count + extra)

    @invariant()
    def counts_are_owners(self):
        if not hasattr(self, "allocator"):
            return
        owners = Counter(b for held in self.owned for b in held)
        for block in range(self.allocator.count):
            assert self.allocator.references(block) == owners[block]
        assert self.allocator.free_blocks == self.allocator.count - len(owners)


Owners.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestOwners = Owners.TestCase
