// Attention of many queries a sequence on unpacked keys and values (prefill_shape.cuh), for sm_90a.
//
// A block has 128 rows of queries (queries x heads of a group) of one KV head and goes through its tiles from the last to
// the first. One warp copies tiles into two rings of shared memory; two warpgroups of 64 rows each multiply and keep scores,
// probabilities and output in registers. A warpgroup starts the scores of the next tile before the softmax of this one,
// and the two take turns in starting products, so that one's softmax runs beside the other's products.
#include "common/hopper.cuh"
#include "prefill/rows.cuh"
#include "prefill/softmax.cuh"

struct Rings {
  u8* keys;
  u8* values;
  u64* keys_full;
  u64* keys_empty;
  u64* values_full;
  u64* values_empty;
  u8* totals;
};

// One thread: copies every tile, in the order in which they are used.
DEVICE void copy_tiles(const PrefillArgs& args, const Work& w, const Rings& rings) {
  const i64 row = ((i64)w.s.rank * args.num_kv_heads + w.head) * args.tiles - args.first_tile;
  auto copy = [&](int i, const u8* from, u8* ring, u64* full, u64* empty, int bytes) {
    const int slot = i % STAGES;
    if (i >= STAGES) mbarrier_wait(empty + slot, (i / STAGES - 1) & 1);
    mbarrier_arrive_expect_tx(full + slot, bytes);
    cp_async_bulk(ring + slot * bytes, from + (row + w.tile - i) * bytes, bytes, full + slot);
  };
  for (int i = 0; i <= w.count; i++) {
    if (i < w.count) copy(i, args.keys, rings.keys, rings.keys_full, rings.keys_empty, KEYS_BYTES);
    if (i > 0) copy(i - 1, args.values, rings.values, rings.values_full, rings.values_empty, VALUES_BYTES);
  }
}

#if INT8_KEYS
// Sums of bytes, in parts of as many tokens as a row of keys has dimensions: from MAGIC, or from zero.
constexpr int PARTS = STEP / D > 0 ? STEP / D : 1;
struct Sums { u32 part[PARTS][N / PARTS]; };

DEVICE void start_sums(Sums& s, const u32 (&q)[D / 8], u32 keys) {
  if (FROM_MAGIC)
#pragma unroll
    for (int i = 0; i < N; i++) s.part[i / (N / PARTS)][i % (N / PARTS)] = MAGIC;
  wgmma_fence();
#pragma unroll
  for (int h = 0; h < PARTS; h++) {
    const u64 b = smem_descriptor(keys + h * D, 16);
    WgmmaBytes<STEP / PARTS>::template s8<FROM_MAGIC>(s.part[h], q[0], q[1], q[2], q[3], b);
#pragma unroll
    for (int k = 1; k < D / 32; k++)
      WgmmaBytes<STEP / PARTS>::template s8<true>(s.part[h], q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3], b + (k * 32 >> 4));
  }
  wgmma_commit();
}

// What they are with the scales of the keys.
DEVICE void scale_sums(const Sums& sums, float (&s)[N], const u8* numbers, int t) {
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const Words4 a = *(const Words4*)(numbers + token_number_at(KEY_SCALE, 16 * j + 4 * t));
    const float scales[4] = {as_float(a.x), as_float(a.y), as_float(a.z), as_float(a.w)};
    float offsets[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (FROM_MAGIC) {
      const Words4 c = *(const Words4*)(numbers + token_number_at(KEY_OFFSET, 16 * j + 4 * t));
      offsets[0] = as_float(c.x), offsets[1] = as_float(c.y), offsets[2] = as_float(c.z), offsets[3] = as_float(c.w);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int i = 8 * j + k, token = 2 * (k / 4) + k % 2;
      const u32 sum = sums.part[i / (N / PARTS)][i % (N / PARTS)];
      s[i] = FROM_MAGIC ? fma_rn(as_float(sum), scales[token], offsets[token]) : i32_to_f32_rn((i32)sum) * scales[token];
    }
  }
}
#else
DEVICE void start_scores(float (&s)[N], u32 queries, u32 keys) {
  const u64 a = smem_descriptor(queries, 16), b = smem_descriptor(keys, 16);
  wgmma_fence();
  Wgmma<STEP>::template shared_a<false>(s, a, b);
#pragma unroll
  for (int k = 1; k < D / 16; k++)
    Wgmma<STEP>::template shared_a<true>(s, a + ((k / 4 * 128 * GROUP_ROWS + k % 4 * 32) >> 4),
                                              b + ((k / 4 * HALF_TILE + k % 4 * 32) >> 4));
  wgmma_commit();
}
#endif

