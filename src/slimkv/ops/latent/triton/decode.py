"""The Triton kernel of attend_latent: scores from latents and rope parts, values from the same latents.

The latents of a step are unpacked once, as keys [tokens, dimensions]: scores use them directly, the output uses their
transpose. Scores are in base 2; the scale of a latent multiplies its score and its probability. The latter is at
most 2, so fp16 holds it, because the running max is over score + log2(scale).
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimkv.ops.attention.triton.decode import add_values, load_queries, side_scores
from slimkv.ops.triton.rotate import dot
from slimkv.ops.triton.side import RAW
from slimkv.ops.triton.unpack import as_keys, fragment_order, in_fragment_order, tile_numbers, values_as_keys

_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _rope_scores(page, inside, field_at, tile_valid, valid_tiles, qh, rest, q_sum, levels, EXACT: tl.constexpr,
                 R: tl.constexpr):  # fmt: skip
    """The scores of the rope parts of one step: float32 [BT, M], without the queries' scale factors."""
    k = values_as_keys(tile_numbers(page, inside, tile_valid, levels, R))
    if R.KIND == RAW:
        k = tl.where(tl.reshape(valid_tiles, (k.shape[0],))[:, None], k, 0.0).to(k.dtype)
    s = side_scores(k, page, field_at, valid_tiles, qh, q_sum, R)
    if R.KIND == RAW and R.BF16 and not EXACT:  # the queries have more significant bits than bf16
        s = dot(k, rest, s)
    return s


@triton.jit
def _store_rows(out_ptr, lse_ptr, acc, m, z, q_row, head, row_valid, heads, out_stride, out_head_stride, part,
                KD: tl.constexpr, KDP: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Writes the output acc [KDP, M] and, unless lse_ptr is None, the log-sum-exps, of one part if SPLITS > 1."""
    empty = z == 0
    safe = tl.where(empty, 1.0, z)
    dim = fragment_order(tl.arange(0, KDP))
    mask = row_valid[None, :] & (dim < KD)[:, None]
    total = m + tl.log2(safe)
    if SPLITS == 1:
        at = q_row * out_stride + head * out_head_stride
        lse_at = q_row * heads + head
        total *= _LN2
    else:
        lse_at = (q_row * heads + head) * SPLITS + part
        at = lse_at * KD
    out = (acc / safe[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[None, :] + dim[:, None], out, mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_at, tl.where(empty, float("-inf"), total), mask=row_valid)


@triton.jit(do_not_specialize=["row_tiles", "heads"])
def attend_latent_kernel(
    q_ptr, rope_ptr, pages_ptr, table_ptr, lens_ptr, starts_ptr, out_ptr, lse_ptr,
    latent_levels, rope_levels, row_tiles, heads, blocks, q_stride, q_head_stride, rope_stride, rope_head_stride,
    block_stride, table_stride, out_stride, out_head_stride, scale_log2,
    M: tl.constexpr, NT: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One program: M rows (query, head) of one sequence, one of SPLITS parts of its tokens.

    K is the latent, V the rope part. With several SPLITS, out_ptr and lse_ptr point to partial results: [rows, SPLITS,
    KD] and [rows, SPLITS]."""
    sequence = tl.program_id(0) // row_tiles
    first = tl.program_id(0) % row_tiles * M
    part = tl.program_id(1)
    BT: tl.constexpr = 16 * NT
    KDP: tl.constexpr = 16 * K.SP
    TILES_PER_BLOCK: tl.constexpr = K.BLOCK_SIZE // 16
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    if first >= queries * heads:
        return
    length = tl.load(lens_ptr + sequence)
    row = first + tl.arange(0, M)
    query = row // heads
    head = row % heads
    row_valid = query < queries
    q_row = (start + query).to(tl.int64)
    position = length - queries + query
    end = tl.minimum(length, length - queries + (first + M - 1) // heads + 1)
    clear_end = length - queries + first // heads + 1
    steps = tl.cdiv(tl.maximum(end, 0), BT)
    per_part = tl.cdiv(steps, SPLITS)
    step_end = tl.minimum((part + 1) * per_part, steps)

    qh, _, q_sum, up = load_queries(q_ptr + q_row * q_stride + head * q_head_stride, row_valid, None, 1.0, M, K)
    qh = in_fragment_order(qh)
    rope_rows = rope_ptr + q_row * rope_stride + head * rope_head_stride
    rh, r_rest, r_sum, r_up = load_queries(rope_rows, row_valid, None, 1.0, M, V)
    latent_factor = up * scale_log2
    rope_factor = r_up * scale_log2
    m = tl.full([M], float("-inf"), tl.float32)
    z = tl.zeros([M], tl.float32)
    w = tl.zeros([M], tl.float32)  # sums of probabilities times the centres of uniform latents
    acc = tl.zeros([KDP, M], tl.float32)

    for step in range(part * per_part, step_end):
        token0 = step * BT
        token = token0 + tl.arange(0, BT)
        tile = token0 // 16 + tl.arange(0, NT)
        tile_valid = tile * 16 < length
        block = tl.load(table_ptr + sequence * table_stride + tile // TILES_PER_BLOCK, mask=tile_valid, other=0)
        tile_valid = tile_valid & (block >= 0) & (block < blocks)
        page = pages_ptr + block.to(tl.int64) * block_stride
        inside = (tile % TILES_PER_BLOCK).to(tl.int64)
        field_at = (inside * 16)[:, None] + tl.arange(0, 16)[None, :]
        valid = token < length
        valid_tiles = tl.reshape(valid, (NT, 16)) & tile_valid[:, None]
        k = as_keys(tile_numbers(page, inside, tile_valid, latent_levels, K))
        if K.KIND == RAW:
            k = tl.where(valid[:, None], k, 0.0).to(k.dtype)
        s = side_scores(k, page, field_at, valid_tiles, qh, q_sum, K) * latent_factor[None, :]
        s += rope_factor[None, :] * _rope_scores(
            page, inside, field_at, tile_valid, valid_tiles, rh, r_rest, r_sum, rope_levels, EXACT, V
        )
        if token0 + BT > clear_end:
            s = tl.where(valid[:, None] & (token[:, None] <= position[None, :]), s, float("-inf"))
        m, z, w, acc = add_values(s, m, z, w, acc, tl.trans(k), page, field_at, valid_tiles, False, K)

    _store_rows(
        out_ptr, lse_ptr, acc + w[None, :], m, z, q_row, head, row_valid, heads, out_stride, out_head_stride, part,
        K.D, KDP, SPLITS,
    )  # fmt: skip
