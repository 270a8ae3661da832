"""The prefill kernels of attend: many queries per sequence.

Prefill is compute-bound, and unpacking every key for every block of queries would take too long. So keys and values
are unpacked once, into a bounded workspace that attention reads. A context longer than the workspace takes several
passes, which carry the softmax state.

Unpacked numbers are fp16 (raw formats keep their dtype), scaled by a power of two that brings the largest number of a
sequence and head near 2^6; queries and output are scaled by the inverse. The power follows from the scales' exponents.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.codec import scale16
from slimkv.ops.attention.triton.decode import (
    _LOG2E,
    finish,
    first_query,
    hide,
    keys_to_read,
    load_queries,
    query_rows,
    soft_cap,
)
from slimkv.ops.triton.rotate import dot
from slimkv.ops.triton.side import RAW, UNIFORM
from slimkv.ops.triton.unpack import (
    as_keys,
    decode_unsigned,
    fragment_order,
    load_centre,
    load_field,
    tile_numbers,
    values_as_keys,
)

_BIAS: tl.constexpr = tl.constexpr(scale16.BIAS)
_INVALID: tl.constexpr = tl.constexpr(scale16.INVALID)
_TARGET: tl.constexpr = tl.constexpr(6)


@triton.jit
def _raise_exponent(exponent_ptr, page, position, mask, S: tl.constexpr):
    """Raises an exponent to a bound on these tokens' numbers: levels are below 2^8 (lloyd), 2^BITS or 2^9 (fp8)."""
    if S.KIND != RAW:
        code = load_field(page, position, mask, 0, S)
        code = tl.where(code == _INVALID, 0, code)
        top = tl.max(code >> 10, 0) + (S.BITS if S.KIND == UNIFORM else 9)
        if S.KIND == UNIFORM:
            zero = load_field(page, position, mask, 1, S)
            zero = tl.where(zero == _INVALID, 0, zero & 0x7FFF)
            top = tl.maximum(top, tl.max(zero >> 9, 0)) + 2
        tl.atomic_max(exponent_ptr, top - _BIAS)


@triton.jit
def first_seen(length, queries, window):
    """The first token that a query of the sequence attends to. Earlier blocks may belong to another sequence."""
    return tl.maximum(0, length - queries - window + 1)


