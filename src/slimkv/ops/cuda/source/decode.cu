// Attention of few queries a sequence on packed pages: `attend` reads pages and leaves partial results, `merge` puts them
// together, rotates back and writes the output.
//
// Work is cut into steps of 16 NT tokens of one KV head. All steps of all sequences form one line, of which every block
// gets an equal piece, whatever the sequences' lengths: no block waits for another. The warps of a block take the steps
// of a piece in turn; each has its own ring of shared memory, filled ahead by asynchronous copies.
//
// A query (rotated, scaled to 15 bits) is multiplied as two signed bytes with the bytes of the keys' levels, a
// probability (times its value's scale, 16 bits relative to the largest of the step) as two unsigned bytes with the
// bytes of the values' levels: integer tensor cores, exact sums. Both bytes of one query are neighbouring columns of a
// product, so a lane finds them side by side. Formats without byte levels use fp16 in the same places.
//
// The bytes of a value word alternate between two dimensions, g and g + 8. They are used as they are, once with
// probabilities in the even bytes and once in the odd ones: more products, but nothing to rearrange.
#include "intrinsics.cuh"
#include "pages.cuh"
#include "rotation.cuh"

// Compile-time: PAGE, KD, VD, K_KIND, K_BITS, K_FIELDS, K_ROTATED, V_KIND, V_BITS, V_CODES, V_FIELDS, V_ROTATED (the pages),
// NG (groups of 4 columns: query heads of a KV head times queries), NT, WARPS, STAGES, BLOCKS, SHARED (the shape),
// Q_TYPE, OUT_TYPE (0 fp16, 1 bf16, 2 fp32), WINDOW, SOFTCAP (the options).
constexpr int KS = KD / 16, VS = VD / 16, COLUMNS = 4 * NG, STEP = 16 * NT;
constexpr bool K_BYTES = in_bytes<K_KIND, K_BITS>(), V_BYTES = in_bytes<V_KIND, V_BITS>();
constexpr int K_TILE = 2 * KD * K_BITS, V_TILE = 2 * VD * V_BITS;
constexpr int K_NUMBER_OF_FIELDS = K_KIND == UNIFORM ? 2 : 1, V_NUMBER_OF_FIELDS = V_KIND == UNIFORM ? 2 : 1;
// A tile in the ring: key codes, value codes, then 32 bytes of each field.
constexpr int PAGES = NT > PAGE / 16 ? NT / (PAGE / 16) : 1;  // of a step
constexpr int FIELDS_AT = K_TILE + V_TILE, TILE = FIELDS_AT + 32 * (K_NUMBER_OF_FIELDS + V_NUMBER_OF_FIELDS);
constexpr int OUT_ROW = VD + 8;  // floats; keeps the columns of a warp's result in different banks
constexpr int SLOT = NT * TILE > 16 * OUT_ROW ? NT * TILE : 16 * OUT_ROW;
constexpr int LEVELS_K = (K_KIND == LLOYD && !K_BYTES) ? (1 << K_BITS) : 0;
constexpr int LEVELS_V = (V_KIND == LLOYD && !V_BYTES) ? (1 << V_BITS) : 0;
constexpr int KP = (KS + 1) / 2, QI = K_BYTES ? KP : KS;  // products of a tile
constexpr bool Q_IN_SHARED = NG * QI > 8;               // registers are better spent on the output
constexpr int QUERY_BYTES = K_BYTES ? 2 * COLUMNS * KD : 4 * COLUMNS * KD;
constexpr float KEY_OFFSET = (K_KIND == LLOYD && K_BYTES) ? 63.5f : 0.0f;
constexpr float KEY_UNIT = K_KIND == FP8 ? 256.0f : 1.0f, VALUE_UNIT = V_KIND == FP8 ? 256.0f : 1.0f;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define MINUS_INFINITY as_float(0xFF800000u)

// Shared memory: rings | levels of keys | levels of values | queries | column constants | maxima and sums of the warps
constexpr int LEVELS_AT = WARPS * STAGES * SLOT;
constexpr int QUERY_AT = LEVELS_AT + 128 * (LEVELS_K + LEVELS_V);
constexpr int COLUMN_AT = QUERY_AT + QUERY_BYTES;
constexpr int STATE_AT = COLUMN_AT + 8 * COLUMNS;
constexpr int SHARED_BYTES = STATE_AT + 8 * COLUMNS * WARPS;
static_assert(SHARED_BYTES == SHARED, "the launcher counts shared memory as this file does");

struct Args {
  const void* query;
  const u8* pages;
  const i32* table;
  const i32* lengths;
  const i32* starts;
  const void* key_signs;    // bf16 [KD, KD], the rotation's entries +-1
  const void* value_signs;  // bf16 [VD, VD]
  const float* key_levels;  // by code
  const float* value_levels;
  const float* sinks;  // or null
  void* out;
  float* lse;          // or null
  float* parts;        // [slots, COLUMNS, VD]
  float* part_states;  // [slots, COLUMNS, 2]: maximum (base 2), sum
  i64 query_stride, query_head_stride, page_stride, page_head_stride, table_stride, out_stride, out_head_stride;
  float scale;    // of scores, times log2(e)
  float softcap;  // times log2(e)
  float key_norm, value_norm;  // what makes the rotations orthonormal
  Table key_table, value_table;  // their signs are unused
  Powers powers;
  u32 key_sign_bits[8], value_sign_bits[8];  // the rotations' random signs, a set bit for -1
  i32 sequences, heads, group, most_queries, causal, window, blocks, merge_split;
};

