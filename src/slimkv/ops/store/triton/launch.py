"""store in one Triton launch: rotate, norm, quantise, pack, scatter. Byte for byte what the reference writes."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from slimkv.ops.store.api import StoreRequest
from slimkv.ops.store.refusals import refuses_policy, refuses_raw_dtype
from slimkv.ops.store.triton.encode import encode_fp8, encode_lloyd, encode_uniform
from slimkv.ops.triton import unpack
from slimkv.ops.triton.unpack import PLAIN_ROWS, lane_and_number, side_constants, word_index
from slimkv.spec import PageLayout, SideLayout

_LLOYD: tl.constexpr = tl.constexpr(unpack.LLOYD)
_UNIFORM: tl.constexpr = tl.constexpr(unpack.UNIFORM)
_RAW: tl.constexpr = tl.constexpr(unpack.RAW)
FEW_VECTORS = 8192  # tokens times heads: of fewer, each matrix has programs of its own


@triton.jit
def _merge_bits(x, SHIFT: tl.constexpr):
    """x [..., 2] -> x[..., 0] | x[..., 1] << SHIFT."""
    a, b = tl.split(x)
    return a | (b << SHIFT)


@triton.jit
def _token_bytes(bits, W: tl.constexpr, SP: tl.constexpr, NT: tl.constexpr, TRANSPOSED: tl.constexpr):
    """A plane's bits int32 [16 NT, 16 SP] as one byte per token and lane column.

    Keys: [NT, 2 row halves, 8 g, words, 4 t, 2 jhi]; values: [NT, 2 jhi, 4 t, 2 jlo, words, 8 g].
    """
    SUB: tl.constexpr = 4 // W
    WP: tl.constexpr = SP // SUB
    if TRANSPOSED:  # dimensions (word, sub, row half, g)
        x = tl.permute(tl.reshape(bits, (NT, 2, 4, 2, WP, SUB, 2, 8)), (0, 1, 2, 3, 4, 7, 5, 6))
    else:  # dimensions (word, sub, jhi, t, jlo)
        x = tl.permute(tl.reshape(bits, (NT, 2, 8, WP, SUB, 2, 4, 2)), (0, 1, 2, 3, 6, 5, 4, 7))
    x = _merge_bits(x, 4)  # the last axis left is sub
    if SUB == 4:
        x = _merge_bits(_merge_bits(tl.reshape(x, x.shape[:-1] + (2, 2)), W), 2 * W)
    elif SUB == 2:
        x = _merge_bits(x, W)
    else:
        x = tl.reshape(x, x.shape[:-1])
    return x


@triton.jit
def _store_words(x, base, WORDS: tl.constexpr, WP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Writes whole tiles from `_token_bytes`; base: pointers [NT] to the plane in each tile."""
    if TRANSPOSED:
        y = tl.permute(x, (0, 2, 4, 5, 1, 3))  # NT, t, word, g, jhi, jlo
        lane = 4 * tl.arange(0, 8)[None, None, None, :] + tl.arange(0, 4)[None, :, None, None]
    else:
        y = tl.permute(x, (0, 2, 3, 4, 1, 5))  # NT, g, word, t, row half, jhi
        lane = 4 * tl.arange(0, 8)[None, :, None, None] + tl.arange(0, 4)[None, None, None, :]
    y = _merge_bits(_merge_bits(y, 8), 16)
    i = tl.arange(0, WP)[None, None, :, None]
    index = word_index(i, lane, WORDS)
    at = base.to(tl.pointer_type(tl.int32))[:, None, None, None] + index
    tl.store(at, y, mask=(i < WORDS) & (index >= 0))