#if E4M3_VALUES
DEVICE void start_output(float (&o)[D / 2], float (&digits)[4], const u32 (&p)[N / 4], u32 values, bool add) {
  const u64 b = smem_descriptor(values, 16), last = smem_descriptor(values + STEP * D, 16);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < STEP / 32; k++)
    WgmmaBytes<D>::e4m3(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 32 >> 4), k > 0 || add);
#pragma unroll
  for (int k = 0; k < STEP / 32; k++)
    WgmmaBytes<8>::e4m3(digits, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], last + (k * 32 >> 4), k > 0);
  wgmma_commit();
}

// Output so far, out of the way of the tensor cores' short sums: each thread's own, with the references it is relative to.
struct Totals {
  float* mine;  // every 1,024th float of shared memory, by fours
  float row_max[2];

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) *(Words4*)(mine + i * 256) = {0, 0, 0, 0};
  }
  DEVICE_MEMBER float factor(int r, float now) const { return row_max[r] == MINUS_INFINITY ? 0.0f : exp2_approx(row_max[r] - now); }
  // Adds o, which is relative to `now`.
  DEVICE_MEMBER void add(const float (&o)[D / 2], const float (&now)[2]) {
    const float by[2] = {factor(0, now[0]), factor(1, now[1])};
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) {
      Words4 x = *(const Words4*)(mine + i * 256);
      x.x = as_bits(fma_rn(as_float(x.x), by[0], o[i])), x.y = as_bits(fma_rn(as_float(x.y), by[0], o[i + 1]));
      x.z = as_bits(fma_rn(as_float(x.z), by[1], o[i + 2])), x.w = as_bits(fma_rn(as_float(x.w), by[1], o[i + 3]));
      *(Words4*)(mine + i * 256) = x;
    }
    row_max[0] = now[0], row_max[1] = now[1];
  }
  DEVICE_MEMBER void add_to(float (&o)[D / 2], const float (&now)[2]) const {
    const float by[2] = {factor(0, now[0]), factor(1, now[1])};
#pragma unroll
    for (int i = 0; i < D / 2; i += 4) {
      const Words4 x = *(const Words4*)(mine + i * 256);
      o[i] = fma_rn(as_float(x.x), by[0], o[i]), o[i + 1] = fma_rn(as_float(x.y), by[0], o[i + 1]);
      o[i + 2] = fma_rn(as_float(x.z), by[1], o[i + 2]), o[i + 3] = fma_rn(as_float(x.w), by[1], o[i + 3]);
    }
  }
};
#else
DEVICE void start_output(float (&o)[D / 2], const u32 (&p)[N / 2], u32 values) {
  const u64 b = smem_descriptor(values, HALF_TILE);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < STEP / 16; k++)
    Wgmma<D>::register_a(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b + (k * 2048 >> 4));
  wgmma_commit();
}
#endif