// ---- who does what ------------------------------------------------------------------------------------------------

struct Sequence {
  int start, queries, length, begin, steps, chunks;
};

DEVICE Sequence sequence_at(const Args& args, int b) {
  Sequence s;
  s.start = load_int(args.starts + b);
  s.queries = load_int(args.starts + b + 1) - s.start;
  s.length = load_int(args.lengths + b);
  s.begin = 0;
  if (WINDOW) s.begin = greatest(0, s.length - s.queries - args.window + 1) / STEP * STEP;
  const int per_chunk = COLUMNS / args.group;
  const bool ours = s.queries > 0 && s.queries <= args.most_queries;
  s.chunks = ours ? (s.queries + per_chunk - 1) / per_chunk : 0;
  s.steps = ours ? (greatest(0, s.length - s.begin) + STEP - 1) / STEP : 0;
  return s;
}

struct Sums {
  i32 steps, items;  // steps of all heads and chunks; (chunk, head) pairs
};

// Sums over the sequences before `b`, and all steps. Every thread of the block calls it and gets them.
DEVICE Sums sums_before(const Args& args, int b, int threads, i32* scratch, i32& all_steps) {
  i32 steps = 0, items = 0, all = 0;
  for (int i = thread_index(); i < args.sequences; i += threads) {
    Sequence s = sequence_at(args, i);
    i32 n = s.chunks * args.heads;
    if (i < b) steps += n * s.steps, items += n;
    all += n * s.steps;
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) steps += shuffle_xor(steps, d), items += shuffle_xor(items, d), all += shuffle_xor(all, d);
  const int warp = thread_index() / 32, lane = thread_index() & 31, warps = threads / 32;
  if (lane == 0) scratch[3 * warp] = steps, scratch[3 * warp + 1] = items, scratch[3 * warp + 2] = all;
  sync_threads();
  steps = items = all = 0;
  for (int i = 0; i < warps; i++) steps += scratch[3 * i], items += scratch[3 * i + 1], all += scratch[3 * i + 2];
  sync_threads();
  all_steps = all;
  return {steps, items};
}

DEVICE int steps_per_block(int all, int blocks) { return greatest(1, (all + blocks - 1) / blocks); }

// A run of steps of one (sequence, chunk of queries, head).
struct Piece {
  int b, chunk, head;
  Sequence s;
  int item;         // number of the (sequence, chunk, head)
  int first, last;  // steps
};

// ---- loading ------------------------------------------------------------------------------------------------------

struct Loader {
  const u8* pages;
  const i32* table;
  i64 page_stride;
  u8* ring;
  int lane, last_page, begin_tile;

  // A step lies in one page, or in several whole ones.
  DEVICE_MEMBER void pages_of(int step, i32 (&ids)[PAGES]) const {
#pragma unroll
    for (int i = 0; i < PAGES; i++) ids[i] = load_int(table + least((begin_tile + NT * step) / (PAGE / 16) + i, last_page));
  }

  DEVICE_MEMBER void copy(int step, int slot, const i32 (&ids)[PAGES]) const {
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
      const u8* region = pages + ids[i] * page_stride;
      const int inside = PAGES > 1 ? 0 : (begin_tile + NT * step) % (PAGE / 16);
      constexpr int TILES = NT / PAGES;
      u8* to = ring + slot * SLOT + i * TILES * TILE;
      const u8* keys = region + inside * K_TILE + 16 * lane;
      const u8* values = region + V_CODES + inside * V_TILE + 16 * lane;
      // 32 bytes of each field and tile: two lanes each
      constexpr int FIELDS = K_NUMBER_OF_FIELDS + V_NUMBER_OF_FIELDS;
      const int field = lane / 2;
      const u8* fields = region + 32 * inside + 16 * (lane & 1) +
                         (field < K_NUMBER_OF_FIELDS ? K_FIELDS + 2 * PAGE * field
                                                     : V_FIELDS + 2 * PAGE * (field - K_NUMBER_OF_FIELDS));
#pragma unroll
      for (int x = 0; x < TILES; x++) {
        piece<K_TILE>(to + x * TILE, keys + x * K_TILE);
        piece<V_TILE>(to + x * TILE + K_TILE, values + x * V_TILE);
        if (lane < 2 * FIELDS) copy_async_16(to + x * TILE + FIELDS_AT + 16 * lane, fields + 32 * x);
      }
    }
  }

  template <int BYTES> DEVICE_MEMBER void piece(u8* to, const u8* from) const {
#pragma unroll
    for (int i = 0; i < BYTES; i += 512)
      if (i + 512 <= BYTES || i + 16 * lane < BYTES) copy_async_16(to + i + 16 * lane, from + i);
  }
};

// ---- queries ------------------------------------------------------------------------------------------------------

DEVICE float load_number(const void* p, i64 i, int type) {
  if (type == 2) return ((const float*)p)[i];
  u32 bits = ((const u16*)p)[i];
  return type == 1 ? as_float(bits << 16) : half_to_float(bits);
}

constexpr int QN = (KD + 31) / 32;

