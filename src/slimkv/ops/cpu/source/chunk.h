// A tile of rows and one chunk of keys and values: scores, one step of the online softmax, weighted sums.
#pragma once

#include "tile.h"

// Loads the queries of a tile: rotated, in the order of K's numbers, and as digits if keys are multiplied as bytes.
static void prepare_queries(const Attention& a, const RowTile& tile, TileMemory& m) {
  const Side& side = *a.key.side;
  const i64 rows = tile.end - tile.first, stride = a.key_stride;
  for (i64 r = 0; r < rows; r++) {
    const i64 row = tile.first + r;
    const i64 at = a.call.cu_seqlens_q[tile.sequence] + row / a.group, head = tile.head * a.group + row % a.group;
    load_row(a.call.query, at, head, side.dim, m.row);
    if (side.rotated) rotate_normalised(m.row, side);
    float* query = m.query + r * stride;
    float sum = 0;
    for (int d = 0; d < side.dim; d++) {
      query[d] = m.row[a.key.order[d]];
      sum += query[d];
    }
    for (i64 d = side.dim; d < stride; d++) query[d] = 0;
    m.row_scale[r] = a.call.softmax_scale;
    m.row_sum[r] = a.call.softmax_scale * sum;
    m.row_shift[r] = a.call.score_shift == nullptr ? 0.0f : a.call.score_shift[at * a.call.heads + head];
#if defined(SLIMKV_DOT)
    if (a.key.bytes) m.row_scale[r] *= as_digits(query, stride, stride, m.digits + r * 3 * stride, m.offset + 3 * r);
#endif
  }
}

// Loads scales and zeros of tokens [first + skip, first + count) of a chunk that begins at `first`; other tokens of the
// chunk get 0.
static void load_fields(const Attention& a, const SideUse& use, const RowTile& tile, i64 first, int skip, int count,
    float* scale, float* zero) {
  const Side& side = *use.side;
  const int block_size = side.block_size;
  const float unit = use.bytes ? use.unit : 1.0f, centre = (float)uniform_centre(side);
  memset(scale, 0, sizeof(float) * CHUNK);
  memset(zero, 0, sizeof(float) * CHUNK);
  for (int t = skip, run; t < count; t += run) {  // consecutive tokens of one page
    const int position = (int)((first + t) % block_size);
    run = std::min(block_size - position, count - t);
    const u8* page = a.page(tile.sequence, tile.head, first + t) + 2 * position;
    if (side.kind == RAW)
      for (int i = t; i < t + run; i++) scale[i] = 1;
    else
      for (int i = 0; i < run; i++) scale[t + i] = decode_unsigned(load_u16(page + side.field_offset[0] + 2 * i));
    if (side.field_count > 1)
      for (int i = 0; i < run; i++)
        zero[t + i] = decode_signed(load_u16(page + side.field_offset[1] + 2 * i)) + scale[t + i] * centre;
  }
  if (unit != 1.0f)
    for (int t = skip; t < count; t++) scale[t] *= unit;
}

// Loads a chunk of K or V as floats [token][stride], in the order of the side's values. The first `skip` tokens, which
// no row sees, are not read: a page of one token may belong to another sequence.
static void load_floats(const Attention& a, const SideUse& use, const RowTile& tile, i64 first, int skip, int count,
    float* out, i64 stride) {
  const Side& side = *use.side;
  for (int t = skip; t < count; t++) {
    const i64 token = first + t;
    unpack_token(side, a.page(tile.sequence, tile.head, token), (int)(token % side.block_size), use.numbers,
        out + t * stride);
  }
}

// Loads fresh vectors of a chunk, already rotated.
static void load_fresh(const Attention& a, const SideUse& use, bool value, const RowTile& tile, i64 first, int count,
    float* out, i64 stride) {
  const i64 begin = a.call.cu_seqlens_q[tile.sequence] + a.queries(tile.sequence) - a.length(tile.sequence);
  const int dim = use.side->dim;
  for (int t = 0; t < count; t++) {
    const float* x = a.rotated_fresh[value] + ((begin + first + t) * a.call.pages.heads + tile.head) * dim;
    for (int d = 0; d < dim; d++) out[t * stride + d] = x[use.order[d]];
  }
}

static inline const u8* tile_codes(const Attention& a, const Side& side, const RowTile& tile, i64 token) {
  const i64 inside = token % side.block_size / TILE;
  return a.page(tile.sequence, tile.head, token) + side.codes_offset + inside * side.tile_bytes;
}

// Computes scores of every row that sees a token of the chunk [first, first + count).
static void chunk_scores(const Attention& a, const RowTile& tile, TileMemory& m, i64 first, int skip, int count,
    bool fresh) {
  const Side& side = *a.key.side;
  const int rows = (int)(tile.end - tile.first), four = (count + 3) / 4 * 4;
  const i64 stride = a.key_stride;
  if (fresh) {
    load_fresh(a, a.key, false, tile, first, count, m.floats, stride);
    for (int t = 0; t < CHUNK; t++) m.key_scale[t] = 1, m.key_zero[t] = 0;
  } else {
    load_fields(a, a.key, tile, first, skip, count, m.key_scale, m.key_zero);
    if (a.key.bytes)
      for (int t = 0; t < count; t += TILE)
        unpack_key_bytes(side, tile_codes(a, side, tile, first + t), a.key.table, m.bytes + t * stride, stride);
    else load_floats(a, a.key, tile, first, skip, count, m.floats, stride);
  }
  if (fresh || !a.key.bytes) {
    scores_float<float>(m.query, rows, stride, m.floats, stride, four, side.dim, m.scores);
    return;
  }
#if defined(SLIMKV_DOT)
  for (int r = 0; r < rows; r++)
    if (m.seen[r].any())
      scores_dot(m.digits + r * 3 * stride, m.offset + 3 * r, m.bytes, stride, four, m.scores + r * CHUNK);
#else
  scores_float<i8>(m.query, rows, stride, (const i8*)m.bytes, stride, four, side.dim, m.scores);
#endif
}