@triton.jit
def _store_bytes(
    x, base, position, keep, WORDS: tl.constexpr, WP: tl.constexpr, NT: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Writes single tokens from `_token_bytes`; base: pointers [16 NT] to the plane in each token's tile."""
    y = tl.reshape(x, (16 * NT, WP, 8))
    place = (position % 16).to(tl.int32)[:, None, None]
    j = tl.arange(0, 8)[None, None, :]
    if TRANSPOSED:  # j is g
        lane = 4 * j + place % 8 // 2
        byte = 2 * (place // 8) + place % 2
    else:  # j is t and jhi
        lane = 4 * (place % 8) + j // 2
        byte = 2 * (place // 8) + j % 2
    i = tl.arange(0, WP)[None, :, None]
    at = base[:, None, None] + word_index(i, lane, WORDS) * 4 + byte
    tl.store(at, y.to(tl.uint8), mask=keep[:, None, None] & (i < WORDS))


@triton.jit
def _store_plane(bits, page, tile_page, position, tile_position, keep, aligned, OFFSET: tl.constexpr,
                 TILE_BYTES: tl.constexpr,
                 W: tl.constexpr, D: tl.constexpr, SP: tl.constexpr, NT: tl.constexpr,
                 TRANSPOSED: tl.constexpr):  # fmt: skip
    """Writes one plane of W <= 4 bits: bits int32 [16 NT, 16 SP].

    page, position, keep [16 NT]: every token's page, place in its block, and whether it is stored; tile_page,
    tile_position [NT]: the same of each tile's first token, used when every tile is whole and in order (``aligned``).
    """
    S: tl.constexpr = D // 16
    WORDS: tl.constexpr = S // (4 // W)
    TAIL: tl.constexpr = S % (4 // W)
    if WORDS > 0:
        WP: tl.constexpr = SP // (4 // W)
        x = _token_bytes(bits, W, SP, NT, TRANSPOSED)
        if aligned:
            _store_words(x, tile_page + OFFSET + tile_position // 16 * TILE_BYTES, WORDS, WP, TRANSPOSED)
        else:
            _store_bytes(x, page + OFFSET + position // 16 * TILE_BYTES, position, keep, WORDS, WP, NT, TRANSPOSED)
    if TAIL > 0:
        FIRST: tl.constexpr = (S - TAIL) * 2 * W  # bytes of a plain row before the tail
        PER: tl.constexpr = 8 // W
        rows = tl.reshape(bits, (16 * NT, 2 * SP * W, PER))
        packed = tl.sum(rows << (tl.arange(0, PER) * W)[None, None, :], 2)
        col = tl.arange(0, 2 * SP * W)[None, :]
        start = page + OFFSET + position // 16 * TILE_BYTES + WORDS * 128 + position % 16 * (TAIL * 2 * W)
        mask = keep[:, None] & (col >= FIRST) & (col < S * 2 * W)
        tl.store(start[:, None] + (col - FIRST), packed.to(tl.uint8), mask=mask)


@triton.jit
def _store_wide(bits, page, position, keep, OFFSET: tl.constexpr, TILE_BYTES: tl.constexpr, W: tl.constexpr,
                D: tl.constexpr, SP: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """Writes one plane of 8, 16 or 32 bits, value by value."""
    col = tl.arange(0, 16 * SP)[None, :]
    place = (position % 16).to(tl.int32)[:, None]
    lane, number = lane_and_number(place, col, TRANSPOSED)
    word = col // 16 * (W // 4) + number * W // 32
    byte = word_index(word, lane, D // 16 * (W // 4)) * 4 + number * W % 32 // 8
    base = page + OFFSET + position // 16 * TILE_BYTES
    mask = keep[:, None] & (col < D)
    if W == 8:
        tl.store(base[:, None] + byte, bits.to(tl.uint8), mask=mask)
    elif W == 16:
        tl.store((base[:, None] + byte).to(tl.pointer_type(tl.int16)), bits.to(tl.int16), mask=mask)
    else:
        tl.store((base[:, None] + byte).to(tl.pointer_type(tl.int32)), bits, mask=mask)


@triton.jit
def _store_codes(codes, page, tile_page, position, tile_position, keep, aligned, CODES: tl.constexpr,
                 BITS: tl.constexpr,
                 D: tl.constexpr, SP: tl.constexpr, NT: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """Writes codes int32 [16 NT, 16 SP], plane by plane."""
    TILE: tl.constexpr = 2 * D * BITS
    if BITS >= 8:
        _store_wide(codes, page, position, keep, CODES, TILE, BITS, D, SP, TRANSPOSED)
    else:
        FOUR: tl.constexpr = BITS // 4
        TWO: tl.constexpr = BITS % 4 // 2
        if FOUR:
            _store_plane(codes & 15, page, tile_page, position, tile_position, keep, aligned, CODES, TILE, 4, D, SP, NT,
                         TRANSPOSED)  # fmt: skip
        if TWO:
            _store_plane((codes >> (4 * FOUR)) & 3, page, tile_page, position, tile_position, keep, aligned,
                         CODES + 8 * D * FOUR, TILE, 2, D, SP, NT, TRANSPOSED)  # fmt: skip
        if BITS % 2:
            _store_plane((codes >> (4 * FOUR + 2 * TWO)) & 1, page, tile_page, position, tile_position, keep,
                aligned,
                         CODES + 8 * D * FOUR + 4 * D * TWO, TILE, 1, D, SP, NT, TRANSPOSED)  # fmt: skip


@triton.jit
def _store_field(field, page, position, keep, OFFSET: tl.constexpr):
    at = (page + OFFSET).to(tl.pointer_type(tl.uint16)) + position
    tl.store(at, field.to(tl.uint16), mask=keep)


@triton.jit
def _store_side(x_ptr, x_stride, x_head_stride, pages_ptr, slots_ptr, signs, bounds, entries, unit, orthonormal,
                weights, index_ptr, matrix_stride, only, levels, error_steps,
                tokens, block_stride, page_stride, group, head,
                NT: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, SP: tl.constexpr, KIND: tl.constexpr,
                BITS: tl.constexpr, ROTATED: tl.constexpr, CODES: tl.constexpr, FIELDS: tl.constexpr,
                TRANSPOSED: tl.constexpr, QUERY_AWARE: tl.constexpr, MATRICES: tl.constexpr,
                SPREAD: tl.constexpr):  # fmt: skip
    """Encodes and writes 16 NT tokens of one head of K or V.

    weights: pointer to the head's first matrix, the next one matrix_stride behind it; index_ptr: which of several
    MATRICES each token takes. SPREAD: only tokens of matrix ``only`` are written.
    """
    M: tl.constexpr = 16 * NT
    DP: tl.constexpr = 16 * SP
    first = group * M
    token = first + tl.arange(0, M)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    which = tl.zeros((M,), tl.int32)
    if MATRICES > 1:
        which = tl.minimum(tl.maximum(tl.load(index_ptr + token, mask=token < tokens, other=0), 0), MATRICES - 1)
        if SPREAD:
            slot = tl.where(which == only, slot, -1)
    keep = slot >= 0
    safe = tl.maximum(slot, 0)
    page = pages_ptr + safe // BLOCK_SIZE * block_stride + head * page_stride
    position = safe % BLOCK_SIZE
    # Whole tiles in order (a prefill chunk that starts at a tile) are written as words, anything else as single bytes.
    tile_token = first + tl.arange(0, NT) * 16
    tile_slot = tl.maximum(tl.load(slots_ptr + tile_token, mask=tile_token < tokens, other=-1).to(tl.int64), 0)
    tile_page = pages_ptr + tile_slot // BLOCK_SIZE * block_stride + head * page_stride
    expected = tl.reshape(tl.broadcast_to(tile_slot[:, None], (NT, 16)) + tl.arange(0, 16)[None, :], (M,))
    aligned = tl.min(((slot == expected) & ((expected - tl.arange(0, M) % 16) % 16 == 0)).to(tl.int32), 0) == 1

    col = tl.arange(0, DP)
    x_rows = x_ptr + token.to(tl.int64) * x_stride + head * x_head_stride
    x = tl.load(x_rows[:, None] + col[None, :], mask=keep[:, None] & (col < D)[None, :], other=0.0)
    if KIND == _RAW:
        if BITS == 32:
            codes = x.to(tl.int32, bitcast=True)
        else:
            codes = x.to(tl.int16, bitcast=True).to(tl.int32)
    elif KIND == _LLOYD:
        codes, field = encode_lloyd(
            x, x_rows, keep, signs, bounds, entries, unit, weights, which, matrix_stride, levels, error_steps,
            D, DP, BITS, QUERY_AWARE, MATRICES > 1,
        )  # fmt: skip
        _store_field(field, page, position, keep, FIELDS)
    elif KIND == _UNIFORM:
        codes, field, zero = encode_uniform(x.to(tl.float32), x_rows, keep, signs, orthonormal, D, DP, BITS, ROTATED)
        _store_field(field, page, position, keep, FIELDS)
        _store_field(zero, page, position, keep, FIELDS + 2 * BLOCK_SIZE)
    else:
        codes, field = encode_fp8(x.to(tl.float32))
        _store_field(field, page, position, keep, FIELDS)
    _store_codes(
        codes, page, tile_page, position, tile_slot % BLOCK_SIZE, keep, aligned, CODES, BITS, D, SP, NT, TRANSPOSED
    )


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(
    key_ptr, value_ptr, pages_ptr, slots_ptr,
    key_signs, key_bounds, key_entries, key_unit, key_orthonormal,
    value_signs, value_bounds, value_entries, value_unit, value_orthonormal,
    query_aware_ptr, index_ptr, key_levels, key_error_steps,
    tokens, key_stride, key_head_stride, value_stride, value_head_stride, block_stride, page_stride,
    NT: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERY_AWARE: tl.constexpr, MATRICES: tl.constexpr, SPREAD: tl.constexpr,
    K_D: tl.constexpr, K_SP: tl.constexpr, K_KIND: tl.constexpr, K_BITS: tl.constexpr,
    K_ROTATED: tl.constexpr, K_CODES: tl.constexpr, K_FIELDS: tl.constexpr,
    V_D: tl.constexpr, V_SP: tl.constexpr, V_KIND: tl.constexpr, V_BITS: tl.constexpr,
    V_ROTATED: tl.constexpr, V_CODES: tl.constexpr, V_FIELDS: tl.constexpr,
):  # fmt: skip
    """One program: 16 NT tokens of one head, K (axis 2, one for each matrix where they are SPREAD) or V (its last).

    QUERY_AWARE: keys are rounded with query_aware_ptr, int8 [MATRICES, num_kv_heads, K_D, K_D]; where there are
    several, index_ptr int32 [tokens] chooses.
    """
    group = tl.program_id(0)
    head = tl.program_id(1)
    if tl.program_id(2) < tl.num_programs(2) - 1:
        _store_side(key_ptr, key_stride, key_head_stride, pages_ptr, slots_ptr, key_signs, key_bounds, key_entries,
                    key_unit, key_orthonormal, query_aware_ptr + head * (K_D * K_D), index_ptr,
                    tl.num_programs(1) * (K_D * K_D), tl.program_id(2), key_levels, key_error_steps,
                    tokens, block_stride, page_stride, group, head,
                    NT, BLOCK_SIZE, K_D, K_SP, K_KIND, K_BITS, K_ROTATED, K_CODES, K_FIELDS, False,
                    QUERY_AWARE, MATRICES, SPREAD)  # fmt: skip
    else:
        _store_side(value_ptr, value_stride, value_head_stride, pages_ptr, slots_ptr, value_signs, value_bounds,
                    value_entries, value_unit, value_orthonormal, query_aware_ptr, index_ptr, 0, 0, key_levels,
                    key_error_steps,
                    tokens, block_stride, page_stride, group, head,
                    NT, BLOCK_SIZE, V_D, V_SP, V_KIND, V_BITS, V_ROTATED, V_CODES, V_FIELDS, True,
                    False, 1, False)  # fmt: skip


def supports(request: StoreRequest) -> str | None:
    """Every format with the scale policy ``norm``; blocks of at least a tile."""
    if request.layout.plain_rows:
        return PLAIN_ROWS
    return refuses_policy(request.layout) or refuses_raw_dtype(request)


@lru_cache(maxsize=256)
def _side_constants(side: SideLayout, prefix: str) -> dict[str, int | bool]:
    return {**side_constants(side, prefix), f"{prefix}_ROTATED": side.format.rotated}


def _plain_program(tokens: int, layout: PageLayout) -> tuple[int, int]:
    """Tiles and warps: small programs fill the device; few tokens want low latency, long vectors registers."""
    dim = max(layout.spec.key_dim, layout.spec.value_dim)
    return 1, 8 if dim > 256 else 4 if dim > 128 or tokens <= 256 else 2


def _query_aware_program(tokens: int, layout: PageLayout) -> tuple[int, int]:
    """Tiles and warps: the sequential part has one thread per token, so tokens are many, as far as registers go."""
    dim = triton.next_power_of_2(max(layout.spec.key_dim, layout.spec.value_dim))
    tiles = 1 if tokens <= 512 or dim > 512 else 2 if dim > 256 else 4
    return tiles, min(max(tiles * dim // (64 if tiles == 1 else 128), 1), 8)


def run(request: StoreRequest) -> None:
    """See ``slimkv.ops.store.store``: one launch."""
    tokens = request.slot_mapping.shape[0]
    if tokens == 0:
        return
    layout, key, value, pages = request.layout, request.key, request.value, request.pages
    k, v = request.codec.key_tables, request.codec.value_tables
    query_aware = request.query_aware is not None
    index = request.query_aware_index if request.matrices > 1 else None
    tiles, warps = _query_aware_program(tokens, layout) if query_aware else _plain_program(tokens, layout)
    # Neighbours in a chunk share a matrix; those of a decode step do not, and have programs enough to take one each.
    spread = index is not None and tokens * pages.shape[1] < FEW_VECTORS
    grid = (triton.cdiv(tokens, 16 * tiles), pages.shape[1], 1 + (request.matrices if spread else 1))
    store_kernel[grid](
        key, value, pages, request.slot_mapping,
        k.signs, k.bounds, k.entries, k.unit, k.orthonormal,
        v.signs, v.bounds, v.entries, v.unit, v.orthonormal,
        request.query_aware if query_aware else k.bounds, index if index is not None else k.bounds,
        k.levels, k.error_steps,
        tokens, key.stride(0), key.stride(1), value.stride(0), value.stride(1), pages.stride(0), pages.stride(1),
        NT=tiles, BLOCK_SIZE=layout.block_size, QUERY_AWARE=query_aware,
        MATRICES=request.matrices if index is not None else 1, SPREAD=spread,
        **_side_constants(layout.key, "K"), **_side_constants(layout.value, "V"),
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
