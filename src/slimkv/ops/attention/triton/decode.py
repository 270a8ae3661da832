"""The Triton kernels of attend on packed pages: attention, and the merge of split-KV parts.

Scores are in base 2. A key's scale multiplies its score; a value's scale multiplies its probability. The product is at
most 2, so fp16 holds it, because the running max is over score + log2(value scale) instead of the score alone.

Tiles are transposed, scores [tokens, rows] and output [dimensions, rows]: a group of up to 8 query heads then fills the
8 columns of a tensor-core tile instead of half of its 16 rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.ops.triton.rotate import dot, rotate_columns, unrotate_store
from slimkv.ops.triton.side import RAW, UNIFORM
from slimkv.ops.triton.unpack import (
    as_keys,
    as_values,
    decode_unsigned,
    field_exponent,
    fragment_order,
    in_fragment_order,
    load_centre,
    load_field,
    tile_numbers,
)

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def first_query(starts_ptr, sequences, block, BLOCK_Q: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """The sequence of a block of queries, the sequence's first row of the query tensor, and the block's first query.

    Sequence i has len_i // BLOCK_Q + 1 blocks, or one block if ONE_BLOCK.
    """
    if ONE_BLOCK:
        return block, tl.load(starts_ptr + block), 0
    else:
        left = 0
        right = sequences
        while left < right:
            middle = (left + right) // 2
            if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= block:
                left = middle + 1
            else:
                right = middle
        sequence = left - 1
        start = tl.load(starts_ptr + sequence)
        return sequence, start, (block - (start // BLOCK_Q + sequence)) * BLOCK_Q


@triton.jit
def query_rows(first, start, queries, head, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """The M rows of a program: their query in the sequence, their query head, whether they are valid, their row of the
    query tensor, and their index among all (query, head) rows."""
    row = tl.arange(0, M)
    query = first + row // GROUP
    q_head = head * GROUP + row % GROUP
    row_valid = (row < M // GROUP * GROUP) & (query < queries)
    q_row = (start + query).to(tl.int64)
    return query, q_head, row_valid, q_row, q_row * (HEADS * GROUP) + q_head


@triton.jit
def power_below(top):
    """For magnitudes top [N]: 1 / 2^e, 2^e and e with top / 2^e in [1, 2), float32 [N] each."""
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((-exponent + 254) << 23).to(tl.float32, bitcast=True)
    return inverse, (exponent << 23).to(tl.float32, bitcast=True), (exponent - 127).to(tl.float32)


@triton.jit
def softmax_columns(s, top, m, z, acc):
    """One step of the online softmax on scores s [BT, M] with maximum top [M], acc [VDP, M].

    Returns the probabilities, the state rescaled to the new maximum, and the factor of rescaling.
    """
    m_new = tl.maximum(m, top)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[None, :])
    alpha = tl.exp2(m - m_safe)
    return p, m_new, z * alpha + tl.sum(p, 0), acc * alpha[None, :], alpha


@triton.jit
def keys_to_read(length, queries, first, window, BLOCK_Q: tl.constexpr, BT: tl.constexpr, CAUSAL: tl.constexpr,
                 WINDOW: tl.constexpr, FRESH: tl.constexpr):  # fmt: skip
    """The keys that a block of queries reads: begin (a multiple of BT), end, the end of packed keys, and the first key
    that any of its queries sees (earlier blocks may belong to another sequence).

    Also the begin and end of the keys that every query of the block sees: they need no mask.
    """
    end = length
    seen_from = 0
    if CAUSAL:
        end = tl.minimum(length, length - queries + first + BLOCK_Q)
    if WINDOW:
        seen_from = tl.maximum(0, length - queries + first - window + 1)
    begin = seen_from // BT * BT
    packed_end = end
    if FRESH:
        packed_end = tl.maximum(tl.minimum(end, length - queries), 0)
    clear_end = packed_end
    clear_begin = begin
    if CAUSAL:
        clear_end = tl.minimum(packed_end, length - queries + first + 1)
    if WINDOW:
        clear_begin = length - queries + tl.minimum(first + BLOCK_Q, queries) - window
    return begin, end, packed_end, seen_from, clear_begin, clear_end


@triton.jit
def load_queries(q_ptrs, row_valid, key_rotation, key_norm, M: tl.constexpr, K: tl.constexpr):
    """Loads queries, rotates them (unless key_rotation is None) and scales each column into the keys' dtype.

    Returns them [KDP, M], their rounding errors, their sums [M], and the factors that undo the scaling [M].
    """
    KDP: tl.constexpr = 16 * K.SP
    if key_rotation is not None:
        q = rotate_columns(q_ptrs, row_valid, key_rotation, key_norm, M, K.D, KDP, 16)
    else:
        dim = tl.arange(0, KDP)
        mask = row_valid[None, :] & (dim < K.D)[:, None]
        q = tl.load(q_ptrs[None, :] + dim[:, None], mask=mask, other=0.0).to(tl.float32)
    down, up, _ = power_below(tl.max(tl.abs(q), 0))
    q *= down[None, :]
    if K.KIND == RAW and K.BITS == 32:
        qh = q
    elif K.KIND == RAW and K.BF16:
        qh = q.to(tl.bfloat16)
    else:
        qh = q.to(tl.float16)
    rest = (q - qh.to(tl.float32)).to(qh.dtype)
    return qh, rest, tl.sum(qh.to(tl.float32), 0), up


@triton.jit
def side_scores(k, page, field_at, valid_tiles, qh, q_sum, S: tl.constexpr):
    """Scores float32 [BT, M] of the numbers k [BT, dim] of one step, without the queries' scale factors."""
    if S.KIND == RAW:
        return dot(k, qh, tl.zeros([k.shape[0], qh.shape[1]], tl.float32))
    else:
        scale = tl.reshape(decode_unsigned(load_field(page[:, None], field_at, valid_tiles, 0, S)), (k.shape[0],))
        s = tl.dot(k, qh) * scale[:, None]
        if S.KIND == UNIFORM:
            s += load_centre(page[:, None], field_at, valid_tiles, scale, S)[:, None] * q_sum[None, :]
        return s


