"""Unpacking restores exactly what was packed, and every byte belongs to one token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from page_blocks import pack_block, unpack_block
from slimkv import Codec, CodecSpec, Encoded, PageLayout
from slimkv.codec import pack
from slimkv.errors import InputError
from slimkv.spec import BLOCK_SIZES, LatentSpec

CPU = torch.device("cpu")
PARTS = [
    *(f"{b}" for b in range(1, 9)),
    *(f"u{b}" for b in range(2, 9)),
    "ur4",
    "fp8",
    "rawbf16",
    "rawfp16",
    "rawfp32",
]
DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256, 576)
layouts = st.builds(
    lambda key, value, key_dim, value_dim, block, rows: (
        PageLayout(LatentSpec.parse(f"c{key}r{value}", key_dim, value_dim), block, True)
        if rows
        else PageLayout(CodecSpec.parse(f"k{key}v{value}", key_dim, value_dim), block)
    ),
    st.sampled_from(PARTS),
    st.sampled_from(PARTS),
    st.sampled_from(DIMS),
    st.sampled_from(DIMS),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from([False, False, True]),
)


def random_encoded(side, shape, generator) -> Encoded:
    """Codes and fields of every possible value, including those that no encoder writes."""
    bits = side.format.bits
    if bits == 32:
        codes = torch.randint(-(2**31), 2**31, (*shape, side.dim), generator=generator, dtype=torch.int64).to(
            torch.int32
        )
    else:
        codes = torch.randint(0, 1 << bits, (*shape, side.dim), generator=generator, dtype=torch.int32)
    fields = torch.randint(0, 1 << 16, (*shape, side.format.field_count), generator=generator, dtype=torch.int32)
    return Encoded(codes if bits > 8 else codes.to(torch.uint8), fields)


def assert_same(found: Encoded, expected: Encoded) -> None:
    assert found.codes.dtype == expected.codes.dtype
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.fields, expected.fields)


@given(
    layout=layouts,
    seed=st.integers(0, 2**32 - 1),
    part=st.floats(0, 1),
    batch=st.sampled_from([(), (2,), (0,), (2, 3)]),
)
@settings(max_examples=250, deadline=None)
def test_blocks_round_trip(layout, seed, part, batch):
    generator = torch.Generator().manual_seed(seed)
    tokens = round(part * layout.block_size)
    key, value = (random_encoded(side, (*batch, tokens), generator) for side in (layout.key, layout.value))
    page = pack_block(layout, key, value)
    assert page.shape == (*batch, layout.page_bytes)
    assert page.dtype == torch.uint8
    for unpacked, expected in zip(unpack_block(layout, page), (key, value), strict=True):
        assert_same(Encoded(unpacked.codes[..., :tokens, :], unpacked.fields[..., :tokens, :]), expected)
        assert not unpacked.codes[..., tokens:, :].any()
        assert not unpacked.fields[..., tokens:, :].any()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_every_format_in_every_block_size(part, block):
    generator = torch.Generator().manual_seed(block)
    for dim in (64, 80, 96, 128, 576):
        layout = PageLayout(CodecSpec.parse(f"k{part}v{part}", dim), block)
        key, value = (random_encoded(side, (2, block), generator) for side in (layout.key, layout.value))
        page = pack_block(layout, key, value)
        for unpacked, expected in zip(unpack_block(layout, page), (key, value), strict=True):
            assert_same(unpacked, expected)


@given(layout=layouts)
@settings(max_examples=150, deadline=None)
def test_rows_are_a_permutation_of_the_content_bytes(layout):
    tables = pack.page_tables(layout, CPU)
    assert tables.byte_offsets.shape == (layout.block_size, tables.row_bytes)
    order = tables.byte_offsets.flatten().sort().values
    assert torch.equal(order, torch.arange(layout.content_bytes))


@given(layout=layouts, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_appending_tokens_one_by_one_gives_the_block(layout, seed):
    """A token is stored by plain byte writes: nothing that other tokens wrote is read or changed."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (random_encoded(side, (layout.block_size,), generator) for side in (layout.key, layout.value))
    offsets = pack.page_tables(layout, CPU).byte_offsets
    rows = pack.pack_rows(layout, key, value)
    page = torch.zeros(layout.page_bytes, dtype=torch.uint8)
    for token in torch.randperm(layout.block_size, generator=generator).tolist():
        before = page.clone()
        page[offsets[token]] = rows[token]
        untouched = torch.ones(layout.page_bytes, dtype=torch.bool)
        untouched[offsets[token]] = False
        assert torch.equal(page[untouched], before[untouched])
    assert torch.equal(page, pack_block(layout, key, value))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_single_vectors_round_trip(part, dim):
    layout = PageLayout(CodecSpec.parse(f"k{part}v{part}", dim), 1)
    generator = torch.Generator().manual_seed(dim)
    for side in (layout.key, layout.value):
        encoded = random_encoded(side, (2, 5), generator)
        rows = pack.pack_vectors(side, encoded)
        assert rows.shape == (2, 5, dim * side.format.bits // 8 + 2 * side.format.field_count)
        assert_same(pack.unpack_vectors(side, rows), encoded)


def test_vectors_pack_the_same_from_any_block_size():
    codec = Codec.from_format("k3v5", 80)
    encoded = codec.encode_key(torch.randn(4, 80, generator=torch.Generator().manual_seed(1)))
    rows = [pack.pack_vectors(PageLayout(codec.spec, block).key, encoded) for block in (1, 16)]
    assert torch.equal(rows[0], rows[1])


def test_mistakes_are_named():
    layout = PageLayout(CodecSpec.parse("k4v4", 64), 16)
    codec = Codec(layout.spec)
    key = codec.encode_key(torch.ones(17, 64))
    with pytest.raises(InputError, match="must have the same batch shape"):
        pack.pack_rows(layout, key, codec.encode_value(torch.ones(3, 64)))
    with pytest.raises(InputError, match=r"uint8 rows of 34 bytes, not torch.uint8 of 33"):
        codec.unpack_key(torch.zeros(2, 33, dtype=torch.uint8))
