// Attention of few rows (queries x heads) on packed latents: scores from latents and rope parts, values from the same latents.
//
// A block has up to 16 rows of a sequence and some of its tokens. Two teams of four warps take turns with them, a step of 32 at a time;
// warps of their own have the copy engine bring each team's steps to its ring in shared memory. Each of a team's warps has a quarter
// of the latent's dimensions, for scores and for values: it unpacks their codes once, in the order in which products of scores
// want them, and turns them around for products of values. A warp's scores are sums over its own dimensions; they are added
// up in shared memory, 8 tokens by each warp, which makes weights of them for all.
#include "common/hopper.cuh"
#include "common/numbers.cuh"

constexpr int ROWS = 16, WARPS = 4, TEAM = 32 * WARPS, THREADS = (TEAMS + 1) * TEAM;  // one more: warps that copy
constexpr int STEP = 32, ITEM_COST = 4, PARTS = 1;
#include "latent/codes.cuh"
#include "latent/merge.cuh"
#include "latent/queries.cuh"

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int OWN = S / WARPS;  // slices of a warp
constexpr bool BY_PAIRS = L_KIND == LLOYD && L_BITS == 4;  // levels are looked up, those of two codes at a time
constexpr float SHIFT = BY_PAIRS ? 0.0f : OFFSET;  // what the operands have too much
// Entries of the table of levels: of two codes of 4 bits, of a byte with a code of 6 bits and anything above it, of a code.
constexpr int ENTRIES = BY_PAIRS ? PAIR_ENTRIES : L_LEVELS && L_BITS == 6 ? 256 : L_LEVELS;
constexpr bool HELD = BY_PAIRS;  // queries stay in registers, of which other formats leave too few
constexpr int R_COPIES = 32;  // of a level, so that lanes do not wait for one another
// What is done between a barrier and the answer whether a reference is behind, by measurement: slices that are turned, weights read.
constexpr int TURNED_EARLY = L_LEVELS ? 0 : min_of(R_KIND == RAW ? 3 : 4, OWN);
constexpr bool WEIGHED_EARLY = !L_LEVELS && R_KIND != RAW;
constexpr int GRAIN = BLOCK_SIZE % STEP ? 16 : STEP;  // tokens that lie side by side

struct __attribute__((aligned(16))) Row { float start, unit, rope_unit; i32 visible_end; };

// A stage of the ring: codes of latents, of rope parts, then their fields.
constexpr int R_CODES_AT = 2 * L_TILE, L_FIELDS_AT = R_CODES_AT + 2 * R_TILE, R_FIELDS_AT = L_FIELDS_AT + 2 * STEP;
constexpr int STAGE = R_FIELDS_AT + (R_KIND == RAW ? 0 : 2 * STEP);
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40, CONSUMERS = 1 + TEAMS;  // of a thread; a named barrier
// Shared memory of a block, then of each team. Scores: [8 tokens, warp that summed them, 8 rows, lane].
constexpr int SCORE_BYTES = 4 * WARPS * 2 * 32 * 8;
constexpr int QUERIES_AT = 0, ROPE_AT = QUERIES_AT + S * 512, ROWS_AT = ROPE_AT + ROPE_SLICES * 512, ROUTE_AT = ROWS_AT + 16 * ROWS;
constexpr int R_LEVELS_AT = ROUTE_AT + 64, LEVELS_AT = R_LEVELS_AT + 4 * R_COPIES * R_LEVELS;
constexpr int SCRATCH_AT = LEVELS_AT + 128 * ENTRIES;  // behind levels, a copy for every lane
constexpr int TEAMS_AT = SCRATCH_AT + (TEAMS > 1 ? 64 * LD : 0);  // behind the output of a team
constexpr int SCORES_AT = 0, WEIGHTS_AT = SCORE_BYTES, MOST_AT = WEIGHTS_AT + 1024, REFERENCES_AT = MOST_AT + 4 * 4 * ROWS;
constexpr int BARRIERS_AT = REFERENCES_AT + 4 * ROWS, BEHIND_AT = BARRIERS_AT + 80, RING_AT = BARRIERS_AT + 96;
constexpr int TEAM_BYTES = RING_AT + STAGES * STAGE, ALL = TEAMS_AT + TEAMS * TEAM_BYTES;
constexpr float MOST_WEIGHT = 256.0f, LEAST_SCALE = 9.094947e-13f;  // by the reference there is; 2^-40
constexpr float LOWEST = -1e30f;  // the reference before the first score: any is far above it
static_assert(sizeof(Route) <= 64 && 16 * STAGES <= 80, "what there is room for");
static_assert(ALL == SHARED, "the launcher counts shared memory as this file does");