@triton.jit
def add_values(s, m, z, w, acc, v, page, field_at, valid_tiles, FRAGMENTS: tl.constexpr, S: tl.constexpr):
    """One step of the online softmax with values v [VDP, BT]: scores s [BT, M] -> m, z, w [M], acc [VDP, M].

    FRAGMENTS: whether the tokens of v are in fragment order. Raw values that no query sees must be zeros.
    """
    BT: tl.constexpr = s.shape[0]
    if S.KIND == RAW:
        p, m, z, acc, _ = softmax_columns(s, tl.max(s, 0), m, z, acc)
    else:
        field = load_field(page[:, None], field_at, valid_tiles, 0, S)
        scale = tl.reshape(decode_unsigned(field), (BT,))
        exponent = tl.reshape(field_exponent(field), (BT,))
        p, m, z, acc, alpha = softmax_columns(s, tl.max(s + exponent[:, None], 0), m, z, acc)
        seen = p != 0.0  # the scale of a masked token may be NaN
        if S.KIND == UNIFORM:
            centre = load_centre(page[:, None], field_at, valid_tiles, scale, S)
            w = w * alpha + tl.sum(tl.where(seen, p * centre[:, None], 0.0), 0)
        p = tl.where(seen, p * scale[:, None], 0.0)
    p = p.to(v.dtype)
    return m, z, w, dot(v, in_fragment_order(p) if FRAGMENTS else p, acc)


