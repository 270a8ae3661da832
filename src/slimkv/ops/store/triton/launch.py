"""store in one Triton launch: rotate, norm, quantise, pack, scatter. The bytes equal those of the reference."""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.ops.store.api import StoreRequest, refuses_policy, refuses_raw_dtype
from slimkv.ops.store.triton.encode import encode_fp8, encode_lloyd, encode_uniform
from slimkv.ops.triton.side import LLOYD, PLAIN_ROWS, RAW, UNIFORM, side_of
from slimkv.ops.triton.unpack import lane_and_number, word_index
from slimkv.spec import PageLayout

FEW_VECTORS = 8192  # tokens times heads; below this, every matrix has its own programs


@triton.jit
def _merge_bits(x, SHIFT: tl.constexpr):
    """x [..., 2] -> x[..., 0] | x[..., 1] << SHIFT."""
    a, b = tl.split(x)
    return a | (b << SHIFT)


@triton.jit
def _store_plane(bits, base, place, keep, W: tl.constexpr, S: tl.constexpr):
    """Writes one plane of W <= 4 bits: bits int32 [M, 16 SP]; see `_store_codes`."""
    M: tl.constexpr = bits.shape[0]
    SLICES: tl.constexpr = S.D // 16
    SUB: tl.constexpr = 4 // W
    WORDS: tl.constexpr = SLICES // SUB
    TAIL: tl.constexpr = SLICES % SUB
    if WORDS > 0:
        # For each word index, a token owns one byte at each of 8 (lane, byte) pairs.
        WP: tl.constexpr = S.SP // SUB
        at = place[:, None, None]
        j = tl.arange(0, 8)[None, None, :]
        if S.TRANSPOSED:  # dimensions (word, sub, row half, g); j is g
            x = tl.permute(tl.reshape(bits, (M, WP, SUB, 2, 8)), (0, 1, 4, 2, 3))
            lane = 4 * j + at % 8 // 2
            byte = 2 * (at // 8) + at % 2
        else:  # dimensions (word, sub, jhi, t, jlo); j is t and jhi
            x = tl.permute(tl.reshape(bits, (M, WP, SUB, 2, 4, 2)), (0, 1, 4, 3, 2, 5))
            x = tl.reshape(x, (M, WP, 8, SUB, 2))
            lane = 4 * (at % 8) + j // 2
            byte = 2 * (at // 8) + j % 2
        x = _merge_bits(x, 4)  # sub is now the last axis
        if SUB == 4:
            x = _merge_bits(_merge_bits(tl.reshape(x, (M, WP, 8, 2, 2)), W), 2 * W)
        elif SUB == 2:
            x = _merge_bits(x, W)
        i = tl.arange(0, WP)[None, :, None]
        to = base[:, None, None] + word_index(i, lane, WORDS) * 4 + byte
        tl.store(to, tl.reshape(x, (M, WP, 8)).to(tl.uint8), mask=keep[:, None, None] & (i < WORDS))
    if TAIL > 0:
        FIRST: tl.constexpr = (SLICES - TAIL) * 2 * W  # bytes of a plain row before the tail
        PER: tl.constexpr = 8 // W
        rows = tl.reshape(bits, (M, 2 * S.SP * W, PER))
        packed = tl.sum(rows << (tl.arange(0, PER) * W)[None, None, :], 2)
        col = tl.arange(0, 2 * S.SP * W)[None, :]
        start = base + WORDS * 128 + place * (TAIL * 2 * W)
        mask = keep[:, None] & (col >= FIRST) & (col < SLICES * 2 * W)
        tl.store(start[:, None] + (col - FIRST), packed.to(tl.uint8), mask=mask)


@triton.jit
def _store_wide(bits, base, place, keep, S: tl.constexpr):
    """Writes one plane of 8, 16 or 32 bits, value by value."""
    WPS: tl.constexpr = S.BITS // 4
    col = tl.arange(0, 16 * S.SP)[None, :]
    lane, number = lane_and_number(place[:, None], col, S.TRANSPOSED)
    word = col // 16 * WPS + number * S.BITS // 32
    at = base[:, None] + (word_index(word, lane, S.D // 16 * WPS) * 4 + number * S.BITS % 32 // 8)
    mask = keep[:, None] & (col < S.D)
    if S.BITS == 8:
        tl.store(at, bits.to(tl.uint8), mask=mask)
    elif S.BITS == 16:
        tl.store(at.to(tl.pointer_type(tl.int16)), bits.to(tl.int16), mask=mask)
    else:
        tl.store(at.to(tl.pointer_type(tl.int32)), bits, mask=mask)


@triton.jit
def _store_codes(codes, base, place, keep, S: tl.constexpr):
    """Writes codes int32 [M, 16 SP], plane by plane.

    base, place, keep [M]: the tile of codes of each token, its place in the tile, and whether it is stored.
    """
    if S.BITS >= 8:
        _store_wide(codes, base, place, keep, S)
    else:
        FOUR: tl.constexpr = S.BITS // 4
        TWO: tl.constexpr = S.BITS % 4 // 2
        if FOUR:
            _store_plane(codes & 15, base, place, keep, 4, S)
        if TWO:
            _store_plane((codes >> (4 * FOUR)) & 3, base + 8 * S.D * FOUR, place, keep, 2, S)
        if S.BITS % 2:
            SHIFT: tl.constexpr = 4 * FOUR + 2 * TWO
            _store_plane((codes >> SHIFT) & 1, base + 2 * S.D * SHIFT, place, keep, 1, S)


@triton.jit
def _store_field(field, page, position, keep, INDEX: tl.constexpr, S: tl.constexpr):
    fields = (page + (S.FIELDS + INDEX * 2 * S.BLOCK_SIZE)).to(tl.pointer_type(tl.uint16))
    tl.store(fields + position, field.to(tl.uint16), mask=keep)


@triton.jit
def _store_side(x_ptr, x_stride, x_head_stride, pages_ptr, slots_ptr, signs, bounds, entries, unit, orthonormal,
                weights, index_ptr, matrix_stride, levels, error_steps, tokens, block_stride, page_stride,
                NT: tl.constexpr, MATRICES: tl.constexpr, SPREAD: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Encodes and writes 16 NT tokens of one head of K or V.

    weights: pointer to the first matrix of the head, or None; matrices are matrix_stride apart. index_ptr: the matrix
    of each token, if there are several MATRICES. SPREAD: only tokens of the program's matrix (axis 2) are written.
    """
    M: tl.constexpr = 16 * NT
    DP: tl.constexpr = 16 * S.SP
    TILE: tl.constexpr = 2 * S.D * S.BITS
    head = tl.program_id(1)
    first = tl.program_id(0) * M
    token = first + tl.arange(0, M)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    which = tl.zeros((M,), tl.int32)
    if MATRICES > 1:
        which = tl.minimum(tl.maximum(tl.load(index_ptr + token, mask=token < tokens, other=0), 0), MATRICES - 1)
        if SPREAD:
            slot = tl.where(which == tl.program_id(2), slot, -1)
    keep = slot >= 0
    safe = tl.maximum(slot, 0)
    page = pages_ptr + safe // S.BLOCK_SIZE * block_stride + head * page_stride
    position = safe % S.BLOCK_SIZE

    col = tl.arange(0, DP)
    x_rows = x_ptr + token.to(tl.int64) * x_stride + head * x_head_stride
    x = tl.load(x_rows[:, None] + col[None, :], mask=keep[:, None] & (col < S.D)[None, :], other=0.0)
    if S.KIND == RAW:
        if S.BITS == 32:
            codes = x.to(tl.int32, bitcast=True)
        else:
            codes = x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        if S.KIND == LLOYD:
            codes, field = encode_lloyd(
                x, x_rows, keep, signs, bounds, entries, unit, weights, which, matrix_stride, levels, error_steps,
                S.D, DP, S.BITS, MATRICES > 1,
            )  # fmt: skip
        elif S.KIND == UNIFORM:
            codes, field, zero = encode_uniform(
                x.to(tl.float32), x_rows, keep, signs, orthonormal, S.D, DP, S.BITS, S.ROTATED
            )
            _store_field(zero, page, position, keep, 1, S)
        else:
            codes, field = encode_fp8(x.to(tl.float32))
        _store_field(field, page, position, keep, 0, S)
    _store_codes(codes, page + S.CODES + position // 16 * TILE, (position % 16).to(tl.int32), keep, S)


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(
    key_ptr, value_ptr, pages_ptr, slots_ptr, query_aware_ptr, index_ptr,
    key_signs, key_bounds, key_entries, key_unit, key_orthonormal, key_levels, key_error_steps,
    value_signs, value_bounds, value_entries, value_unit, value_orthonormal,
    tokens, key_stride, key_head_stride, value_stride, value_head_stride, block_stride, page_stride,
    NT: tl.constexpr, MATRICES: tl.constexpr, SPREAD: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One program: 16 NT tokens of one head, V (last program of axis 2) or K (all others; one per matrix if SPREAD).

    query_aware_ptr: the rounding matrices of keys, int8 [MATRICES, num_kv_heads, D, D], or None; index_ptr: int32
    [tokens], the matrix of each token if there are several.
    """
    if tl.program_id(2) < tl.num_programs(2) - 1:
        weights = query_aware_ptr
        if query_aware_ptr is not None:
            weights += tl.program_id(1) * (K.D * K.D)
        _store_side(key_ptr, key_stride, key_head_stride, pages_ptr, slots_ptr, key_signs, key_bounds, key_entries,
                    key_unit, key_orthonormal, weights, index_ptr, tl.num_programs(1) * (K.D * K.D), key_levels,
                    key_error_steps, tokens, block_stride, page_stride, NT, MATRICES, SPREAD, K)  # fmt: skip
    else:
        _store_side(value_ptr, value_stride, value_head_stride, pages_ptr, slots_ptr, value_signs, value_bounds,
                    value_entries, value_unit, value_orthonormal, None, None, 0, None, 1.0, tokens, block_stride,
                    page_stride, NT, 1, False, V)  # fmt: skip


def supports(request: StoreRequest) -> str | None:
    """Supports every format with the scale policy ``norm``, and blocks of at least a tile."""
    if request.layout.plain_rows:
        return PLAIN_ROWS
    return refuses_policy(request.layout) or refuses_raw_dtype(request)


def _program(tokens: int, layout: PageLayout, query_aware: bool) -> tuple[int, int]:
    """Tiles and warps of a program.

    Small programs fill the device; few tokens need low latency, and long vectors need registers. The sequential part of
    query-aware rounding uses one thread per token, so programs have as many tokens as registers allow.
    """
    dim = triton.next_power_of_2(max(layout.spec.key_dim, layout.spec.value_dim))
    if not query_aware:
        return 1, 8 if dim > 256 else 4 if dim > 128 or tokens <= 256 else 2
    tiles = 1 if tokens <= 512 or dim > 512 else 2 if dim > 256 else 4
    return tiles, min(max(tiles * dim // (64 if tiles == 1 else 128), 1), 8)


def run(request: StoreRequest) -> None:
    """See ``slimkv.ops.store_kv``: one launch."""
    tokens = request.slot_mapping.shape[0]
    if tokens == 0:
        return
    layout, key, value, pages = request.layout, request.key, request.value, request.pages
    k, v = request.codec.key_tables, request.codec.value_tables
    index = request.query_aware_index if request.matrices > 1 else None
    tiles, warps = _program(tokens, layout, request.query_aware is not None)
    # Neighbouring tokens of a chunk share a matrix; those of a decode step do not, so each matrix has its own programs.
    spread = index is not None and tokens * pages.shape[1] < FEW_VECTORS
    grid = (triton.cdiv(tokens, 16 * tiles), pages.shape[1], 1 + (request.matrices if spread else 1))
    store_kernel[grid](
        key, value, pages, request.slot_mapping, request.query_aware, index,
        k.signs, k.bounds, k.entries, k.unit, k.orthonormal, k.levels, k.error_steps,
        v.signs, v.bounds, v.entries, v.unit, v.orthonormal,
        tokens, key.stride(0), key.stride(1), value.stride(0), value.stride(1), pages.stride(0), pages.stride(1),
        NT=tiles, MATRICES=request.matrices if index is not None else 1, SPREAD=spread, K=side_of(layout.key),
        V=side_of(layout.value), num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
