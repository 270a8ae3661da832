// Attention of many rows (queries x heads) on packed latents, for sm_90a: scores from latents and rope parts, values from the same
// latents.
//
// A block has up to 64 rows of a sequence and some of its tokens, a tile of 64 at a time. One warpgroup unpacks a tile into shared
// memory as levels, which halves have exactly, once for scores (tokens x dimensions) and for values, which `wgmma` reads the other
// way round; scores and weights are multiplied by the tokens' scales. Two warpgroups multiply: each has half the dimensions of the
// output, and they take turns with the scores of tiles. Weights go to the other one through shared memory.
#include "common/hopper.cuh"
#include "common/numbers.cuh"

constexpr int ROWS = 64, STEP = 64, THREADS = 384, ITEM_COST = 4, PARTS = 1, STAGES = 2;
#include "latent/merge.cuh"
#include "latent/queries.cuh"
#include "latent/producer.cuh"

constexpr int HALF = LD / 2;  // dimensions of a warpgroup
// With fewer registers for those that multiply, the compiler makes every product wait for the one before it.
constexpr int PRODUCER_REGISTERS = 104, CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;
static_assert(L_LEVELS == 0 && (HALF == 64 || HALF == 128 || HALF == 256), "what fits");

// Shared memory. Weights: rows x tokens; the block's rows and sums of weights stand there before the first tile and after the last.
constexpr int QUERIES_AT = 0, RING_AT = QUERIES_AT + STAGE, WEIGHTS_AT = RING_AT + STAGES * STAGE, REFERENCES_AT = WEIGHTS_AT + ROWS * 128;
constexpr int SCALES_AT = REFERENCES_AT + 4 * ROWS, SCALES = (int)sizeof(TokenScales);
constexpr int BARRIERS_AT = SCALES_AT + STAGES * SCALES, WALK_AT = BARRIERS_AT + 48 * STAGES, R_LEVELS_AT = WALK_AT + 48;
constexpr int ALL = R_LEVELS_AT + 2 * R_LEVELS;
static_assert(ALL == SHARED, "the launcher counts shared memory as this file does");
static_assert(sizeof(Route) <= 48, "what there is room for");
constexpr int WEIGHTS_OF_FIRST = 1, CONSUMERS = 3;  // named barriers; the second warpgroup's weights have the one between

typedef float Output[HALF / 2];
typedef u32 Weights[4][4];  // an operand for every 16 tokens

// What makes scores of products of latents, the unit of rope parts in units of those, and which tokens a row sees.
struct __attribute__((aligned(16))) Row { float unit, rope; i32 visible_end; i32 unused; };

// Row n of a block, by one warp: 64 dimensions side by side at `to`, those of the rope part behind the latent's. Rows beyond the
// last are zeros and see nothing.
DEVICE void stage_query(const LatentArgs& args, const Item& item, const Query& query, int n, u8* to, Row* rows) {
  const u32 sign = args.scale < 0.0f ? 0x8000u : 0u;  // so that units are positive
  const float latent = query.latent_unit() * (LEVEL_UNIT / L_UNIT), ratio = query.rope_unit() / latent;
  auto place = [&](int at) { return at / 64 * ROWS * 128 + n * 128 + ((at % 64 / 8 ^ (n & 7)) << 4) + at % 8 * 2; };
  query.latent_operand([&](int at, u32 bits) { *(u16*)(to + place(at)) = (u16)(bits ^ sign); },
                       [&](int at, u32 bits) { *(u32*)(to + place(at)) = bits ^ sign * 0x10001u; });
  query.rope_operand([&](int at, u32 bits) { *(u16*)(to + place(LD + at)) = (u16)(bits ^ sign); }, ratio);
  if (query.lane == 0)
    rows[n] = {latent * as_float(as_bits(args.scale) & 0x7FFFFFFF), ratio, query.real ? item.visible_end(args, n) : 0, 0};
}

template <bool B> struct Bool { static constexpr bool VALUE = B; };

