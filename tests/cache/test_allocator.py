"""The block allocator: reference counts."""

from __future__ import annotations

import pytest

from slimkv.cache import BlockAllocator
from slimkv.errors import InputError, OutOfPagesError


def test_all_or_nothing():
    allocator = BlockAllocator(4)
    first = allocator.allocate(3)
    assert len(set(first)) == 3
    with pytest.raises(OutOfPagesError, match="2 blocks requested, 1 of 4 are free"):
        allocator.allocate(2)
    assert allocator.free_blocks == 1
    assert allocator.allocate(0) == []
    assert allocator.allocate() == list(set(range(4)) - set(first))


def test_a_shared_block_is_free_when_the_last_owner_lets_go():
    allocator = BlockAllocator(1)
    (block,) = allocator.allocate()
    allocator.share([block])
    allocator.free([block])
    assert allocator.free_blocks == 0
    assert allocator.references(block) == 1
    allocator.free([block])
    assert allocator.free_blocks == 1


def test_writing_a_shared_block_takes_a_fresh_one():
    allocator = BlockAllocator(3)
    (block,) = allocator.allocate()
    assert allocator.writable(block) == (block, False)
    allocator.share([block])
    fresh, copy = allocator.writable(block)
    assert copy
    assert fresh != block
    assert (allocator.references(block), allocator.references(fresh)) == (1, 1)


def test_writing_a_shared_block_of_a_full_pool_changes_nothing():
    allocator = BlockAllocator(1)
    (block,) = allocator.allocate()
    allocator.share([block])
    with pytest.raises(OutOfPagesError):
        allocator.writable(block)
    assert allocator.references(block) == 2


@pytest.mark.parametrize("method", ["share", "free"])
def test_a_list_with_a_block_that_is_not_owned_changes_nothing(method):
    allocator = BlockAllocator(3)
    (block,) = allocator.allocate()
    other = (block + 1) % 3
    with pytest.raises(InputError, match=f"block {other} is free"):
        getattr(allocator, method)([block, other])
    assert allocator.references(block) == 1


def test_a_block_is_freed_once_by_each_owner():
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate()
    with pytest.raises(InputError, match=f"block {block} has 1 owners; it cannot be freed 2 times"):
        allocator.free([block, block])
    assert (allocator.references(block), allocator.free_blocks) == (1, 1)
    allocator.share([block])
    allocator.free([block, block])
    assert (allocator.references(block), allocator.free_blocks) == (0, 2)


def test_mistakes_are_named():
    allocator = BlockAllocator(2)
    with pytest.raises(InputError, match="a pool cannot have -1 blocks"):
        BlockAllocator(-1)
    with pytest.raises(InputError, match="cannot allocate -1 blocks"):
        allocator.allocate(-1)
    with pytest.raises(InputError, match="block 2 is not one of this pool's 2"):
        allocator.references(2)
    with pytest.raises(InputError, match="cannot shrink to 1"):
        allocator.grow(1)
    with pytest.raises(InputError, match="block 0 is free"):
        allocator.writable(0)
