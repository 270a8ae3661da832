// Attention of few queries on packed latents, for sm_90a: scores from latents and rope parts, values from the same latents.
//
// A block has ROWS rows (queries x heads) of a sequence and one part of its tokens, 64 at a time for each warpgroup. A warp has 16 of
// them, whose codes it holds in registers in the order of the operand that scores want, tokens x dimensions. What it makes of
// them goes into the product at once and into shared memory, from where the product with the weights takes it transposed,
// dimensions x tokens. Scores are [tokens, rows] and output [dimensions, rows], so that a lane has the same rows in both.
// Two blocks share a multiprocessor: one unpacks while the other multiplies. Of many rows a block has two warpgroups, each with
// the scores of its own tokens and half the dimensions of the output, and a multiprocessor to itself.
#include "latent_split/queries.cuh"
#include "latent_split/tokens.cuh"

typedef float Scores[ROWS / 2];
typedef float Output[OWN_CHUNKS][ROWS / 2];  // the chunks of a warpgroup
typedef WgmmaNarrow<ROWS, false> Halves;
typedef WgmmaNarrow<ROWS, R_KIND == RAW && R_BF16> RopeNumbers;

// The tokens of a warp, ahead by one tile.
struct Reader {
  const LatentArgs& args;
  const Rows& rows;
  const int warp, lane;

  DEVICE_MEMBER int token_of(int tile) const { return tile * TILE + 16 * warp; }
  DEVICE_MEMBER i32 page_of(int tile) const {
    const int token = token_of(tile);
    return token < rows.length ? ldg_i32(args.block_table + (i64)rows.sequence * args.table_stride + token / BLOCK_SIZE) : 0;
  }
  DEVICE_MEMBER void load(Tokens& tokens, i32 page, int tile) const {
    const int token = token_of(tile);
    tokens.load(args.pages + page * args.page_stride, token % BLOCK_SIZE, rows.length - token, lane);
  }
  DEVICE_MEMBER void prefetch(i32 page, int tile) const {
    const int token = token_of(tile);
    Tokens::prefetch(args.pages + page * args.page_stride, token % BLOCK_SIZE, rows.length - token, lane);
  }
};

template <int N> struct Number { static constexpr int VALUE = N; };
template <int CHUNK, class F> DEVICE void each_chunk(const F& f) {
  if constexpr (CHUNK < CHUNKS) f(Number<CHUNK>()), each_chunk<CHUNK + 1>(f);
}

// Products of a warpgroup's tokens with the queries, while latents go to shared memory.
DEVICE void start_scores(const Tokens& tokens, const LatentArgs& args, const LevelTable& levels, const RopeLevels<R_COPIES>& rope_levels,
                         const Scales& scales, u8* shared, int warp, int lane, Scores& s) {
  const u32 to = operand_rows(shared_address(shared + VALUES_AT) + warp / 4 * GROUP_VALUES + warp % 4 * 2048, lane);
  const u64 queries = smem_descriptor(shared_address(shared + QUERIES_AT), 16);
  const u64 rope_queries = smem_descriptor(shared_address(shared + ROPE_AT), 16);
  const Column* columns = (const Column*)(shared + COLUMNS_AT);
  u32 rope[ROPE_SLICES][4];
#pragma unroll
  for (int i = 0; i < ROPE_SLICES; i++) tokens.rope_operand(i, args.table, rope_levels, rope[i]);
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) s[i] = 0.0f;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < ROPE_SLICES; i++)
    RopeNumbers::register_a(s, rope[i][0], rope[i][1], rope[i][2], rope[i][3],
                            rope_queries + ((i / 4 * ROWS * 128 + i % 4 * 32) >> 4));
  wgmma_commit();
  each_chunk<0>([&](auto number) {
    constexpr int chunk = decltype(number)::VALUE;
    u32 a[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      tokens.latent_operand(4 * chunk + i, args.table, levels, a[i]);
      stmatrix_x4<chunk * 64 * 128>(to ^ 32 * i, a[i][0], a[i][1], a[i][2], a[i][3]);
    }
    if (chunk == 0) {  // the products of rope parts, in units of latents
      wgmma_wait<0>();
      wgmma_fence_operand(s);
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++) {
        const Column& column = columns[8 * (i / 4) + 2 * (lane & 3) + i % 2];
        s[i] = s[i] * (scales.rope[i / 2 % 2] * column.rope) + column.start;
      }
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
      Halves::register_a(s, a[i][0], a[i][1], a[i][2], a[i][3], queries + ((chunk * ROWS * 128 + i * 32) >> 4));
    wgmma_commit();
    if (chunk) wgmma_wait<1>();
  });
}

