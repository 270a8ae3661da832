"""Triton pieces that read single tokens wherever they are, value by value: slow, but from any slot."""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.ops.triton.unpack import lane_and_number, word_index


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
def element_codes(page, position, keep, S: tl.constexpr):
    """Codes of single tokens wherever they are: int32 [M, 16 SP]."""
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
