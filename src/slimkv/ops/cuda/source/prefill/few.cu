// Attention of few queries a sequence (verification, short chunks) on packed pages, with products of single warps, from sm_80 on.
//
// A block of eight warps has up to 64 rows (queries x heads of a group) of a KV head, and a part of the context. A tile is 64 tokens: four
// warps unpack 16 keys each and four as many values (unpacker.cuh) while the codes of the next tile are on their way to registers. Then
// warps share scores by rows and tokens, and the output by dimensions; maxima and probabilities pass between them in shared memory.
// merge.cu puts the parts together.
// Compile-time: that of work.cuh, with FUSED, CONSUMERS = PRODUCERS = 1, SPLITS. Shared memory: queries | keys, later probabilities | values |
// SCALES_AT: maxima, then sums, of PARTS x 64 rows.
#include "prefill/softmax.cuh"
#include "prefill/unpacker.cuh"
#include "prefill/lane_rows.cuh"
#include "prefill/warp_fragments.cuh"

static_assert(STEP == 64 && ROWS == 64 && THREADS == 256 && D % 128 == 0, "eight warps share a tile of 64 tokens");
constexpr int WARP_DIMS = D / 8, PAIRS = WARP_DIMS / 16;  // of the output, of a warp

// What a warp unpacks of a tile: 16 keys, or 16 values. All warps look at the fields of all tokens.
struct TileCodes {
  Codes<K_BITS, S, false> keys[1];
  Codes<V_BITS, S, true> values[1];
  Fields fields;
  i32 page;  // of the tile after

  DEVICE_MEMBER void load(const Unpacker& unpacker, int tile, int warp, int lane) {
    fields.load_from_page(unpacker.page_at(page), (tile * STEP + PER_LANE * lane) % BLOCK_SIZE);
    const int place = (tile * STEP + 16 * unpacker.warp) % BLOCK_SIZE / 16;
    const u8* const from = unpacker.page_at(Unpacker::page_with(page, 16 * unpacker.warp));
    if (warp < 4) keys[0].load(from + place * K_TILE, lane);
    else values[0].load(from + V_CODES + place * V_TILE, lane);
  }
};

// A reference for the exponents of a row, from the maxima of its parts of a tile: at least what it was. Minus infinity for rows that have
// seen nothing yet.
template <int PARTS> DEVICE float raised(float reference, const float* maxima, int row) {
#pragma unroll
  for (int p = 0; p < PARTS; p++) reference = max_f32(reference, maxima[64 * p + row]);
  return reference;
}
DEVICE float rescale_of(float before, float after) { return before == after ? 1.0f : exp2_approx(before - after); }

// Two warps share the scores of 16 rows, each 32 tokens.
struct FewRows {
  static constexpr int TILES = 4, PARTS = 8 / TILES, TOKENS = STEP / PARTS, SCORES = TOKENS / 2;
  const PrefillArgs& args;
  const Work& w;
  u8* shared;
  int warp, lane;
  int tile_row, part;  // of this warp's scores
  LaneRows rows;
  u32 queries[PLACES / 16][4];
  float reference[2], row_sum[2];  // of this warp's scores
  float of_output[TILES][2];  // references of all rows
  float o[TILES][2 * PAIRS][4];

  DEVICE_MEMBER float* maxima() const { return (float*)(shared + SCALES_AT); }
  DEVICE_MEMBER u8* probabilities() const { return shared + KEYS_AT; }

