"""gather in one Triton launch: take codes, decode, rotate back."""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from slimkv.ops.gather.api import GatherRequest
from slimkv.ops.triton import unpack
from slimkv.ops.triton.rotate import hadamard_16, hadamard_rows, unrotate_store
from slimkv.ops.triton.token_reader import element_codes
from slimkv.ops.triton.unpack import PLAIN_ROWS, decode_signed, decode_unsigned, fp8_to_half, side_constants
from slimkv.spec import Kind, SideLayout

_LLOYD: tl.constexpr = tl.constexpr(unpack.LLOYD)
_UNIFORM: tl.constexpr = tl.constexpr(unpack.UNIFORM)
_FP8: tl.constexpr = tl.constexpr(unpack.FP8)
_RAW: tl.constexpr = tl.constexpr(unpack.RAW)
_DENSE: tl.constexpr = tl.constexpr(64)  # up to this a product with the whole matrix rotates back


@triton.jit
def _gather_side(pages_ptr, slots_ptr, out_ptr, signs, levels, norm, tokens, block_stride, page_stride,
                 out_stride, out_head_stride, offset_ptr,
                 group, head, OFFSET: tl.constexpr, M: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
                 SP: tl.constexpr, KIND: tl.constexpr,
                 BITS: tl.constexpr, BF16: tl.constexpr, UNROTATE: tl.constexpr, CODES: tl.constexpr,
                 FIELDS: tl.constexpr,
                 TRANSPOSED: tl.constexpr):  # fmt: skip
    """Decodes M tokens of one head of K or V."""
    token = group * M + tl.arange(0, M)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    keep = slot >= 0
    safe = tl.maximum(slot, 0)
    page = pages_ptr + safe // BLOCK_SIZE * block_stride + head * page_stride
    position = safe % BLOCK_SIZE
    codes = element_codes(page, position, keep, CODES, BITS, D, SP, TRANSPOSED)
    rows = out_ptr + token.to(tl.int64) * out_stride + head * out_head_stride
    col = tl.arange(0, 16 * SP)[None, :]
    BY_SLICES: tl.constexpr = UNROTATE and KIND == _LLOYD and D == 16 * SP and D > _DENSE
    if KIND == _RAW:
        if BITS == 32:
            x = codes.to(tl.float32, bitcast=True)
        elif BF16:
            x = codes.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
        else:
            x = codes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        if KIND == _LLOYD:
            x = tl.load(levels + codes)
        elif KIND == _FP8:
            x = fp8_to_half(codes).to(tl.float32)
        else:
            x = codes.to(tl.float32)
        field = tl.load((page + FIELDS).to(tl.pointer_type(tl.uint16)) + position, mask=keep, other=0).to(tl.int32)
        if BY_SLICES:  # of levels, which fp16 holds: sums are exact, or nearly so
            x = hadamard_rows(x.to(tl.float16), hadamard_16(signs, D))
            x = x * tl.load(signs + col * D).to(tl.float32) * norm
        x = x * decode_unsigned(field)[:, None]
        if KIND == _UNIFORM:
            zero = tl.load(
                (page + FIELDS + 2 * BLOCK_SIZE).to(tl.pointer_type(tl.uint16)) + position, mask=keep, other=0
            ).to(tl.int32)
            x = x + decode_signed(zero)[:, None]
    if OFFSET:
        x += tl.load(offset_ptr + head * D + col, mask=col < D, other=0.0)
    x = tl.where(keep[:, None] & (col < D), x, 0.0)
    UNROTATE_DENSE: tl.constexpr = UNROTATE and not BY_SLICES
    unrotate_store(x, signs, norm, rows, token < tokens, D, 16 * SP, 16 * SP if SP <= 8 else 32, 3, UNROTATE_DENSE)