DEVICE void load_query(const Args& args, const Piece& piece, int c, float (&y)[QN], int lane) {
  const int query = piece.chunk * (COLUMNS / args.group) + c / args.group, head = piece.head * args.group + c % args.group;
  const bool valid = c < COLUMNS / args.group * args.group && query < piece.s.queries;
  const i64 at = (i64)(piece.s.start + query) * args.query_stride + (i64)head * args.query_head_stride;
#pragma unroll
  for (int i = 0; i < QN; i++) {
    const int d = lane + 32 * i;
    y[i] = valid && d < KD ? load_number(args.query, at + d, Q_TYPE) : 0.0f;
    if (args.scale < 0) y[i] = -y[i];
  }
}

// One warp: rotates the query of column c and leaves it in shared memory in the order of the operand.
DEVICE void prepare_query(const Args& args, int c, float (&y)[QN], u8* shared, float* scratch, int lane) {
  constexpr int N = QN;
  if (K_ROTATED) rotate<KD>(y, args.key_sign_bits, (const u16*)args.key_signs, args.key_norm, scratch, lane);
  float top = 0.0f;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float a = y[i] < 0 ? -y[i] : y[i];
    finite = finite && a < as_float(0x7F800000u);
    top = maximum(top, a);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) top = maximum(top, shuffle_xor(top, d));
  finite = !any_lane(!finite);
  float unit = 0.0f, sum = 0.0f;
  if (K_BYTES) {
    const float up = top > 1e-30f && finite ? 16256.0f / top : 0.0f;
    unit = finite ? top * (1.0f / 16256.0f) : as_float(0x7FC00000u);
    i32 total = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int d = lane + 32 * i;
      if (d < KD) {
        const i32 n = (i32)as_bits(finite ? y[i] * up + 12582912.0f : 12582912.0f) - 0x4B400000;
        const i32 high = (n + 64) >> 7, low = n - 128 * high;
        const int in_slice = d % 16, word = (d / 16) * 4 + (in_slice % 8) / 2, byte = (in_slice & 1) + 2 * (in_slice / 8);
        u8* to = shared + QUERY_AT + ((c / 4) * 8 + 2 * (c % 4)) * KD + 4 * word + byte;
        to[0] = (u8)high;
        to[KD] = (u8)low;
        total += n;
      }
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) total += shuffle_xor(total, d);
    sum = (float)total;
  } else {
    const float up = top > 1e-30f && finite ? 1.0f / top : 0.0f;
    unit = finite ? top : as_float(0x7FC00000u);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int d = lane + 32 * i;
      if (d < KD) {
        const float x = finite ? y[i] * up : 0.0f;
        const u32 high = float_to_half(x);
        u16* to = (u16*)(shared + QUERY_AT) + ((c / 4) * 8 + 2 * (c % 4)) * KD + d;
        to[0] = (u16)high;
        to[KD] = (u16)float_to_half(x - half_to_float(high));
      }
    }
  }
  if (lane == 0) {
    float* column = (float*)(shared + COLUMN_AT) + 2 * c;
    column[0] = unit * KEY_UNIT;
    column[1] = sum;
  }
}

// The queries' part of product i of group n: two slices of bytes, or one of halves.
DEVICE void load_operand(const u8* shared, int n, int i, int lane, u32 (&q)[2]) {
  const u32* words = (const u32*)(shared + QUERY_AT) + (8 * n + lane / 4) * (K_BYTES ? KD / 4 : KD / 2) + 8 * i + lane % 4;
  q[0] = words[0];
  q[1] = !K_BYTES || 2 * i + 1 < KS ? words[4] : 0;
}

DEVICE void key_bytes(const Codes<K_BITS, KS, false>& codes, int slice, Table table, const Powers& powers, u32& first,
                      u32& second) {
  code_bytes<K_KIND, K_BITS>(codes.low(slice, powers), codes.high(slice, powers), table, powers, first, second);
}

DEVICE void value_bytes(const Codes<V_BITS, VS, true>& codes, int slice, Table table, const Powers& powers, u32& first,
                        u32& second) {
  code_bytes<V_KIND, V_BITS>(codes.low(slice, powers), codes.high(slice, powers), table, powers, first, second);
}

DEVICE float soft_cap(float s, float cap) {
  float x = minimum(maximum(2.0f * LOG2E * (s / cap), -80.0f), 80.0f);
  float e = exp2_fast(x);
  return cap * ((e - 1.0f) / (e + 1.0f));
}

// ---- the kernel ---------------------------------------------------------------------------------------------------

