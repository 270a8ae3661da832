// Attention of many queries a sequence on unpacked keys and values (prefill_shape.cuh), for sm_90a.
//
// A block has 128 rows of queries (queries x heads of a group) of one KV head and goes through its tiles from the last to
// the first. One warp copies tiles into two rings of shared memory; two warpgroups of 64 rows each multiply and keep scores,
// probabilities and output in registers. A warpgroup starts the scores of the next tile before the softmax of this one,
// and the two take turns in starting products, so that one's softmax runs beside the other's products.
#include "hopper.cuh"
#include "prefill_rows.cuh"
#include "prefill_softmax.cuh"

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
    const i64 at = q_row[r] * args.query_stride + q_head[r] * args.query_head_stride;
    softmax.factor[r] = prepare_row(args, valid[r], at, operand, row, t);
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
  const Rings rings = {shared + KEYS_AT,  shared + VALUES_AT,    barriers,
                       barriers + STAGES, barriers + 2 * STAGES, barriers + 3 * STAGES};
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_create(rings.keys_full + i, 1), barrier_create(rings.values_full + i, 1);
      barrier_create(rings.keys_empty + i, 8), barrier_create(rings.values_empty + i, 8);
    }
    barriers_created();
  }
  sync_threads();
  after_grid_before();
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
