"""Triton pieces that rotate: products with the +-1 Hadamard matrix, which half precision holds exactly; and the product itself."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton's interpreter keeps bfloat16 as bare bits and multiplies those, so there the operands are widened first.
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """a [M, K] @ b [K, N] + acc (float32 [M, N]); operands of one dtype, float32 ones multiplied as three tf32 pieces."""
    if _INTERPRETED or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def rotate_rows(x_ptr, x_mask, signs, norm, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KB: tl.constexpr):
    """x [M, D] @ signs [D, D] * norm -> float32 [M, DP]; x_ptr: pointers [M] to the rows; KB columns of x at a time."""
    out = tl.zeros([M, DP], tl.float32)
    col = tl.arange(0, DP)
    for k0 in range(0, D, KB):
        k = k0 + tl.arange(0, KB)
        x = tl.load(x_ptr[:, None] + k[None, :], mask=x_mask[:, None] & (k < D)[None, :], other=0.0)
        r = tl.load(signs + k[:, None] * D + col[None, :], mask=(k < D)[:, None] & (col < D)[None, :], other=0.0)
        out = dot(x, r.to(x.dtype), out)
    return out * norm


@triton.jit
def unrotate(x, signs, norm, D: tl.constexpr, DP: tl.constexpr, PIECES: tl.constexpr):
    """x float32 [M, DP] @ signs^T * norm, with x cut into PIECES bf16 numbers of 8 bits each."""
    row = tl.arange(0, DP)
    inside = (row < D)[:, None] & (row < D)[None, :]
    r = tl.load(signs + row[None, :] * D + row[:, None], mask=inside, other=0.0).to(tl.bfloat16)
    piece = x.to(tl.bfloat16)
    out = dot(piece, r, tl.zeros([x.shape[0], DP], tl.float32))
    for _ in tl.static_range(PIECES - 1):
        x = x - piece.to(tl.float32)
        piece = x.to(tl.bfloat16)
        out = dot(piece, r, out)
    return out * norm