@triton.jit(do_not_specialize=["most_queries", "window"])
def range_kernel(
    pages_ptr, table_ptr, lens_ptr, starts_ptr, exponent_ptr, most_queries, window, block_stride, page_stride,
    table_stride,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Raises exponent[sequence, head, side] to bound the numbers of TOKENS tokens, except those that no query sees."""
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    queries = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence)
    length = tl.load(lens_ptr + sequence)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if (queries <= most_queries) | (tl.program_id(0) * TOKENS >= length):
        return
    mask = (token < length) & (token >= first_seen(length, queries, window))
    block_id = tl.load(table_ptr + sequence * table_stride + token // K.BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    page = pages_ptr + block_id * block_stride + head * page_stride
    at = exponent_ptr + (sequence * HEADS + head) * 2
    _raise_exponent(at, page, token % K.BLOCK_SIZE, mask, K)
    _raise_exponent(at + 1, page, token % K.BLOCK_SIZE, mask, V)


@triton.jit
def _dense_scale(exponent_ptr, sequence, head, SIDE: tl.constexpr, HEADS: tl.constexpr, UP: tl.constexpr):
    """2^(TARGET - exponent), or its inverse if UP: float32."""
    exponent = tl.load(exponent_ptr + (sequence * HEADS + head) * 2 + SIDE)
    power = exponent - _TARGET if UP else -exponent + _TARGET
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _unpack_side(page, inside, tile_valid, present, fresh, fresh_row, row, levels, fresh_ptr, dense_ptr, up,
                 S: tl.constexpr):  # fmt: skip
    """Writes tokens [BT] of K or V, times ``up``, to the rows ``row`` of dense_ptr; absent tokens become zeros.

    Tokens marked in ``fresh`` are read from the rows ``fresh_row`` of fresh_ptr, unless fresh_ptr is None.
    """
    BT: tl.constexpr = present.shape[0]
    dim = tl.arange(0, 16 * S.SP)
    cube = tile_numbers(page, inside, tile_valid, levels, S)
    if S.TRANSPOSED:
        x = values_as_keys(cube)
    else:
        x = as_keys(cube)
        dim = fragment_order(dim)
    if S.KIND != RAW:
        x = x.to(tl.float32)
        keep = tl.reshape(present, (BT // 16, 16))
        field_at = (inside * 16)[:, None] + tl.arange(0, 16)[None, :]
        scale = tl.reshape(decode_unsigned(load_field(page[:, None], field_at, keep, 0, S)), (BT,))
        x *= scale[:, None]
        if S.KIND == UNIFORM:
            x += load_centre(page[:, None], field_at, keep, scale, S)[:, None]
        x *= up
    if fresh_ptr is not None:
        mask = (fresh & present)[:, None] & (dim < S.D)[None, :]
        raw = tl.load(fresh_ptr + (fresh_row * S.D)[:, None] + dim[None, :], mask=mask, other=0.0)
        x = tl.where(fresh[:, None], (raw.to(tl.float32) * up).to(x.dtype), x)
    x = tl.where(present[:, None], x, 0.0).to(dense_ptr.dtype.element_ty)
    tl.store(dense_ptr + (row * S.D)[:, None] + dim[None, :], x, mask=(row >= 0)[:, None] & (dim < S.D)[None, :])


@triton.jit(do_not_specialize=["most_queries", "window"])
def unpack_kernel(
    pages_ptr, table_ptr, lens_ptr, starts_ptr, rank_ptr, exponent_ptr, fresh_k_ptr, fresh_v_ptr, dense_k_ptr,
    dense_v_ptr, key_levels, value_levels, most_queries, window, chunk, first_token, block_stride, page_stride,
    table_stride, HEADS: tl.constexpr, NT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One program: 16 NT tokens of a head of a sequence -> dense K and V [rank, head, token, dim], in stored space.

    Tokens before the window of every query become zeros, because a probability of zero does not hide NaN or Inf."""
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    BT: tl.constexpr = 16 * NT
    TILES_PER_BLOCK: tl.constexpr = K.BLOCK_SIZE // 16
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lens_ptr + sequence)
    inside0 = tl.program_id(0) * BT
    token0 = first_token + inside0
    if (queries <= most_queries) | (token0 >= length):
        return
    tile = token0 // 16 + tl.arange(0, NT)
    tile_valid = tile * 16 < length
    block_ptrs = table_ptr + sequence * table_stride + tile // TILES_PER_BLOCK
    block_id = tl.load(block_ptrs, mask=tile_valid, other=0).to(tl.int64)
    page = pages_ptr + block_id * block_stride + head * page_stride
    inside = (tile % TILES_PER_BLOCK).to(tl.int64)
    token = token0 + tl.arange(0, BT)
    present = (token < length) & (token >= first_seen(length, queries, window))
    fresh = token >= length - queries
    fresh_row = (start + token - (length - queries)).to(tl.int64) * HEADS + head
    row = (tl.load(rank_ptr + sequence).to(tl.int64) * HEADS + head) * chunk + inside0 + tl.arange(0, BT)
    row = tl.where(token < length, row, -1)
    k_up = _dense_scale(exponent_ptr, sequence, head, 0, HEADS, False)
    v_up = _dense_scale(exponent_ptr, sequence, head, 1, HEADS, False)
    _unpack_side(
        page, inside, tile_valid, present, fresh, fresh_row, row, key_levels, fresh_k_ptr, dense_k_ptr, k_up, K
    )
    _unpack_side(
        page, inside, tile_valid, present, fresh, fresh_row, row, value_levels, fresh_v_ptr, dense_v_ptr, v_up, V
    )


@triton.jit
def _softmax_rows(s, factor, m, z, acc):
    """One step of the online softmax on scores s [M, BN] times factor [M] > 0: probabilities and the rescaled state."""
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor[:, None] - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    return p, m_new, z * alpha + tl.sum(p, 1), acc * alpha[:, None]


