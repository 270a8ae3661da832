// Attention of many queries a sequence on unpacked keys and values (prefill_shape.cuh), for sm_90a.
//
// A block has 128 rows of queries (queries x heads of a group) of one KV head and goes through its tiles from the last to the
// first. One warp copies tiles into two rings of shared memory; two warpgroups of 64 rows each multiply and keep scores,
// probabilities and output in registers. A warpgroup starts the scores of the next tile before the softmax of this one,
// and the two take turns in starting products, so that one's softmax runs beside the other's products.
//
// Compile-time: D, STEP, STAGES, WINDOW, Q_TYPE, OUT_TYPE (0 fp16, 1 bf16, 2 fp32), K_ROTATED, V_ROTATED.
#include "hopper.cuh"
#include "prefill_shape.cuh"

constexpr int ROWS = 128, GROUP_ROWS = 64, THREADS = 384, N = STEP / 2, OWN = D / 4;
constexpr int QUERY_BYTES = 2 * GROUP_ROWS * D;
// Shared memory, from a boundary of 1,024 bytes: queries of both warpgroups | ring of keys | ring of values | barriers
constexpr int KEYS_AT = 2 * QUERY_BYTES, VALUES_AT = KEYS_AT + STAGES * TILE_BYTES;
constexpr int BARRIERS_AT = VALUES_AT + STAGES * TILE_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + 4 * STAGES * 8 + 1024;
static_assert(SHARED_BYTES == SHARED, "the launcher counts shared memory as this file does");
constexpr float LAZY = 8.0f, LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;
#define MINUS_INFINITY as_float(0xFF800000u)

struct Args {
  const void* query;
  const u8* keys;    // [rank, head, tile]
  const u8* values;
  const Unit* units;
  const i32* lengths;
  const i32* starts;
  const float* sinks;  // or null
  void* out;
  float* lse;    // or null
  float* state;  // between passes: [D / 2 + 4, blocks, 256]
  i64 query_stride, query_head_stride, out_stride, out_head_stride;
  float scale;  // of scores, times log2(e)
  float key_norm, value_norm;
  u32 key_sign_bits[4], value_sign_bits[4];
  i32 sequences, heads, group, most_queries, causal, window;
  i32 query_blocks, section;  // of the grid: blocks of queries, and KV heads that are attended at the same time
  i32 first_tile, tiles;      // of this pass
  i32 first_pass, last_pass;
  i32 aligned;  // whether 16 bytes of output can be stored at a time
};

// What a block does.
struct Work {
  Prefilled s;
  int head, first;   // query
  int tile, count;   // the last tile and how many there are
  int clear_begin, clear_end;  // tokens that all queries see
};

DEVICE bool find_work(const Args& args, int lane, Work& w) {
  const int queries_of_block = ROWS / args.group;
  // Sections of few heads share their keys and values in the L2 cache; long rows of a causal mask come first in each.
  const int per_section = args.section * args.query_blocks, section = block_index() / per_section;
  const int inside = block_index() - section * per_section;
  const int heads = least(args.section, args.heads - section * args.section);
  const int block = args.query_blocks - 1 - inside / heads;
  w.head = section * args.section + inside % heads;
  int left = 0, right = args.sequences;
  while (left < right) {
    const int middle = (left + right) / 2;
    if (load_int(args.starts + middle) / queries_of_block + middle <= block) left = middle + 1;
    else right = middle;
  }
  const int sequence = left - 1;
  w.s = prefilled_at(args.starts, args.lengths, sequence, args.most_queries, lane);
  w.first = (block - (w.s.start / queries_of_block + sequence)) * queries_of_block;
  if (w.first >= w.s.queries || w.s.queries <= args.most_queries) return false;
  const int before = w.s.length - w.s.queries, last = least(w.first + queries_of_block, w.s.queries);
  const int end = args.causal ? before + last : w.s.length;
  w.clear_end = args.causal ? before + w.first + 1 : w.s.length;
  w.clear_begin = WINDOW ? before + last - args.window : 0;
  const int begin_tile = WINDOW ? greatest(0, before + w.first - args.window + 1) / STEP : 0;
  const int end_tile = end > 0 ? (end + STEP - 1) / STEP : 0;
  const int low = greatest(begin_tile, args.first_tile), high = least(end_tile, args.first_tile + args.tiles);
  w.tile = high - 1;
  w.count = greatest(0, high - low);
  return true;
}

