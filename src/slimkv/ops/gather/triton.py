"""gather in one Triton launch: reads codes, decodes, rotates back."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slimkv.ops.gather.api import GatherRequest
from slimkv.ops.triton.rotate import hadamard_16, hadamard_rows, unrotate_store
from slimkv.ops.triton.side import FP8, LLOYD, PLAIN_ROWS, RAW, UNIFORM, side_of
from slimkv.ops.triton.unpack import (
    decode_signed,
    decode_unsigned,
    fp8_to_half,
    lane_and_number,
    load_field,
    word_index,
)
from slimkv.spec import Kind

FUSES_OFFSET = True  # the kernel adds the key offset
_DENSE: tl.constexpr = tl.constexpr(64)  # up to this head size, a product with the whole matrix rotates back


@triton.jit
def _element_bits(page, position, keep, OFFSET: tl.constexpr, W: tl.constexpr, S: tl.constexpr):
    """One plane, token by token: page uint8 pointers [M], position [M] in the block -> int32 [M, 16 SP]."""
    SLICES: tl.constexpr = S.D // 16
    col = tl.arange(0, 16 * S.SP)[None, :]
    place = (position % 16).to(tl.int32)[:, None]
    piece = col // 16
    lane, number = lane_and_number(place, col, S.TRANSPOSED)
    base = (page + S.CODES + OFFSET + position // 16 * (2 * S.D * S.BITS))[:, None]
    mask = keep[:, None] & (col < S.D)
    if W <= 4:
        SUB: tl.constexpr = 4 // W
        WORDS: tl.constexpr = SLICES // SUB
        FIRST: tl.constexpr = WORDS * SUB
        bit = 32 * word_index(piece // SUB, lane, WORDS) + 4 * number + W * (piece % SUB)
        if SLICES % SUB:
            row = 8 * (WORDS * 128 + place * ((SLICES - FIRST) * 2 * W)) + W * (col - FIRST * 16)
            bit = tl.where(piece < FIRST, bit, row)
        byte = tl.load(base + bit // 8, mask=mask, other=0).to(tl.int32)
        return (byte >> (bit % 8)) & ((1 << W) - 1)
    else:
        word = word_index(piece * (W // 4) + number * W // 32, lane, SLICES * (W // 4))
        at = base + word * 4 + number * W % 32 // 8
        if W == 8:
            return tl.load(at, mask=mask, other=0).to(tl.int32)
        elif W == 16:
            return tl.load(at.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.int32)
        else:
            return tl.load(at.to(tl.pointer_type(tl.int32)), mask=mask, other=0)


@triton.jit
def _element_codes(page, position, keep, S: tl.constexpr):
    """Codes of single tokens at any positions: int32 [M, 16 SP]."""
    if S.BITS >= 8:
        return _element_bits(page, position, keep, 0, S.BITS, S)
    else:
        FOUR: tl.constexpr = S.BITS // 4
        TWO: tl.constexpr = S.BITS % 4 // 2
        codes = tl.zeros([page.shape[0], 16 * S.SP], tl.int32)
        if FOUR:
            codes |= _element_bits(page, position, keep, 0, 4, S)
        if TWO:
            codes |= _element_bits(page, position, keep, 8 * S.D * FOUR, 2, S) << (4 * FOUR)
        if S.BITS % 2:
            SHIFT: tl.constexpr = 4 * FOUR + 2 * TWO
            codes |= _element_bits(page, position, keep, 2 * S.D * SHIFT, 1, S) << SHIFT
        return codes


@triton.jit
def _gather_side(pages_ptr, slots_ptr, out_ptr, signs, levels, norm, tokens, block_stride, page_stride, out_stride,
                 out_head_stride, offset_ptr, M: tl.constexpr, KEEP_ROTATED: tl.constexpr,
                 S: tl.constexpr):  # fmt: skip
    """Decodes M tokens of one head of K or V; offset_ptr: float32 [heads, D] to add, or None."""
    token = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    keep = slot >= 0
    safe = tl.maximum(slot, 0)
    page = pages_ptr + safe // S.BLOCK_SIZE * block_stride + head * page_stride
    position = safe % S.BLOCK_SIZE
    codes = _element_codes(page, position, keep, S)
    rows = out_ptr + token.to(tl.int64) * out_stride + head * out_head_stride
    col = tl.arange(0, 16 * S.SP)[None, :]
    UNROTATE: tl.constexpr = S.ROTATED and not KEEP_ROTATED
    BY_SLICES: tl.constexpr = UNROTATE and S.KIND == LLOYD and S.D == 16 * S.SP and S.D > _DENSE
    if S.KIND == RAW:
        if S.BITS == 32:
            x = codes.to(tl.float32, bitcast=True)
        else:
            x = codes.to(tl.int16).to(tl.bfloat16 if S.BF16 else tl.float16, bitcast=True).to(tl.float32)
    else:
        if S.KIND == LLOYD:
            x = tl.load(levels + codes)
        elif S.KIND == FP8:
            x = fp8_to_half(codes).to(tl.float32)
        else:
            x = codes.to(tl.float32)
        if BY_SLICES:  # levels are fp16 numbers: sums are exact, or nearly so
            x = hadamard_rows(x.to(tl.float16), hadamard_16(signs, S.D))
            x = x * tl.load(signs + col * S.D).to(tl.float32) * norm
        x = x * decode_unsigned(load_field(page, position, keep, 0, S))[:, None]
        if S.KIND == UNIFORM:
            x = x + decode_signed(load_field(page, position, keep, 1, S))[:, None]
    if offset_ptr is not None:
        x += tl.load(offset_ptr + head * S.D + col, mask=col < S.D, other=0.0)
    x = tl.where(keep[:, None] & (col < S.D), x, 0.0)
    DENSE: tl.constexpr = UNROTATE and not BY_SLICES
    unrotate_store(x, signs, norm, rows, token < tokens, S.D, 16 * S.SP, 16 * S.SP if S.SP <= 8 else 32, 3, DENSE)


@triton.jit(do_not_specialize=["tokens"])
def gather_kernel(
    pages_ptr, slots_ptr, key_ptr, value_ptr, offset_ptr, key_signs, value_signs, key_levels, value_levels,
    key_norm, value_norm, tokens, block_stride, page_stride, key_stride, key_head_stride, value_stride,
    value_head_stride, M: tl.constexpr, KEEP_ROTATED: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One program: M tokens of one head, K (axis 2 = 0) or V (1)."""
    if tl.program_id(2) == 0:
        _gather_side(pages_ptr, slots_ptr, key_ptr, key_signs, key_levels, key_norm, tokens, block_stride, page_stride,
                     key_stride, key_head_stride, offset_ptr, M, KEEP_ROTATED, K)  # fmt: skip
    else:
        _gather_side(pages_ptr, slots_ptr, value_ptr, value_signs, value_levels, value_norm, tokens, block_stride,
                     page_stride, value_stride, value_head_stride, None, M, KEEP_ROTATED, V)  # fmt: skip