  DEVICE_MEMBER void start() {
    tile_row = warp / PARTS, part = warp % PARTS;
    rows = prepare_lane_rows(args, w, shared, 0, tile_row, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) reference[r] = MINUS_INFINITY, row_sum[r] = rows.softmax.row_sum[r];
    sync_warp();  // warps that share rows have all written them
    const u32 own = by_columns(shared_address(shared), 16 * tile_row, lane);
#pragma unroll
    for (int k = 0; k < PLACES / 16; k++) ldmatrix_x4(queries[k], (own ^ k % 4 * 32) + k / 4 * 128 * GROUP_ROWS);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      of_output[j][0] = of_output[j][1] = MINUS_INFINITY;
#pragma unroll
      for (int n = 0; n < 2 * PAIRS; n++) o[j][n][0] = o[j][n][1] = o[j][n][2] = o[j][n][3] = 0.0f;
    }
  }

  // Scores of the warp's part of a tile, as powers of two; their maxima to the others.
  DEVICE_MEMBER void score(float (&s)[SCORES], const TileScale& unit, int tile) {
    const u32 keys = by_rows(shared_address(shared + KEYS_AT), lane) + part * TOKENS * 128;
#pragma unroll
    for (int i = 0; i < SCORES; i++) s[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < PLACES / 16; k++) {
      const u32(&q)[4] = queries[k];
#pragma unroll
      for (int n = 0; n < TOKENS / 16; n++) {
        u32 key[4];
        ldmatrix_x4(key, (keys ^ k % 4 * 32) + k / 4 * HALF_TILE + n * 2048);
        mma_f16(s + 8 * n, q[0], q[1], q[2], q[3], key[0], key[1]);
        mma_f16(s + 8 * n + 4, q[0], q[1], q[2], q[3], key[2], key[3]);
      }
    }
    const bool clear = is_clear(w, tile);
    float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      s[i] = rows.softmax.score(s[i], i / 2 % 2, unit, unit.value, args.softcap);
      if (!clear && rows.visible.hides(tile * STEP + part * TOKENS, i, lane & 3)) s[i] = MINUS_INFINITY;
      most[i / 2 % 2] = max_f32(most[i / 2 % 2], s[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float m = quad_max(most[r]);
      if (lane % 4 == 0) maxima()[64 * part + 16 * tile_row + lane / 4 + 8 * r] = m;
    }
  }

  // To probabilities, for all warps. Rows that see none of the tile's tokens have no reference: zeros.
  DEVICE_MEMBER void weigh(float (&s)[SCORES], const TileScale& unit) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = 16 * tile_row + lane / 4 + 8 * r;
      const float now = raised<PARTS>(reference[r], maxima(), row), from = now == MINUS_INFINITY ? 0.0f : now;
      row_sum[r] *= rescale_of(reference[r], now);
      reference[r] = now;
      u8* const to = probabilities() + row * 128 + lane % 4 * 4;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < SCORES; i += 4) {
        const float a = exp2_approx(s[i + 2 * r] - from), b = exp2_approx(s[i + 2 * r + 1] - from);
        sum += a + b;
        *(u32*)(to + (((part * TOKENS + 2 * i) / 8 ^ (row & 7)) << 4)) = pack_f16x2(a, b);
      }
      row_sum[r] += sum * unit.value_inverse;
    }
  }

  // The warp's dimensions of the output of all rows.
  DEVICE_MEMBER void add_output() {
    const u32 p = by_columns(shared_address(probabilities()), 0, lane);
    const u32 values = (by_columns(shared_address(shared + VALUES_AT), 0, lane) ^ WARP_DIMS * warp % 64 * 2) +
        WARP_DIMS * warp / 64 * HALF_TILE;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      float by[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float now = raised<PARTS>(of_output[j][r], maxima(), 16 * j + lane / 4 + 8 * r);
        by[r] = rescale_of(of_output[j][r], now);
        of_output[j][r] = now;
      }
      if (warp_any(by[0] != 1.0f || by[1] != 1.0f))
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; n++)
          o[j][n][0] *= by[0], o[j][n][1] *= by[0], o[j][n][2] *= by[1], o[j][n][3] *= by[1];
    }
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
      u32 value[PAIRS][4];