#include "latent/narrow_codes.cuh"

// ---- queries ------------------------------------------------------------------------------------------------------

// Row n of a block, by one warp, to fragments. Rows beyond the last are zeros and see nothing.
DEVICE void stage_query(const LatentArgs& args, const Item& item, const Query& query, int n, u8* shared) {
  auto place = [&](int at) { return at / 16 * 512 + (4 * (n % 8) + at % 8 / 2) * 16 + (n / 8 + 2 * (at % 16 / 8)) * 4 + at % 2 * 2; };
  float sum = 0.0f;
  query.latent_operand(
      [&](int at, u32 bits) {
        *(u16*)(shared + QUERIES_AT + place(at)) = (u16)bits;
        sum += f16_to_f32(bits);
      },
      [&](int at, u32 bits) {
        *(u32*)(shared + QUERIES_AT + place(at)) = bits;
        sum += f16_to_f32(bits & 0xFFFF) + f16_to_f32(bits >> 16);
      });
  query.rope_operand([&](int at, u32 bits) { *(u16*)(shared + ROPE_AT + place(at)) = (u16)bits; });
  if (SHIFT != 0.0f)
#pragma unroll
    for (int d = 16; d; d >>= 1) sum += shfl_xor(sum, d);
  if (query.lane == 0)
    ((Row*)(shared + ROWS_AT))[n] = {SHIFT == 0.0f ? 0.0f : -SHIFT * sum, query.latent_unit() * args.scale, query.rope_unit() * args.scale,
                                     query.real ? item.visible_end(args, n) : 0};
}

// ---- the ring -----------------------------------------------------------------------------------------------------

// A warp that has the copy engine bring a team's steps to its ring, a lane for every region of the pages.
DEVICE void bring_steps(const LatentArgs& args, u8* ring, u64* full, u64* empty, int team, int lane) {
  constexpr int REGIONS = R_KIND == RAW ? 3 : 4, GRAINS = STEP / GRAIN, AHEAD = 32 / GRAINS;
  constexpr u32 GRAIN_BYTES = GRAIN / 16 * (L_TILE + R_TILE) + 2 * GRAIN + (R_KIND == RAW ? 0 : 2 * GRAIN);
  const int from = lane == 0 ? 0 : lane == 1 ? R_CODES : lane == 2 ? L_FIELDS : R_FIELDS;  // the region in a page
  const int to = lane == 0 ? 0 : lane == 1 ? R_CODES_AT : lane == 2 ? L_FIELDS_AT : R_FIELDS_AT;  // in a stage
  const int each = lane == 0 ? L_TILE / 16 : lane == 1 ? R_TILE / 16 : 2;  // bytes of a token
  int slot = 0;
  u32 phase = 1;
  Walk walk(args, block_index(), lane);
  Range range;
  while (walk.next(args, range)) {
    const Item item(args, range.sequence, range.tile);
    const int last = min_i32(range.last, item.steps(args));
    const i32* const table = args.block_table + (i64)item.sequence * args.table_stride;
    for (int base = range.first + team; base < last; base += AHEAD * TEAMS) {
      const int token = (base + lane / GRAINS * TEAMS) * STEP + lane % GRAINS * GRAIN;
      const i32 pages = base + lane / GRAINS * TEAMS < last && token < item.length ? ldg_i32(table + (u32)token / BLOCK_SIZE) : -1;
      for (int i = 0; i < AHEAD && base + i * TEAMS < last; i++) {
        i32 found[GRAINS];
        u32 bytes = 0;
#pragma unroll
        for (int n = 0; n < GRAINS; n++) found[n] = shfl(pages, i * GRAINS + n), bytes += found[n] < 0 ? 0 : GRAIN_BYTES;
        mbarrier_wait(empty + slot, phase);
        if (lane == 0) mbarrier_arrive_expect_tx(full + slot, bytes);
        sync_warp();
#pragma unroll
        for (int n = 0; n < GRAINS; n++) {
          const int place = (u32)((base + i * TEAMS) * STEP + n * GRAIN) % BLOCK_SIZE;
          if (lane < REGIONS && found[n] >= 0)
            cp_async_bulk(ring + slot * STAGE + to + n * GRAIN * each, args.pages + found[n] * args.page_stride + from + place * each,
                          GRAIN * each, full + slot);
        }
        slot++;
        if (slot == STAGES) slot = 0, phase ^= 1;
      }
    }
  }
}

