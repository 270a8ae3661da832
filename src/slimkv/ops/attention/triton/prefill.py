"""The prefill kernels of attend: many queries per sequence.

With many queries the arithmetic counts, not the bytes: a key would be unpacked once for every block of queries. So the
keys and values of the sequences concerned are unpacked once, into a bounded workspace, and attended there. A context
longer than the workspace takes several passes, which hand on the state of the softmax.

Unpacked numbers are fp16 (raw formats keep their dtype),
times the power of two that brings the largest of a sequence and
head near 2^6; the queries and the output carry the inverse. The exponents of the stored fields tell that power.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.codec import scale16
from slimkv.ops.attention.triton.decode import _LOG2E, find_block, finish, power_below, soft_cap
from slimkv.ops.triton import unpack
from slimkv.ops.triton.rotate import dot, rotate_rows
from slimkv.ops.triton.unpack import (
    as_keys,
    as_values,
    decode_signed,
    decode_unsigned,
    fragment_order,
    load_code_words,
    load_field,
    numbers,
    raw_numbers,
    uniform_centre,
)

_LLOYD: tl.constexpr = tl.constexpr(unpack.LLOYD)
_UNIFORM: tl.constexpr = tl.constexpr(unpack.UNIFORM)
_RAW: tl.constexpr = tl.constexpr(unpack.RAW)
_BIAS: tl.constexpr = tl.constexpr(scale16.BIAS)
_KEY_OFFSET: tl.constexpr = tl.constexpr(unpack.KEY_OFFSET)
_VALUE_OFFSET: tl.constexpr = tl.constexpr(unpack.VALUE_OFFSET)


_TARGET: tl.constexpr = tl.constexpr(6)
_INVALID: tl.constexpr = tl.constexpr(scale16.INVALID)


@triton.jit
def _side_exponent(
    page, position, mask, FIELDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr
):
    """An exponent that no number of these tokens exceeds, int32: codes are below 2^8 (lloyd), 2^BITS or 2^9 (fp8)."""
    code = tl.load((page + FIELDS).to(tl.pointer_type(tl.uint16)) + position, mask=mask, other=0).to(tl.int32)
    code = tl.where(code == _INVALID, 0, code)
    top = tl.max(code >> 10, 0) + (BITS if KIND == _UNIFORM else 9)
    if KIND == _UNIFORM:
        zero = tl.load(
            (page + FIELDS + 2 * BLOCK_SIZE).to(tl.pointer_type(tl.uint16)) + position, mask=mask, other=0
        ).to(tl.int32)
        zero = tl.where(zero == _INVALID, 0, zero & 0x7FFF)
        top = tl.maximum(top, tl.max(zero >> 9, 0)) + 2
    return top - _BIAS


@triton.jit
def first_seen(length, queries, window):
    """The first token that a query of the sequence sees. What lies before it may be of another sequence by now."""
    return tl.maximum(0, length - queries - window + 1)


@triton.jit(do_not_specialize=["most_queries", "window"])
def range_kernel(
    pages_ptr, table_ptr, lens_ptr, starts_ptr, exponent_ptr, most_queries, window, block_stride, page_stride,
    table_stride,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_KIND: tl.constexpr, K_BITS: tl.constexpr,
    K_FIELDS: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_FIELDS: tl.constexpr,
):  # fmt: skip
    """Raises exponent[sequence, head, side] to bound the numbers of TOKENS tokens, of those that a query sees."""
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    queries = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence)
    length = tl.load(lens_ptr + sequence)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if (queries <= most_queries) | (tl.program_id(0) * TOKENS >= length):
        return
    mask = (token < length) & (token >= first_seen(length, queries, window))
    block_id = tl.load(table_ptr + sequence * table_stride + token // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    page = pages_ptr + block_id * block_stride + head * page_stride
    at = exponent_ptr + (sequence * HEADS + head) * 2
    if K_KIND != _RAW:
        tl.atomic_max(at, _side_exponent(page, token % BLOCK_SIZE, mask, K_FIELDS, BLOCK_SIZE, K_KIND, K_BITS))
    if V_KIND != _RAW:
        tl.atomic_max(at + 1, _side_exponent(page, token % BLOCK_SIZE, mask, V_FIELDS, BLOCK_SIZE, V_KIND, V_BITS))


@triton.jit
def _dense_scale(exponent_ptr, sequence, head, SIDE: tl.constexpr, HEADS: tl.constexpr, UP: tl.constexpr):
    """2^(TARGET - exponent), or its inverse: float32."""
    exponent = tl.load(exponent_ptr + (sequence * HEADS + head) * 2 + SIDE)
    power = exponent - _TARGET if UP else -exponent + _TARGET
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fields(
    page, field_at, keep, FIELDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr
):
    """Scale of every token and what number 0 stands for: float32 [16 NT] each."""
    BT: tl.constexpr = field_at.shape[0] * field_at.shape[1]
    scale = tl.reshape(decode_unsigned(load_field((page + FIELDS)[:, None], field_at, keep)), (BT,))
    zero = tl.zeros([BT], tl.float32)
    if KIND == _UNIFORM:
        zero = tl.reshape(decode_signed(load_field((page + FIELDS + 2 * BLOCK_SIZE)[:, None], field_at, keep)), (BT,))
        zero += scale * uniform_centre(BITS)
    return scale, zero


@triton.jit(do_not_specialize=["most_queries", "window"])
def unpack_kernel(
    pages_ptr, table_ptr, lens_ptr, starts_ptr, rank_ptr, exponent_ptr, fresh_k_ptr, fresh_v_ptr, dense_k_ptr,
    dense_v_ptr,
    key_levels, value_levels, key_table0, key_table1, value_table0, value_table1,
    most_queries, window, chunk, first_token, block_stride, page_stride, table_stride,
    HEADS: tl.constexpr, NT: tl.constexpr, BLOCK_SIZE: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr,
    KS: tl.constexpr,
    VS: tl.constexpr,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_BF16: tl.constexpr, K_FIELDS: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_BF16: tl.constexpr, V_CODES: tl.constexpr, V_FIELDS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """One program: 16 NT tokens of a head of a sequence -> dense K and V [rank, head, token, dim], in stored space.

    Tokens before the window of every query become zeros: a weight of zero would not hide what is not finite."""
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    BT: tl.constexpr = 16 * NT
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lens_ptr + sequence)
    inside0 = tl.program_id(0) * BT
    token0 = first_token + inside0
    if (queries <= most_queries) | (token0 >= length):
        return
    rank = tl.load(rank_ptr + sequence).to(tl.int64)
    tile = token0 // 16 + tl.arange(0, NT)
    tile_valid = tile * 16 < length
    block_id = tl.load(table_ptr + sequence * table_stride + tile // (BLOCK_SIZE // 16), mask=tile_valid, other=0).to(
        tl.int64
    )
    page = pages_ptr + block_id * block_stride + head * page_stride
    in_block = (tile % (BLOCK_SIZE // 16)).to(tl.int64)
    field_at = (in_block * 16)[:, None] + tl.arange(0, 16)[None, :]
    seen_from = first_seen(length, queries, window)
    token = token0 + tl.arange(0, BT)
    tile_tokens = tl.reshape((token < length) & (token >= seen_from), (NT, 16))
    out_row = (rank * HEADS + head) * chunk + inside0

    k_up = _dense_scale(exponent_ptr, sequence, head, 0, HEADS, False)
    v_up = _dense_scale(exponent_ptr, sequence, head, 1, HEADS, False)

    # -- keys: [tokens, dimensions in fragment order]
    dim = fragment_order(tl.arange(0, 16 * KS))
    if K_KIND == _RAW:
        k = as_keys(raw_numbers(page + in_block * (2 * KD * K_BITS), tile_valid, K_BITS, K_BF16, KD // 16, KS))
    else:
        low, high = load_code_words(page + in_block * (2 * KD * K_BITS), tile_valid, K_BITS, KD // 16, KS, False)
        k = as_keys(numbers(low, high, key_levels, key_table0, key_table1, K_KIND, K_BITS, False, PTX)).to(tl.float32)
        scale, zero = _fields(page, field_at, tile_tokens, K_FIELDS, BLOCK_SIZE, K_KIND, K_BITS)
        if PTX and K_KIND == _LLOYD and K_BITS <= 4:
            k -= _KEY_OFFSET
        k = (k * scale[:, None] + zero[:, None]) * k_up
    if fresh_k_ptr is not None:
        fresh = token >= length - queries
        at = ((start + token - (length - queries)).to(tl.int64) * HEADS + head) * KD
        mask = (fresh & (token < length))[:, None] & (dim < KD)[None, :]
        raw = tl.load(fresh_k_ptr + at[:, None] + dim[None, :], mask=mask, other=0.0)
        k = tl.where(fresh[:, None], (raw.to(tl.float32) * k_up).to(k.dtype), k)
    k = tl.where((token >= seen_from)[:, None], k, 0.0)
    to = dense_k_ptr + (out_row + tl.arange(0, BT))[:, None] * KD + dim[None, :]
    tl.store(to, k.to(dense_k_ptr.dtype.element_ty), mask=(token < length)[:, None] & (dim < KD)[None, :])

    # -- values: [dimensions, tokens in fragment order]
    place = fragment_order(tl.arange(0, BT))
    v_token = token0 + place
    v_dim = tl.arange(0, 16 * VS)
    if V_KIND == _RAW:
        v = as_values(
            raw_numbers(page + V_CODES + in_block * (2 * VD * V_BITS), tile_valid, V_BITS, V_BF16, VD // 16, VS)
        )
    else:
        low, high = load_code_words(
            page + V_CODES + in_block * (2 * VD * V_BITS), tile_valid, V_BITS, VD // 16, VS, True
        )
        v = as_values(numbers(low, high, value_levels, value_table0, value_table1, V_KIND, V_BITS, True, PTX)).to(
            tl.float32
        )
        v_field_at = (in_block * 16)[:, None] + fragment_order(tl.arange(0, 16))[None, :]
        v_keep = tl.reshape((v_token < length) & (v_token >= seen_from), (NT, 16))
        scale, zero = _fields(page, v_field_at, v_keep, V_FIELDS, BLOCK_SIZE, V_KIND, V_BITS)
        if PTX and V_KIND == _LLOYD and V_BITS <= 4:
            v -= _VALUE_OFFSET
        v = (v * scale[None, :] + zero[None, :]) * v_up
    if fresh_v_ptr is not None:
        fresh = v_token >= length - queries
        at = ((start + v_token - (length - queries)).to(tl.int64) * HEADS + head) * VD
        mask = (fresh & (v_token < length))[None, :] & (v_dim < VD)[:, None]
        raw = tl.load(fresh_v_ptr + at[None, :] + v_dim[:, None], mask=mask, other=0.0)
        v = tl.where(fresh[None, :], (raw.to(tl.float32) * v_up).to(v.dtype), v)
    v = tl.where((v_token >= seen_from)[None, :], v, 0.0)
    to = dense_v_ptr + (out_row + place)[None, :] * VD + v_dim[:, None]
    tl.store(to, v.to(dense_v_ptr.dtype.element_ty), mask=(v_token < length)[None, :] & (v_dim < VD)[:, None])


@triton.jit
def _softmax_rows(s, factor, m, z, acc):
    """One online softmax step on scores s [M, BN] times factor [M] > 0: probabilities, and the state rescaled."""
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor[:, None] - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    return p, m_new, z * alpha + tl.sum(p, 1), acc * alpha[:, None]


@triton.jit
def _load_query_rows(q_ptrs, row_valid, key_rotation, key_norm, scale_log2, M: tl.constexpr, KD: tl.constexpr,
                     KDP: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The queries, rotated, [M, KDP] in the keys' dtype, and what their scores are to be multiplied by [M]."""
    if key_rotation is not None:
        q = rotate_rows(q_ptrs, row_valid, key_rotation, key_norm, M, KD, KDP, 64 if KDP >= 64 else KDP)
    else:
        dim = tl.arange(0, KDP)
        q = tl.load(q_ptrs[:, None] + dim[None, :], mask=row_valid[:, None] & (dim < KD)[None, :], other=0.0).to(
            tl.float32
        )
    # Rows are scaled by powers of two, which loses nothing; the rest of the scale waits for the float32 scores.
    down, up, _ = power_below(tl.max(tl.abs(q), 1))
    # A negative scale becomes the queries' sign: the factor is taken to be positive.
    down = tl.where(scale_log2 < 0, -down, down)
    return (q * down[:, None]).to(DTYPE), up * tl.abs(scale_log2)