@triton.jit
def hide(s, token, present, position, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Masks scores s with -inf where a token is not ``present`` or not visible to the query at ``position``.

    ``token`` and ``present`` broadcast over the queries' axis of s, ``position`` over the tokens'.
    """
    seen = present & (position == position)
    if CAUSAL:
        seen = seen & (token <= position)
    if WINDOW:
        seen = seen & (token > position - window)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _add_fresh(m, z, acc, qh, row_scale, shift, position, k_ptr, v_ptr, begin, end, start, queries, length, softcap,
               window, HEADS: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, BT: tl.constexpr, CAUSAL: tl.constexpr,
               WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """Steps of the online softmax over the query tokens' own unquantised keys and values, BT at a time.

    k_ptr and v_ptr point to the KV head in [total_queries, HEADS, dim].
    """
    dim = fragment_order(tl.arange(0, qh.shape[0]))
    v_dim = tl.arange(0, acc.shape[0])
    for fresh0 in range(tl.maximum(begin - (length - queries), 0), end - (length - queries), BT):
        fresh = fresh0 + tl.arange(0, BT)
        present = fresh < queries
        at = (start + fresh).to(tl.int64) * HEADS
        mask = present[:, None] & (dim < KD)[None, :]
        k = tl.load(k_ptr + (at * KD)[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
        k_down, k_up, _ = power_below(tl.max(tl.abs(k), 1))
        k = (k * k_down[:, None]).to(tl.float16)
        s = tl.dot(k, qh.to(tl.float16)) * (row_scale[None, :] * k_up[:, None])
        if SOFTCAP:
            s = soft_cap(s + shift[None, :], softcap)
        token = length - queries + fresh
        s = hide(s, token[:, None], present[:, None], position[None, :], window, CAUSAL, WINDOW)
        mask = present[None, :] & (v_dim < VD)[:, None]
        v = tl.load(v_ptr + (at * VD)[None, :] + v_dim[:, None], mask=mask, other=0.0).to(tl.float32)
        v_down, v_up, v_exponent = power_below(tl.max(tl.abs(v), 0))
        p, m, z, acc, _ = softmax_columns(s, tl.max(s + v_exponent[:, None], 0), m, z, acc)
        acc = tl.dot((v * v_down[None, :]).to(tl.float16), (p * v_up[:, None]).to(tl.float16), acc)
    return m, z, acc


@triton.jit(do_not_specialize=["sequences", "most_queries", "window"])
def attend_kernel(
    q_ptr, pages_ptr, table_ptr, lens_ptr, starts_ptr, sinks_ptr, shift_ptr, fresh_k_ptr, fresh_v_ptr, out_ptr, lse_ptr,
    key_rotation, value_rotation, key_levels, value_levels,
    sequences, most_queries, q_stride, q_head_stride, block_stride, page_stride, table_stride, out_stride,
    out_head_stride, scale_log2, softcap, key_norm, value_norm, window,
    K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, NT: tl.constexpr,
    SPLITS: tl.constexpr, ONE_BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINK_STRIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one sequence, one KV head, one of SPLITS parts of the keys.

    Sequences with more than ``most_queries`` queries are left to the prefill kernel. Pointers to sinks, score shift,
    fresh K and V (contiguous), log-sum-exp and rotations may be None. With several SPLITS, out_ptr and lse_ptr point to
    the workspace of partial results: [rows, SPLITS, dim].
    """
    head = tl.program_id(1)
    part = tl.program_id(2)
    BT: tl.constexpr = 16 * NT
    BLOCK_Q: tl.constexpr = M // GROUP
    VDP: tl.constexpr = 16 * V.SP
    TILES_PER_BLOCK: tl.constexpr = K.BLOCK_SIZE // 16

    sequence, start, first = first_query(starts_ptr, sequences, tl.program_id(0), BLOCK_Q, ONE_BLOCK)
    queries = tl.load(starts_ptr + sequence + 1) - start
    if (first >= queries) | (queries > most_queries):
        return
    length = tl.load(lens_ptr + sequence)

    query, q_head, row_valid, q_row, row_at = query_rows(first, start, queries, head, HEADS, GROUP, M)
    position = length - queries + query  # the position of each row's query in its sequence

    begin, end, packed_end, seen_from, clear_begin, clear_end = keys_to_read(
        length, queries, first, window, BLOCK_Q, BT, CAUSAL, WINDOW, fresh_k_ptr is not None
    )
    steps = tl.cdiv(tl.maximum(packed_end - begin, 0), BT)
    per_part = tl.cdiv(steps, SPLITS)
    qh, _, q_sum, up = load_queries(
        q_ptr + q_row * q_stride + q_head * q_head_stride, row_valid, key_rotation, key_norm, M, K
    )
    qh = in_fragment_order(qh)
    row_scale = up * scale_log2
    shift = tl.zeros([M], tl.float32)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + row_at, mask=row_valid, other=0.0) * _LOG2E

    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M], tl.float32)
    w = tl.zeros([M], tl.float32)  # sums of probabilities times the centres of uniform values
    acc = tl.zeros([VDP, M], tl.float32)
    for step in tl.range(part * per_part, tl.minimum((part + 1) * per_part, steps), num_stages=STAGES):
        token0 = begin + step * BT
        token = token0 + tl.arange(0, BT)
        tile = token0 // 16 + tl.arange(0, NT)
        tile_valid = tile * 16 < length
        block_ptrs = table_ptr + sequence * table_stride + tile // TILES_PER_BLOCK
        block_id = tl.load(block_ptrs, mask=tile_valid, other=0).to(tl.int64)
        page = pages_ptr + block_id * block_stride + head * page_stride
        inside = (tile % TILES_PER_BLOCK).to(tl.int64)
        field_at = (inside * 16)[:, None] + tl.arange(0, 16)[None, :]  # the fields of a tile are contiguous
        valid = token < length
        if WINDOW:
            valid = valid & (token >= seen_from)
        valid_tiles = tl.reshape(valid, (NT, 16))
        k = as_keys(tile_numbers(page, inside, tile_valid, key_levels, K))
        s = side_scores(k, page, field_at, valid_tiles, qh, q_sum, K) * row_scale[None, :]
        if SOFTCAP:
            s = soft_cap(s + shift[None, :], softcap)
        # Rows without a query are never stored, so only steps at the first and last visible keys need a mask.
        if token0 + BT > clear_end or token0 < clear_begin:
            present = valid & (token < packed_end)
            s = hide(s, token[:, None], present[:, None], position[None, :], window, CAUSAL, WINDOW)
        v = as_values(tile_numbers(page, inside, tile_valid, value_levels, V))
        if V.KIND == RAW:
            v_token = token0 + fragment_order(tl.arange(0, BT))
            v = tl.where(((v_token < length) & (v_token >= seen_from))[None, :], v, 0.0).to(v.dtype)
        m, z, w, acc = add_values(s, m, z, w, acc, v, page, field_at, valid_tiles, True, V)
    acc += w[None, :]

    if fresh_k_ptr is not None:
        if part == SPLITS - 1:
            m, z, acc = _add_fresh(
                m, z, acc, qh, row_scale, shift, position, fresh_k_ptr + head * K.D, fresh_v_ptr + head * V.D, begin,
                end, start, queries, length, softcap, window, HEADS, K.D, V.D, BT, CAUSAL, WINDOW, SOFTCAP,
            )  # fmt: skip
    if SPLITS == 1:
        lse = finish(
            tl.trans(acc), m, z, sinks_ptr, q_row * SINK_STRIDE + q_head, row_valid, value_rotation, value_norm,
            out_ptr + q_row * out_stride + q_head * out_head_stride, V.D, VDP, 16,
        )  # fmt: skip
        if lse_ptr is not None:
            tl.store(lse_ptr + row_at, lse, mask=row_valid)
    else:
        _store_part(acc, m, z, row_at * SPLITS + part, row_valid, out_ptr, lse_ptr, V.D, VDP)