DEVICE void attend_rows(const PrefillArgs& args, const Work& w, const Rings& rings, u8* operand, int warpgroup, int lane) {
  const int warp = thread_index() / 32 % 4, g = lane >> 2, t = lane & 3;
  const int queries_of_block = ROWS / args.group_size;
  i64 q_row[2];
  int q_head[2], visible_begin[2], visible_end[2];
  bool valid[2];
  Softmax softmax;
#if INT8_KEYS
  u32 q[D / 8];
#endif
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = 16 * warp + g + 8 * r, of_block = GROUP_ROWS * warpgroup + row, query = w.first + of_block / args.group_size;
    q_row[r] = w.s.start + query;
    q_head[r] = w.head * args.group_size + of_block % args.group_size;
    valid[r] = of_block < queries_of_block * args.group_size && query < w.s.queries;
    const int position = w.s.length - w.s.queries + query;
    visible_end[r] = args.causal ? min_i32(w.s.length, position + 1) : w.s.length;
    visible_begin[r] = WINDOW ? position - args.sliding_window + 1 : 0;
    const i64 at = q_row[r] * args.query_stride + q_head[r] * args.query_head_stride;
    softmax.row_max[r] = MINUS_INFINITY, softmax.row_sum[r] = 0.0f;
#if INT8_KEYS
    softmax.factor[r] = prepare_row_int8(args, valid[r], at, q, r, t, softmax.row_sum[r]);
#else
    softmax.factor[r] = prepare_row(args, valid[r], at, operand, row, t);
#endif
  }
  if (!INT8_KEYS) {
    fence_proxy_async();
    bar_sync(1 + warpgroup, 128);
  }

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
      softmax.row_max[r] = state[(D / 2 + r) * state_stride], softmax.row_sum[r] = state[(D / 2 + 2 + r) * state_stride];
  }

  if (w.count > 0) {
    float s[N];
    u32 p[E4M3_VALUES ? N / 4 : N / 2];
#if INT8_KEYS
    Sums sums;
#endif
#if E4M3_VALUES
    float digits[4];
    bool add = true;  // what products find in o
    Totals totals = {(float*)(rings.totals) + 4 * (thread_index() - 128), {MINUS_INFINITY, MINUS_INFINITY}};
    if (w.count > PROMOTE) totals.clear();
#endif
    const u32 queries = shared_address(operand), keys = shared_address(rings.keys), values = shared_address(rings.values);
    const TileScale* tile_scales = args.tile_scales + ((i64)w.s.rank * args.num_kv_heads + w.head) * args.tiles - args.first_tile + w.tile;
    TileScale unit = *tile_scales;
#if E4M3_VALUES
    float inverse = unit.value_inverse;  // of the tile whose products are under way
#endif
    int tile = w.tile;
    auto apply_mask = [&] {
      if ((tile + 1) * STEP <= w.clear_end && (!WINDOW || tile * STEP >= w.clear_begin)) return;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const int token = tile * STEP + 8 * (i / 4) + 2 * t + i % 2, r = i / 2 % 2;
        if (token >= visible_end[r] || (WINDOW && token < visible_begin[r])) s[i] = MINUS_INFINITY;
      }
    };
    auto rescale_output = [&] {
#if E4M3_VALUES  // sums follow the output; elsewhere they are made with the probabilities
      softmax.row_sum[0] *= softmax.rescale[0], softmax.row_sum[1] *= softmax.rescale[1];
#endif
      if (softmax.needs_rescale)
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= softmax.rescale[i / 2 % 2];
    };
    // Once products do not read p any more.
    auto pack = [&] {
#if E4M3_VALUES
      softmax.pack_e4m3(s, p);
#else
#pragma unroll
      for (int i = 0; i < N / 2; i++) p[i] = pack_f16x2(s[2 * i], s[2 * i + 1]);
#endif
    };
    auto start = [&](int at) {
#if INT8_KEYS
      start_sums(sums, q, keys + at * KEYS_BYTES);
#else
      start_scores(s, queries, keys + at * KEYS_BYTES);
#endif
    };
    auto start_products = [&](int at) {
#if E4M3_VALUES
      start_output(o, digits, p, values + at * VALUES_BYTES, add);
      add = true;
#else
      start_output(o, p, values + at * VALUES_BYTES);
#endif
    };
    // From products that have ended to probabilities.
    auto take = [&](int at) {
#if INT8_KEYS
      const u8* numbers = rings.keys + at * KEYS_BYTES;
#pragma unroll
      for (int h = 0; h < PARTS; h++) wgmma_fence_operand(sums.part[h]);
      scale_sums(sums, s, numbers, t);
#else
      wgmma_fence_operand(s);
#endif
#if !E4M3_VALUES
      if (INT8_KEYS) sync_warp();
      if (lane == 0) mbarrier_arrive(rings.keys_empty + at);
#endif
      if (SOFTCAP) softmax.cap(s, unit, args.softcap);
      apply_mask();
#if E4M3_VALUES
      softmax.step_e4m3(s, numbers, t);
      sync_warp();
      if (lane == 0) mbarrier_arrive(rings.keys_empty + at);
#else
      softmax.step(s, unit);
#endif
    };
    mbarrier_wait(rings.keys_full, 0);
    start(0);
    wgmma_wait<0>();
    take(0);
    rescale_output();
    pack();
    if (warpgroup == 1 && w.count > 1) bar_arrive(3, 256);
    int slot = 0;       // of values; keys are one further
    u32 parity = 0;
    for (int i = 1; i < w.count; i++) {
      const int next = slot + 1 == STAGES ? 0 : slot + 1;
      const u32 next_parity = next ? parity : parity ^ 1;
      unit = tile_scales[-i];
      tile--;
      mbarrier_wait(rings.keys_full + next, next_parity);
      bar_sync(3 + warpgroup, 256);
      start(next);
      mbarrier_wait(rings.values_full + slot, parity);
      start_products(slot);
      if (warpgroup == 0 || i + 1 < w.count) bar_arrive(4 - warpgroup, 256);
      wgmma_wait<1>();
      take(next);
#if E4M3_VALUES
      keep_before(s[0], s[N - 1]);
#else
      keep_before(softmax.row_sum[0], softmax.row_sum[1]);
#endif
      wgmma_wait<0>();
      wgmma_fence_operand(o);
      if (lane == 0) mbarrier_arrive(rings.values_empty + slot);
#if E4M3_VALUES
      wgmma_fence_operand(digits);
      softmax.add_sums(digits, inverse, t);
      inverse = unit.value_inverse;
#endif
      rescale_output();
#if E4M3_VALUES
      if (i % PROMOTE == 0) {
        totals.add(o, softmax.row_max);
        add = false;
      }
#endif
      pack();
      slot = next, parity = next_parity;
    }
    mbarrier_wait(rings.values_full + slot, parity);
    start_products(slot);
    wgmma_wait<0>();
    wgmma_fence_operand(o);