// ---- attention ----------------------------------------------------------------------------------------------------

typedef float Fragment[4];

KERNEL(THREADS, 1) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(shared);
  const int team = shfl(thread_index() / TEAM, 0), warp = shfl(thread_index() / 32 % WARPS, 0), lane = thread_index() & 31;
  const int g = lane >> 2, t = lane & 3;
  u8* const own = shared + TEAMS_AT + (team < TEAMS ? team : warp % TEAMS) * TEAM_BYTES;
  u64* const full = (u64*)(own + BARRIERS_AT);
  u64* const empty = full + STAGES;
  auto sync_team = [&] { bar_sync(1 + team, TEAM); };
  fill_levels<R_LEVELS, R_COPIES, THREADS>(args.rope_levels, shared + R_LEVELS_AT);
  if (team < TEAMS && warp == 0 && lane == 0) {
    for (int i = 0; i < 2 * STAGES; i++) mbarrier_init(full + i, 1);
    *(i32*)(own + BEHIND_AT) = -1;
    fence_mbarrier_init();
  }
  if constexpr (BY_PAIRS) {
    fill_pairs(args.table, shared + LEVELS_AT, WARPS * team + warp, lane);
  } else {
    for (int i = thread_index(); i < 32 * ENTRIES; i += THREADS)
      ((u32*)(shared + LEVELS_AT))[i] = f32_to_f16(args.latent_levels[i / 32 % at_least_one(L_LEVELS)]);
  }
  pdl_wait();
  sync_threads();
  if (team == TEAMS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp < TEAMS) bring_steps(args, own + RING_AT, full, empty, warp, lane);
    return;
  }
  setmaxnreg_inc<CONSUMER_REGISTERS>();
  auto sync_consumers = [&] { bar_sync(CONSUMERS, TEAMS * TEAM); };
  const LevelTable levels = {shared_address(shared + LEVELS_AT) + 4 * lane};
  const RopeLevels<R_COPIES> rope_levels = {shared_address(shared + R_LEVELS_AT) + 4 * (lane % R_COPIES)};
  Words2* const scores = (Words2*)(own + SCORES_AT);
  float* const most = (float*)(own + MOST_AT);
  int slot = 0;
  u32 phase = 0;

  Route* const route = (Route*)(shared + ROUTE_AT);
  if (team == 0 && warp == 0) {
    const Walk walk(args, block_index(), lane);
    if (lane == 0) route->walk = walk;
  }
  while (true) {
    sync_consumers();
    if (thread_index() == 0) route->go_on(args);
    sync_consumers();
    const Range range = route->common_range();
    if (range.sequence < 0) return;
    const Item item(args, range.sequence, range.tile);
    const int last = shfl(min_i32(range.last, item.steps(args)), 0);
    each_query<TEAMS * WARPS, ROWS / (TEAMS * WARPS)>(args, item, WARPS * team + warp, lane,
                                                      [&](const Query& query, int n) { stage_query(args, item, query, n, shared); });
    sync_consumers();

    auto query_of = [&](int i) { return *(const Words4*)(shared + QUERIES_AT + (warp * OWN + i) * 512 + 16 * lane); };
    Words4 queries[OWN];  // of the own dimensions
    if constexpr (HELD)
#pragma unroll
      for (int i = 0; i < OWN; i++) queries[i] = query_of(i);
    const Row* const rows = (const Row*)(shared + ROWS_AT) + g;
    const float unit[2] = {rows[0].unit, rows[8].unit};
    const float rope_unit[2] = {BF16_ROPE ? R_UNIT * args.scale : rows[0].rope_unit,
                                BF16_ROPE ? R_UNIT * args.scale : rows[8].rope_unit};
    const float start[2] = {SHIFT == 0.0f ? 0.0f : rows[0].start, SHIFT == 0.0f ? 0.0f : rows[8].start};
    const int visible_end[2] = {rows[0].visible_end, rows[8].visible_end};
    const int clear_end = item.visible_end(args, 0);
    float reference[2] = {LOWEST, LOWEST}, row_sum[2] = {0.0f, 0.0f};
    // The 8 tokens that this warp weighs, here those of odd lanes and there those of even ones, whose units of 16 bytes fill banks.
    const int octet = warp ^ (lane & 1);
    Fragment o[2 * OWN], weight_sum;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      weight_sum[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < 2 * OWN; j++) o[j][i] = 0.0f;
    }

    for (int step = range.first + team; step < last; step += TEAMS) {
      const u8* stage = own + RING_AT + slot * STAGE;
      mbarrier_wait(full + slot, phase);
      OwnCodes codes[2];
#pragma unroll
      for (int half = 0; half < 2; half++) codes[half].load(stage + half * L_TILE, lane, warp);
      // -- scores of rope parts of 8 tokens: others have the time that these wait for one another
      const RopeOperand rope(stage + R_CODES_AT + warp / 2 * R_TILE, lane, octet % 2);
      Fragment r = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < ROPE_SLICES; i++) {
        const Words4 q = *(const Words4*)(shared + ROPE_AT + 512 * i + 16 * lane);
        u32 b[2];
        rope.slice(i, args.table, rope_levels, b);
        if (BF16_ROPE) mma_bf16(r, q.x, q.y, q.z, q.w, b[0], b[1]);
        else mma_f16(r, q.x, q.y, q.z, q.w, b[0], b[1]);
      }
      // -- scores of the own dimensions, of all tokens
      u32 kept[2][OWN][4];
      Fragment s[4];