KERNEL(32 * WARPS, BLOCKS) attend(GRID_CONSTANT Args args) {
  SHARED_MEMORY(shared);
  const int warp = thread_index() / 32, lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
  u8* ring = shared + warp * STAGES * SLOT;
  let_next_grid_start();

  // -- this block's piece of the line
  i32 all;
  sums_before(args, 0, 32 * WARPS, (i32*)(shared + STATE_AT), all);
  const int share = steps_per_block(all, block_count());
  const int from = block_index() * share, to = least(all, from + share);
  if (from >= to) return;
  Piece piece;
  {
    i32 steps = 0, items = 0;
    int b = 0;
    for (;; b += 32) {  // 32 sequences at a time: how many of them end before this piece begins
      Sequence s = {};
      if (b + lane < args.sequences) s = sequence_at(args, b + lane);
      const i32 n = s.chunks * args.heads;
      i32 ends = n * s.steps, numbers = n;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const i32 more = shuffle(ends, (lane - d) & 31), more_items = shuffle(numbers, (lane - d) & 31);
        if (lane >= d) ends += more, numbers += more_items;
      }
      i32 over = steps + ends <= from;
#pragma unroll
      for (int d = 16; d; d >>= 1) over += shuffle_xor(over, d);
      if (over < 32) {
        b += over;
        if (over) steps += shuffle(ends, over - 1), items += shuffle(numbers, over - 1);
        break;
      }
      steps += shuffle(ends, 31), items += shuffle(numbers, 31);
    }
    piece.s = sequence_at(args, b);
    const int within = (from - steps) / piece.s.steps;
    piece.b = b;
    piece.chunk = within / args.heads;
    piece.head = within % args.heads;
    piece.item = items + within;
    piece.first = from - steps - within * piece.s.steps;
    piece.last = least(piece.s.steps, piece.first + to - from);
  }
  int left = to - from;

  // -- levels that are looked up in shared memory
  u32* key_levels = (u32*)(shared + LEVELS_AT);
  u32* value_levels = key_levels + 32 * LEVELS_K;
  for (int i = thread_index(); i < 32 * LEVELS_K; i += 32 * WARPS) key_levels[i] = float_to_half(args.key_levels[i / 32]);
  for (int i = thread_index(); i < 32 * LEVELS_V; i += 32 * WARPS) value_levels[i] = float_to_half(args.value_levels[i / 32]);

  // A permutation takes one operand of the kind that all lanes share; its table must not be one.
  const u32 signs = in_register(0x80808080u, lane);
  const Table key_table = {in_register(args.key_table.low, lane), in_register(args.key_table.high, lane), signs};
  constexpr bool ONE_TABLE = K_KIND == V_KIND && K_BITS == V_BITS && KD == VD;
  const Table value_table = ONE_TABLE ? key_table
                                      : Table{in_register(args.value_table.low, lane), in_register(args.value_table.high, lane), signs};

  Loader loader;
  loader.ring = ring;
  loader.lane = lane;
  loader.page_stride = args.page_stride;
  i32 ids[PAGES];
  int filled = 0;  // steps copied so far, over all pieces; slot = number % STAGES
  auto begin_loading = [&](const Piece& p) {
    loader.pages = args.pages + (i64)p.head * args.page_head_stride;
    loader.table = args.table + (i64)p.b * args.table_stride;
    loader.begin_tile = p.s.begin / 16;
    loader.last_page = (p.s.length - 1) / PAGE;
    loader.pages_of(least(p.first + warp, p.last - 1), ids);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      const int step = p.first + warp + i * WARPS;
      if (step < p.last) loader.copy(step, filled % STAGES, ids);
      copy_async_commit();
      filled++;
      loader.pages_of(least(step + WARPS, p.last - 1), ids);
    }
  };
  // The queries travel at the same time as the first pages.
  constexpr int QUERIES = (COLUMNS + WARPS - 1) / WARPS;
  float query[QUERIES][QN];
  auto load_queries = [&](const Piece& p) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (warp + i * WARPS < COLUMNS) load_query(args, p, warp + i * WARPS, query[i], lane);
  };
  load_queries(piece);
  begin_loading(piece);

  while (true) {
    // -- the queries of this piece
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (warp + i * WARPS < COLUMNS)
        prepare_query(args, warp + i * WARPS, query[i], shared, (float*)(ring + (filled % STAGES) * SLOT), lane);
    sync_threads();
    u32 q[NG][Q_IN_SHARED ? 1 : QI][2];
    float unit[NG], sum[NG];
    int visible_end[NG], visible_begin[NG];
    const int first_query = piece.chunk * (COLUMNS / args.group);
#pragma unroll
    for (int n = 0; n < NG; n++) {
      if (!Q_IN_SHARED)
#pragma unroll
        for (int i = 0; i < QI; i++) load_operand(shared, n, i, lane, q[n][i]);
      const float* column = (const float*)(shared + COLUMN_AT) + 2 * (4 * n + t);
      unit[n] = column[0] * (args.scale < 0 ? -args.scale : args.scale);
      sum[n] = K_KIND == LLOYD ? -KEY_OFFSET * column[1] : column[1];  // what an offset of the levels adds to a score
      const int position = piece.s.length - piece.s.queries + first_query + (4 * n + t) / args.group;
      visible_end[n] = args.causal ? least(piece.s.length, position + 1) : piece.s.length;
      visible_begin[n] = WINDOW ? position - args.window + 1 : 0;
    }
    // What every query of the chunk sees needs no mask.
    const int last_query = least(piece.s.queries, first_query + COLUMNS / args.group) - 1;
    const int clear_end = args.causal ? piece.s.length - piece.s.queries + first_query + 1 : piece.s.length;
    const int clear_begin = WINDOW ? piece.s.length - piece.s.queries + last_query - args.window + 1 : 0;

    // Scores and their maximum are kept without the query's unit, which joins them inside the exponential.
    float out[NG][VS][2], top[NG], total[NG], shift[NG];
    u32 worst = 0;  // the largest field: 0xFFFF marks a token whose K or V was not a number
#pragma unroll
    for (int n = 0; n < NG; n++) {
      top[n] = MINUS_INFINITY, total[n] = 0, shift[n] = 0;
#pragma unroll
      for (int i = 0; i < VS; i++) out[n][i][0] = out[n][i][1] = 0;
    }

    int taken = filled - (STAGES - 1);
    for (int step = piece.first + warp; step < piece.last; step += WARPS) {
      copy_async_wait<STAGES - 2>();
      sync_warp();
      {
        const int ahead = step + (STAGES - 1) * WARPS;
        if (ahead < piece.last) loader.copy(ahead, filled % STAGES, ids);
        copy_async_commit();
        filled++;
        loader.pages_of(least(ahead + WARPS, piece.last - 1), ids);
      }
      const u8* slot = ring + (taken % STAGES) * SLOT;
      taken++;
      const int token0 = piece.s.begin + step * STEP;
      const bool clear = token0 + STEP <= clear_end && token0 >= clear_begin;

      // -- scores of tokens g and g + 8 of each tile, column t of each group
      float s[NG][NT][2];
      if (K_BYTES) {
        i32 c[NT][NG][4];
        Codes<K_BITS, KS, false> codes[NT];
#pragma unroll
        for (int x = 0; x < NT; x++) codes[x].load(slot + x * TILE, lane);
#pragma unroll
        for (int i = 0; i < KP; i++) {
          if (Q_IN_SHARED)
#pragma unroll
            for (int n = 0; n < NG; n++) load_operand(shared, n, i, lane, q[n][0]);
#pragma unroll
          for (int x = 0; x < NT; x++) {
            u32 a0, a1, a2 = 0, a3 = 0;
            key_bytes(codes[x], 2 * i, key_table, args.powers, a0, a1);
            if (2 * i + 1 < KS) key_bytes(codes[x], 2 * i + 1, key_table, args.powers, a2, a3);
#pragma unroll
            for (int n = 0; n < NG; n++) {
              const u32 b0 = q[n][Q_IN_SHARED ? 0 : i][0], b1 = q[n][Q_IN_SHARED ? 0 : i][1];
              if (i == 0) mma_u8_s8_from(c[x][n], a0, a1, a2, a3, b0, b1, 0, 0, 0, 0);
              else mma_u8_s8(c[x][n], a0, a1, a2, a3, b0, b1);
            }
          }
        }
#pragma unroll
        for (int x = 0; x < NT; x++)
#pragma unroll
          for (int n = 0; n < NG; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) s[n][x][r] = (float)(128 * c[x][n][2 * r] + c[x][n][2 * r + 1]);
      } else {
        float c[NT][NG][4];
        Codes<K_BITS, KS, false> codes[NT];
#pragma unroll
        for (int x = 0; x < NT; x++) {
          codes[x].load(slot + x * TILE, lane);
#pragma unroll
          for (int n = 0; n < NG; n++) c[x][n][0] = c[x][n][1] = c[x][n][2] = c[x][n][3] = 0;
        }
#pragma unroll
        for (int i = 0; i < KS; i++) {
          if (Q_IN_SHARED)
#pragma unroll
            for (int n = 0; n < NG; n++) load_operand(shared, n, i, lane, q[n][0]);
#pragma unroll
          for (int x = 0; x < NT; x++) {
            const u32 low = codes[x].low(i, args.powers), high = codes[x].high(i, args.powers);
            const u32 a0 = code_halves<K_KIND, K_BITS>(low, high, key_levels, lane, 0, 1);
            const u32 a1 = code_halves<K_KIND, K_BITS>(low, high, key_levels, lane, 4, 5);
            const u32 a2 = code_halves<K_KIND, K_BITS>(low, high, key_levels, lane, 2, 3);
            const u32 a3 = code_halves<K_KIND, K_BITS>(low, high, key_levels, lane, 6, 7);
#pragma unroll
            for (int n = 0; n < NG; n++)
              mma_f16(c[x][n], a0, a1, a2, a3, q[n][Q_IN_SHARED ? 0 : i][0], q[n][Q_IN_SHARED ? 0 : i][1]);
          }
        }
#pragma unroll
        for (int x = 0; x < NT; x++)
#pragma unroll
          for (int n = 0; n < NG; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) s[n][x][r] = c[x][n][2 * r] + c[x][n][2 * r + 1];
      }
#pragma unroll
      for (int x = 0; x < NT; x++) {
        const u8* tile = slot + x * TILE;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const u32 field = field_bits(tile + FIELDS_AT, g + 8 * r);
          const float scale = scale_of(field);
          const float zero = K_KIND == UNIFORM ? zero_of(field_bits(tile + FIELDS_AT + 32, g + 8 * r)) : 0;
#pragma unroll
          for (int n = 0; n < NG; n++) {
            const float raw = s[n][x][r];
            float score = K_KIND == UNIFORM ? raw * scale + zero * sum[n] : K_BYTES ? (raw + sum[n]) * scale : raw * scale;
            if (SOFTCAP) score = soft_cap(score * unit[n], args.softcap);
            s[n][x][r] = score;
          }
          if (clear) {
            worst = worst > field ? worst : field;
          } else {
            const int token = token0 + 16 * x + g + 8 * r;
            const u32 value_field = field_bits(tile + FIELDS_AT + 32 * K_NUMBER_OF_FIELDS, g + 8 * r);
            const bool bad = field == INVALID_FIELD || value_field == INVALID_FIELD;
#pragma unroll
            for (int n = 0; n < NG; n++) {
              const bool visible = token < visible_end[n] && token >= visible_begin[n];
              s[n][x][r] = !visible ? MINUS_INFINITY : bad ? as_float(0x7FC00000u) : s[n][x][r];
            }
          }
        }
      }

      // -- the running maximum moves rarely
#pragma unroll
      for (int n = 0; n < NG; n++) {
        float highest = s[n][0][0];
#pragma unroll
        for (int x = 0; x < NT; x++) highest = maximum(highest, maximum(s[n][x][0], s[n][x][1]));
        if (any_lane(highest > top[n])) {
#pragma unroll
          for (int d = 4; d < 32; d <<= 1) highest = maximum(highest, shuffle_xor(highest, d));
          highest = maximum(highest, top[n]);
          const float factor = top[n] == MINUS_INFINITY ? 0.0f : exp2_fast((top[n] - highest) * (SOFTCAP ? 1.0f : unit[n]));
          top[n] = highest;
          total[n] *= factor, shift[n] *= factor;
#pragma unroll
          for (int i = 0; i < VS; i++) out[n][i][0] *= factor, out[n][i][1] *= factor;
        }
      }

      // -- probabilities times their values' scales, and the largest of them
      u32 p[NG][NT][2];
      float fold[NG];
#pragma unroll
      for (int n = 0; n < NG; n++) {
        const float base = SOFTCAP ? 1.0f : unit[n], reference = top[n] == MINUS_INFINITY ? 0.0f : top[n] * base;
        float largest = 0;
#pragma unroll
        for (int x = 0; x < NT; x++) {
          const u8* fields = slot + x * TILE + FIELDS_AT + 32 * K_NUMBER_OF_FIELDS;
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const u32 field = field_bits(fields, g + 8 * r);
            if (n == 0 && clear) worst = worst > field ? worst : field;
            const float e = exp2_fast(s[n][x][r] * base - reference);
            total[n] += e;
            const float weighted = e * scale_of(field);
            if (V_KIND == UNIFORM) shift[n] += e > 0 ? e * zero_of(field_bits(fields + 32, g + 8 * r)) : 0;
            largest = maximum(largest, weighted);
            s[n][x][r] = weighted;
          }
        }
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) largest = maximum(largest, shuffle_xor(largest, d));
        largest = maximum(largest, 1e-30f);
        const float up = (V_BYTES ? 65535.0f : 1.0f) * reciprocal_fast(largest);
        fold[n] = largest * (V_BYTES ? 1.0f / 65535.0f : 1.0f);