#pragma unroll
      for (int n = 0; n < PAIRS; n++) ldmatrix_x4_trans(value[n], (values ^ n * 32) + k * 2048);
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        u32 a[4];
        ldmatrix_x4(a, (p ^ k * 32) + j * 2048);
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; n++)
          mma_f16(o[j][n], a[0], a[1], a[2], a[3], value[n / 2][2 * (n % 2)], value[n / 2][2 * (n % 2) + 1]);
      }
    }
  }

  // Behind the last tile, by way of shared memory: a quad has a row, which it rotates back.
  DEVICE_MEMBER void store() {
    float* const outputs = (float*)(shared + KEYS_AT);  // [64, D], keys' place and values'
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          outputs[(16 * j + lane / 4 + i / 2 * 8) * D + WARP_DIMS * warp + 8 * n + lane % 4 * 2 + i % 2] = o[j][n][i];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      row_sum[r] += shfl_xor(row_sum[r], 1);
      row_sum[r] += shfl_xor(row_sum[r], 2);
      const int row = 16 * tile_row + lane / 4 + 8 * r;
      if (lane % 4 == 0) maxima()[64 * part + row] = row_sum[r];
      if (lane % 4 == 0 && part == 0) maxima()[64 * PARTS + row] = reference[r];
    }
    sync_threads();
    for (int first = 8 * warp; first < 16 * TILES; first += 64) {
      const int own = first + lane / 4;
      const Row row = row_of(args, w, 0, own);
      float sum = 0.0f;
#pragma unroll
      for (int p = 0; p < PARTS; p++) sum += maxima()[64 * p + own];
      const bool empty = sum == 0.0f;
      float x[OWN];
#pragma unroll
      for (int i = 0; i < OWN; i++)
        x[i] = outputs[own * D + 8 * (i / 2) + lane % 4 * 2 + i % 2] *
            ((V_ROTATED ? args.value_norm : 1.0f) / (empty ? 1.0f : sum));
      const i64 query = (i64)block_index_y() * args.total + row.query;
      store_row(args, x, query * args.out_stride + row.head * args.out_head_stride, row.valid, 0, lane);
      if (lane % 4 == 0 && row.valid)
        args.part_lse[query * args.num_kv_heads * args.group_size + row.head] =
            empty ? MINUS_INFINITY : maxima()[64 * PARTS + own] + log2_approx(sum);
    }
  }

  DEVICE_MEMBER void run(LevelTable key_levels, LevelTable value_levels) {
    const Unpacker unpacker = {args, w, key_levels, value_levels, warp % 4, lane};
    TileCodes codes;
    if (w.count > 0) {
      codes.page = unpacker.page_of(tile_at(w, 0));
      codes.load(unpacker, tile_at(w, 0), warp, lane);
      if (w.count > 1) codes.page = unpacker.page_of(tile_at(w, 1));
    }
    start();
    for (int i = 0; i < w.count; i++) {
      const int tile = tile_at(w, i);
      const TileScale unit = unpacker.scale(codes.fields, tile);
      if (warp < 4) unpacker.store_keys(codes.keys, codes.fields, shared + KEYS_AT);
      else unpacker.store_values(codes.values, codes.fields, shared + VALUES_AT);
      if (i + 1 < w.count) codes.load(unpacker, tile_at(w, i + 1), warp, lane);
      if (i + 2 < w.count) codes.page = unpacker.page_of(tile_at(w, i + 2));
      sync_threads();  // keys and values are there; queries, the first time
      float s[SCORES];
      score(s, unit, tile);
      sync_threads();  // maxima are there, and nobody needs the keys
      weigh(s, unit);
      sync_threads();  // probabilities are there
      add_output();
      sync_threads();  // nobody needs values or probabilities
    }
    store();
  }
};

KERNEL(THREADS, 1) attend(GRID_CONSTANT PrefillArgs args) {
  SHARED_OPERANDS(shared);
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31;
  fill_levels(args.key_levels, shared + LEVELS_AT, K_LEVELS);
  fill_levels(args.value_levels, shared + LEVELS_AT + 128 * (ONE_TABLE ? 0 : K_LEVELS), ONE_TABLE ? 0 : V_LEVELS);
  const LevelTable key_levels = {shared_address(shared + LEVELS_AT) + 4 * lane};
  const LevelTable value_levels = {key_levels.address + 128 * (ONE_TABLE ? 0 : K_LEVELS)};
  if (K_LEVELS + V_LEVELS) sync_threads();
  pdl_wait();
  Work w;
  if (!find_work(args, lane, w)) return;
  FewRows{args, w, shared, warp, lane}.run(key_levels, value_levels);
}
HOST_TESTABLE(attend, PrefillArgs)
