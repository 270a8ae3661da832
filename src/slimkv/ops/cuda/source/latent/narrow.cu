// Attention of few rows (queries x heads) on packed latents: scores from latents and rope parts, values from the same latents.
//
// A block has up to 16 rows of a sequence and some of its tokens, a step of 32 at a time, which copies bring to a ring in shared
// memory. Each of its four warps has a quarter of the latent's dimensions, for scores and for values: it unpacks their codes once,
// in the order in which products of scores want them, and turns them around for products of values. A warp's scores are sums
// over its own dimensions; they are added up in shared memory, 8 tokens by each warp, which makes weights of them for all.
#include "common/hopper.cuh"
#include "common/numbers.cuh"

constexpr int ROWS = 16, WARPS = 4, THREADS = 128, STEP = 32, ITEM_COST = 4, PARTS = 1;
#include "latent/codes.cuh"
#include "latent/merge.cuh"
#include "latent/queries.cuh"

constexpr int OWN = S / WARPS;  // slices of a warp
constexpr bool BY_PAIRS = L_KIND == LLOYD && L_BITS == 4;  // levels are looked up, those of two codes at a time
constexpr float SHIFT = BY_PAIRS ? 0.0f : OFFSET;  // what the operands have too much
constexpr int R_COPIES = 8;  // of a level, so that lanes seldom wait for one another
constexpr int GRAIN = BLOCK_SIZE % STEP ? 16 : STEP;  // tokens that lie side by side

struct __attribute__((aligned(16))) Row { float start, unit, rope_unit; i32 visible_end; };

// A stage of the ring: codes of latents, of rope parts, then their fields.
constexpr int R_CODES_AT = 2 * L_TILE, L_FIELDS_AT = R_CODES_AT + 2 * R_TILE, R_FIELDS_AT = L_FIELDS_AT + 2 * STEP;
constexpr int STAGE = R_FIELDS_AT + (R_KIND == RAW ? 0 : 2 * STEP);
// Shared memory. Scores: [8 tokens, warp that summed them, 8 rows, lane].
constexpr int SCORE_BYTES = 4 * WARPS * 2 * 32 * 8;
constexpr int QUERIES_AT = 0, ROPE_AT = QUERIES_AT + S * 512, SCORES_AT = ROPE_AT + ROPE_SLICES * 512;
constexpr int WEIGHTS_AT = SCORES_AT + SCORE_BYTES, MOST_AT = WEIGHTS_AT + 1024, ROWS_AT = MOST_AT + 4 * 4 * ROWS;
constexpr int BARRIERS_AT = ROWS_AT + 16 * ROWS, ROUTE_AT = BARRIERS_AT + 32, BEHIND_AT = BARRIERS_AT + 80, RING_AT = BARRIERS_AT + 96;
constexpr int R_LEVELS_AT = RING_AT + STAGES * STAGE, PAIRS_AT = R_LEVELS_AT + 4 * R_COPIES * R_LEVELS;
constexpr int ALL = PAIRS_AT + (BY_PAIRS ? 128 * PAIR_ENTRIES : 0);
static_assert(ROUTE_AT + (int)sizeof(Route) <= BEHIND_AT, "what there is room for");
static_assert(L_LEVELS == 0, "latents that need no table");
static_assert(ALL == SHARED, "the launcher counts shared memory as this file does");

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

// ---- codes --------------------------------------------------------------------------------------------------------