@triton.jit
def _load_dense(ptr, row, valid, D: tl.constexpr, DP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Unpacked vectors: rows [N] -> [N, DP], or [DP, N]; zeros where not valid [N]."""
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
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr,
    KDP: tl.constexpr, VDP: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINK_STRIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one sequence, one KV head, the keys [first_token, first_token + chunk).

    Pointers may be None: no sinks, no score shift, no log-sum-exp wanted, sides that are not rotated. Between passes
    the state of a row is its output, maximum and sum: float32 [total_queries, num_heads, VD + 2].
    """
    BLOCK_Q: tl.constexpr = M // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # long rows of a causal mask first
    head = tl.program_id(1)
    sequence = find_block(starts_ptr, sequences, block, BLOCK_Q)
    start = tl.load(starts_ptr + sequence)
    first = (block - (start // BLOCK_Q + sequence)) * BLOCK_Q
    queries = tl.load(starts_ptr + sequence + 1) - start
    if (first >= queries) | (queries <= most_queries):
        return
    length = tl.load(lens_ptr + sequence)
    rank = tl.load(rank_ptr + sequence).to(tl.int64)

    row = tl.arange(0, M)
    query = first + row // GROUP
    q_head = head * GROUP + row % GROUP
    row_valid = (row < BLOCK_Q * GROUP) & (query < queries)
    q_row = (start + query).to(tl.int64)
    row_at = q_row * (HEADS * GROUP) + q_head
    position = length - queries + query
    end = length
    begin = 0
    clear_begin = 0
    clear_end = length
    if CAUSAL:
        end = tl.minimum(length, length - queries + first + BLOCK_Q)
        clear_end = length - queries + first + 1
    if WINDOW:
        begin = tl.maximum(0, length - queries + first - window + 1) // BN * BN
        clear_begin = length - queries + tl.minimum(first + BLOCK_Q, queries) - window
    begin = tl.maximum(begin, first_token)
    end = tl.minimum(end, first_token + chunk)
    qh, up = _load_query_rows(
        q_ptr + q_row * q_stride + q_head * q_head_stride, row_valid, key_rotation, key_norm, scale_log2, M, KD, KDP,
        dense_k_ptr.dtype.element_ty,
    )  # fmt: skip
    factor = tl.maximum(up * _dense_scale(exponent_ptr, sequence, head, 0, HEADS, True), 1e-30)
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
        kt = _load_dense(dense_k_ptr, base + token, token < end, KD, KDP, True)
        s = dot(qh, kt, tl.zeros([M, BN], tl.float32))
        if SOFTCAP:
            s = soft_cap(s * factor[:, None] + shift[:, None], softcap)
        if token0 + BN > clear_end or token0 < clear_begin or token0 + BN > end:
            visible = (token < end)[None, :] & (token >= 0)[None, :]
            if CAUSAL:
                visible = visible & (token[None, :] <= position[:, None])
            if WINDOW:
                visible = visible & (token[None, :] > position[:, None] - window)
            s = tl.where(visible, s, float("-inf"))
        if SOFTCAP:
            p, m, z, acc = _softmax_rows(s, tl.full([M], 1.0, tl.float32), m, z, acc)
        else:
            p, m, z, acc = _softmax_rows(s, factor, m, z, acc)
        v = _load_dense(dense_v_ptr, base + token, token < end, VD, VDP, False)
        acc = dot(p.to(v.dtype), v, acc)

    if LAST:
        acc *= _dense_scale(exponent_ptr, sequence, head, 1, HEADS, True)
        lse = finish(
            acc, m, z, sinks_ptr, q_row * SINK_STRIDE + q_head, row_valid, value_rotation, value_norm,
            out_ptr + q_row * out_stride + q_head * out_head_stride, sinks_ptr is not None, value_rotation is not None,
            VD, VDP, 64 if VDP >= 64 else VDP,
        )  # fmt: skip
        if lse_ptr is not None:
            tl.store(lse_ptr + row_at, lse, mask=row_valid)
    else:
        tl.store(state + VD, m, mask=row_valid)
        tl.store(state + VD + 1, z, mask=row_valid)
        tl.store(state[:, None] + v_dim[None, :], acc, mask=state_mask)