// A warpgroup's rows, scores and half of the output. A lane has rows g and g + 8 of its warp's 16.
struct Consumer {
  u8* shared;
  int group, warp, lane;
  float unit[2], rope[2];
  int visible_end[2];
  float reference[2], row_sum[2];

  DEVICE_MEMBER int row_of(int r) const { return 16 * warp + lane / 4 + 8 * r; }
  DEVICE_MEMBER void take_rows() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Row row = ((const Row*)(shared + WEIGHTS_AT))[row_of(r)];
      unit[r] = row.unit, rope[r] = row.rope, visible_end[r] = row.visible_end;
      reference[r] = MINUS_INFINITY, row_sum[r] = 0.0f;
    }
  }
  DEVICE_MEMBER const TokenScales& scales_of(int stage) const { return *(const TokenScales*)(shared + SCALES_AT + stage * SCALES); }
  // Of the lane's tokens 8 j + 2 t and the next one.
  DEVICE_MEMBER Words2 pair_of(const float* scales, int j) const { return *(const Words2*)(scales + 8 * j + 2 * (lane & 3)); }

  // Operands of a tile: queries and keys `bytes` behind their first, values of the own dimensions.
  DEVICE_MEMBER u64 queries_at(int bytes) const {
    return descriptor_behind(smem_descriptor(shared_address(shared + QUERIES_AT), 16), bytes);
  }
  DEVICE_MEMBER u64 keys_at(int stage, int bytes) const {
    return descriptor_behind(smem_descriptor(shared_address(shared + RING_AT) + stage * STAGE, 16), bytes);
  }
  DEVICE_MEMBER u64 values_at(int stage, int bytes) const {
    const u32 first = shared_address(shared + RING_AT) + stage * STAGE + group * (CHUNKS / 2) * CHUNK;
    return descriptor_behind(smem_descriptor(first, CHUNK), bytes);
  }

  // Products of queries with the rope parts of a tile, on their way.
  DEVICE_MEMBER void start_rope_scores(float (&s)[32], int stage) const {
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = 0.0f;
    wgmma_fence_operand(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROPE_SLICES; k++) {
      const int at = (CHUNKS + k / 4) * CHUNK + k % 4 * 32;
      WgmmaNarrow<64, BF16_ROPE>::shared_a(s, queries_at(at), keys_at(stage, at));
    }
    wgmma_commit();
  }
  // Those in units of the latents' scales.
  DEVICE_MEMBER void scale_rope_scores(float (&s)[32], int stage) const {
    const TokenScales& scales = scales_of(stage);
    wgmma_fence_operand(s);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const Words2 by = pair_of(R_KIND == RAW ? scales.inverse : scales.rope, j);
#pragma unroll
      for (int i = 0; i < 4; i++) s[4 * j + i] *= as_float(i % 2 ? by.y : by.x) * (BF16_ROPE ? 1.0f : rope[i / 2]);
    }
    wgmma_fence_operand(s);
    wgmma_fence();
  }
  // Products with a quarter of the latents' dimensions added to them, on their way.
  template <int QUARTER> DEVICE_MEMBER void start_scores(float (&s)[32], int stage) const {
#pragma unroll
    for (int k = QUARTER * S / 4; k < (QUARTER + 1) * S / 4; k++) {
      const int at = k / 4 * CHUNK + k % 4 * 32;
      Wgmma<64>::shared_a<true>(s, queries_at(at), keys_at(stage, at));
    }
    wgmma_commit();
  }

  // Scores to weights in halves, which have the tokens' scales; what the output so far is to be multiplied by.
  DEVICE_MEMBER bool weigh(float (&s)[32], int stage, int token, bool clear, float (&by)[2], Weights& p) {
    const int t = lane & 3;
    const TokenScales& scales = scales_of(stage);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const Words2 scale = pair_of(scales.scale, j), log = pair_of(scales.log, j);
#pragma unroll
      for (int i = 0; i < 4; i++)
        s[4 * j + i] = s[4 * j + i] * as_float(i % 2 ? scale.y : scale.x) * unit[i / 2] + as_float(i % 2 ? log.y : log.x);
    }
    if (!clear) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (token + 8 * (i / 4) + 2 * t + i % 2 >= visible_end[i / 2 % 2]) s[i] = MINUS_INFINITY;
    }
    bool behind = false;
    float shift[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float wanted = MINUS_INFINITY;
#pragma unroll
      for (int j = 0; j < 8; j++) wanted = max_f32(wanted, max_f32(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      wanted = max_f32(wanted, shfl_xor(wanted, 1));
      wanted = max_f32(wanted, shfl_xor(wanted, 2));
      const bool raise = wanted > reference[r] + RESCALE_THRESHOLD || (reference[r] == MINUS_INFINITY && wanted > MINUS_INFINITY);
      by[r] = raise ? exp2_approx(reference[r] - wanted) : 1.0f;
      reference[r] = raise ? wanted : reference[r];
      shift[r] = reference[r] == MINUS_INFINITY ? 0.0f : reference[r];
      behind = behind || raise;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const Words2 inverse = pair_of(scales.inverse, j);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float low = exp2_approx(s[4 * j + 2 * r] - shift[r]), high = exp2_approx(s[4 * j + 2 * r + 1] - shift[r]);
        sum[r] += low * as_float(inverse.x);
        sum[r] += high * as_float(inverse.y);
        p[j / 2][j % 2 * 2 + r] = pack_f16x2(low, high);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[r] = row_sum[r] * by[r] + sum[r];
    return behind;
  }

  // To the other warpgroup.
  DEVICE_MEMBER void give(const Weights& p) const {
    const u32 row = shared_address(shared + WEIGHTS_AT) + (16 * warp + lane % 16) * 128;
#pragma unroll
    for (int k = 0; k < 4; k++) stmatrix_x4<0>(row + ((2 * k + lane / 16 ^ (lane & 7)) << 4), p[k][0], p[k][1], p[k][2], p[k][3]);
    float* references = (float*)(shared + REFERENCES_AT);
    if ((lane & 3) == 0) references[row_of(0)] = reference[0], references[row_of(1)] = reference[1];
    fence_proxy_async();
    bar_arrive(WEIGHTS_OF_FIRST + group, 256);
  }
  // The reference of the other's weights; what the output so far is to be multiplied by.
  DEVICE_MEMBER bool await_reference(float (&by)[2]) {
    bar_sync(WEIGHTS_OF_FIRST + 1 - group, 256);
    bool behind = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float others = ((const float*)(shared + REFERENCES_AT))[row_of(r)];
      const bool raise = others != reference[r];
      by[r] = raise ? exp2_approx(reference[r] - others) : 1.0f;
      reference[r] = others, row_sum[r] *= by[r];
      behind = behind || raise;
    }
    return behind;
  }

  DEVICE_MEMBER void rescale(Output& o, bool behind, const float (&by)[2]) const {
    if (!warp_any(behind)) return;
#pragma unroll
    for (int i = 0; i < HALF / 2; i++) o[i] *= by[i / 2 % 2];
  }

  // Products of weights, the own ones or the other's, with the own dimensions of a tile, on their way.
  DEVICE_MEMBER void start_values(Output& o, const Weights& p, int stage) const {
    wgmma_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) Wgmma<HALF>::register_a(o, p[k][0], p[k][1], p[k][2], p[k][3], values_at(stage, k * 2048));
    wgmma_commit();
  }
  DEVICE_MEMBER void start_others_values(Output& o, int stage) const {
    const u64 weights = smem_descriptor(shared_address(shared + WEIGHTS_AT), 16);
    wgmma_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) Wgmma<HALF>::shared_a_across(o, descriptor_behind(weights, k * 32), values_at(stage, k * 2048));
    wgmma_commit();
  }
};

