"""Triton functions that rotate: products with the Hadamard matrix, whose entries of +-1 are exact in half precision."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bfloat16, so operands are converted to float32 first.
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """a [M, K] @ b [K, N] + acc, float32 [M, N]; operands of one dtype; float32 in three tf32 products."""
    if _INTERPRETED or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def rotate_columns(x_ptr, x_mask, signs, norm, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KB: tl.constexpr):
    """signs [D, D]^T @ x [D, M] * norm -> float32 [DP, M]; x_ptr: pointers [M] to the columns; KB rows at a time.

    Queries are columns, because there may be fewer of them than a tensor-core tile has rows.
    """
    out = tl.zeros([DP, M], tl.float32)
    row = tl.arange(0, DP)
    for k0 in range(0, D, KB):
        k = k0 + tl.arange(0, KB)
        x = tl.load(x_ptr[None, :] + k[:, None], mask=x_mask[None, :] & (k < D)[:, None], other=0.0)
        r = tl.load(signs + k[None, :] * D + row[:, None], mask=(k < D)[None, :] & (row < D)[:, None], other=0.0)
        out = dot(r.to(x.dtype), x, out)
    return out * norm


@triton.jit
def unrotate_store(x, signs, norm, out_ptr, row_mask, D: tl.constexpr, DP: tl.constexpr, NB: tl.constexpr,
                   PIECES: tl.constexpr,
                   ROTATED: tl.constexpr):  # fmt: skip
    """Stores x float32 [M, DP] to the rows out_ptr [M]; with ROTATED, x @ signs^T * norm instead.

    x is split into PIECES bf16 numbers of 8 bits each; NB columns of the product are computed at a time.
    """
    if ROTATED:
        row = tl.arange(0, DP)
        piece = x.to(tl.bfloat16)
        second = (x - piece.to(tl.float32)).to(tl.bfloat16)
        if PIECES == 3:
            third = (x - piece.to(tl.float32) - second.to(tl.float32)).to(tl.bfloat16)
        for n0 in range(0, D, NB):
            col = n0 + tl.arange(0, NB)
            inside = (row < D)[:, None] & (col < D)[None, :]
            r = tl.load(signs + col[None, :] * D + row[:, None], mask=inside, other=0.0).to(tl.bfloat16)
            out = dot(piece, r, tl.zeros([x.shape[0], NB], tl.float32))
            out = dot(second, r, out)
            if PIECES == 3:
                out = dot(third, r, out)
            out = (out * norm).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr[:, None] + col[None, :], out, mask=row_mask[:, None] & (col < D)[None, :])
    else:
        col = tl.arange(0, DP)
        tl.store(
            out_ptr[:, None] + col[None, :], x.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (col < D)[None, :]
        )


@triton.jit
def _butterfly(x, M: tl.constexpr, S: tl.constexpr):
    """x [S * M, 16], rows ordered (s, m): the Hadamard transform over s -> [M, 16 S].

    Each step splits off the highest bit of s and makes it the lowest bit of the flat index.
    """
    flat = tl.reshape(x, (S * M * 16,))
    for i in tl.static_range(10):
        if (1 << i) < S:
            a, b = tl.split(tl.permute(tl.reshape(flat, (2, S * M * 8)), (1, 0)))
            flat = tl.reshape(tl.join(a + b, a - b), (S * M * 16,))
    return tl.reshape(tl.permute(tl.reshape(flat, (M, 16, S)), (0, 2, 1)), (M, 16 * S))


@triton.jit
def _in_slices(x, S: tl.constexpr):
    """[M, 16 S] -> [S * M, 16], rows ordered (s, m)."""
    M: tl.constexpr = x.shape[0]
    return tl.reshape(tl.permute(tl.reshape(x, (M, S, 16)), (1, 0, 2)), (S * M, 16))


@triton.jit
def hadamard_16(signs, D: tl.constexpr):
    """The Hadamard matrix of order 16 in fp16, from a corner of a rotation whose size is a power of two."""
    i = tl.arange(0, 16)
    own = tl.load(signs + i * D).to(tl.float32)
    return (tl.load(signs + i[:, None] * D + i[None, :]).to(tl.float32) * own[:, None]).to(tl.float16)


@triton.jit
def hadamard_rows(x, h):
    """x fp16 [M, D], D a power of two, times the Hadamard matrix of order D: float32. h: ``hadamard_16``.

    A matrix of order 2^n is the Kronecker product of one of order 16, which tensor cores apply to every slice of 16,
    and one over the slices, which takes a few additions. So the whole matrix is not needed.
    """
    S: tl.constexpr = x.shape[1] // 16
    return _butterfly(tl.dot(_in_slices(x, S), h), x.shape[0], S)
