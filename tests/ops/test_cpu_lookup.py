"""The CPU backends in torch against the reference: the same bytes stored, the same numbers read."""

from __future__ import annotations

import pytest
import torch

from slimkv import ops
from slimkv.cache import AttentionBatch, PagedPool
from slimkv.errors import InputError
from slimkv.spec import CodecSpec

FORMATS = [
    "k4v4",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "k3v3",
    "k2v2",
    "k1v1",
    "k8v8",
    "k5v6",
    "fp8",
    "krawfp32vrawfp32",
    "kur4vu8",
]
LENGTHS, QUERIES = [1, 133, 130, 0], [1, 3, 40, 0]
HEADS, GROUP = 2, 3


def filled(format: str, dim: int, block_size: int) -> tuple[PagedPool, AttentionBatch, AttentionBatch]:
    """A pool of scattered blocks, the batch of all its tokens, and that of its last ones."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-n // block_size) for n in LENGTHS]
    ids = torch.randperm(sum(counts) + 5, generator=generator).tolist()
    blocks = [[ids.pop() for _ in range(n)] for n in counts]
    pool = PagedPool(CodecSpec.parse(format, dim), sum(counts) + 5, HEADS, block_size)
    everything = AttentionBatch.build(blocks, LENGTHS, LENGTHS, block_size, "cpu")
    key, value = (torch.randn(sum(LENGTHS), HEADS, dim, generator=generator) for _ in range(2))
    pool.store(key, value, everything.slot_mapping)
    return pool, everything, AttentionBatch.build(blocks, LENGTHS, QUERIES, block_size, "cpu")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (80, 64), (128, 32)])
def test_attend_equals_the_reference(format, dim, block_size):
    pool, _, batch = filled(format, dim, block_size)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(sum(QUERIES), HEADS * GROUP, dim, generator=generator)
    fresh = tuple(torch.randn(sum(QUERIES), HEADS, dim, generator=generator) for _ in range(2))
    choices = (
        ops.AttendOptions(),
        ops.AttendOptions(causal=False, softmax_scale=0.3),
        ops.AttendOptions(sliding_window=7),
        ops.AttendOptions(softcap=5.0, sinks=torch.randn(HEADS * GROUP, generator=generator)),
    )
    for options in choices:
        for new in (None, fresh):
            for lse in (False, True):
                results = []
                for pool.backend in ("reference", "cpu_torch"):
                    out = pool.attend(query, batch, options, fresh=new, return_lse=lse)
                    results.append(out if lse else (out,))
                for expected, actual in zip(*results, strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rotated", [False, True])
def test_gather_equals_the_reference(format, rotated):
    pool, everything, _ = filled(format, 80, 16)
    slots = everything.slot_mapping.flip(0).clone()
    slots[5] = -1
    results = []
    for pool.backend in ("reference", "cpu_torch"):
        results.append(pool.gather(slots, rotated=rotated))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
        assert actual[5].abs().max() == 0


@pytest.mark.parametrize("format", FORMATS)
def test_store_writes_the_reference_bytes(format):
    spec = CodecSpec.parse(format, 64)
    key, value = torch.randn(40, HEADS, 64), torch.randn(40, HEADS, 64) * 7
    slots = torch.randperm(64)[:40]
    slots[3] = -1
    pages = []
    for backend in ("reference", "cpu_torch"):
        pool = PagedPool(spec, 4, HEADS, 16, backend=backend)
        pool.store(key, value, slots)
        pages.append(pool.pages)
    assert torch.equal(*pages)
    value[7, 1, 2] = torch.inf
    if "raw" not in format:
        with pytest.raises(InputError, match="cannot be encoded"):
            pool.store(key, value, slots)