struct Rings {
  u8* keys;
  u8* values;
  u64* keys_full;
  u64* keys_empty;
  u64* values_full;
  u64* values_empty;
};

// One thread: copies every tile, in the order in which they are used.
DEVICE void copy_tiles(const Args& args, const Work& w, const Rings& rings) {
  const i64 row = ((i64)w.s.rank * args.heads + w.head) * args.tiles - args.first_tile;
  auto copy = [&](int i, const u8* from, u8* ring, u64* full, u64* empty) {
    const int slot = i % STAGES;
    if (i >= STAGES) barrier_wait(empty + slot, (i / STAGES - 1) & 1);
    barrier_arrive_announcing(full + slot, TILE_BYTES);
    copy_to_shared(ring + slot * TILE_BYTES, from + (row + w.tile - i) * TILE_BYTES, TILE_BYTES, full + slot);
  };
  for (int i = 0; i <= w.count; i++) {
    if (i < w.count) copy(i, args.keys, rings.keys, rings.keys_full, rings.keys_empty);
    if (i > 0) copy(i - 1, args.values, rings.values, rings.values_full, rings.values_empty);
  }
}

DEVICE float load_number(const void* p, i64 i, int type) {
  if (type == 2) return ((const float*)p)[i];
  const u32 bits = ((const u16*)p)[i];
  return type == 1 ? as_float(bits << 16) : half_to_float(bits);
}

DEVICE float signed_by(float x, u32 bits, int i) { return as_float(as_bits(x) ^ ((bits >> i) << 31)); }

// The Hadamard transform of a row of D numbers in the 4 lanes of its quad.
DEVICE void hadamard_of_quad(float (&x)[OWN], int t) {
#pragma unroll
  for (int d = 1; d < OWN; d <<= 1)
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (!(i & d)) {
        const float a = x[i], b = x[i | d];
        x[i] = a + b, x[i | d] = a - b;
      }
#pragma unroll
  for (int d = 1; d < 4; d <<= 1)
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float other = shuffle_xor(x[i], d);
      x[i] = t & d ? other - x[i] : x[i] + other;
    }
}

// Row `row` of a warpgroup's queries to its operand, by the quad; what the row is to be multiplied by after the product.
DEVICE float prepare_row(const Args& args, bool valid, i64 at, u8* operand, int row, int t) {
  float x[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int dim = 32 * (i / 8) + 16 * (i / 4 % 2) + 8 * (i / 2 % 2) + 2 * t + i % 2;
    x[i] = valid ? load_number(args.query, at + dim, Q_TYPE) : 0.0f;
    if (args.scale < 0) x[i] = -x[i];
    if (K_ROTATED) x[i] = signed_by(x[i] * args.key_norm, args.key_sign_bits[i / 8], dim % 32);
  }
  if (K_ROTATED) hadamard_of_quad(x, t);
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < OWN; i++) top = maximum(top, as_float(as_bits(x[i]) & 0x7FFFFFFF));
  top = maximum(top, shuffle_xor(top, 1));
  top = maximum(top, shuffle_xor(top, 2));
  // A power of two, which loses nothing.
  const u32 exponent = (u32)least(greatest((int)(as_bits(top) >> 23), 1), 253);
  const float down = as_float((254 - exponent) << 23);
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    Words4 words;
    words.x = pack_halves(x[8 * j] * down, x[8 * j + 1] * down), words.y = pack_halves(x[8 * j + 2] * down, x[8 * j + 3] * down);
    words.z = pack_halves(x[8 * j + 4] * down, x[8 * j + 5] * down), words.w = pack_halves(x[8 * j + 6] * down, x[8 * j + 7] * down);
    *(Words4*)(operand + unit_at(j / 2, row, 4 * (j % 2) + t, GROUP_ROWS)) = words;
  }
  return as_float(exponent << 23) * (args.scale < 0 ? -args.scale : args.scale);
}

