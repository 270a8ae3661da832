// Attention of few query rows (queries x heads) on packed latents: scores from latents and rope parts, values from the
// same latents.
//
// A work tile has up to 16 rows of a sequence. Eight consumer warps form two teams that alternate between KV blocks. Of
// the producer warpgroup, one warp per team issues bulk copies of KV blocks into the team's ring in shared memory, and
// one computes the scores of rope parts. The warps of a team divide the latent's dimensions equally, for scores and for
// values: each unpacks its codes once, in the operand order of the scores, and transposes them for the values. A warp's
// scores are partial sums over its own dimensions. Through shared memory, each warp adds up the scores of 8 tokens, and
// then computes these tokens' probabilities for the team.
#include "common/hopper.cuh"
#include "common/numbers.cuh"

constexpr int TEAMS = 2, WARPS = 4;  // WARPS: per team
constexpr int CONSUMER_WARPS = TEAMS * WARPS, THREADS = 32 * (CONSUMER_WARPS + 4);  // and the producer warpgroup
constexpr int TILE_COST = 8;
#include "latent/merge.cuh"
#include "latent/queries.cuh"
#include "latent/narrow_consumer.cuh"
#include "latent/narrow_rope.cuh"

constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;
constexpr int CONSUMERS = 1 + TEAMS, ATTENDING = 2 + 2 * TEAMS;  // named barriers; the others belong to the teams
static_assert(ROWS == 16 && KV_BLOCK == 32, "operands");
static_assert(sizeof(WorkRanges) <= ROPE_LEVELS_AT - RANGES_AT, "shared memory");

DEVICE void sync_consumers() { bar_sync(CONSUMERS, 32 * CONSUMER_WARPS); }
DEVICE void sync_attending() { bar_sync(ATTENDING, 32 * (CONSUMER_WARPS + TEAMS)); }  // consumers and rope scorers

// ---- queries --------------------------------------------------------------------------------------------------------

// One warp: stages row n of a work tile in fragment order. Rows beyond the last are zeros and see no tokens.
DEVICE void stage_query(const LatentArgs& args, const WorkTile& tile, const Query& query, int n, u8* shared) {
  auto place = [&](int at) {
    return at / 16 * 512 + (4 * (n % 8) + at % 8 / 2) * 16 + (n / 8 + 2 * (at % 16 / 8)) * 4 + at % 2 * 2;
  };
  u8* const latents = shared + QUERIES_AT;
  u8* const ropes = shared + ROPE_QUERIES_AT;
  float sum = 0.0f;
  query.latent_operand(
      [&](int at, u32 bits) {
        *(u16*)(latents + place(at)) = (u16)bits;
        sum += f16_to_f32(bits);
      },
      [&](int at, u32 bits) {
        *(u32*)(latents + place(at)) = bits;
        sum += sum_of_halves(bits);
      });
  query.rope_operand([&](int at, u32 bits) { *(u16*)(ropes + place(at)) = (u16)bits; });
  if (SHIFT != 0.0f)
    UNROLL_FOR (int d = 16; d; d >>= 1) sum += shfl_xor(sum, d);
  if (query.lane == 0)
    ((Row*)(shared + ROWS_AT))[n] = {SHIFT == 0.0f ? 0.0f : -SHIFT * sum, query.latent_unit() * args.scale,
        query.rope_unit() * args.scale, query.real ? tile.visible_end(args, n) : 0};
}

// ---- the ring -------------------------------------------------------------------------------------------------------

// The region of a page that one lane copies: codes of latents, codes of rope parts, or either's scales.
struct Region {
  int from, to;  // offsets in a page and in a stage
  int bytes;  // per token
};
DEVICE Region region_of(int lane) {
  auto choose = [&](int a, int b, int c, int d) { return lane < 2 ? (lane ? b : a) : (lane == 2 ? c : d); };
  return {choose(0, R_CODES, L_FIELDS, R_FIELDS), choose(0, ROPE_CODES_AT, LATENT_FIELDS_AT, ROPE_FIELDS_AT),
      choose(L_TILE / 16, R_TILE / 16, 2, 2)};
}