#pragma unroll
      for (int j = 0; j < 4; j++) s[j][0] = 0.0f, s[j][1] = 0.0f, s[j][2] = 0.0f, s[j][3] = 0.0f;
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const Words4 q = HELD ? queries[i] : query_of(i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32(&a)[4] = kept[half][i];
          codes[half].matrices(i, args.table, levels, a);
          mma_f16(s[2 * half], q.x, q.y, q.z, q.w, a[0], a[2]);
          mma_f16(s[2 * half + 1], q.x, q.y, q.z, q.w, a[1], a[3]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int n = 0; n < 2; n++)
          scores[((j * WARPS + warp) * 2 + n) * 32 + lane] = {as_bits(s[j][2 * n]), as_bits(s[j][2 * n + 1])};
      const int token = step * STEP + 8 * octet + 2 * t;
      const u32 fields = *(const u32*)(stage + L_FIELDS_AT + 2 * (8 * octet + 2 * t));
      const u32 rope_fields = R_KIND == RAW ? 0 : *(const u32*)(stage + R_FIELDS_AT + 2 * (8 * octet + 2 * t));
      float value_scale[2], rope_scale[2];
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const u32 field = token + b < item.length ? fields >> (16 * b) & 0xFFFF : 0;
        value_scale[b] = marked_scale(field);
        rope_scale[b] = R_KIND == RAW ? 1.0f : marked_scale(rope_fields >> (16 * b) & 0xFFFF);
      }
      sync_team();
      // -- the stage is free, all sums are there
      if (warp == 0 && lane == 0) mbarrier_arrive(empty + slot);
      slot++;
      if (slot == STAGES) slot = 0, phase ^= 1;
      const bool clear = (step + 1) * STEP <= clear_end;
      float x[4];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float low[WARPS], high[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const Words2 sums = scores[((octet * WARPS + w) * 2 + n) * 32 + lane];
          low[w] = as_float(sums.x), high[w] = as_float(sums.y);
        }
        // Of what follows, each waits for the one before it: there is time to turn levels, those of the second half of the tokens.