#pragma unroll
        for (int x = 0; x < NT; x++) {
#pragma unroll
          for (int r = 0; r < 2; r++) {
            if (V_BYTES) {  // high byte, 0, low byte, 0
              p[n][x][r] = transpose_8x8(prmt(as_bits(s[n][x][r] * up + 8388608.0f), 0, 0x4041));
            } else {
              const float w = s[n][x][r] * up;
              const u32 high = float_to_half(w);
              p[n][x][r] = transpose_8x8(high | float_to_half(w - half_to_float(high)) << 16);
            }
          }
        }
      }

      // -- values
      if (V_BYTES) {
        // The offset of the levels comes off in integers: what a row of ones gives, times 63.5.
        i32 start[NG];
#pragma unroll
        for (int n = 0; n < NG; n++) {
          start[n] = 0;
          if (V_KIND == LLOYD) {
            const u32 ones = 0x01010101u;
            i32 sums[4];
#pragma unroll
            for (int x = 0; x < NT; x++)
              if (x == 0) mma_u8_u8_from(sums, ones, ones, ones, ones, p[n][x][0], p[n][x][1], 0, 0, 0, 0);
              else mma_u8_u8(sums, ones, ones, ones, ones, p[n][x][0], p[n][x][1]);
            start[n] = -((127 * (256 * sums[0] + sums[1])) >> 1);
          }
        }
        Codes<V_BITS, VS, true> codes[NT];
#pragma unroll
        for (int x = 0; x < NT; x++) codes[x].load(slot + x * TILE + K_TILE, lane);
#pragma unroll
        for (int i = 0; i < VS; i += 2) {  // two slices are one operand
          i32 even[NG][4], odd[NG][4];     // dimensions g of both slices, dimensions g + 8
#pragma unroll
          for (int x = 0; x < NT; x++) {
            u32 a0, a1 = 0, a2, a3 = 0;
            value_bytes(codes[x], i, value_table, args.powers, a0, a2);
            if (i + 1 < VS) value_bytes(codes[x], i + 1, value_table, args.powers, a1, a3);
#pragma unroll
            for (int n = 0; n < NG; n++) {
              const u32 b0 = p[n][x][0], b1 = p[n][x][1];
              if (x == 0) {
                mma_u8_u8_from(even[n], a0, a1, a2, a3, b0, b1, 0, start[n], 0, start[n]);
                mma_u8_u8_from(odd[n], a0, a1, a2, a3, b0 << 8, b1 << 8, 0, start[n], 0, start[n]);
              } else {
                mma_u8_u8(even[n], a0, a1, a2, a3, b0, b1);
                mma_u8_u8(odd[n], a0, a1, a2, a3, b0 << 8, b1 << 8);
              }
            }
          }
#pragma unroll
          for (int n = 0; n < NG; n++)
#pragma unroll
            for (int j = 0; j < 2 && i + j < VS; j++) {
              out[n][i + j][0] += (float)(256 * even[n][2 * j] + even[n][2 * j + 1]) * fold[n];
              out[n][i + j][1] += (float)(256 * odd[n][2 * j] + odd[n][2 * j + 1]) * fold[n];
            }
        }
      } else {
        Codes<V_BITS, VS, true> codes[NT];
#pragma unroll
        for (int x = 0; x < NT; x++) codes[x].load(slot + x * TILE + K_TILE, lane);
#pragma unroll
        for (int i = 0; i < VS; i++) {
          float c[NG][4];
#pragma unroll
          for (int n = 0; n < NG; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
#pragma unroll
          for (int x = 0; x < NT; x++) {
            const u32 low = codes[x].low(i, args.powers), high = codes[x].high(i, args.powers);
            const u32 a0 = code_halves<V_KIND, V_BITS>(low, high, value_levels, lane, 0, 2);
            const u32 a1 = code_halves<V_KIND, V_BITS>(low, high, value_levels, lane, 1, 3);
            const u32 a2 = code_halves<V_KIND, V_BITS>(low, high, value_levels, lane, 4, 6);
            const u32 a3 = code_halves<V_KIND, V_BITS>(low, high, value_levels, lane, 5, 7);
#pragma unroll
            for (int n = 0; n < NG; n++) mma_f16(c[n], a0, a1, a2, a3, p[n][x][0], p[n][x][1]);
          }
#pragma unroll
          for (int n = 0; n < NG; n++) {
            out[n][i][0] += (c[n][0] + c[n][1]) * fold[n];
            out[n][i][1] += (c[n][2] + c[n][3]) * fold[n];
          }
        }
      }
      sync_warp();  // before this slot is filled again
    }
    copy_async_wait<0>();

    // -- what comes next is loaded while this piece is finished
    Piece next = piece;
    left -= piece.last - piece.first;
    if (left > 0) {
      if (++next.head == args.heads) {
        next.head = 0;
        if (++next.chunk == piece.s.chunks) {
          next.chunk = 0;
          do next.s = sequence_at(args, ++next.b), next.item += next.s.steps ? 0 : next.s.chunks * args.heads;
          while (next.s.chunks == 0 || next.s.steps == 0);
        }
      }
      next.item++;
      next.first = 0;
      next.last = least(next.s.steps, left);
    }
    filled = 1;  // slot 0 is kept free for this piece's results
    if (left > 0) {
      load_queries(next);
      begin_loading(next);
    }

    // -- the warps' results together: maxima and sums, then four columns at a time through the spare slots
    float* states = (float*)(shared + STATE_AT);
    const bool bad = worst == INVALID_FIELD;