@triton.jit
def _load_dense(ptr, row, valid, S: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Loads unpacked vectors: rows [N] -> [N, 16 SP] or [16 SP, N]; zeros where ``valid`` [N] is False."""
    D: tl.constexpr = S.D
    DP: tl.constexpr = 16 * S.SP
    dim = tl.arange(0, DP)
    if TRANSPOSED:
        mask = valid[None, :]
        if DP != D:
            mask = mask & (dim < D)[:, None]
        return tl.load(ptr + row[None, :] * D + dim[:, None], mask=mask, other=0.0)
    else:
        mask = valid[:, None]
        if DP != D:
            mask = mask & (dim < D)[None, :]
        return tl.load(ptr + row[:, None] * D + dim[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["sequences", "most_queries", "window"])
def prefill_kernel(
    q_ptr, dense_k_ptr, dense_v_ptr, lens_ptr, starts_ptr, rank_ptr, exponent_ptr, sinks_ptr, shift_ptr, out_ptr,
    lse_ptr, state_ptr, key_rotation, value_rotation,
    sequences, most_queries, chunk, first_token, q_stride, q_head_stride, out_stride, out_head_stride,
    scale_log2, softcap, key_norm, value_norm, window,
    K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINK_STRIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one sequence, one KV head, the keys [first_token, first_token + chunk).

    Pointers to sinks, score shift, log-sum-exp and rotations may be None. Between passes, the state of a row is its
    output, maximum and sum: float32 [total_queries, num_heads, VD + 2].
    """
    BLOCK_Q: tl.constexpr = M // GROUP
    VD: tl.constexpr = V.D
    VDP: tl.constexpr = 16 * V.SP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # rows with the most visible keys first
    head = tl.program_id(1)
    sequence, start, first = first_query(starts_ptr, sequences, block, BLOCK_Q, False)
    queries = tl.load(starts_ptr + sequence + 1) - start
    if (first >= queries) | (queries <= most_queries):
        return
    length = tl.load(lens_ptr + sequence)
    rank = tl.load(rank_ptr + sequence).to(tl.int64)

    query, q_head, row_valid, q_row, row_at = query_rows(first, start, queries, head, HEADS, GROUP, M)
    position = length - queries + query
    begin, end, _, _, clear_begin, clear_end = keys_to_read(
        length, queries, first, window, BLOCK_Q, BN, CAUSAL, WINDOW, False
    )
    begin = tl.maximum(begin, first_token)
    end = tl.minimum(end, first_token + chunk)
    # Rows are scaled by powers of two, which is exact; the rest of the scale is applied to the float32 scores. A
    # negative scale flips the sign of the queries, because the softmax needs a positive factor.
    qh, _, _, up = load_queries(
        q_ptr + q_row * q_stride + q_head * q_head_stride, row_valid, key_rotation, key_norm, M, K
    )
    qh = tl.trans(tl.where(scale_log2 < 0, -qh, qh))
    factor = up * tl.abs(scale_log2) * _dense_scale(exponent_ptr, sequence, head, 0, HEADS, True)
    factor = tl.maximum(factor, 1e-30)
    shift = tl.zeros([M], tl.float32)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + row_at, mask=row_valid, other=0.0) * _LOG2E

    v_dim = tl.arange(0, VDP)
    state = state_ptr + row_at * (VD + 2)
    state_mask = row_valid[:, None] & (v_dim < VD)[None, :]
    if FIRST:
        m = tl.full([M], float("-inf"), tl.float32)
        z = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, VDP], tl.float32)
    else:
        m = tl.load(state + VD, mask=row_valid, other=float("-inf"))
        z = tl.load(state + VD + 1, mask=row_valid, other=0.0)
        acc = tl.load(state[:, None] + v_dim[None, :], mask=state_mask, other=0.0)

    base = (rank * HEADS + head) * chunk - first_token
    for token0 in tl.range(begin, end, BN, num_stages=STAGES):
        token = token0 + tl.arange(0, BN)
        kt = _load_dense(dense_k_ptr, base + token, token < end, K, True)
        s = dot(qh, kt, tl.zeros([M, BN], tl.float32))
        if SOFTCAP:
            s = soft_cap(s * factor[:, None] + shift[:, None], softcap)
        if token0 + BN > clear_end or token0 < clear_begin or token0 + BN > end:
            s = hide(s, token[None, :], (token < end)[None, :], position[:, None], window, CAUSAL, WINDOW)
        if SOFTCAP:
            p, m, z, acc = _softmax_rows(s, tl.full([M], 1.0, tl.float32), m, z, acc)
        else:
            p, m, z, acc = _softmax_rows(s, factor, m, z, acc)
        v = _load_dense(dense_v_ptr, base + token, token < end, V, False)
        acc = dot(p.to(v.dtype), v, acc)

    if LAST:
        acc *= _dense_scale(exponent_ptr, sequence, head, 1, HEADS, True)
        lse = finish(
            acc, m, z, sinks_ptr, q_row * SINK_STRIDE + q_head, row_valid, value_rotation, value_norm,
            out_ptr + q_row * out_stride + q_head * out_head_stride, VD, VDP, 64 if VDP >= 64 else VDP,
        )  # fmt: skip
        if lse_ptr is not None:
            tl.store(lse_ptr + row_at, lse, mask=row_valid)
    else:
        tl.store(state + VD, m, mask=row_valid)
        tl.store(state + VD + 1, z, mask=row_valid)
        tl.store(state[:, None] + v_dim[None, :], acc, mask=state_mask)