def supports(request: GatherRequest) -> str | None:
    """Supports every format, with blocks of at least a tile."""
    return PLAIN_ROWS if request.layout.plain_rows else None


def _offset(request: GatherRequest) -> Tensor | None:
    """The offset as float32 [heads, key_dim]: rotated, unless the kernel adds it after it rotates back (by slices)."""
    if request.key_offset is None:
        return None
    key = request.layout.key
    power_of_two = key.dim & (key.dim - 1) == 0
    by_slices = key.format.kind == Kind.LLOYD and power_of_two and key.dim > _DENSE.value and not request.rotated
    return request.key_offset.float() if by_slices else request.codec.rotate_query(request.key_offset)


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather_kv``: one launch."""
    tokens, pages, layout, key, value = (
        request.slots.shape[0], request.pages, request.layout, request.key, request.value,
    )  # fmt: skip
    if tokens == 0:
        return
    k, v = request.codec.key_tables, request.codec.value_tables
    longest = max(layout.spec.key_dim, layout.spec.value_dim)
    rows = 64 if longest <= 128 else 32 if longest <= 256 else 16
    gather_kernel[(triton.cdiv(tokens, rows), pages.shape[1], 2)](
        pages, request.slots, key, value, _offset(request), k.signs, v.signs, k.levels, v.levels, k.orthonormal,
        v.orthonormal, tokens, pages.stride(0), pages.stride(1), key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), M=rows, KEEP_ROTATED=request.rotated, K=side_of(layout.key), V=side_of(layout.value),
        num_warps=4,
    )  # fmt: skip
