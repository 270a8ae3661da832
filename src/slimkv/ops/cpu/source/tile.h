// The data of attention: a call, tiles of rows, their softmax state, and the working memory of a thread.
#pragma once

#include <algorithm>
#include <new>

#include "products.h"
#include "store.h"

constexpr int TILE_ROWS = 32;

struct SideUse {
  const Side* side;
  bool bytes;
  float unit;  // the value that byte 1 stands for
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
  i64 key_begin, key_end;  // keys that at least one row sees
  i64 parts;  // split-KV parts
  i64 splits;  // tasks: one per part, or one for all
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
  i64 key_stride;  // elements of a row of K: key_dim rounded up to a multiple of 64
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

// The tokens of a chunk that a row sees.
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
  Seen* seen;  // [rows]: in the current chunk
  float* scores;  // [rows][CHUNK]; then weights
  i8* weight_digits;  // [rows][3][CHUNK]
  i32* weight_offset;  // [rows][3]
  // A chunk of K ([CHUNK][key_stride]) and, once its scores are computed, of V ([CHUNK][value_dim], or bytes at
  // value_offset). Both use the same memory, so it stays in the L1 cache.
  float* floats;
  u8* bytes;
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
    take(floats, CHUNK * (key_stride > value_dim ? key_stride : value_dim), base, used);
    bytes = (u8*)floats;
    for (float** fields : {&key_scale, &key_zero, &value_scale, &value_zero}) take(*fields, CHUNK, base, used);
    take(row, MAX_DIM, base, used);
    for (float** of : {&state, &part}) take(*of, (size_t)state_floats((i64)rows, (i64)value_dim), base, used);
    return used;
  }
};
