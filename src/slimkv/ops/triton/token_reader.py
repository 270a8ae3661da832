"""Triton pieces that read single tokens wherever they are, value by value: slow, but from any slot."""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.ops.triton.unpack import lane_and_number, word_index


@triton.jit
def _element_bits(page, position, keep, OFFSET: tl.constexpr, TILE_BYTES: tl.constexpr, W: tl.constexpr,
                  D: tl.constexpr,
                  SP: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """One plane, token by token: page uint8 pointers [M], position [M] in the block -> int32 [M, 16 SP]."""
    S: tl.constexpr = D // 16
    col = tl.arange(0, 16 * SP)[None, :]
    place = (position % 16).to(tl.int32)[:, None]
    piece = col // 16
    lane, number = lane_and_number(place, col, TRANSPOSED)
    base = (page + OFFSET + position // 16 * TILE_BYTES)[:, None]
    mask = keep[:, None] & (col < D)
    if W <= 4:
        SUB: tl.constexpr = 4 // W
        WORDS: tl.constexpr = S // SUB
        FIRST: tl.constexpr = WORDS * SUB
        bit = 32 * word_index(piece // SUB, lane, WORDS) + 4 * number + W * (piece % SUB)
        if S % SUB:
            row = 8 * (WORDS * 128 + place * ((S - FIRST) * 2 * W)) + W * (col - FIRST * 16)
            bit = tl.where(piece < FIRST, bit, row)
        byte = tl.load(base + bit // 8, mask=mask, other=0).to(tl.int32)
        return (byte >> (bit % 8)) & ((1 << W) - 1)
    else:
        word = word_index(piece * (W // 4) + number * W // 32, lane, S * (W // 4))
        at = base + word * 4 + number * W % 32 // 8
        if W == 8:
            return tl.load(at, mask=mask, other=0).to(tl.int32)
        elif W == 16:
            return tl.load(at.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.int32)
        else:
            return tl.load(at.to(tl.pointer_type(tl.int32)), mask=mask, other=0)


@triton.jit
def element_codes(page, position, keep, CODES: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, SP: tl.constexpr,
                  TRANSPOSED: tl.constexpr):  # fmt: skip
    """Codes of single tokens wherever they are: int32 [M, 16 SP]."""
    TILE: tl.constexpr = 2 * D * BITS
    if BITS >= 8:
        return _element_bits(page, position, keep, CODES, TILE, BITS, D, SP, TRANSPOSED)
    else:
        FOUR: tl.constexpr = BITS // 4
        TWO: tl.constexpr = BITS % 4 // 2
        codes = tl.zeros([page.shape[0], 16 * SP], tl.int32)
        if FOUR:
            codes |= _element_bits(page, position, keep, CODES, TILE, 4, D, SP, TRANSPOSED)
        if TWO:
            codes |= _element_bits(page, position, keep, CODES + 8 * D * FOUR, TILE, 2, D, SP, TRANSPOSED) << (4 * FOUR)
        if BITS % 2:
            OFFSET: tl.constexpr = CODES + 8 * D * FOUR + 4 * D * TWO
            codes |= _element_bits(page, position, keep, OFFSET, TILE, 1, D, SP, TRANSPOSED) << (4 * FOUR + 2 * TWO)
        return codes