#pragma unroll
        for (int i = n * OWN / 2; i < (n + 1) * OWN / 2; i++)
#pragma unroll
          for (int m = 0; m < 4; m++) kept[1][i][m] = movmatrix_trans(kept[1][i][m]);
#pragma unroll
        for (int w = WARPS / 2; w; w /= 2)
#pragma unroll
          for (int i = 0; i < w; i++) low[i] += low[i + w], high[i] += high[i + w];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float products = i ? high[0] : low[0];
          x[2 * n + i] = (SHIFT == 0.0f ? products : products + start[n]) * (value_scale[i] * unit[n]);
          x[2 * n + i] += r[2 * n + i] * (rope_scale[i] * rope_unit[n]);
          if (!clear && token + i >= visible_end[n]) x[2 * n + i] = MINUS_INFINITY;
        }
      }
      // -- weights of 8 tokens, by the reference so far: it seldom changes. Whether none is large.
      float sum[2];
      auto weigh = [&] {
        bool fine = true;
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float p = exp2_approx(x[2 * n] - reference[n]), q = exp2_approx(x[2 * n + 1] - reference[n]);
          sum[n] = p + q;
          // What is not seen weighs nothing, even if it is not a number.
          const float first = p > 0.0f ? p * value_scale[0] : p, second = q > 0.0f ? q * value_scale[1] : q;
          fine = fine && first <= MOST_WEIGHT && second <= MOST_WEIGHT;
          *(u32*)(own + WEIGHTS_AT + warp / 2 * 512 + 16 * lane + octet % 2 * 8 + 4 * n) = pack_f16x2(first, second);
        }
        return fine;
      };
      const bool behind = !weigh();
      i32* const last_behind = (i32*)(own + BEHIND_AT);  // the last step in which a reference was
      if (behind) *last_behind = step;
      sync_team();
      const int behind_at = *last_behind;
      auto weights_of = [&](int half) { return *(const Words4*)(own + WEIGHTS_AT + half * 512 + 16 * lane); };
      Words4 p;
      if (WEIGHED_EARLY) p = weights_of(0);
#pragma unroll
      for (int i = 0; i < TURNED_EARLY; i++)
#pragma unroll
        for (int m = 0; m < 4; m++) kept[0][i][m] = movmatrix_trans(kept[0][i][m]);
      if (shfl(behind_at, 0) == step) {
        float top[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
          top[n] = max_f32(x[2 * n] + log2_approx(max_f32(value_scale[0], LEAST_SCALE)),
                           x[2 * n + 1] + log2_approx(max_f32(value_scale[1], LEAST_SCALE)));
          top[n] = max_f32(top[n], shfl_xor(top[n], 1));
          top[n] = max_f32(top[n], shfl_xor(top[n], 2));
          if (t == 0) most[warp * ROWS + g + 8 * n] = top[n];
        }
        sync_team();
        float by[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float* all = most + g + 8 * n;
          const float wanted = max_f32(max_f32(all[0], all[ROWS]), max_f32(all[2 * ROWS], all[3 * ROWS]));
          const bool raise = wanted > reference[n] + RESCALE_THRESHOLD;
          by[n] = raise ? exp2_approx(reference[n] - wanted) : 1.0f;
          reference[n] = raise ? wanted : reference[n];
        }
        weigh();
#pragma unroll
        for (int n = 0; n < 2; n++) row_sum[n] *= by[n];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          weight_sum[i] *= by[i / 2];
#pragma unroll
          for (int j = 0; j < 2 * OWN; j++) o[j][i] *= by[i / 2];
        }
        sync_team();
        if (WEIGHED_EARLY) p = weights_of(0);
      }
#pragma unroll
      for (int n = 0; n < 2; n++) row_sum[n] += sum[n];
      // -- the weighted sum of the own dimensions
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (half || !WEIGHED_EARLY) p = weights_of(half);
        if (SHIFT != 0.0f) mma_f16(weight_sum, p.x, p.y, p.z, p.w, 0x3C003C00u, 0x3C003C00u);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          u32 b[4];
