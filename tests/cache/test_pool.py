"""``PagedPool``: attention reads what was stored, also after sharing, copying and growing."""

from __future__ import annotations

import math

import pytest
import torch

from slimkv import CodecSpec
from slimkv.cache import PagedPool
from slimkv.errors import InputError
from slimkv.ops import AttentionBatch

HEADS, DIM, TOKENS = 2, 64, 16


@pytest.fixture
def device() -> torch.device:
    return torch.zeros(0, device="cuda" if torch.cuda.is_available() else "cpu").device


def pool_of(blocks: int, device: torch.device, format: str = "k4v4") -> PagedPool:
    return PagedPool(CodecSpec.parse(format, DIM), blocks, HEADS, TOKENS, device)


def tokens(count: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, count, HEADS, DIM, generator=g).to(device)
    return key, value


def fill(pool: PagedPool, blocks: list[int], count: int, seed: int = 0, first: int = 0) -> None:
    """Stores tokens first .. first + count of a sequence."""
    batch = AttentionBatch.build([blocks], [first + count], [count], TOKENS, pool.pages.device)
    pool.store(*tokens(count, pool.pages.device, seed), batch.slot_mapping)


def attend(pool: PagedPool, blocks: list[int], length: int) -> torch.Tensor:
    batch = AttentionBatch.build([blocks], [length], [1], TOKENS, pool.pages.device)
    query = torch.randn(1, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(9)).to(pool.pages.device)
    return pool.attend(query, batch)


def slots_of(blocks: list[int], length: int, device: torch.device) -> torch.Tensor:
    return AttentionBatch.build([blocks], [length], [length], TOKENS, device).slot_mapping


def test_bytes(device):
    pool = pool_of(5, device)
    assert pool.nbytes == pool.pages.numel() == pool.layout.pool_bytes(5, HEADS)
    assert (pool.pages == 0).all()


def test_store_attend_and_gather_agree(device):
    pool = pool_of(6, device)
    blocks = pool.allocator.allocate(3)[::-1]
    fill(pool, blocks, 37)
    key, value = pool.gather(slots_of(blocks, 37, device))
    original = tokens(37, device)
    assert ((key - original[0]).norm() / original[0].norm()) < 0.11  # the error of 4 bits
    out = attend(pool, blocks, 37)
    query = torch.randn(1, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(9)).to(device)
    scores = torch.einsum("hgd,khd->hgk", query[0].unflatten(0, (HEADS, 2)), key) / math.sqrt(DIM)
    want = torch.einsum("hgk,khd->hgd", scores.softmax(-1), value).flatten(0, 1)
    assert ((out[0] - want).norm() / want.norm()) < 2e-3
    rotated, _ = pool.gather(slots_of(blocks, 37, device), dtype=torch.float32, rotated=True)
    assert torch.allclose(rotated, key @ pool.codec.key_rotation, atol=1e-5)


def test_a_fork_shares_and_copies_only_what_it_writes(device):
    pool = pool_of(6, device)
    parent = pool.allocator.allocate(2)
    fill(pool, parent, 20)
    before = attend(pool, parent, 20)
    child = list(parent)
    pool.allocator.share(child)
    pool.make_writable(child, first_position=20)
    assert child[0] == parent[0]
    assert child[1] != parent[1]
    assert torch.equal(attend(pool, child, 20), before)  # the copied block is only partly filled
    fill(pool, child, 4, seed=1, first=20)
    assert torch.equal(attend(pool, parent, 20), before)
    assert not torch.equal(attend(pool, child, 24), before)
    pool.allocator.free(parent)
    assert pool.allocator.free_blocks == 4
    again = list(child)
    pool.make_writable(again, first_position=24)
    assert again == child  # its only owner now: nothing to copy


def test_growing_keeps_what_is_stored(device):
    pool = pool_of(2, device)
    blocks = pool.allocator.allocate(2)
    fill(pool, blocks, 20)
    before = attend(pool, blocks, 20)
    pool.grow(5)
    assert pool.pages.shape[0] == pool.allocator.count == 5
    assert pool.nbytes == pool.layout.pool_bytes(5, HEADS)
    assert (pool.pages[2:] == 0).all()
    assert torch.equal(attend(pool, blocks, 20), before)
    pool.grow(5)
    assert pool.pages.shape[0] == 5


def test_copying_blocks_that_do_not_pair_up(device):
    with pytest.raises(InputError, match="source has 1 blocks, target 2"):
        pool_of(3, device).copy_blocks([0], [1, 2])


def test_an_implementation_by_name(device):
    pool = PagedPool(CodecSpec.parse("k4v4", DIM), 2, HEADS, TOKENS, device, backend="nonesuch")
    with pytest.raises(InputError, match="no backend 'nonesuch'; known are "):
        fill(pool, [0], 4)


def test_a_pool_takes_the_name_of_a_format():
    pool = PagedPool("k4v4", 4, HEADS, TOKENS, head_dim=DIM)
    assert pool.layout.spec == CodecSpec.parse("k4v4", DIM)
    assert repr(pool) == f"PagedPool(k4v4, 4 blocks of {TOKENS} tokens, {HEADS} KV heads, {pool.nbytes:,} bytes)"
    with pytest.raises(InputError, match="'k4v4' needs a head size: pass head_dim"):
        PagedPool("k4v4", 4, HEADS)
    with pytest.raises(InputError, match="head_dim=32 contradicts the spec"):
        PagedPool(CodecSpec.parse("k4v4", DIM), 4, HEADS, head_dim=32)