// Word i of a lane, of N in a plane.
template <int N> DEVICE u32 plane_word(const u8* plane, int lane, int i) {
  constexpr int QUADS = N & ~3, PAIRS = N & ~1;
  if (i < QUADS) return *(const u32*)(plane + 16 * (32 * (i / 4) + lane) + 4 * (i % 4));
  if (i < PAIRS) return *(const u32*)(plane + 128 * QUADS + 8 * lane + 4 * (i - QUADS));
  return *(const u32*)(plane + 128 * PAIRS + 4 * lane);
}
// Slice s in a plane of W bits, value n in the low bits of nibble n.
template <int W, int SLICES> DEVICE u32 plane_nibbles(const u8* plane, int lane, int s) {
  const u32 word = plane_word<SLICES * W / 4>(plane, lane, s * W / 4);
  return W == 4 ? word : word >> (s * W % 4) & (W == 2 ? 0x33333333u : 0x11111111u);
}
// What Codes has as low(s) and high(s), from memory.
template <int BITS, int SLICES> DEVICE void read_codes(const u8* tile, int lane, int s, u32& low, u32& high) {
  constexpr int FIRST = BITS >= 4 ? 4 : (BITS >= 2 ? 2 : 1), REST = BITS - FIRST;
  constexpr int TWO_AT = 32 * SLICES * FIRST, ONE_AT = TWO_AT + (REST >= 2 ? 64 * SLICES : 0);
  high = 0;
  if constexpr (BITS == 8) {
    low = plane_word<2 * SLICES>(tile, lane, 2 * s), high = plane_word<2 * SLICES>(tile, lane, 2 * s + 1);
  } else {
    low = plane_nibbles<FIRST, SLICES>(tile, lane, s);
    if (BITS == 3) low |= plane_nibbles<1, SLICES>(tile + ONE_AT, lane, s) << 2;
    if (BITS > 4 && REST >= 2) high = plane_nibbles<2, SLICES>(tile + TWO_AT, lane, s);
    if (BITS > 4 && (REST & 1)) high |= plane_nibbles<1, SLICES>(tile + ONE_AT, lane, s) << (REST >= 2 ? 2 : 0);
  }
}