// A row's result from the quad's accumulators (x[2 j + b] is place 8 j + 2 t + b): 16 dimensions side by side of each 64.
DEVICE void store_row(const Args& args, float (&x)[OWN], i64 at, bool valid, int t) {
  if (V_ROTATED) hadamard_of_quad(x, t);
  if (!valid) return;
#pragma unroll
  for (int h = 0; h < D / 64; h++) {
    float y[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      y[i] = x[2 * (8 * h + i % 8) + i / 8];
      if (V_ROTATED) y[i] = signed_by(y[i] * args.value_norm, args.value_sign_bits[2 * h + t / 2], 16 * (t & 1) + i);
    }
    const i64 to = at + 64 * h + 16 * t;
    if (OUT_TYPE == 2) {
#pragma unroll
      for (int i = 0; i < 16; i += 4)
        if (args.aligned) *(Words4*)((float*)args.out + to + i) = {as_bits(y[i]), as_bits(y[i + 1]), as_bits(y[i + 2]), as_bits(y[i + 3])};
        else
#pragma unroll
          for (int k = i; k < i + 4; k++) ((float*)args.out)[to + k] = y[k];
    } else {
#pragma unroll
      for (int i = 0; i < 16; i += 8) {
        u32 words[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
          words[k] = OUT_TYPE == 0 ? pack_halves(y[i + 2 * k], y[i + 2 * k + 1])
                                   : float_to_bfloat(y[i + 2 * k]) | float_to_bfloat(y[i + 2 * k + 1]) << 16;
        if (args.aligned) *(Words4*)((u16*)args.out + to + i) = {words[0], words[1], words[2], words[3]};
        else
#pragma unroll
          for (int k = 0; k < 8; k++) ((u16*)args.out)[to + i + k] = (u16)(words[k / 2] >> (16 * (k % 2)));
      }
    }
  }
}

DEVICE void start_scores(float (&s)[N], u32 queries, u32 keys) {
  const u64 a = operand_at(queries, 16), b = operand_at(keys, 16);
  products_begin();
  Product<STEP>::template from_shared<false>(s, a, b);
#pragma unroll
  for (int k = 1; k < D / 16; k++)
    Product<STEP>::template from_shared<true>(s, a + ((k / 4 * 128 * GROUP_ROWS + k % 4 * 32) >> 4),
                                              b + ((k / 4 * HALF_TILE + k % 4 * 32) >> 4));
  products_commit();
}

DEVICE void start_output(float (&o)[D / 2], const u32 (&p)[N / 2], u32 values) {
  const u64 b = operand_at(values, HALF_TILE);
  products_begin();
#pragma unroll
  for (int k = 0; k < STEP / 16; k++)
    Product<D>::from_registers(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 2048 >> 4));
  products_commit();
}

struct Softmax {
  float factor[2];  // of this lane's rows g and g + 8
  float top[2];     // the reference that exponents are taken from: score plus the exponent of the values' unit
  float total[2];   // of this lane's share of the row, relative to it
  float fade[2];    // what the output so far is to be multiplied by
  bool fades;       // some row of the warp

