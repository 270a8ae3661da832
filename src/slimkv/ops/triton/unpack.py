"""Triton functions for all kernels that read pages: words from a page, codes from words, numbers from codes.

Shapes: NT tiles of 16 tokens; 32 lanes; SP = slices of 16 dimensions, padded to a power of two. A lane's 8 values of a
slice are numbered as in ``slimkv.spec``. ``S`` is a ``slimkv.ops.triton.side.Side``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.codec import scale16
from slimkv.ops.triton.side import FP8, LLOYD, RAW

_INVALID: tl.constexpr = tl.constexpr(scale16.INVALID)
_RESCALE: tl.constexpr = tl.constexpr(2.0 ** (127 - scale16.BIAS))
_BIAS: tl.constexpr = tl.constexpr(scale16.BIAS)


# 8 sign-and-magnitude nibbles (sign in bit 3) -> 8 levels in fp16: two byte permutations look up four magnitudes each,
# an exclusive or with 0x80 or 0xFF negates, and a third permutation puts the byte b = level + 63.5 after 0x64, which is
# 1024 + b in fp16. $8 is the word, $9 and $10 the table (see `side.byte_table`).
_LOOKUP = """{
.reg .b32 s, t, l, h, m, n, a, x, c, d, e;
mov.b32 x, 0x80808080;
mov.b32 c, 0x64646464;
mov.b32 d, 0x643F643F;
mov.b32 e, 0x38003800;
and.b32 s, $8, 0x77777777;
shr.u32 t, $8, 16;
shr.u32 h, s, 16;
prmt.b32 l, $9, $10, s;
prmt.b32 h, $9, $10, h;
prmt.b32 m, x, x, $8;
prmt.b32 n, x, x, t;
xor.b32 l, l, m;
xor.b32 h, h, n;
"""
# Minus 1087, then minus 0.5: their sum is not an fp16 number.
_PAIR = """prmt.b32 a, {0}, c, {1};
sub.rn.f16x2 a, a, d;
sub.rn.f16x2 a, a, e;
mov.b32 {{${2}, ${3}}}, a;
"""
# Numbers that share a register of the tensor-core operand are computed in one register.
_KEY_PAIRS = (("l", "0x4140", 0, 1), ("l", "0x4342", 2, 3), ("h", "0x4140", 4, 5), ("h", "0x4342", 6, 7))
_VALUE_PAIRS = (("l", "0x4240", 0, 2), ("l", "0x4341", 1, 3), ("h", "0x4240", 4, 6), ("h", "0x4341", 5, 7))
_LOOKUP_KEYS_ASM = tl.constexpr(_LOOKUP + "".join(_PAIR.format(*pair) for pair in _KEY_PAIRS) + "}")
_LOOKUP_VALUES_ASM = tl.constexpr(_LOOKUP + "".join(_PAIR.format(*pair) for pair in _VALUE_PAIRS) + "}")
_LOOKUP_OPERANDS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")


@triton.jit
def word_index(i, lane, WORDS: tl.constexpr):
    """Index of word i of a lane: vectors of four words per lane come first, then of two, then single words."""
    if WORDS % 4 == 0:
        return (i // 4) * 128 + lane * 4 + i % 4
    else:
        QUADS: tl.constexpr = WORDS // 4 * 4
        PAIRS: tl.constexpr = WORDS // 2 * 2
        rest = tl.where(i < PAIRS, QUADS * 32 + lane * 2 + i % 2, PAIRS * 32 + lane)
        return tl.where(i < QUADS, (i // 4) * 128 + lane * 4 + i % 4, rest)


@triton.jit
def lane_and_number(place, col, TRANSPOSED: tl.constexpr):
    """The lane that owns token ``place`` of a tile at dimension ``col``, and the value's number among the lane's 8."""
    if TRANSPOSED:
        lane = 4 * (col % 8) + place % 8 // 2
        number = 4 * (place // 8) + 2 * (place % 2) + col % 16 // 8
    else:
        lane = 4 * (place % 8) + col % 8 // 2
        number = 4 * (place // 8) + 2 * (col % 16 // 8) + col % 2
    return lane, number


@triton.jit
def _load_words(base, keep, OFFSET: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """base: uint8 pointers [NT] to tiles' codes; keep: bool [NT]. -> int32 [32, NT, PADDED].

    The lane axis comes first, and addresses of consecutive lanes are declared discontiguous. Triton then assigns the
    words of lane l of the page to lane l of the warp, which is the operand layout of the tensor cores.
    """
    VEC: tl.constexpr = 4 if WORDS % 4 == 0 else (2 if WORDS % 2 == 0 else 1)
    i = tl.arange(0, PADDED // VEC)[None, None, :, None] * VEC + tl.arange(0, VEC)[None, None, None, :]
    lane = tl.arange(0, 32)[:, None, None, None]
    index = word_index(i, lane, WORDS)
    index = tl.max_contiguous(index, (1, 1, 1, VEC))
    words = (base + OFFSET).to(tl.pointer_type(tl.int32))[None, :, None, None] + index
    mask = keep[None, :, None, None] & (index >= 0)
    if WORDS != PADDED:
        mask = mask & (i < WORDS)
    w = tl.load(words, mask=mask, other=0)
    return tl.reshape(w, (32, base.shape[0], PADDED))


@triton.jit
def _tail_nibbles(base, keep, OFFSET: tl.constexpr, W: tl.constexpr, S: tl.constexpr):
    """The slices of a plane that are stored as token rows, as nibble-aligned words: int32 [32, NT, SP]."""
    SLICES: tl.constexpr = S.D // 16
    TAIL: tl.constexpr = SLICES % (4 // W)
    FIRST: tl.constexpr = SLICES - TAIL
    PIECES: tl.constexpr = S.SP  # Triton 3.6 does not accept an attribute in a shape
    lane = tl.arange(0, 32)[:, None, None]
    piece = tl.arange(0, PIECES)[None, None, :]
    g = lane // 4
    t = lane % 4
    mask = keep[None, :, None] & (piece >= FIRST) & (piece < SLICES) & (lane >= 0)
    out = tl.zeros([32, base.shape[0], PIECES], tl.int32)
    # Positions that are negative outside the mask are not divided: a shift by a negative remainder is undefined, and
    # the compiler could conclude that the mask always holds.
    row = base[None, :, None] + OFFSET + (piece - FIRST) * (2 * W)
    for n in tl.static_range(8):
        if S.TRANSPOSED:
            token = 2 * t + 8 * (n // 4) + (n // 2) % 2
            byte_at = (n % 2) * W + g * W // 8
            shift = g * W % 8
        else:
            token = g + 8 * (n // 4)
            byte_at = ((n // 2) % 2) * W + t * W // 4
            shift = 2 * t * W % 8 + (n % 2) * W
        byte = tl.load(row + token * (TAIL * 2 * W) + byte_at, mask=mask, other=0).to(tl.int32)
        out |= ((byte >> shift) & ((1 << W) - 1)) << (4 * n)
    return out


@triton.jit
def _load_plane(base, keep, OFFSET: tl.constexpr, W: tl.constexpr, S: tl.constexpr):
    """A plane of W <= 4 bits -> int32 [32, NT, SP]: value n of the slice in the low W bits of nibble n."""
    SUB: tl.constexpr = 4 // W
    WORDS: tl.constexpr = S.D // 16 // SUB
    if WORDS > 0:
        w = _load_words(base, keep, OFFSET, WORDS, S.SP // SUB)
        if SUB == 1:
            x = w
        elif SUB == 2:
            x = tl.join(w, w >> 2) & 0x33333333
        else:
            x = tl.join(tl.join(w, w >> 2), tl.join(w >> 1, w >> 3)) & 0x11111111
        x = tl.reshape(x, (32, base.shape[0], S.SP))
        if S.D // 16 % SUB > 0:
            x |= _tail_nibbles(base, keep, OFFSET + WORDS * 128, W, S)
    else:
        x = _tail_nibbles(base, keep, OFFSET, W, S)
    return x


@triton.jit
def _load_wide(base, keep, S: tl.constexpr):
    """A plane of 8, 16 or 32 bits -> int32 [32, NT, SP, BITS / 4]: the words of each slice."""
    WPS: tl.constexpr = S.BITS // 4
    return tl.reshape(_load_words(base, keep, 0, S.D // 16 * WPS, S.SP * WPS), (32, base.shape[0], S.SP, WPS))


@triton.jit
def _load_code_words(base, keep, S: tl.constexpr):
    """Codes of 1-8 bits -> two int32 [32, NT, SP].

    Up to 4 bits: nibble n of the first is code n, its top (sign) bit moved to bit 3; the second is unused.
    5-7 bits: low nibbles and the bits above them. 8 bits: bytes n = 0..3 and 4..7.
    """
    BIT: tl.constexpr = 2 * S.D  # bytes of a tile per bit of the width
    if S.BITS == 8:
        low, high = tl.split(_load_wide(base, keep, S))
    elif S.BITS > 4:
        low = _load_plane(base, keep, 0, 4, S)
        high = _load_plane(base, keep, 4 * BIT, 1 if S.BITS == 5 else 2, S)
        if S.BITS == 7:
            high |= _load_plane(base, keep, 6 * BIT, 1, S) << 2
    else:
        if S.BITS == 4:
            low = _load_plane(base, keep, 0, 4, S)
        elif S.BITS == 1:
            low = _load_plane(base, keep, 0, 1, S) << 3
        else:
            low = _load_plane(base, keep, 0, 2, S)
            if S.BITS == 3:
                low |= _load_plane(base, keep, 2 * BIT, 1, S) << 3
            else:
                low = (low & 0x11111111) | ((low & 0x22222222) << 2)
        high = low
    return low, high


@triton.jit
def _code(low, high, n: tl.constexpr, BITS: tl.constexpr):
    """Code n of every lane and slice: int32 [32, NT, SP]."""
    if BITS == 8:
        if n < 4:
            code = (low >> (8 * n)) & 0xFF
        else:
            code = (high >> (8 * (n - 4))) & 0xFF
    elif BITS > 4:
        code = ((low >> (4 * n)) & 0xF) | (((high >> (4 * n)) & 0xF) << 4)
    elif BITS == 4:
        code = (low >> (4 * n)) & 0xF
    else:  # the sign is in bit 3
        nibble = low >> (4 * n)
        code = (nibble & ((1 << (BITS - 1)) - 1)) | (((nibble >> 3) & 1) << (BITS - 1))
    return code


@triton.jit
def fp8_to_half(code):
    """e4m3 bits, int32 -> fp16: as fp16 bits they are the number divided by 256."""
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _number(low, high, levels, n: tl.constexpr, S: tl.constexpr):
    """Number n of every lane and slice, fp16 [32, NT, SP], in the unit that the vector's scale multiplies."""
    code = _code(low, high, n, S.BITS)
    if S.KIND == LLOYD:
        return tl.load(levels + code).to(tl.float16)
    elif S.KIND == FP8:
        return fp8_to_half(code)
    else:
        # After 0x64, the code is the fp16 number 1024 + code.
        return (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (1024 + (1 << (S.BITS - 1)))


@triton.jit
def _decoded(low, high, levels, S: tl.constexpr):
    """The 8 numbers of every lane and slice: fp16 [32, NT, SP, 2, 2, 2], number n = 4 i + 2 j + k at [..., k, j, i]."""
    if S.PTX:
        LOOKUP: tl.constexpr = _LOOKUP_VALUES_ASM if S.TRANSPOSED else _LOOKUP_KEYS_ASM
        v = tl.inline_asm_elementwise(
            LOOKUP, _LOOKUP_OPERANDS, [low, S.TABLE0, S.TABLE1], (tl.float16,) * 8, is_pure=True, pack=1
        )
    else:
        v = ()
        for n in tl.static_range(8):
            v = v + (_number(low, high, levels, n, S),)
    low_half = tl.join(tl.join(v[0], v[1]), tl.join(v[2], v[3]))
    return tl.join(low_half, tl.join(tl.join(v[4], v[5]), tl.join(v[6], v[7])))


@triton.jit
def _raw(base, keep, S: tl.constexpr):
    """``_decoded`` of a raw format: [32, NT, SP, 2, 2, 2] in the raw dtype."""
    NT: tl.constexpr = base.shape[0]
    words = _load_wide(base, keep, S)
    if S.BITS == 32:  # word n is number n = 4 i + 2 j + k
        cube = tl.reshape(words, (32, NT, S.SP, 2, 2, 2))
        return tl.permute(cube, (0, 1, 2, 5, 4, 3)).to(tl.float32, bitcast=True)
    else:  # word m holds numbers 2 m and 2 m + 1
        pair = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF).to(tl.int16)  # [32, NT, SP, 4, 2]
        cube = tl.permute(tl.reshape(pair, (32, NT, S.SP, 2, 2, 2)), (0, 1, 2, 5, 4, 3))
        return cube.to(tl.bfloat16 if S.BF16 else tl.float16, bitcast=True)


@triton.jit
def tile_numbers(page, inside, keep, levels, S: tl.constexpr):
    """The numbers of tiles: page [NT], inside [NT] (the tile's place in its block), keep bool [NT] -> a cube
    [32, NT, SP, 2, 2, 2] for ``as_keys``, ``as_values`` and ``values_as_keys``, fp16 or the raw dtype.

    Uniform numbers are codes minus half their range: otherwise the mean of the codes and the zero of the vector, both
    large, would cancel in the output.
    """
    base = page + S.CODES + inside * (2 * S.D * S.BITS)
    if S.KIND == RAW:
        return _raw(base, keep, S)
    else:
        low, high = _load_code_words(base, keep, S)
        return _decoded(low, high, levels, S)


@triton.jit
def _by_lanes(cube):
    """[32, NT, SP, 2, 2, 2] -> [8 g, 4 t, NT, SP, 2, 2, 2]."""
    return tl.reshape(cube, (8, 4, cube.shape[1], cube.shape[2], 2, 2, 2))


@triton.jit
def as_keys(cube):
    """[32, NT, SP, 2, 2, 2] -> K [16 NT, 16 SP]: tokens in order, dimensions in `fragment_order`."""
    return tl.reshape(tl.permute(_by_lanes(cube), (2, 6, 0, 3, 1, 5, 4)), (16 * cube.shape[1], 16 * cube.shape[2]))


@triton.jit
def as_values(cube):
    """[32, NT, SP, 2, 2, 2] -> V transposed, [16 SP, 16 NT]: dimensions in order, tokens in `fragment_order`."""
    return tl.reshape(tl.permute(_by_lanes(cube), (3, 4, 0, 2, 1, 6, 5)), (16 * cube.shape[2], 16 * cube.shape[1]))


@triton.jit
def values_as_keys(cube):
    """[32, NT, SP, 2, 2, 2] of values -> [16 NT, 16 SP]: tokens and dimensions in order."""
    return tl.reshape(tl.permute(_by_lanes(cube), (2, 6, 1, 5, 3, 4, 0)), (16 * cube.shape[1], 16 * cube.shape[2]))


@triton.jit
def fragment_order(i):
    """The element of 16 at place i % 16 in fragment order: a lane's 2t, 2t+1, 2t+8, 2t+9 are consecutive."""
    return i // 16 * 16 + (i // 2 % 2) * 8 + (i // 4 % 4) * 2 + i % 2


@triton.jit
def in_fragment_order(x):
    """Permutes the rows of x [16 N, M] from natural to fragment order."""
    ROWS: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS // 16, 2, 4, 2, M)), (0, 2, 1, 3, 4)), (ROWS, M))


@triton.jit
def decode_unsigned(code):
    """The unsigned 16-bit field format, int32 -> float32."""
    value = (code << 13).to(tl.float32, bitcast=True) * _RESCALE
    return tl.where(code == _INVALID, float("nan"), value)


@triton.jit
def decode_signed(code):
    """The signed 16-bit field format, int32 -> float32."""
    magnitude = ((code & 0x7FFF) << 14).to(tl.float32, bitcast=True) * _RESCALE
    value = tl.where(code >= 0x8000, -magnitude, magnitude)
    return tl.where(code == _INVALID, float("nan"), value)


@triton.jit
def field_exponent(code):
    """floor(log2) of an unsigned field (-40 for zero), float32: a cheap bound."""
    return ((code >> 10) - _BIAS).to(tl.float32)


@triton.jit
def load_field(page, position, mask, INDEX: tl.constexpr, S: tl.constexpr):
    """16-bit field INDEX (0: scale, 1: zero) of the tokens at ``position`` in their blocks: int32."""
    fields = (page + (S.FIELDS + INDEX * 2 * S.BLOCK_SIZE)).to(tl.pointer_type(tl.uint16))
    return tl.load(fields + position, mask=mask, other=0).to(tl.int32)


@triton.jit
def load_centre(page, position, mask, scale, S: tl.constexpr):
    """The value that number 0 of ``tile_numbers`` encodes in a uniform side: float32, the shape of scale."""
    zero = decode_signed(load_field(page, position, mask, 1, S))
    return tl.reshape(zero, scale.shape) + scale * (1 << (S.BITS - 1))