@triton.jit
def gather_kernel(
    pages_ptr, slots_ptr, key_ptr, value_ptr, offset_ptr, key_signs, value_signs, key_levels, value_levels,
    key_norm, value_norm, tokens,
    block_stride, page_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    OFFSET: tl.constexpr, M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_D: tl.constexpr, K_SP: tl.constexpr, K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_BF16: tl.constexpr,
    K_UNROTATE: tl.constexpr, K_CODES: tl.constexpr, K_FIELDS: tl.constexpr,
    V_D: tl.constexpr, V_SP: tl.constexpr, V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_BF16: tl.constexpr,
    V_UNROTATE: tl.constexpr, V_CODES: tl.constexpr, V_FIELDS: tl.constexpr,
):  # fmt: skip
    """One program: M tokens of one head, K (axis 2 = 0) or V (1)."""
    group = tl.program_id(0)
    head = tl.program_id(1)
    if tl.program_id(2) == 0:
        _gather_side(pages_ptr, slots_ptr, key_ptr, key_signs, key_levels, key_norm, tokens, block_stride,
            page_stride, key_stride,
                     key_head_stride, offset_ptr, group, head, OFFSET, M, BLOCK_SIZE, K_D, K_SP, K_KIND, K_BITS,
                     K_BF16, K_UNROTATE, K_CODES, K_FIELDS, False)  # fmt: skip
    else:
        _gather_side(pages_ptr, slots_ptr, value_ptr, value_signs, value_levels, value_norm, tokens, block_stride,
            page_stride,
                     value_stride, value_head_stride, offset_ptr, group, head, False, M, BLOCK_SIZE, V_D, V_SP, V_KIND,
                     V_BITS, V_BF16, V_UNROTATE, V_CODES, V_FIELDS, True)  # fmt: skip


def supports(request: GatherRequest) -> str | None:
    """Every format; blocks of at least a tile."""
    if request.layout.plain_rows:
        return PLAIN_ROWS
    return None


def fuses_offset(request: GatherRequest) -> bool:
    """The kernel adds the offset of keys itself."""
    return True


def _offset(request: GatherRequest) -> Tensor | None:
    """Float32 [heads, key_dim] in the space in which the kernel adds it: before it rotates back, or after (slices)."""
    if request.key_offset is None:
        return None
    key = request.layout.key
    power_of_two = key.dim & (key.dim - 1) == 0
    by_slices = key.format.kind == Kind.LLOYD and power_of_two and key.dim > _DENSE.value and not request.rotated
    return request.key_offset.float() if by_slices else request.codec.rotate_query(request.key_offset)


@lru_cache(maxsize=256)
def _side_constants(side: SideLayout, prefix: str, rotated: bool) -> dict[str, int | bool]:
    fmt = side.format
    own = {f"{prefix}_BF16": fmt.raw_dtype == "bfloat16", f"{prefix}_UNROTATE": fmt.rotated and not rotated}
    return {**side_constants(side, prefix), **own}


def run(request: GatherRequest) -> None:
    """See ``slimkv.ops.gather.gather``: one launch."""
    tokens, pages, layout = request.slots.shape[0], request.pages, request.layout
    if tokens == 0:
        return
    k, v = request.codec.key_tables, request.codec.value_tables
    longest, offset = max(layout.spec.key_dim, layout.spec.value_dim), _offset(request)
    rows = 64 if longest <= 128 else 32 if longest <= 256 else 16
    grid = (triton.cdiv(tokens, rows), pages.shape[1], 2)
    gather_kernel[grid](
        pages, request.slots, request.key, request.value, offset, k.signs, v.signs, k.levels,
        v.levels, k.orthonormal, v.orthonormal, tokens,
        pages.stride(0), pages.stride(1), request.key.stride(0), request.key.stride(1), request.value.stride(0),
        request.value.stride(1),
        OFFSET=offset is not None, M=rows, BLOCK_SIZE=layout.block_size,
        **_side_constants(layout.key, "K", request.rotated), **_side_constants(layout.value, "V", request.rotated),
        num_warps=4,
    )  # fmt: skip