#pragma unroll
          for (int m = 0; m < 4; m++) b[m] = half || i < TURNED_EARLY ? kept[half][i][m] : movmatrix_trans(kept[half][i][m]);
          mma_f16(o[2 * i], p.x, p.y, p.z, p.w, b[0], b[1]);
          mma_f16(o[2 * i + 1], p.x, p.y, p.z, p.w, b[2], b[3]);
        }
      }
    }

    // -- what this block has of the item: the teams' sums by the highest of their references, added up by the first
#pragma unroll
    for (int n = 0; n < 2; n++) {
      row_sum[n] += shfl_xor(row_sum[n], 1), row_sum[n] += shfl_xor(row_sum[n], 2);
      if (t == 0) most[warp * ROWS + g + 8 * n] = row_sum[n];
      if (t == 0 && warp == 0) ((float*)(own + REFERENCES_AT))[g + 8 * n] = reference[n];
    }
    sync_consumers();
    auto references_of = [&](int i) { return (const float*)(shared + TEAMS_AT + i * TEAM_BYTES + REFERENCES_AT); };
    float highest[2], total[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      highest[n] = reference[n], total[n] = 0.0f;
#pragma unroll
      for (int i = 0; i < TEAMS; i++) highest[n] = max_f32(highest[n], references_of(i)[g + 8 * n]);
      auto factor_of = [&](float x) { return x == LOWEST ? 1.0f : exp2_approx(x - highest[n]); };  // nothing, or no number
#pragma unroll
      for (int i = 0; i < TEAMS; i++) {
        const float* all = (const float*)(shared + TEAMS_AT + i * TEAM_BYTES + MOST_AT) + g + 8 * n;
        total[n] += ((all[0] + all[ROWS]) + (all[2 * ROWS] + all[3 * ROWS])) * factor_of(references_of(i)[g + 8 * n]);
      }
      const float by = factor_of(reference[n]) * L_UNIT;
      const float less = SHIFT * weight_sum[2 * n];
#pragma unroll
      for (int j = 0; j < 2 * OWN; j++) o[j][2 * n] = (o[j][2 * n] - less) * by, o[j][2 * n + 1] = (o[j][2 * n + 1] - less) * by;
    }
#pragma unroll
    for (int i = 1; i < TEAMS; i++) {
      u8* const scratch = shared + SCRATCH_AT + (warp * 2 * OWN * 32 + lane) * 16;
      if (team == i)
#pragma unroll
        for (int j = 0; j < 2 * OWN; j++)
          *(Words4*)(scratch + 512 * j) = {as_bits(o[j][0]), as_bits(o[j][1]), as_bits(o[j][2]), as_bits(o[j][3])};
      sync_consumers();
      if (team == 0)
#pragma unroll
        for (int j = 0; j < 2 * OWN; j++) {
          const Words4 more = *(const Words4*)(scratch + 512 * j);
          o[j][0] += as_float(more.x), o[j][1] += as_float(more.y), o[j][2] += as_float(more.z), o[j][3] += as_float(more.w);
        }
      sync_consumers();
    }
    const i64 part = (i64)range.part(args, block_index()) * ROWS;
    if (team == 0)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        if (g + 8 * n >= item.count) continue;
        const i64 to = part + g + 8 * n;
        if (warp == 0 && t == 0)
          args.states[2 * to] = highest[n] == LOWEST ? MINUS_INFINITY : highest[n], args.states[2 * to + 1] = total[n];
#pragma unroll
        for (int j = 0; j < 2 * OWN; j++) {
          const int d = 16 * (warp * OWN) + 8 * j + 2 * t;
          const float low = o[j][2 * n], high = o[j][2 * n + 1];
          if (IN_BYTES) *(Words2*)(args.parts + to * LD + d) = {as_bits(low), as_bits(high)};
          else args.parts[to * LD + place_of(d)] = low, args.parts[to * LD + place_of(d + 1)] = high;
        }
      }
    sync_consumers();  // before the next item's queries
  }
}
HOST_TESTABLE(attend, LatentArgs)