// One warp: copies the KV blocks of a team to its ring.
DEVICE void copy_kv_blocks(const LatentArgs& args, u8* ring, u64* full, u64* empty, int team, int lane) {
  constexpr int GRAIN = BLOCK_SIZE % KV_BLOCK ? 16 : KV_BLOCK;  // tokens that are contiguous in a page
  constexpr int REGIONS = R_KIND == RAW ? 3 : 4, GRAINS = KV_BLOCK / GRAIN, AHEAD = 32 / GRAINS;
  constexpr u32 GRAIN_BYTES = GRAIN / 16 * (L_TILE + R_TILE) + 2 * GRAIN + (R_KIND == RAW ? 0 : 2 * GRAIN);
  const Region region = region_of(lane);
  int slot = 0;
  u32 phase = 1;
  for (AnnouncedRanges ranges(args, lane, team == 0 && lane == 0); ranges.range.b >= 0; ranges.advance(args)) {
    const WorkRange& range = ranges.range;
    const WorkTile tile(args, range.b, range.tile);
    const int last = min_i32(range.last, tile.kv_blocks(args));
    const i32* const table = args.block_table + (i64)tile.sequence * args.table_stride;
    for (int base = range.first + team; base < last; base += AHEAD * TEAMS) {
      const int own = base + lane / GRAINS * TEAMS, token = own * KV_BLOCK + lane % GRAINS * GRAIN;
      const i32 pages = own < last && token < tile.length ? ldg_i32(table + (u32)token / BLOCK_SIZE) : -1;
      for (int i = 0; i < AHEAD && base + i * TEAMS < last; i++) {
        i32 found[GRAINS];
        u32 bytes = 0;
        UNROLL_FOR (int n = 0; n < GRAINS; n++)
          found[n] = shfl(pages, i * GRAINS + n), bytes += found[n] < 0 ? 0 : GRAIN_BYTES;
        mbarrier_wait(empty + slot, phase);
        if (lane == 0) mbarrier_arrive_expect_tx(full + slot, bytes);
        sync_warp();
        UNROLL_FOR (int n = 0; n < GRAINS; n++) {
          const int place = (u32)((base + i * TEAMS) * KV_BLOCK + n * GRAIN) % BLOCK_SIZE;
          if (lane < REGIONS && found[n] >= 0)
            cp_async_bulk(ring + slot * STAGE_BYTES + region.to + n * GRAIN * region.bytes,
                args.pages + found[n] * args.page_stride + region.from + place * region.bytes, GRAIN * region.bytes,
                full + slot);
        }
        slot++;
        if (slot == STAGES) slot = 0, phase ^= 1;
      }
    }
  }
}

// ---- results --------------------------------------------------------------------------------------------------------

// Rescales both teams' results to the higher of their maxima. Team 0 receives the sum of the outputs.
DEVICE void combine_teams(Consumer& own, float (&highest)[2], float (&total)[2]) {
  const int g = own.g, t = own.t;
  UNROLL_FOR (int n = 0; n < 2; n++) {
    own.row_sum[n] += shfl_xor(own.row_sum[n], 1), own.row_sum[n] += shfl_xor(own.row_sum[n], 2);
    if (t == 0) own.warp_max()[own.warp * ROWS + g + 8 * n] = own.row_sum[n];
    if (t == 0 && own.warp == 0) ((float*)(own.mine + ROW_MAX_AT))[g + 8 * n] = own.row_max[n];
  }
  sync_consumers();
  auto memory_of = [&](int i, int at) { return (const float*)(own.shared + TEAMS_AT + i * TEAM_BYTES + at); };
  UNROLL_FOR (int n = 0; n < 2; n++) {
    float& most = highest[n];
    most = own.row_max[n], total[n] = 0.0f;
    UNROLL_FOR (int i = 0; i < TEAMS; i++) most = max_f32(most, memory_of(i, ROW_MAX_AT)[g + 8 * n]);
    // A team without a maximum has seen no tokens, or NaN.
    auto factor_of = [&](float row_max) { return row_max == LOWEST ? 1.0f : exp2_approx(row_max - most); };
    UNROLL_FOR (int i = 0; i < TEAMS; i++) {
      const float* all = memory_of(i, WARP_MAX_AT) + g + 8 * n;
      const float sum = (all[0] + all[ROWS]) + (all[2 * ROWS] + all[3 * ROWS]);
      total[n] += sum * factor_of(memory_of(i, ROW_MAX_AT)[g + 8 * n]);
    }
    const float by = factor_of(own.row_max[n]) * L_UNIT, less = SHIFT * own.probability_sum[2 * n];
    UNROLL_FOR (int j = 0; j < 2 * OWN; j++) {
      Fragment& o = own.o[j];
      o[2 * n] = (o[2 * n] - less) * by, o[2 * n + 1] = (o[2 * n + 1] - less) * by;
    }
  }
  u8* const scratch = own.shared + OUTPUT_AT + (own.warp * 2 * OWN * 32 + own.lane) * 16;
  if (own.team == 1)
    UNROLL_FOR (int j = 0; j < 2 * OWN; j++) {
      const Fragment& o = own.o[j];
      *(Words4*)(scratch + 512 * j) = {as_bits(o[0]), as_bits(o[1]), as_bits(o[2]), as_bits(o[3])};
    }
  sync_consumers();
  if (own.team == 0)
    UNROLL_FOR (int j = 0; j < 2 * OWN; j++) {
      const Words4 more = *(const Words4*)(scratch + 512 * j);
      Fragment& o = own.o[j];
      o[0] += as_float(more.x), o[1] += as_float(more.y), o[2] += as_float(more.z), o[3] += as_float(more.w);
    }
  sync_consumers();
}