// 16 rows of the output, from row `first` on, to memory: as they are in registers, or through shared memory, so that whole lines
// are written.
DEVICE void leave_output_directly(float* to, const Output& o, int first, int count, int lane) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int n = first + (lane >> 2) + 8 * r;
    if (n >= count) continue;
#pragma unroll
    for (int j = 0; j < HALF / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) to[(i64)n * LD + place_of(8 * j + 2 * (lane & 3) + i)] = o[4 * j + 2 * r + i] * LEVEL_UNIT;
  }
}
constexpr int PASS = 32, PITCH = 4 * PASS + 32;  // dimensions at a time, and bytes of a row of them: rows are in different banks
constexpr int SCRATCH = CHUNKS / 2 * CHUNK / 4;  // of a warp: its share of the own dimensions of a stage
constexpr bool STAGED_OUTPUT = 2 * 16 * PITCH <= SCRATCH;
DEVICE void leave_output(float* to, const Output& o, int first, int count, u8* scratch, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int pass = 0; pass < HALF / PASS; pass++) {
    u8* const rows = scratch + pass % 2 * 16 * PITCH;
#pragma unroll
    for (int j = 0; j < PASS / 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int at = PASS / 2 * pass + 4 * j + 2 * r;
        float* const row = (float*)(rows + (g + 8 * r) * PITCH);
        const float low = o[at] * LEVEL_UNIT, high = o[at + 1] * LEVEL_UNIT;
        if (IN_BYTES) *(Words2*)(row + 8 * j + 2 * t) = {as_bits(low), as_bits(high)};
        else row[place_of(8 * j + 2 * t)] = low, row[place_of(8 * j + 2 * t + 1)] = high;
      }
    sync_warp();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int n = 4 * k + lane / 8;
      const Words4 own = *(const Words4*)(rows + n * PITCH + lane % 8 * 16);
      if (first + n < count) *(Words4*)(to + (i64)(first + n) * LD + PASS * pass + lane % 8 * 4) = own;
    }
  }
}