#pragma unroll
    for (int n = 0; n < NG; n++) {
      if (bad) total[n] = as_float(0x7FC00000u);
      if (!SOFTCAP && top[n] != MINUS_INFINITY) top[n] *= unit[n];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) total[n] += shuffle_xor(total[n], d), shift[n] += shuffle_xor(shift[n], d);
      if (g == 0) states[2 * (warp * COLUMNS + 4 * n + t)] = top[n], states[2 * (warp * COLUMNS + 4 * n + t) + 1] = total[n];
    }
    sync_threads();
    const i64 part = (i64)piece.item + block_index();
#pragma unroll
    for (int n = 0; n < NG; n++) {
      float highest = MINUS_INFINITY;
      for (int w = 0; w < WARPS; w++) highest = maximum(highest, states[2 * (w * COLUMNS + 4 * n + t)]);
      const float factor = top[n] == MINUS_INFINITY ? 0.0f : exp2_fast(top[n] - highest);
      const float add = V_KIND == UNIFORM ? shift[n] : 0.0f;
      float* mine = (float*)ring + t * OUT_ROW;
#pragma unroll
      for (int i = 0; i < VS; i++) {
        mine[16 * i + g] = (out[n][i][0] * VALUE_UNIT + add) * factor;
        mine[16 * i + g + 8] = (out[n][i][1] * VALUE_UNIT + add) * factor;
      }
      sync_threads();
      for (int i = thread_index(); i < 4 * VD; i += 32 * WARPS) {
        const int column = i / VD, d = i % VD;
        float x = 0;
        for (int w = 0; w < WARPS; w++) x += ((const float*)(shared + w * STAGES * SLOT))[column * OUT_ROW + d];
        args.parts[(part * COLUMNS + 4 * n + column) * VD + d] = x;
      }
      if (thread_index() < 4) {
        const int column = 4 * n + thread_index();
        float top_all = MINUS_INFINITY, total_all = 0;
        for (int w = 0; w < WARPS; w++) top_all = maximum(top_all, states[2 * (w * COLUMNS + column)]);
        for (int w = 0; w < WARPS; w++) {
          const float m = states[2 * (w * COLUMNS + column)], l = states[2 * (w * COLUMNS + column) + 1];
          total_all += l * (m == MINUS_INFINITY ? (l == l ? 0.0f : 1.0f) : exp2_fast(m - top_all));
        }
        float* state = args.part_states + (part * COLUMNS + column) * 2;
        state[0] = top_all, state[1] = total_all;
      }
      sync_threads();
    }
    if (left <= 0) return;
    piece = next;
  }
}
LAUNCHABLE(attend, Args)

