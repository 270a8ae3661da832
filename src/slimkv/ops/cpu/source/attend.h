// Attention on pages: decode, verification and prefill.
//
// The queries of a sequence that share a KV head (query by query, head by head of the group) are split into tiles of
// rows. A tile visits its keys in chunks with an online softmax. Keys are split at multiples of SPLIT_TOKENS, and the
// parts are merged in order, so a row's result depends only on its own sequence, not on other rows and sequences of the
// call. Several threads attend the parts of a sequence with a single tile, as in decoding.
#pragma once

#include <algorithm>
#include <new>

#include "products.h"
#include "store.h"

constexpr int TILE_ROWS = 32;
constexpr i64 SPLIT_TOKENS = 512;

struct SideUse {
  const Side* side;
  bool bytes;
  float unit;  // of a byte
  u8 table[16];
  float numbers[256];
  i32 order[MAX_DIM];  // position -> dimension

  void prepare(const Side& of, bool value) {
    side = &of;
    bytes = becomes_bytes(of);
    unit = byte_unit(of);
    if (bytes) {
      byte_table(of, table);
      value ? value_order(of.dim, order) : key_order(of.dim, order);
    } else {
      if (of.kind != RAW) number_table(of, uniform_centre(of), numbers);
      for (int d = 0; d < of.dim; d++) order[d] = d;
    }
  }
};

// Rows [first, end) of one sequence and KV head.
struct RowTile {
  i64 sequence, head, first, end;
  i64 key_begin, key_end;  // keys that any of its rows sees
  i64 parts;  // of its keys
  i64 splits;  // tasks: one for each part, or one for all
  i64 partial;  // index of its first float in the partial results
  std::atomic<i64> left;
};

// The running softmax of a tile's rows.
struct State {
  float *greatest, *sum, *zero;  // [rows]
  float* out;  // [rows][value_dim]
};

static inline i64 state_floats(i64 rows, i64 value_dim) { return rows * (value_dim + 3); }

static inline State state_at(float* memory, i64 rows) {
  return {memory, memory + rows, memory + 2 * rows, memory + 3 * rows};
}

// Working memory of a thread. It grows on demand and is kept for the next call.
struct Scratch {
  u8* memory = nullptr;
  size_t size = 0;
  ~Scratch() { ::operator delete(memory, std::align_val_t(64)); }
  u8* reserve(size_t wanted) {
    if (wanted > size) {
      ::operator delete(memory, std::align_val_t(64));
      memory = nullptr;
      size = 0;
      memory = (u8*)::operator new(wanted, std::align_val_t(64));
      memset(memory, 0, wanted);
      size = wanted;
    }
    return memory;
  }
};

struct Attention {
  AttendCall& call;
  SideUse key, value;
  i64 group;
  i64 key_stride;  // of a row of K's bytes: dimensions rounded up to 64
  float* rotated_fresh[2] = {nullptr, nullptr};

  explicit Attention(AttendCall& c) : call(c) {
    key.prepare(c.layout->key, false);
    value.prepare(c.layout->value, true);
    group = c.heads / c.pages.heads;
    key_stride = (c.layout->key.dim + 63) / 64 * 64;
  }

  i64 length(i64 sequence) const { return call.seq_lens[sequence]; }
  i64 queries(i64 sequence) const { return call.cu_seqlens_q[sequence + 1] - call.cu_seqlens_q[sequence]; }
  i64 position(i64 sequence, i64 row) const { return length(sequence) - queries(sequence) + row / group; }
  // The first position whose key is a fresh vector.
  i64 fresh_from(i64 sequence) const {
    return call.fresh_key.data == nullptr ? length(sequence) : std::max<i64>(length(sequence) - queries(sequence), 0);
  }
  i64 sees_from(i64 sequence, i64 row) const {
    return call.window ? std::max<i64>(position(sequence, row) - call.window + 1, 0) : 0;
  }
  i64 sees_to(i64 sequence, i64 row) const {
    return std::max<i64>(call.causal ? position(sequence, row) + 1 : length(sequence), 0);
  }
  const u8* page(i64 sequence, i64 head, i64 token) const {
    const i64 block = call.block_table[sequence * call.table_stride + token / call.layout->block_size];
    return call.pages.data + block * call.pages.block_stride + head * call.pages.head_stride;
  }
};