#if E4M3_VALUES
    wgmma_fence_operand(digits);
    softmax.add_sums(digits, inverse, t);
    if (w.count > PROMOTE) totals.add_to(o, softmax.row_max);
#endif
  }

  if (!args.last_pass) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) state[i * state_stride] = o[i];
#pragma unroll
    for (int r = 0; r < 2; r++)
      state[(D / 2 + r) * state_stride] = softmax.row_max[r], state[(D / 2 + 2 + r) * state_stride] = softmax.row_sum[r];
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float row_sum = softmax.row_sum[r], row_max = softmax.row_max[r], by = 1.0f;
    row_sum += shfl_xor(row_sum, 1);
    row_sum += shfl_xor(row_sum, 2);
    if (args.sinks && valid[r]) {
      const float sink = args.sinks[q_head[r]] * LOG2E, higher = max_f32(row_max, sink);
      by = exp2_approx(row_max - higher);
      row_sum = row_sum * by + exp2_approx(sink - higher);
      row_max = higher;
    }
    const bool empty = row_sum == 0.0f;
    by /= empty ? 1.0f : row_sum;
    float x[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) x[i] = o[4 * (i / 2) + 2 * r + i % 2] * by;
    store_row(args, x, q_row[r] * args.out_stride + q_head[r] * args.out_head_stride, valid[r], t);
    if (args.lse && t == 0 && valid[r])
      args.lse[q_row[r] * args.num_kv_heads * args.group_size + q_head[r]] = empty ? MINUS_INFINITY : (row_max + log2_approx(row_sum)) * LN2;
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT PrefillArgs args) {
  SHARED_MEMORY(memory);
  u8* shared = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const int lane = thread_index() & 31, part = shfl(thread_index() / 128, 0);
  u64* barriers = (u64*)(shared + BARRIERS_AT);
  const Rings rings = {shared + KEYS_AT,  shared + VALUES_AT,    barriers,
                       barriers + STAGES, barriers + 2 * STAGES, barriers + 3 * STAGES, shared + TOTALS_AT};
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(rings.keys_full + i, 1), mbarrier_init(rings.values_full + i, 1);
      mbarrier_init(rings.keys_empty + i, 8), mbarrier_init(rings.values_empty + i, 8);
    }
    fence_mbarrier_init();
  }
  sync_threads();
  pdl_wait();
  Work w;
  if (!find_work(args, lane, w)) return;
  if (part == 0) {
    setmaxnreg_dec<24>();
    if (thread_index() == 0) copy_tiles(args, w, rings);
  } else {
    setmaxnreg_inc<240>();
    attend_rows(args, w, rings, shared + (part - 1) * QUERY_BYTES, part - 1, lane);
  }
}
HOST_TESTABLE(attend, PrefillArgs)