// Merges the parts of a (query, head), adds the sink, divides, rotates back. `merge_split` warps share the parts of one,
// so that few rows with many parts do not wait for one load after the other.
constexpr int MERGE_WARPS = 8, AT_ONCE = 4, VN = (VD + 31) / 32;

struct Merged {
  float highest, total, x[VN];
  DEVICE_MEMBER void add(float m, float l, const float (&v)[VN]) {
    const float top = maximum(highest, m);
    const float mine = highest == MINUS_INFINITY ? 0.0f : exp2_fast(highest - top);
    const float other = m == MINUS_INFINITY ? (l == l ? 0.0f : 1.0f) : exp2_fast(m - top);
    total = total * mine + l * other;
#pragma unroll
    for (int i = 0; i < VN; i++) x[i] = x[i] * mine + v[i] * other;
    highest = top;
  }
};

KERNEL(32 * MERGE_WARPS, 1) merge(GRID_CONSTANT Args args) {
  SHARED_MEMORY(shared);
  const int warp = thread_index() / 32, lane = thread_index() & 31, split = args.merge_split;
  const int row = block_index(), head = block_index_y() * (MERGE_WARPS / split) + warp / split;
  const int query_heads = args.heads * args.group;
  if (row >= load_int(args.starts + args.sequences)) return;
  int b = 0;
  for (int high = args.sequences; high - b > 1;) {
    const int middle = (b + high) / 2;
    if (load_int(args.starts + middle) <= row) b = middle; else high = middle;
  }
  const Sequence s = sequence_at(args, b);
  if (s.chunks == 0) return;  // another kernel's
  i32 all;
  const Sums before = sums_before(args, b, 32 * MERGE_WARPS, (i32*)shared, all);
  const int share = steps_per_block(all, args.blocks);
  const int per_chunk = COLUMNS / args.group, query = row - s.start, chunk = query / per_chunk;
  const int column = (query % per_chunk) * args.group + head % args.group;
  const int within = chunk * args.heads + head / args.group, item = before.items + within;
  const int first = before.steps + within * s.steps, first_block = first / share;
  const int last_block = s.steps && head < query_heads ? (first + s.steps - 1) / share : first_block - 1;
  wait_for_grid_before();

  Merged merged;
  merged.highest = MINUS_INFINITY, merged.total = 0;
#pragma unroll
  for (int i = 0; i < VN; i++) merged.x[i] = 0;
  for (int block = first_block + warp % split; block <= last_block; block += AT_ONCE * split) {
    float m[AT_ONCE], l[AT_ONCE], v[AT_ONCE][VN];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const bool real = block + j * split <= last_block;
      const i64 part = (i64)(item + (real ? block + j * split : block)) * COLUMNS + column;
      m[j] = real ? args.part_states[2 * part] : MINUS_INFINITY;
      l[j] = real ? args.part_states[2 * part + 1] : 0.0f;
#pragma unroll
      for (int i = 0; i < VN; i++) v[j][i] = real && lane + 32 * i < VD ? args.parts[part * VD + lane + 32 * i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) merged.add(m[j], l[j], v[j]);
  }
  float* mine = (float*)shared + warp * (VD + 2);
  if (split > 1) {
    if (lane == 0) mine[VD] = merged.highest, mine[VD + 1] = merged.total;
#pragma unroll
    for (int i = 0; i < VN; i++)
      if (lane + 32 * i < VD) mine[lane + 32 * i] = merged.x[i];
    sync_threads();
    if (warp % split) return;
    for (int w = 1; w < split; w++) {
      const float* theirs = mine + w * (VD + 2);
      float v[VN];
#pragma unroll
      for (int i = 0; i < VN; i++) v[i] = lane + 32 * i < VD ? theirs[lane + 32 * i] : 0.0f;
      merged.add(theirs[VD], theirs[VD + 1], v);
    }
  }
  if (head >= query_heads) return;
  float highest = merged.highest, total = merged.total, factor = 1.0f;
  if (args.sinks) {
    const float sink = args.sinks[head] * LOG2E, top = maximum(highest, sink);
    factor = highest == MINUS_INFINITY ? 0.0f : exp2_fast(highest - top);
    total = total * (total == total ? factor : 1.0f) + exp2_fast(sink - top);
    highest = top;
  }
  const float inverse = total == 0 ? 0.0f : factor / total;
  float x[VN];
#pragma unroll
  for (int i = 0; i < VN; i++) x[i] = merged.x[i] * inverse;
  if (V_ROTATED) unrotate<VD>(x, args.value_sign_bits, (const u16*)args.value_signs, args.value_norm, mine, lane);
  const i64 at = (i64)row * args.out_stride + (i64)head * args.out_head_stride;
#pragma unroll
  for (int i = 0; i < VN; i++) {
    const int d = lane + 32 * i;
    if (d >= VD) continue;
    if (OUT_TYPE == 2) ((float*)args.out)[at + d] = x[i];
    else ((u16*)args.out)[at + d] = (u16)(OUT_TYPE == 1 ? float_to_bfloat(x[i]) : float_to_half(x[i]));
  }
  if (args.lse && lane == 0)
    args.lse[(i64)row * query_heads + head] = total == 0 ? MINUS_INFINITY : (highest + log2_fast(total)) * LN2;
}
LAUNCHABLE(merge, Args)