  // Scores to probabilities times the values' unit. The reference follows the maximum only when it has fallen behind by
  // LAZY powers of two, so that the output is seldom rescaled.
  DEVICE_MEMBER void step(float (&s)[N], const Unit& unit) {
    float most[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) most[r][0] = s[2 * r], most[r][1] = s[2 * r + 1];
#pragma unroll
    for (int i = 4; i < N; i++) most[i / 2 % 2][i % 2] = maximum(most[i / 2 % 2][i % 2], s[i]);
    float by[2], shift[2];
    bool behind = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m = maximum(most[r][0], most[r][1]);
      m = maximum(m, shuffle_xor(m, 1));
      m = maximum(m, shuffle_xor(m, 2));
      by[r] = maximum(factor[r] * unit.key, 1e-30f);  // zero times minus infinity would not be a number
      const float wanted = m * by[r] + unit.value;
      const bool raise = wanted > top[r] + LAZY;
      fade[r] = raise ? exp2_fast(top[r] - wanted) : 1.0f;
      top[r] = raise ? wanted : top[r];
      behind = behind || raise;
      shift[r] = top[r] == MINUS_INFINITY ? 0.0f : unit.value - top[r];
    }
    fades = any_lane(behind);
    float sum[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < N; i++) {
      s[i] = exp2_fast(s[i] * by[i / 2 % 2] + shift[i / 2 % 2]);
      sum[i / 2 % 2][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) total[r] = total[r] * fade[r] + (sum[r][0] + sum[r][1]) * unit.value_inverse;
  }
};

DEVICE void attend_rows(const Args& args, const Work& w, const Rings& rings, u8* operand, int me, int lane) {
  const int warp = thread_index() / 32 % 4, g = lane >> 2, t = lane & 3;
  const int queries_of_block = ROWS / args.group;
  i64 q_row[2];
  int q_head[2], visible_begin[2], visible_end[2];
  bool valid[2];
  Softmax softmax;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = 16 * warp + g + 8 * r, of_block = GROUP_ROWS * me + row, query = w.first + of_block / args.group;
    q_row[r] = w.s.start + query;
    q_head[r] = w.head * args.group + of_block % args.group;
    valid[r] = of_block < queries_of_block * args.group && query < w.s.queries;
    const int position = w.s.length - w.s.queries + query;
    visible_end[r] = args.causal ? least(w.s.length, position + 1) : w.s.length;
    visible_begin[r] = WINDOW ? position - args.window + 1 : 0;
    softmax.factor[r] = prepare_row(args, valid[r], q_row[r] * args.query_stride + q_head[r] * args.query_head_stride, operand, row, t);
    softmax.top[r] = MINUS_INFINITY, softmax.total[r] = 0.0f;
  }
  publish_shared();
  named_wait(1 + me, 128);

  float o[D / 2];
  const i64 state_stride = (i64)block_count() * 256;
  float* state = args.state + (i64)block_index() * 256 + thread_index() - 128;
  if (args.first_pass) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
  } else {
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = state[i * state_stride];
#pragma unroll
    for (int r = 0; r < 2; r++)
      softmax.top[r] = state[(D / 2 + r) * state_stride], softmax.total[r] = state[(D / 2 + 2 + r) * state_stride];
  }

  if (w.count > 0) {
    float s[N];
    u32 p[N / 2];
    const u32 queries = shared_address(operand), keys = shared_address(rings.keys), values = shared_address(rings.values);
    const Unit* units = args.units + ((i64)w.s.rank * args.heads + w.head) * args.tiles - args.first_tile + w.tile;
    Unit unit = *units;
    int tile = w.tile;
    auto hide = [&] {
      if ((tile + 1) * STEP <= w.clear_end && (!WINDOW || tile * STEP >= w.clear_begin)) return;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const int token = tile * STEP + 8 * (i / 4) + 2 * t + i % 2, r = i / 2 % 2;
        if (token >= visible_end[r] || (WINDOW && token < visible_begin[r])) s[i] = MINUS_INFINITY;
      }
    };
    auto rescale = [&] {
      if (softmax.fades)
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= softmax.fade[i / 2 % 2];
    };
    auto pack = [&] {
#pragma unroll
      for (int i = 0; i < N / 2; i++) p[i] = pack_halves(s[2 * i], s[2 * i + 1]);
    };
    barrier_wait(rings.keys_full, 0);
    start_scores(s, queries, keys);
    products_wait<0>();
    hold(s);
    if (lane == 0) barrier_arrive(rings.keys_empty);
    hide();
    softmax.step(s, unit);
    rescale();
    pack();
    if (me == 1 && w.count > 1) named_arrive(3, 256);
    int slot = 0;       // of values; keys are one further
    u32 parity = 0;
    for (int i = 1; i < w.count; i++) {
      const int next = slot + 1 == STAGES ? 0 : slot + 1;
      const u32 next_parity = next ? parity : parity ^ 1;
      unit = units[-i];
      tile--;
      barrier_wait(rings.keys_full + next, next_parity);
      named_wait(3 + me, 256);
      start_scores(s, queries, keys + next * TILE_BYTES);
      barrier_wait(rings.values_full + slot, parity);
      start_output(o, p, values + slot * TILE_BYTES);
      if (me == 0 || i + 1 < w.count) named_arrive(4 - me, 256);
      products_wait<1>();
      hold(s);
      if (lane == 0) barrier_arrive(rings.keys_empty + next);
      hide();
      softmax.step(s, unit);
      keep_before(softmax.total[0], softmax.total[1]);
      products_wait<0>();
      hold(o);
      if (lane == 0) barrier_arrive(rings.values_empty + slot);
      rescale();
      pack();
      slot = next, parity = next_parity;
    }
    barrier_wait(rings.values_full + slot, parity);
    start_output(o, p, values + slot * TILE_BYTES);
    products_wait<0>();
    hold(o);
  }

  if (!args.last_pass) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) state[i * state_stride] = o[i];