DEVICE void attend_tiles(const LatentArgs& args, u8* shared, u64* full, u64* empty, int group, int lane) {
  const int thread = thread_index() % 128, warp = shfl(thread / 32, 0), t = lane & 3;
  Consumer own;
  own.shared = shared, own.group = group, own.warp = warp, own.lane = lane;
  int before = 0;  // tiles
  Route* const route = (Route*)(shared + WALK_AT);
  if (thread_index() < 32) {
    const Walk walk(args, block_index(), lane);
    if (lane == 0) route->walk = walk;
  }
  while (true) {
    bar_sync(CONSUMERS, 256);
    if (thread_index() == 0) route->go_on(args);
    bar_sync(CONSUMERS, 256);
    const Range range = route->common_range();
    if (range.sequence < 0) return;
    const Item item(args, range.sequence, range.tile);
    const int count = shfl(min_i32(range.last, item.steps(args)) - range.first, 0), clear_end = item.visible_end(args, 0);
    each_query<8, 4>(args, item, 4 * group + warp, lane, [&](const Query& query, int n) {
      stage_query(args, item, query, n, shared + QUERIES_AT, (Row*)(shared + WEIGHTS_AT));
    });
    fence_proxy_async();
    bar_sync(CONSUMERS, 256);
    own.take_rows();
    bar_sync(CONSUMERS, 256);
    Output o;
#pragma unroll
    for (int i = 0; i < HALF / 2; i++) o[i] = 0.0f;

    // The own dimensions, whose other reader, of scores, was there before. Those of the last tile make room for the output.
    auto release = [&](int tile) {
      wgmma_fence_operand(o);
      if (lane == 0 && tile + 1 < count) mbarrier_arrive(empty + 2 * ((before + tile) % STAGES) + group);
    };
    auto stage_at = [&](int tile) { return (before + tile) % STAGES; };
    auto attend_others = [&](int tile) {  // values of a tile whose weights are the other's, on their way
      float by[2];
      const bool behind = own.await_reference(by);
      own.rescale(o, behind, by);
      own.start_others_values(o, stage_at(tile));
    };
    // Half of an own tile's scores, values of the other's, whose weights come meanwhile, then the other half and values of the own one.
    // No product with the output is on its way when that is rescaled.
    auto attend_tile = [&](int tile, auto after_other) {
      constexpr bool AFTER_OTHER = decltype(after_other)::VALUE;
      const int first = (range.first + tile) * STEP, stage = stage_at(tile);
      float s[32], by[2];
      Weights p;
      const u32 turn = (u32)((before + tile) / STAGES & 1);
      auto await = [&](int quarter) {
        mbarrier_wait(full + 4 * stage + quarter, turn);
        fence_proxy_async();  // between stores of those that unpack, which the barrier has ordered before it, and products
      };
      await(0);
      own.start_rope_scores(s, stage);
      wgmma_wait<0>();
      own.scale_rope_scores(s, stage);
      own.template start_scores<0>(s, stage);
      await(1);
      own.template start_scores<1>(s, stage);
      if (AFTER_OTHER) {
        wgmma_wait<0>();
        wgmma_fence_operand(s);
        attend_others(tile - 1);
      }
      await(2);
      wgmma_fence_operand(s);
      wgmma_fence();
      own.template start_scores<2>(s, stage);
      await(3);
      own.template start_scores<3>(s, stage);
      if (AFTER_OTHER) {
        wgmma_wait<2>();
        release(tile - 1);
      }
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      const bool behind = own.weigh(s, stage, first, first + STEP <= clear_end, by, p);
      own.give(p);
      own.rescale(o, behind, by);
      own.start_values(o, p, stage);
      wgmma_wait<0>();
      release(tile);
    };
    int tile = group;
    if (group == 0 && count > 0) attend_tile(0, Bool<false>()), tile = 2;
    for (; tile < count; tile += 2) attend_tile(tile, Bool<true>());
    if (tile == count && count) {  // the last one is the other's
      attend_others(count - 1);
      wgmma_wait<0>();
      release(count - 1);
    }
    before += max_i32(count, 0);

    // -- what this block has of the item
#pragma unroll
    for (int r = 0; r < 2; r++) own.row_sum[r] += shfl_xor(own.row_sum[r], 1), own.row_sum[r] += shfl_xor(own.row_sum[r], 2);
    bar_sync(CONSUMERS, 256);
    float* sums = (float*)(shared + WEIGHTS_AT) + 2 * thread;
    if (group) sums[0] = own.row_sum[0], sums[1] = own.row_sum[1];
    bar_sync(CONSUMERS, 256);
    const i64 part = (i64)range.part(args, block_index()) * ROWS;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int n = own.row_of(r);
      if (group == 0 && t == 0 && n < item.count)
        args.states[2 * (part + n)] = own.reference[r], args.states[2 * (part + n) + 1] = own.row_sum[r] + sums[r];
    }
    float* const to = args.parts + part * LD + group * HALF;
    if (STAGED_OUTPUT && count > 0) {
      const u32 at = (before - 1) % STAGES * STAGE + group * (CHUNKS / 2) * CHUNK + warp * SCRATCH;
      leave_output(to, o, 16 * warp, item.count, shared + RING_AT + at, lane);
    } else {
      leave_output_directly(to, o, 16 * warp, item.count, lane);
    }
    sync_warp();
    if (lane == 0 && count > 0) mbarrier_arrive(empty + 2 * ((before - 1) % STAGES) + group);
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_OPERANDS(shared);
  const int lane = thread_index() & 31, warp = shfl(thread_index() / 32, 0);
  u64 *full = (u64*)(shared + BARRIERS_AT), *empty = full + 4 * STAGES;  // [stage, quarter of the dimensions] and [stage, half of them]
  fill_packed_levels<R_LEVELS, THREADS>(args.rope_levels, shared + R_LEVELS_AT);
  if (thread_index() == 0) {
    for (int i = 0; i < 6 * STAGES; i++) mbarrier_init(full + i, 4);
    fence_mbarrier_init();
  }
  pdl_wait();
  sync_threads();
  if (warp >= 8) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    const LevelTable levels = {0};
    const PackedRopeLevels rope_levels = {shared_address(shared + R_LEVELS_AT)};
    Producer<STAGES>(args, shared + RING_AT, (TokenScales*)(shared + SCALES_AT), full, empty, warp - 8, lane).run(levels, rope_levels);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    attend_tiles(args, shared, full, empty, warp / 4, lane);
  }
}
HOST_TESTABLE(attend, LatentArgs)