// Which tokens of a chunk a row sees.
struct Seen {
  int begin, end;
  bool any() const { return begin < end; }
  bool all(int count) const { return begin == 0 && end == count; }
  template <bool ALL>
  VF select(int t, VF x, VF other) const {
    if (ALL) return x;
    VI at;
    for (int i = 0; i < W; i++) at[i] = t + i;
    return (at >= splat_i(begin)) & (at < splat_i(end)) ? x : other;
  }
};

// The part of a thread's memory that one tile uses.
struct TileMemory {
  float* query;  // [rows][key_stride], in the order of K's bytes
  i8* digits;  // [rows][3][key_stride]
  i32* offset;  // [rows][3]
  float *row_scale, *row_sum, *row_shift, *rescale;  // [rows]
  Seen* seen;  // [rows]: of the chunk
  float* scores;  // [rows][CHUNK]; then weights
  i8* weight_digits;  // [rows][3][CHUNK]
  i32* weight_offset;  // [rows][3]
  // A chunk of K and, once its scores are computed, of V: they share memory, which then stays in the L1 cache.
  u8* key_bytes;  // [CHUNK][key_stride]
  float* key_floats;  // [CHUNK][key_stride]
  u8* value_bytes;  // see value_offset
  float* value_floats;  // [CHUNK][value_dim]
  float *key_scale, *key_zero, *value_scale, *value_zero;  // [CHUNK]
  float* row;  // [MAX_DIM]
  float *state, *part;  // softmax states of a tile: of its first part of keys, and of a later one

  template <typename T>
  static void take(T*& pointer, size_t count, u8* base, size_t& used) {
    pointer = (T*)(base + used);
    used += (count * sizeof(T) + 63) / 64 * 64;
  }

  size_t carve(u8* base, size_t rows, size_t key_stride, size_t value_dim) {
    size_t used = 0;
    take(query, rows * key_stride, base, used);
    take(digits, rows * 3 * key_stride, base, used);
    take(offset, rows * 3, base, used);
    for (float** numbers : {&row_scale, &row_sum, &row_shift, &rescale}) take(*numbers, rows, base, used);
    take(seen, rows, base, used);
    take(scores, rows * CHUNK, base, used);
    take(weight_digits, rows * 3 * CHUNK, base, used);
    take(weight_offset, rows * 3, base, used);
    take(key_floats, CHUNK * (key_stride > value_dim ? key_stride : value_dim), base, used);
    key_bytes = value_bytes = (u8*)key_floats;
    value_floats = key_floats;
    for (float** fields : {&key_scale, &key_zero, &value_scale, &value_zero}) take(*fields, CHUNK, base, used);
    take(row, MAX_DIM, base, used);
    for (float** of : {&state, &part}) take(*of, (size_t)state_floats((i64)rows, (i64)value_dim), base, used);
    return used;
  }
};

// Queries of a tile: rotated, in the order of K's numbers, and as digits where bytes are multiplied.
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

// Scales and zeros of tokens [first + skip, first + count) of a chunk that begins at `first`; zeros before and up to
// CHUNK.
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

// Loads a chunk of K or V as floats [token][stride], in the order of the side's values. No row sees the first `skip`
// tokens: a page of one token may belong to another sequence.
static void load_floats(const Attention& a, const SideUse& use, const RowTile& tile, i64 first, int skip, int count,
    float* out, i64 stride) {
  const Side& side = *use.side;
  for (int t = skip; t < count; t++) {
    const i64 token = first + t;
    unpack_token(side, a.page(tile.sequence, tile.head, token), (int)(token % side.block_size), use.numbers,
        out + t * stride);
  }
}

// Fresh vectors of a chunk, already rotated.
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