#pragma unroll
    for (int r = 0; r < 2; r++)
      state[(D / 2 + r) * state_stride] = softmax.top[r], state[(D / 2 + 2 + r) * state_stride] = softmax.total[r];
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = softmax.total[r], top = softmax.top[r], by = 1.0f;
    total += shuffle_xor(total, 1);
    total += shuffle_xor(total, 2);
    if (args.sinks && valid[r]) {
      const float sink = args.sinks[q_head[r]] * LOG2E, higher = maximum(top, sink);
      by = exp2_fast(top - higher);
      total = total * by + exp2_fast(sink - higher);
      top = higher;
    }
    const bool empty = total == 0.0f;
    by /= empty ? 1.0f : total;
    float x[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) x[i] = o[4 * (i / 2) + 2 * r + i % 2] * by;
    store_row(args, x, q_row[r] * args.out_stride + q_head[r] * args.out_head_stride, valid[r], t);
    if (args.lse && t == 0 && valid[r])
      args.lse[q_row[r] * args.heads * args.group + q_head[r]] = empty ? MINUS_INFINITY : (top + log2_fast(total)) * LN2;
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT Args args) {
  SHARED_MEMORY(memory);
  u8* shared = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const int lane = thread_index() & 31, part = shuffle(thread_index() / 128, 0);
  u64* barriers = (u64*)(shared + BARRIERS_AT);
  const Rings rings = {shared + KEYS_AT, shared + VALUES_AT, barriers, barriers + STAGES, barriers + 2 * STAGES, barriers + 3 * STAGES};
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_create(rings.keys_full + i, 1), barrier_create(rings.values_full + i, 1);
      barrier_create(rings.keys_empty + i, 8), barrier_create(rings.values_empty + i, 8);
    }
    barriers_created();
  }
  sync_threads();
  wait_for_grid_before();
  let_next_grid_start();
  Work w;
  if (!find_work(args, lane, w)) return;
  if (part == 0) {
    fewer_registers<24>();
    if (thread_index() == 0) copy_tiles(args, w, rings);
  } else {
    more_registers<240>();
    attend_rows(args, w, rings, shared + (part - 1) * QUERY_BYTES, part - 1, lane);
  }
}
LAUNCHABLE(attend, Args)