// Slice s of the rope parts of 8 tokens (the first or, `half`, the last of 16), which pages have dimensions x tokens.
DEVICE void rope_operand(const u8* tile, int s, int half, Table table, const RopeLevels<R_COPIES>& levels, int lane, u32 (&b)[2]) {
  if constexpr (R_KIND == RAW) {
    const Words2 w = *(const Words2*)(tile + 512 * s + 16 * lane + 8 * half);  // a token's dimensions g and g + 8
    b[0] = prmt(w.x, w.y, 0x5410), b[1] = prmt(w.x, w.y, 0x7632);
  } else {
    u32 word, v[4];
    if constexpr (R_BITS == 8) {
      word = plane_word<2 * ROPE_SLICES>(tile, lane, 2 * s + half);
    } else {
      Codes<(R_BITS < 8 ? R_BITS : 7), ROPE_SLICES, true> codes;
      codes.load(tile, lane);
      const u32 low = codes.low(s), high = codes.high(s);
      const u32 even = (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4, odd = (low >> 4 & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
      word = prmt(even, odd, half ? 0x7362 : 0x5140);
    }
    code_halves<R_KIND, 8, true>(word, word, table, levels, v);
    b[0] = v[0], b[1] = v[1];
  }
  b[0] = movmatrix_trans(b[0]), b[1] = movmatrix_trans(b[1]);
}

// Levels of all pairs of codes, a copy of each for every lane.
DEVICE void fill_pairs(Table table, u8* to, int warp, int lane) {
  for (int entry = 32 * warp; entry < PAIR_ENTRIES; entry += THREADS) {
    u32 first, second;
    code_bytes<LLOYD, 4>((u32)(entry + lane), 0, table, first, second);
    const u32 own = pack_f16x2((float)(first & 0xFF) - 63.5f, (float)(first >> 8 & 0xFF) - 63.5f);
#pragma unroll
    for (int i = 0; i < 32; i++) ((u32*)to)[32 * (entry + i) + lane] = shfl(own, i);
  }
}

// In units of powers of two: at least the base-2 logarithm of a field's scale, less one.
DEVICE float exponent_of(u32 field) { return as_float(0x4B000000u | field >> 10) - 8388648.0f; }

// ---- the ring -----------------------------------------------------------------------------------------------------

// Steps first .. last of a sequence, on their way to the ring. One lane of each of the first warps copies one region of the pages.
struct Loader {
  static constexpr int REGIONS = R_KIND == RAW ? 3 : 4;
  typedef i32 Pages[STEP / GRAIN];  // of a step
  const LatentArgs& args;
  const i32* pages;  // of the sequence
  int length, at, last;
  const int lane;
  const bool copies;
  const int from, to, each;  // the region in a page and in a stage, bytes of a token
  Pages ahead;               // of the next step; a register of the lane, for which nobody waits before it is used

  DEVICE_MEMBER Loader(const LatentArgs& args_, const Item& item, int first, int last_, int warp, int lane_)
      : args(args_), pages(args_.block_table + (i64)item.sequence * args_.table_stride), length(item.length), at(first), last(last_),
        lane(lane_), copies(warp < REGIONS), from(warp == 0 ? 0 : warp == 1 ? R_CODES : warp == 2 ? L_FIELDS : R_FIELDS),
        to(warp == 0 ? 0 : warp == 1 ? R_CODES_AT : warp == 2 ? L_FIELDS_AT : R_FIELDS_AT),
        each(warp == 0 ? L_TILE / 16 : warp == 1 ? R_TILE / 16 : 2) {}
  DEVICE_MEMBER void look(int step, Pages& found) const {
#pragma unroll
    for (int i = 0; i < STEP / GRAIN; i++) {
      const int token = step * STEP + i * GRAIN;
      found[i] = step < last && token < length ? ldg_i32(pages + (u32)token / BLOCK_SIZE) : -1;
    }
  }
  DEVICE_MEMBER void copy(int step, const Pages& found, u8* stage, u64* barrier) const {
    if (from == 0) {  // announces all regions
      constexpr u32 ALL_REGIONS = GRAIN / 16 * (L_TILE + R_TILE) + 2 * GRAIN + (R_KIND == RAW ? 0 : 2 * GRAIN);
      u32 bytes = 0;
#pragma unroll
      for (int i = 0; i < STEP / GRAIN; i++) bytes += found[i] < 0 ? 0 : ALL_REGIONS;
      mbarrier_arrive_expect_tx(barrier, bytes);
    }
#pragma unroll
    for (int i = 0; i < STEP / GRAIN; i++) {
      if (found[i] < 0) continue;
      const int place = (u32)(step * STEP + i * GRAIN) % BLOCK_SIZE;
      cp_async_bulk(stage + to + i * GRAIN * each, args.pages + found[i] * args.page_stride + from + place * each, GRAIN * each, barrier);
    }
  }
  // The first ones, a lane each, so that page numbers are waited for once.
  DEVICE_MEMBER void begin(u8* ring, u64* full, int slot) {
    if (copies && lane < STAGES) {
      const int step = at + lane, place = slot + lane < STAGES ? slot + lane : slot + lane - STAGES;
      Pages found;
      look(step, found);
      if (step < last) copy(step, found, ring + place * STAGE, full + place);
    }
    at += STAGES;
    if (copies && lane == 0) look(at, ahead);
  }
  DEVICE_MEMBER void load(u8* stage, u64* barrier) {
    if (!copies || lane || at >= last) return;
    copy(at, ahead, stage, barrier);
    at++;
    look(at, ahead);
  }
};

// ---- attention ----------------------------------------------------------------------------------------------------

typedef float Fragment[4];

KERNEL(THREADS, RESIDENT) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(shared);
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
  u64* const full = (u64*)(shared + BARRIERS_AT);
  fill_levels<R_LEVELS, R_COPIES, THREADS>(args.rope_levels, shared + R_LEVELS_AT);
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES; i++) mbarrier_init(full + i, 1);
    *(i32*)(shared + BEHIND_AT) = -1;
    fence_mbarrier_init();
  }
  if constexpr (BY_PAIRS) fill_pairs(args.table, shared + PAIRS_AT, warp, lane);
  pdl_wait();
  sync_threads();
  const LevelTable levels = {shared_address(shared + PAIRS_AT) + 4 * lane};
  const RopeLevels<R_COPIES> rope_levels = {shared_address(shared + R_LEVELS_AT) + 4 * (lane % R_COPIES)};
  Words2* const scores = (Words2*)(shared + SCORES_AT);
  float* const most = (float*)(shared + MOST_AT);
  int slot = 0;
  u32 phase = 0;

  Route* const route = (Route*)(shared + ROUTE_AT);
  if (warp == 0) {
    const Walk walk(args, block_index(), lane);
    if (lane == 0) route->walk = walk;
  }
  while (true) {
    sync_threads();
    if (thread_index() == 0) route->go_on(args);
    sync_threads();
    const Range range = route->common_range();
    if (range.sequence < 0) return;
    const Item item(args, range.sequence, range.tile);
    const int last = shfl(min_i32(range.last, item.steps(args)), 0);
    Loader loader(args, item, range.first, last, warp, lane);
    loader.begin(shared + RING_AT, full, slot);
    each_query<WARPS, ROWS / WARPS>(args, item, warp, lane, [&](const Query& query, int n) { stage_query(args, item, query, n, shared); });
    sync_threads();

    Words4 queries[OWN];  // of the own dimensions
#pragma unroll
    for (int i = 0; i < OWN; i++) queries[i] = *(const Words4*)(shared + QUERIES_AT + (warp * OWN + i) * 512 + 16 * lane);
    const Row row[2] = {((const Row*)(shared + ROWS_AT))[g], ((const Row*)(shared + ROWS_AT))[g + 8]};
    const int clear_end = item.visible_end(args, 0);
    float reference[2] = {MINUS_INFINITY, MINUS_INFINITY}, row_sum[2] = {0.0f, 0.0f};
    Fragment o[2 * OWN], weight_sum;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      weight_sum[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < 2 * OWN; j++) o[j][i] = 0.0f;
    }

    for (int step = range.first; step < last; step++) {
      const u8* stage = shared + RING_AT + slot * STAGE;
      mbarrier_wait(full + slot, phase);
      // -- scores of the own dimensions, of all tokens
      Fragment s[4];
#pragma unroll
      for (int j = 0; j < 4; j++) s[j][0] = 0.0f, s[j][1] = 0.0f, s[j][2] = 0.0f, s[j][3] = 0.0f;
      u32 kept[2][OWN][4];
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const Words4 q = queries[i];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 low, high, a[4];
          if constexpr (L_BITS == 4 && OWN % 4 == 0) {
            const Words4 w = *(const Words4*)(stage + half * L_TILE + 16 * (32 * (warp * OWN / 4 + i / 4) + lane));
            low = i % 4 == 0 ? w.x : i % 4 == 1 ? w.y : i % 4 == 2 ? w.z : w.w, high = 0;
          } else {
            read_codes<L_BITS, S>(stage + half * L_TILE, lane, warp * OWN + i, low, high);
          }
          if constexpr (BY_PAIRS) a[0] = levels.at(low, 0), a[1] = levels.at(low, 2), a[2] = levels.at(low, 1), a[3] = levels.at(low, 3);
          else latent_matrices(low, high, args.table, levels, a);
#pragma unroll
          for (int m = 0; m < 4; m++) kept[half][i][m] = a[m];
          mma_f16(s[2 * half], q.x, q.y, q.z, q.w, a[0], a[2]);
          mma_f16(s[2 * half + 1], q.x, q.y, q.z, q.w, a[1], a[3]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int n = 0; n < 2; n++) scores[((j * WARPS + warp) * 2 + n) * 32 + lane] = {as_bits(s[j][2 * n]), as_bits(s[j][2 * n + 1])};
      // -- those of rope parts of 8 tokens, and their fields
      Fragment r = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < ROPE_SLICES; i++) {
        const Words4 q = *(const Words4*)(shared + ROPE_AT + 512 * i + 16 * lane);
        u32 b[2];
        rope_operand(stage + R_CODES_AT + warp / 2 * R_TILE, i, warp % 2, args.table, rope_levels, lane, b);
        if (BF16_ROPE) mma_bf16(r, q.x, q.y, q.z, q.w, b[0], b[1]);
        else mma_f16(r, q.x, q.y, q.z, q.w, b[0], b[1]);
      }
      const int token = step * STEP + 8 * warp + 2 * t;
      const u32 fields = *(const u32*)(stage + L_FIELDS_AT + 2 * (8 * warp + 2 * t));
      const u32 rope_fields = R_KIND == RAW ? 0 : *(const u32*)(stage + R_FIELDS_AT + 2 * (8 * warp + 2 * t));
      float value_scale[2], rope_scale[2], exponent[2];
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const u32 field = token + b < item.length ? fields >> (16 * b) & 0xFFFF : 0;
        value_scale[b] = marked_scale(field), exponent[b] = exponent_of(field);
        rope_scale[b] = R_KIND == RAW ? 1.0f : marked_scale(rope_fields >> (16 * b) & 0xFFFF);
      }
      sync_threads();
      // -- the stage is free, all sums are there
      loader.load((u8*)stage, full + slot);
      slot++;
      if (slot == STAGES) slot = 0, phase ^= 1;
      const bool clear = (step + 1) * STEP <= clear_end;
      float x[4], top[2];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float low[WARPS], high[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const Words2 sums = scores[((warp * WARPS + w) * 2 + n) * 32 + lane];
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
          float& own = x[2 * n + i];
          own = ((i ? high[0] : low[0]) + row[n].start) * (value_scale[i] * row[n].unit) + r[2 * n + i] * (rope_scale[i] * row[n].rope_unit);
          if (!clear && token + i >= row[n].visible_end) own = MINUS_INFINITY;
        }
      }
      // -- weights of 8 tokens, by the reference so far: it seldom changes
      bool behind = false;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        top[n] = max_f32(x[2 * n] + exponent[0], x[2 * n + 1] + exponent[1]);
        behind = behind || top[n] > reference[n] + RESCALE_THRESHOLD;
      }
      float sum[2];
      auto weigh = [&] {
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float shift = reference[n] == MINUS_INFINITY ? 0.0f : reference[n];
          const float p = exp2_approx(x[2 * n] - shift), q = exp2_approx(x[2 * n + 1] - shift);
          sum[n] = p + q;
          // What is not seen weighs nothing, even if it is not a number.
          *(u32*)(shared + WEIGHTS_AT + warp / 2 * 512 + 16 * lane + warp % 2 * 8 + 4 * n) =
              pack_f16x2(p > 0.0f ? p * value_scale[0] : p, q > 0.0f ? q * value_scale[1] : q);
        }
      };
      weigh();
      i32* const last_behind = (i32*)(shared + BEHIND_AT);  // the last step in which a reference was
      if (behind) *last_behind = step;
      sync_threads();
      if (shfl(*last_behind, 0) == step) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
          top[n] = max_f32(top[n], shfl_xor(top[n], 1));
          top[n] = max_f32(top[n], shfl_xor(top[n], 2));
          if (t == 0) most[warp * ROWS + g + 8 * n] = top[n];
        }
        sync_threads();
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
        sync_threads();
      }