// The running softmax of a lane's columns.
struct Softmax {
  float reference[COLUMNS], row_sum[COLUMNS], weight_sum[COLUMNS];

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) reference[c] = MINUS_INFINITY, row_sum[c] = 0.0f, weight_sum[c] = 0.0f;
  }

  // Sums of products to scores, and the largest of this warp's tokens (with the exponent of their scale) to `most`.
  DEVICE_MEMBER void score(Scores& s, const Column* columns, const Fields& fields, const Scales& scales, int token, bool clear,
                           float* most, int g, int t) {
    const float exponent[2] = {exponent_of(fields.latent & 0xFFFF), exponent_of(fields.latent >> 16)};
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int n = 8 * (c / 2) + 2 * t + c % 2;
      const Column column = columns[n];
      float top = MINUS_INFINITY;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float& x = s[4 * (c / 2) + 2 * i + c % 2];
        x *= scales.key[i] * column.unit;
        if (!clear && token + g + 8 * i >= column.visible_end) x = MINUS_INFINITY;
        top = max_f32(top, x + exponent[i]);
      }
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) top = max_f32(top, shfl_xor(top, d));
      if (g == 0) most[n] = top;
    }
  }

  // Scores to weights, scales of values included, in halves [row, token] at `to`; the output so far to their reference. `most`:
  // of the four warps.
  DEVICE_MEMBER void weigh(Scores& s, const Scales& scales, const float* most, u8* to, Output& o, int warp, int g, int t) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 2; j++) {
      float shift[2], by[2];
      bool behind = false;
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const int c = 2 * j + b, n = 8 * j + 2 * t + b;
        float wanted = most[n];
#pragma unroll
        for (int w = 1; w < WARPS; w++) wanted = max_f32(wanted, most[w * ROWS + n]);
        const bool raise = wanted > reference[c] + RESCALE_THRESHOLD || (reference[c] == MINUS_INFINITY && wanted > MINUS_INFINITY);
        by[b] = raise ? exp2_approx(reference[c] - wanted) : 1.0f;
        reference[c] = raise ? wanted : reference[c];
        behind = behind || raise;
        shift[b] = reference[c] == MINUS_INFINITY ? 0.0f : reference[c];
      }
      if (warp_any(behind)) {
#pragma unroll
        for (int b = 0; b < 2; b++) {
          row_sum[2 * j + b] *= by[b], weight_sum[2 * j + b] *= by[b];
#pragma unroll
          for (int chunk = 0; chunk < OWN_CHUNKS; chunk++) o[chunk][4 * j + b] *= by[b], o[chunk][4 * j + 2 + b] *= by[b];
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float w[2];
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const float p = exp2_approx(s[4 * j + 2 * i + b] - shift[b]);
          row_sum[2 * j + b] += p;
          w[b] = p > 0.0f ? p * scales.value[i] : p;  // what is not seen weighs nothing, even if it is not a number
        }
        const u32 pair = pack_f16x2(w[0], w[1]);
        if (OFFSET != 0.0f) weight_sum[2 * j] += f16_to_f32(pair & 0xFFFF), weight_sum[2 * j + 1] += f16_to_f32(pair >> 16);
        *(u32*)(to + (8 * j + g) * 128 + (((2 * (warp % 4) + i) ^ g) << 4) + 4 * t) = movmatrix_trans(pair);
      }
    }
  }
};