// Stores the results of a range.
DEVICE void store_results(const Results& to, Consumer& own) {
  float highest[2], total[2];
  combine_teams(own, highest, total);
  if (own.team == 0)
    UNROLL_FOR (int n = 0; n < 2; n++) {
      const int row_number = own.g + 8 * n;
      if (row_number >= to.tile.count) continue;
      if (own.warp == 0 && own.t == 0)
        to.put_state(row_number, highest[n] == LOWEST ? MINUS_INFINITY : highest[n], total[n]);
      const i64 row = to.row(row_number);
      const float by = to.factor(total[n]);
      UNROLL_FOR (int j = 0; j < OWN; j++) {
        const Fragment &low = own.o[2 * j], &high = own.o[2 * j + 1];
        const i64 at = row + 16 * (own.warp * OWN + j);
        const float x[2] = {low[2 * n] * by, low[2 * n + 1] * by}, y[2] = {high[2 * n] * by, high[2 * n + 1] * by};
        if (!to.whole) to.put_part(at, own.t, pack_f16x2(x[0], x[1]), pack_f16x2(y[0], y[1]));
        else if (IN_BYTES) to.put_all(at + 2 * own.t, x), to.put_all(at + 2 * own.t + 8, y);
        else to.put_all(at + 2 * own.t, {x[0], y[0]}), to.put_all(at + 2 * own.t + 8, {x[1], y[1]});
      }
    }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

DEVICE void attend_ranges(const LatentArgs& args, u8* shared, int team, int warp, int lane) {
  Consumer own(args, shared, team, warp, lane);
  WorkRanges* const common = (WorkRanges*)(shared + RANGES_AT);
  if (team == 0 && warp == 0) {
    const WorkRanges ranges(args, lane);
    if (lane == 0) *common = ranges;
  }
  while (true) {
    sync_attending();
    const WorkRange range = broadcast(common->range);
    if (range.b < 0) return;
    const WorkTile tile(args, range.b, range.tile);
    const int last = shfl(min_i32(range.last, tile.kv_blocks(args)), 0);
    each_query<CONSUMER_WARPS, 2>(args, tile, WARPS * team + warp, lane,
        [&](const Query& query, int n) { stage_query(args, tile, query, n, shared); });
    sync_attending();
    own.take_rows(tile);
    for (int i = range.first + team; i < last; i += TEAMS) own.attend(i);
    store_results(Results(args, range, tile), own);
    sync_consumers();  // before the range and its queries are overwritten
    if (thread_index() == 0) common->advance(args);
  }
}

// One warp: computes the scores of rope parts for a team.
DEVICE void score_ropes(const LatentArgs& args, u8* shared, int team, int lane) {
  RopeScorer own(args, shared, team, lane);
  while (true) {
    sync_attending();
    const WorkRange range = broadcast(((WorkRanges*)(shared + RANGES_AT))->range);
    if (range.b < 0) return;
    const int last = shfl(min_i32(range.last, WorkTile(args, range.b, range.tile).kv_blocks(args)), 0);
    sync_attending();
    own.take_rows();
    for (int i = range.first + team; i < last; i += TEAMS) own.attend();
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(shared);
  const int lane = thread_index() & 31, warp_of_block = shfl(thread_index() / 32, 0);
  const bool produces = warp_of_block >= CONSUMER_WARPS;
  const int warp = produces ? warp_of_block - CONSUMER_WARPS : warp_of_block % WARPS;
  const int team = produces ? warp % TEAMS : warp_of_block / WARPS;
  u8* const mine = shared + TEAMS_AT + team * TEAM_BYTES;
  u64* const full = (u64*)(mine + BARRIERS_AT);
  u64* const empty = full + STAGES;
  fill_rope_levels(args.rope_levels, shared + ROPE_LEVELS_AT);
  if (!produces && warp == 0 && lane == 0) {
    for (int i = 0; i < 2 * STAGES; i++) mbarrier_init(full + i, 1);
    *(i32*)(mine + RAISED_AT) = -1;
    fence_mbarrier_init();
  }
  fill_levels(args, shared + LEVELS_AT, warp_of_block, lane);
  pdl_wait();
  sync_threads();
  if (produces) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp < TEAMS) copy_kv_blocks(args, mine + RING_AT, full, empty, team, lane);
    else score_ropes(args, shared, team, lane);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    attend_ranges(args, shared, team, warp, lane);
  }
}
HOST_TESTABLE(attend, LatentArgs)