// Scores of every row that sees something of the chunk [first, first + count).
static void chunk_scores(const Attention& a, const RowTile& tile, TileMemory& m, i64 first, int skip, int count,
    bool fresh) {
  const Side& side = *a.key.side;
  const int rows = (int)(tile.end - tile.first), four = (count + 3) / 4 * 4;
  const i64 stride = a.key_stride;
  if (fresh) {
    load_fresh(a, a.key, false, tile, first, count, m.key_floats, stride);
    for (int t = 0; t < CHUNK; t++) m.key_scale[t] = 1, m.key_zero[t] = 0;
  } else {
    load_fields(a, a.key, tile, first, skip, count, m.key_scale, m.key_zero);
    if (a.key.bytes)
      for (int t = 0; t < count; t += TILE)
        unpack_key_bytes(side, tile_codes(a, side, tile, first + t), a.key.table, m.key_bytes + t * stride, stride);
    else load_floats(a, a.key, tile, first, skip, count, m.key_floats, stride);
  }
  if (fresh || !a.key.bytes) {
    scores_float<float>(m.query, rows, stride, m.key_floats, stride, four, side.dim, m.scores);
    return;
  }
#if defined(SLIMKV_DOT)
  for (int r = 0; r < rows; r++)
    if (m.seen[r].any())
      scores_dot(m.digits + r * 3 * stride, m.offset + 3 * r, m.key_bytes, stride, four, m.scores + r * CHUNK);
#else
  scores_float<i8>(m.query, rows, stride, (const i8*)m.key_bytes, stride, four, side.dim, m.scores);
#endif
}

// One row's scores -> weights (times the values' scales), and its softmax moved on.
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