DEVICE void add_values(u8* shared, Output& o, int group) {
  const u64 values = smem_descriptor(shared_address(shared + VALUES_AT) + group * OWN_CHUNKS * 64 * 128, 64 * 128);
  const u64 weights = smem_descriptor(shared_address(shared + WEIGHTS_AT), 16);
#pragma unroll
  for (int chunk = 0; chunk < OWN_CHUNKS; chunk++) wgmma_fence_operand(o[chunk]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < TILE / 16; k++)
#pragma unroll
    for (int chunk = 0; chunk < OWN_CHUNKS; chunk++)
      Halves::transposed_a(o[chunk], values + ((k / 4 * GROUP_VALUES + chunk * 64 * 128 + k % 4 * 2048) >> 4),
                           weights + ((k / 4 * GROUP_WEIGHTS + k % 4 * 32) >> 4));
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int chunk = 0; chunk < OWN_CHUNKS; chunk++) wgmma_fence_operand(o[chunk]);
}

// The sum over all tokens of a block, of a lane's share of it.
DEVICE float total_of(float x, float* scratch, int n, int warp, int g) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) x += shfl_xor(x, d);
  sync_threads();
  if (g == 0) scratch[warp * ROWS + n] = x;
  sync_threads();
  x = scratch[n];
#pragma unroll
  for (int w = 1; w < WARPS; w++) x += scratch[w * ROWS + n];
  return x;
}

DEVICE void store_part(const LatentArgs& args, const Rows& rows, const Softmax& softmax, Output& o,
                       float* scratch, int warp, int g, int t) {
  const i64 part = ((i64)block_index() * args.splits + block_index_y()) * ROWS;
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int n = 8 * (c / 2) + 2 * t + c % 2;
    const float row_sum = total_of(softmax.row_sum[c], scratch, n, warp, g);
    const float less = OFFSET != 0.0f ? OFFSET * total_of(softmax.weight_sum[c], scratch, n, warp, g) : 0.0f;
    if (n >= rows.count) continue;
    if (warp == 0 && g == 0) args.states[2 * (part + n)] = softmax.reference[c], args.states[2 * (part + n) + 1] = row_sum;
#pragma unroll
    for (int chunk = 0; chunk < OWN_CHUNKS; chunk++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        args.parts[(part + n) * LD + place_of(64 * (warp / 4 * OWN_CHUNKS + chunk) + 16 * (warp % 4) + g + 8 * i)] =
            (o[chunk][4 * (c / 2) + 2 * i + c % 2] - less) * L_UNIT;
  }
}

KERNEL(THREADS, RESIDENT) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(memory);
  u8* shared = memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
  fill_levels<L_LEVELS, L_COPIES, THREADS>(args.latent_levels, shared + L_LEVELS_AT);
  fill_levels<R_LEVELS, R_COPIES, THREADS>(args.rope_levels, shared + R_LEVELS_AT);
  pdl_wait();
  const Rows rows(args, block_index());
  if (rows.count <= 0) return;
  const int tiles = (rows.visible_end(args, rows.count - 1) + TILE - 1) / TILE;
  const int each = (tiles + args.splits - 1) / args.splits, begin = block_index_y() * each, end = min_i32(tiles, begin + each);
  const int clear_end = rows.visible_end(args, 0);
  const Reader reader = {args, rows, warp, lane};
  Tokens tokens;
  i32 page = 0, ahead = 0;  // of the next tile and of the one after it
  if (begin < end) {
    reader.load(tokens, reader.page_of(begin), begin);
    page = reader.page_of(begin + 1), ahead = reader.page_of(begin + 2);
    if (begin + 1 < end) reader.prefetch(page, begin + 1);
  }
  for (int n = warp; n < ROWS; n += WARPS) stage_query(args, rows, n, shared, lane);
  fence_proxy_async();
  sync_threads();

  const LevelTable levels = {shared_address(shared + L_LEVELS_AT) + 4 * lane};
  const RopeLevels<R_COPIES> rope_levels = {shared_address(shared + R_LEVELS_AT) + 4 * (lane % R_COPIES)};
  const Column* columns = (const Column*)(shared + COLUMNS_AT);
  float* most = (float*)(shared + MOST_AT);
  Output o;
  Softmax softmax;
  softmax.clear();