// Turns the scores of a row into weights (probability times value scale) and updates its softmax state.
template <bool ALL, bool ZEROS>
static void softmax_row(const Attention& a, TileMemory& m, State& state, i64 r, int count, float row_scale) {
  const Seen seen = m.seen[r];
  float* scores = m.scores + r * CHUNK;
  const float softcap = a.call.softcap;
  const int all = (count + W - 1) / W * W;
  VF most = splat(-INFINITY);
  for (int t = 0; t < all; t += W) {
    VF s = load_f(scores + t) * (load_f(m.key_scale + t) * row_scale);
    if (ZEROS) s = fma_f(load_f(m.key_zero + t), splat(m.row_sum[r]), s);
    if (softcap > 0) s = tanh_f((s + m.row_shift[r]) * (1.0f / softcap)) * softcap;
    s = seen.select<ALL>(t, s, splat(-INFINITY));
    most = greater(s, most);
    store_f(scores + t, s);
  }
  const float before = state.greatest[r], found = greatest_f(most), now = found > before ? found : before;
  const float rescale = now > before ? expf(before - now) : 1.0f;
  VF sum = {}, zero = {};
  for (int t = 0; t < all; t += W) {
    const VF p = seen.select<ALL>(t, exp_f(load_f(scores + t) - now), (VF){});
    sum += p;
    if (ZEROS) zero += seen.select<ALL>(t, p * load_f(m.value_zero + t), (VF){});
    store_f(scores + t, seen.select<ALL>(t, p * load_f(m.value_scale + t), (VF){}));
  }
  state.greatest[r] = now;
  state.sum[r] = state.sum[r] * rescale + sum_f(sum);
  if (ZEROS) state.zero[r] = state.zero[r] * rescale + sum_f(zero);
  m.rescale[r] = rescale;
}

// Adds weights times V as floats. A row reads only tokens that it sees: a weight of zero does not hide a NaN.
static void weighted_rows(const Attention& a, const RowTile& tile, TileMemory& m, State& state, int count) {
  const int rows = (int)(tile.end - tile.first), dim = a.value.side->dim;
  if (std::all_of(m.seen, m.seen + rows, [&](const Seen& seen) { return seen.all(count); })) {
    weighted_float(m.scores, rows, m.floats, dim, count, dim, m.rescale, state.out, dim);
    return;
  }
  for (int r = 0; r < rows; r++) {
    const Seen seen = m.seen[r];
    if (seen.any())
      weighted_float(m.scores + r * CHUNK + seen.begin, 1, m.floats + seen.begin * dim, dim, seen.end - seen.begin, dim,
          m.rescale + r, state.out + (i64)r * dim, dim);
  }
}

// out = out * rescale + weights v, for the rows that see a token of the chunk.
static void chunk_values(const Attention& a, const RowTile& tile, TileMemory& m, State& state, i64 first, int skip,
    int count, bool fresh) {
  const Side& side = *a.value.side;
  const int rows = (int)(tile.end - tile.first), dim = side.dim;
  if (fresh || !a.value.bytes) {
    if (fresh) load_fresh(a, a.value, true, tile, first, count, m.floats, dim);
    else load_floats(a, a.value, tile, first, skip, count, m.floats, dim);
    weighted_rows(a, tile, m, state, count);
    return;
  }
  const int whole = (count + TILE - 1) / TILE * TILE;
  for (int t = 0; t < whole; t += TILE)
    unpack_value_bytes(side, tile_codes(a, side, tile, first + t), a.value.table, m.bytes, t);
  int active = 0;
#if defined(SLIMKV_DOT)
  WeightDigits weighted[TILE_ROWS];
#endif
  for (int r = 0; r < rows; r++) {
    if (!m.seen[r].any()) continue;
    float *weights = m.scores + r * CHUNK, ordered[CHUNK];
    for (int t = count; t < whole; t++) weights[t] = 0;
    for (int t = 0; t < whole; t += TILE)  // in the order of V's bytes
      for (int i = 0; i < TILE; i++) ordered[t + i] = weights[t + value_token(i)];
#if defined(SLIMKV_DOT)
    i8* digits = m.weight_digits + r * 3 * CHUNK;
    const float unit = as_digits(ordered, whole, CHUNK, digits, m.weight_offset + 3 * r);
    weighted[active] = {digits, m.weight_offset + 3 * r, unit, m.rescale[r], state.out + (i64)r * dim};
#else
    memcpy(weights, ordered, sizeof(float) * whole);
#endif
    active++;
  }
#if defined(SLIMKV_DOT)
  weighted_dot(weighted, active, m.bytes, whole, dim);
#else
  if (active) weighted_bytes(m.scores, rows, (const i8*)m.bytes, whole, dim, m.rescale, state.out, dim);
#endif
}
