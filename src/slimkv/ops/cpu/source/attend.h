// Attention on pages: decode, verification and prefill.
//
// The rows of a sequence and KV head (all heads of the group for the first query, then for the next) are split into
// tiles. A tile visits its keys in chunks with an online softmax. Keys are split at multiples of SPLIT_TOKENS, and the
// parts are merged in order, so a row's result depends only on its own sequence, not on other rows and sequences of the
// call. If a sequence has a single tile, as in decoding, several threads process its parts.
#pragma once

#include <deque>

#include "chunk.h"

constexpr i64 SPLIT_TOKENS = 512;

// Attention of a tile's prepared queries to keys [key_begin, key_end).
static void attend_keys(const Attention& a, const RowTile& tile, TileMemory& m, State& state, i64 key_begin,
    i64 key_end) {
  const i64 rows = tile.end - tile.first, dim = a.value.side->dim, fresh_from = a.fresh_from(tile.sequence);
  for (i64 r = 0; r < rows; r++) {
    state.greatest[r] = -INFINITY;
    state.sum[r] = state.zero[r] = 0;
  }
  memset(state.out, 0, sizeof(float) * rows * dim);
  // Tiles of codes are unpacked whole, so SIMD lanes sum the same tokens whatever the first visible token is.
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

// Writes out and lse for the rows of a tile, from its softmax state over all keys.
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

// Makes the tiles of all sequences; returns the total number of splits.
static i64 make_tiles(const Attention& a, std::deque<RowTile>& tiles, i64& partials, i64& most_rows, double& work) {
  const AttendCall& call = a.call;
  const i64 value_dim = a.value.side->dim;
  i64 tasks = 0;
  partials = most_rows = 0;
  for (i64 i = 0; i < call.sequences; i++) {
    const i64 rows = a.queries(i) * a.group;
    for (i64 first = 0; first < rows; first += TILE_ROWS)
      for (i64 head = 0; head < call.pages.heads; head++) {
        RowTile& tile = tiles.emplace_back();
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

// Brings fresh K and V into the stored (rotated) space: float32 [total_queries][heads][dim].
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
  std::deque<RowTile> tiles;
  i64 partials, most_rows;
  double work = 0;
  const i64 tasks = make_tiles(a, tiles, partials, most_rows, work);
  std::vector<std::pair<i32, i32>> parts;  // (tile, split)
  parts.reserve((size_t)tasks);
  for (size_t i = tiles.size(); i-- > 0;)  // rows with the most keys come last in a sequence: start with them
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