@triton.jit
def _store_part(acc, m, z, at, row_valid, part_ptr, part_lse_ptr, VD: tl.constexpr, VDP: tl.constexpr):
    """Stores the output acc [VDP, M] and the log-sum-exp (base 2) of one split-KV part for ``merge_kernel``."""
    dim = tl.arange(0, VDP)
    safe = tl.where(z > 0, z, 1.0)
    mask = row_valid[None, :] & (dim < VD)[:, None]
    tl.store(part_ptr + at[None, :] * VD + dim[:, None], acc / safe[None, :], mask=mask)
    tl.store(part_lse_ptr + at, tl.where(z > 0, m + tl.log2(safe), float("-inf")), mask=row_valid)


@triton.jit
def soft_cap(s, cap_log2):
    """cap * tanh(s / cap) for scores in base 2; cap_log2: the cap times log2(e)."""
    x = 2.0 * _LOG2E * (s / cap_log2)
    x = tl.minimum(tl.maximum(x, -80.0), 80.0)
    e = tl.exp2(x)
    return cap_log2 * ((e - 1.0) / (e + 1.0))


@triton.jit
def finish(acc, m, z, sinks_ptr, sink_at, row_valid, value_rotation, value_norm, out_ptrs,
           VD: tl.constexpr, VDP: tl.constexpr, NB: tl.constexpr):  # fmt: skip
    """Adds sinks at sink_at [M] (unless sinks_ptr is None), normalises, rotates back (unless value_rotation is None)
    and stores acc [M, VDP] to the rows out_ptrs [M]; returns the natural log-sum-exp [M]."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + sink_at, mask=row_valid, other=0.0) * _LOG2E
        top = tl.maximum(m, sink)
        acc = acc * tl.exp2(m - top)[:, None]
        z = z * tl.exp2(m - top) + tl.exp2(sink - top)
        m = top
    empty = z == 0
    safe = tl.where(empty, 1.0, z)
    ROTATED: tl.constexpr = value_rotation is not None
    unrotate_store(acc / safe[:, None], value_rotation, value_norm, out_ptrs, row_valid, VD, VDP, NB, 2, ROTATED)
    return tl.where(empty, float("-inf"), (m + tl.log2(safe)) * _LN2)


@triton.jit(do_not_specialize=["sequences"])
def merge_kernel(
    part_ptr, part_lse_ptr, starts_ptr, sinks_ptr, out_ptr, lse_ptr, value_rotation, value_norm, sequences,
    out_stride, out_head_stride,
    Q_HEADS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, VD: tl.constexpr,
    VDP: tl.constexpr, NB: tl.constexpr, SINK_STRIDE: tl.constexpr,
):  # fmt: skip
    """Merges the SPLITS parts of ROWS (query, head) rows, PARTS at a time. Pointers may be None as in `finish`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_valid = row < tl.load(starts_ptr + sequences).to(tl.int64) * Q_HEADS
    q_head = (row % Q_HEADS).to(tl.int32)
    dim = tl.arange(0, VDP)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VDP], tl.float32)
    for part0 in range(0, SPLITS, PARTS):
        part = part0 + tl.arange(0, PARTS)
        at = row[:, None] * SPLITS + part[None, :]
        present = row_valid[:, None] & (part < SPLITS)[None, :]
        part_lse = tl.load(part_lse_ptr + at, mask=present, other=float("-inf"))
        seen = present & (part_lse > float("-inf"))
        x = tl.load(
            part_ptr + at[:, :, None] * VD + dim[None, None, :],
            mask=seen[:, :, None] & (dim < VD)[None, None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(part_lse, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        weight = tl.exp2(part_lse - m_safe[:, None])
        acc = acc * alpha[:, None] + tl.sum(x * weight[:, :, None], 1)
        z = z * alpha + tl.sum(weight, 1)
        m = m_new
    out_ptrs = out_ptr + (row // Q_HEADS) * out_stride + q_head * out_head_stride
    lse = finish(
        acc, m, z, sinks_ptr, (row // Q_HEADS) * SINK_STRIDE + q_head, row_valid, value_rotation, value_norm, out_ptrs,
        VD, VDP, NB,
    )  # fmt: skip
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse, mask=row_valid)