#pragma unroll
      for (int n = 0; n < 2; n++) row_sum[n] += sum[n];
      // -- the weighted sum of the own dimensions
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const Words4 p = *(const Words4*)(shared + WEIGHTS_AT + half * 512 + 16 * lane);
        if (SHIFT != 0.0f) mma_f16(weight_sum, p.x, p.y, p.z, p.w, 0x3C003C00u, 0x3C003C00u);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          u32 b[4];
#pragma unroll
          for (int m = 0; m < 4; m++) b[m] = half ? kept[half][i][m] : movmatrix_trans(kept[half][i][m]);
          mma_f16(o[2 * i], p.x, p.y, p.z, p.w, b[0], b[1]);
          mma_f16(o[2 * i + 1], p.x, p.y, p.z, p.w, b[2], b[3]);
        }
      }
    }

    // -- what this block has of the item
    const i64 part = (i64)range.part(args, block_index()) * ROWS;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      row_sum[n] += shfl_xor(row_sum[n], 1), row_sum[n] += shfl_xor(row_sum[n], 2);
      if (t == 0) most[warp * ROWS + g + 8 * n] = row_sum[n];
    }
    sync_threads();
#pragma unroll
    for (int n = 0; n < 2; n++) {
      if (g + 8 * n >= item.count) continue;
      const i64 to = part + g + 8 * n;
      const float* all = most + g + 8 * n;
      if (warp == 0 && t == 0)
        args.states[2 * to] = reference[n], args.states[2 * to + 1] = (all[0] + all[ROWS]) + (all[2 * ROWS] + all[3 * ROWS]);
      const float less = SHIFT * weight_sum[2 * n];
#pragma unroll
      for (int j = 0; j < 2 * OWN; j++) {
        const int d = 16 * (warp * OWN) + 8 * j + 2 * t;
        const float low = (o[j][2 * n] - less) * L_UNIT, high = (o[j][2 * n + 1] - less) * L_UNIT;
        if (IN_BYTES) *(Words2*)(args.parts + to * LD + d) = {as_bits(low), as_bits(high)};
        else args.parts[to * LD + place_of(d)] = low, args.parts[to * LD + place_of(d + 1)] = high;
      }
    }
    sync_threads();  // before the next item's queries
  }
}
HOST_TESTABLE(attend, LatentArgs)