#if defined(SLIMKV_DOT)
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE_TOKENS(x) __builtin_shufflevector(x, x, 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
#else
#define SHUFFLE_TOKENS(x) __builtin_shuffle(x, (Tile16){0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15})
#endif
typedef u8 Tile16 __attribute__((vector_size(16)));

// A row's weights as digits in the order of V's bytes.
static WeightDigits weight_digits(TileMemory& m, i64 r, int tokens) {
  i8* digits = m.weight_digits + r * 3 * CHUNK;
  i32* offset = m.weight_offset + 3 * r;
  const float unit = as_digits(m.scores + r * CHUNK, tokens, CHUNK, digits, offset);
  for (int j = 0; j < 3; j++)
    for (int t = 0; t < tokens; t += TILE) {  // tokens 0 1 8 9, 2 3 10 11, ...
      Tile16 x = read<Tile16>(digits + j * CHUNK + t);
      x = SHUFFLE_TOKENS(x);
      memcpy(digits + j * CHUNK + t, &x, sizeof x);
    }
  return {digits, offset, unit, m.rescale[r], nullptr};
}
#endif

// Weights times V's floats. A row reads only the tokens that it sees: a weight of zero would not hide a NaN.
static void weighted_rows(const Attention& a, const RowTile& tile, TileMemory& m, State& state, int count) {
  const int rows = (int)(tile.end - tile.first), dim = a.value.side->dim;
  if (std::all_of(m.seen, m.seen + rows, [&](const Seen& seen) { return seen.all(count); })) {
    weighted_float(m.scores, rows, m.value_floats, dim, count, dim, m.rescale, state.out, dim);
    return;
  }
  for (int r = 0; r < rows; r++) {
    const Seen seen = m.seen[r];
    if (seen.any())
      weighted_float(m.scores + r * CHUNK + seen.begin, 1, m.value_floats + seen.begin * dim, dim,
          seen.end - seen.begin, dim, m.rescale + r, state.out + (i64)r * dim, dim);
  }
}

// out = out * rescale + weights v, for the rows that see something of the chunk.
static void chunk_values(const Attention& a, const RowTile& tile, TileMemory& m, State& state, i64 first, int skip,
    int count, bool fresh) {
  const Side& side = *a.value.side;
  const int rows = (int)(tile.end - tile.first), dim = side.dim;
  if (fresh || !a.value.bytes) {
    if (fresh) load_fresh(a, a.value, true, tile, first, count, m.value_floats, dim);
    else load_floats(a, a.value, tile, first, skip, count, m.value_floats, dim);
    weighted_rows(a, tile, m, state, count);
    return;
  }
  const int whole = (count + TILE - 1) / TILE * TILE;
  for (int t = 0; t < whole; t += TILE)
    unpack_value_bytes(side, tile_codes(a, side, tile, first + t), a.value.table, m.value_bytes, t);
  int active = 0;
#if defined(SLIMKV_DOT)
  WeightDigits weighted[TILE_ROWS];
#endif
  for (int r = 0; r < rows; r++) {
    if (!m.seen[r].any()) continue;
    float* weights = m.scores + r * CHUNK;
    for (int t = count; t < whole; t++) weights[t] = 0;
#if defined(SLIMKV_DOT)
    weighted[active] = weight_digits(m, r, whole);
    weighted[active++].out = state.out + (i64)r * dim;
#else
    float ordered[CHUNK];
    for (int t = 0; t < whole; t += TILE)
      for (int i = 0; i < TILE; i++) ordered[t + i] = weights[t + value_token(i)];
    memcpy(weights, ordered, sizeof(float) * whole);
    active++;
#endif
  }
#if defined(SLIMKV_DOT)
  weighted_dot(weighted, active, m.value_bytes, whole, dim);
#else
  if (active) weighted_bytes(m.scores, rows, (const i8*)m.value_bytes, whole, dim, 1.0f, m.rescale, state.out, dim);
#endif
}

// The keys [key_begin, key_end) of a tile whose queries are prepared.
static void attend_keys(const Attention& a, const RowTile& tile, TileMemory& m, State& state, i64 key_begin,
    i64 key_end) {
  const i64 rows = tile.end - tile.first, dim = a.value.side->dim, fresh_from = a.fresh_from(tile.sequence);
  for (i64 r = 0; r < rows; r++) {
    state.greatest[r] = -INFINITY;
    state.sum[r] = state.zero[r] = 0;
  }
  memset(state.out, 0, sizeof(float) * rows * dim);
  // Tiles of codes are unpacked whole, and SIMD lanes sum the same tokens whichever row of the tile sees the first of
  // them.
  i64 first = key_begin / TILE * TILE;
  if (first < fresh_from && key_begin >= fresh_from) first = key_begin;
  while (first < key_end) {
    const bool fresh = first >= fresh_from;
    i64 end = std::min((first / CHUNK + 1) * CHUNK, key_end);
    if (!fresh) end = std::min(end, fresh_from);
    const int count = (int)(end - first), skip = (int)std::max<i64>(key_begin - first, 0);
    bool any = false;
    for (i64 r = 0; r < rows; r++) {
      const i64 row = tile.first + r, from = std::max(a.sees_from(tile.sequence, row), key_begin) - first;
      const i64 to = a.sees_to(tile.sequence, row) - first;
      m.seen[r] = {(int)std::clamp<i64>(from, 0, count), (int)std::clamp<i64>(to, 0, count)};
      any |= m.seen[r].any();
    }
    if (any) {
      chunk_scores(a, tile, m, first, skip, count, fresh);
      if (fresh)
        for (int t = 0; t < CHUNK; t++) m.value_scale[t] = 1, m.value_zero[t] = 0;
      else load_fields(a, a.value, tile, first, skip, count, m.value_scale, m.value_zero);
      const bool exact_rows = fresh || !a.key.bytes;
      const bool zeros = a.key.side->field_count > 1 || a.value.side->field_count > 1;
      for (i64 r = 0; r < rows; r++) {
        if (m.seen[r].any()) {
          const float row_scale = exact_rows ? a.call.softmax_scale : m.row_scale[r];
          const bool all = m.seen[r].all(count) && count % W == 0;
          const auto softmax = all ? (zeros ? softmax_row<true, true> : softmax_row<true, false>)
                                   : (zeros ? softmax_row<false, true> : softmax_row<false, false>);
          softmax(a, m, state, r, count, row_scale);
        } else {
          for (int t = 0; t < CHUNK; t++) m.scores[r * CHUNK + t] = 0;
          m.rescale[r] = 1;
        }
      }
      chunk_values(a, tile, m, state, first, skip, count, fresh);
    }
    first = end;
  }
}

// Merges the softmax state of the next part of the keys into that of the earlier parts.
static void merge_part(const State& state, const State& part, i64 rows, i64 dim) {
  for (i64 r = 0; r < rows; r++) {
    if (part.sum[r] == 0.0f) continue;  // it saw no key
    const float before = state.greatest[r], found = part.greatest[r], now = found > before ? found : before;
    const float kept = state.sum[r] == 0.0f ? 0.0f : expf(before - now), share = expf(found - now);
    state.greatest[r] = now;
    state.sum[r] = kept * state.sum[r] + share * part.sum[r];
    state.zero[r] = kept * state.zero[r] + share * part.zero[r];
    float* out = state.out + r * dim;
    const float* more = part.out + r * dim;
    for (i64 d = 0; d < dim; d++) out[d] = kept * out[d] + share * more[d];
  }
}

// A tile's softmax over all its keys -> its rows of out and lse.
static void finish_tile(const Attention& a, const RowTile& tile, const State& state) {
  const Side& side = *a.value.side;
  const i64 rows = tile.end - tile.first, dim = side.dim;
  float x[MAX_DIM];
  for (i64 r = 0; r < rows; r++) {
    float greatest = state.greatest[r], share = 1, sum = state.sum[r];
    const i64 row = tile.first + r, query = a.call.cu_seqlens_q[tile.sequence] + row / a.group,
              head = tile.head * a.group + row % a.group;
    const bool has_sink = a.call.sinks != nullptr;
    const float sink = has_sink ? a.call.sinks[query * a.call.sink_stride + head] : -INFINITY;
    if (sink > greatest) {
      share = expf(greatest - sink);
      greatest = sink;
      sum *= share;
    }
    if (has_sink) sum += expf(sink - greatest);
    const float inverse = sum == 0.0f ? 0.0f : share / sum;
    for (i64 d = 0; d < dim; d++) x[a.value.order[d]] = (state.out[r * dim + d] + state.zero[r]) * inverse;
    if (side.rotated) unrotate_normalised(x, side);
    store_row(a.call.out, query, head, (int)dim, x);
    if (a.call.lse != nullptr) a.call.lse[query * a.call.heads + head] = sum == 0.0f ? -INFINITY : greatest + logf(sum);
  }
}

static Status check_tables(AttendCall& call) {
  const i64 block_size = call.layout->block_size;
  if (call.cu_seqlens_q[0] < 0) {
    call.fault = {0, 0, call.cu_seqlens_q[0], call.total_queries};
    return BAD_QUERY_START;
  }
  for (i64 i = 0; i < call.sequences; i++) {
    if (call.cu_seqlens_q[i + 1] < call.cu_seqlens_q[i] || call.cu_seqlens_q[i + 1] > call.total_queries) {
      call.fault = {i, i + 1, call.cu_seqlens_q[i + 1], call.total_queries};
      return BAD_QUERY_START;
    }
    const i64 length = call.seq_lens[i], queries = call.cu_seqlens_q[i + 1] - call.cu_seqlens_q[i];
    if (queries == 0) continue;
    if (length < 0 || length > call.table_width * block_size) {
      call.fault = {i, i, length, call.table_width * block_size};
      return BAD_LENGTH;
    }
    i64 first = 0, end = length;
    if (call.window) first = length - queries - call.window + 1;
    if (call.fresh_key.data != nullptr) end = length - queries;
    for (i64 j = first > 0 ? first / block_size : 0; j * block_size < end; j++) {
      const i64 block = call.block_table[i * call.table_stride + j];
      if (block < 0 || block >= call.pages.blocks) {
        call.fault = {i, j, block, call.pages.blocks};
        return BAD_BLOCK;
      }
    }
  }
  return OK;
}

// Tiles of every sequence with queries, and how many splits they have in all.
static i64 make_tiles(const Attention& a, std::vector<RowTile>& tiles, i64& partials, i64& most_rows, double& work) {
  const AttendCall& call = a.call;
  const i64 value_dim = a.value.side->dim;
  i64 tasks = 0, count = 0;
  for (i64 i = 0; i < call.sequences; i++)
    count += (a.queries(i) * a.group + TILE_ROWS - 1) / TILE_ROWS * call.pages.heads;
  tiles = std::vector<RowTile>((size_t)count);
  partials = most_rows = 0;
  size_t next = 0;
  for (i64 i = 0; i < call.sequences; i++) {
    const i64 rows = a.queries(i) * a.group;
    for (i64 first = 0; first < rows; first += TILE_ROWS)
      for (i64 head = 0; head < call.pages.heads; head++) {
        RowTile& tile = tiles[next++];
        tile.sequence = i, tile.head = head;
        tile.first = first, tile.end = std::min(first + TILE_ROWS, rows);
        tile.key_begin = a.sees_from(i, tile.first);
        tile.key_end = a.sees_to(i, tile.end - 1);
        const i64 keys = tile.key_end - tile.key_begin;
        tile.parts = keys <= 0 ? 1 : (tile.key_end - 1) / SPLIT_TOKENS - tile.key_begin / SPLIT_TOKENS + 1;
        tile.splits = rows > TILE_ROWS ? 1 : tile.parts;
        tile.left.store(tile.splits, std::memory_order_relaxed);
        const i64 held = tile.end - tile.first;
        tile.partial = partials;
        if (tile.splits > 1) partials += tile.splits * state_floats(held, value_dim);
        most_rows = held > most_rows ? held : most_rows;
        tasks += tile.splits;
        work += (double)keys * (a.key.side->dim + value_dim) * (0.15 + 0.1 * (double)held);
      }
  }
  return tasks;
}

static thread_local Scratch tile_scratch, partial_scratch, fresh_scratch;

// Fresh K and V in the spaces their codes are in: float32 [total_queries][heads][dim].
static void rotate_fresh(Attention& a) {
  const AttendCall& call = a.call;
  const i64 heads = call.pages.heads, total = call.cu_seqlens_q[call.sequences];
  const i64 dims[2] = {a.key.side->dim, a.value.side->dim};
  a.rotated_fresh[0] =
      (float*)fresh_scratch.reserve(sizeof(float) * (size_t)(total * heads * (dims[0] + dims[1]) + 16));
  a.rotated_fresh[1] = a.rotated_fresh[0] + total * heads * dims[0];
  parallel_for(total, call.threads, (double)total * heads * (dims[0] + dims[1]) * 2, [&](i64 query) {
    for (int side = 0; side < 2; side++)
      for (i64 head = 0; head < heads; head++) {
        const Side& of = side ? *a.value.side : *a.key.side;
        float* out = a.rotated_fresh[side] + (query * heads + head) * dims[side];
        load_row(side ? call.fresh_value : call.fresh_key, query, head, of.dim, out);
        if (of.rotated) rotate_normalised(out, of);
      }
  });
}

static Status attend(AttendCall& call) {
  const Status checked = check_tables(call);
  if (checked != OK) return checked;
  Attention a(call);
  if (call.fresh_key.data != nullptr) rotate_fresh(a);
  std::vector<RowTile> tiles;
  i64 partials, most_rows;
  double work = 0;
  const i64 tasks = make_tiles(a, tiles, partials, most_rows, work);
  std::vector<std::pair<i32, i32>> parts;  // (tile, split)
  parts.reserve((size_t)tasks);
  for (size_t i = tiles.size(); i-- > 0;)  // the longest rows come last in a sequence: begin with them
    for (i64 s = 0; s < tiles[i].splits; s++) parts.emplace_back((i32)i, (i32)s);
  float* partial = (float*)partial_scratch.reserve(sizeof(float) * (size_t)(partials + 16));
  TileMemory sizes;
  const i64 dim = call.layout->value.dim;
  const size_t needed = sizes.carve(nullptr, (size_t)most_rows, (size_t)a.key_stride, (size_t)dim);
  parallel_for(tasks, call.threads, work, [&](i64 i) {
    RowTile& tile = tiles[(size_t)parts[(size_t)i].first];
    const i64 rows = tile.end - tile.first, split = parts[(size_t)i].second;
    TileMemory m;
    m.carve(tile_scratch.reserve(needed), (size_t)most_rows, (size_t)a.key_stride, (size_t)dim);
    float* memory = tile.splits > 1 ? partial + tile.partial + split * state_floats(rows, dim) : m.state;
    State state = state_at(memory, rows);
    prepare_queries(a, tile, m);
    const i64 last = tile.splits > 1 ? split + 1 : tile.parts;
    for (i64 part = split; part < last; part++) {
      const i64 base = (tile.key_begin / SPLIT_TOKENS + part) * SPLIT_TOKENS;
      State own = part == split ? state : state_at(m.part, rows);
      attend_keys(a, tile, m, own, std::max(base, tile.key_begin), std::min(base + SPLIT_TOKENS, tile.key_end));
      if (part != split) merge_part(state, own, rows, dim);
    }
    if (tile.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    float* whole = tile.splits > 1 ? partial + tile.partial : m.state;
    for (i64 s = 1; s < tile.splits; s++)
      merge_part(state_at(whole, rows), state_at(whole + s * state_floats(rows, dim), rows), rows, dim);
    finish_tile(a, tile, state_at(whole, rows));
  });
  return OK;
}