#pragma unroll
  for (int chunk = 0; chunk < OWN_CHUNKS; chunk++)
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) o[chunk][i] = 0.0f;

  for (int tile = begin; tile < end; tile++) {
    Scores s;
    const Fields fields = tokens.fields;
    const Scales scales(fields);
    start_scores(tokens, args, levels, rope_levels, scales, shared, warp, lane, s);
    if (tile + 2 < end) reader.prefetch(ahead, tile + 2);
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    softmax.score(s, columns, fields, scales, reader.token_of(tile), (tile + 1) * TILE <= clear_end, most + warp * ROWS, g, t);
    sync_threads();
    softmax.weigh(s, scales, most, shared + WEIGHTS_AT + warp / 4 * GROUP_WEIGHTS, o, warp, g, t);
    fence_proxy_async();
    sync_threads();
    if (tile + 1 < end) {  // after the fence, which may wait for loads
      reader.load(tokens, page, tile + 1);
      page = ahead, ahead = reader.page_of(tile + 3);
    }
    add_values(shared, o, warp / 4);
    sync_threads();
  }
  store_part(args, rows, softmax, o, most, warp, g, t);
}
HOST_TESTABLE(attend, LatentArgs)

// A block: one row of all parts. MERGERS groups of threads take turns with the parts, then the first adds up what they have.
constexpr int MERGERS = 4, MERGER = 128, MERGE_THREADS = MERGERS * MERGER, OWN = (LD + MERGER - 1) / MERGER;

KERNEL(MERGE_THREADS, 2) merge(GRID_CONSTANT LatentArgs args) {
  SHARED_MEMORY(shared);
  float* sums = (float*)shared;  // [MERGERS, LD + 1]: of values and of weights
  pdl_wait();
  const int item = block_index() / ROWS, n = block_index() % ROWS, thread = thread_index() % MERGER, group = thread_index() / MERGER;
  const Rows rows(args, item);
  if (n >= rows.count) return;
  const i64 first = (i64)item * args.splits * ROWS + n;
  float highest = MINUS_INFINITY, row_sum = 0.0f, x[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) x[i] = 0.0f;
  for (int split = 0; split < args.splits; split++) highest = max_f32(highest, args.states[2 * (first + (i64)split * ROWS)]);
#pragma unroll 4
  for (int split = group; split < args.splits; split += MERGERS) {
    const i64 part = first + (i64)split * ROWS;
    const float reference = args.states[2 * part], sum = args.states[2 * part + 1];
    const float by = reference == MINUS_INFINITY ? 1.0f : exp2_approx(reference - highest);  // then there is nothing, or no number
    row_sum += sum * by;
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (thread + MERGER * i < LD) x[i] += args.parts[part * LD + thread + MERGER * i] * by;
  }
#pragma unroll
  for (int i = 0; i < OWN; i++)
    if (thread + MERGER * i < LD) sums[group * (LD + 1) + thread + MERGER * i] = x[i];
  if (thread == 0) sums[group * (LD + 1) + LD] = row_sum;
  sync_threads();
  if (group) return;
  auto total = [&](int d) {
    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < MERGERS; m++) sum += sums[m * (LD + 1) + d];
    return sum;
  };
  row_sum = total(LD);
  const float inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
  const i64 query = rows.start + (rows.first + n) / args.heads, head = (rows.first + n) % args.heads;
  const i64 at = query * args.out_stride + head * args.out_head_stride;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int d = thread + MERGER * i;
    if (d >= LD) continue;
    const float y = total(d) * inverse;
    if (OUT_TYPE == FLOAT32) ((float*)args.out)[at + d] = y;
    else ((u16*)args.out)[at + d] = (u16)(OUT_TYPE == BFLOAT16 ? f32_to_bf16(y) : f32_to_f16(y));
  }
  if (args.lse && thread == 0)
    args.lse[query * args.heads + head] = row_sum == 0.0f ? MINUS_INFINITY : (highest + log2_approx(row_sum)) * LN2;
}
HOST_TESTABLE(merge, LatentArgs)
