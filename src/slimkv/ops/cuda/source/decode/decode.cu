// Attention of few queries a sequence on packed pages: `attend` reads pages and leaves partial results, `merge` puts them
// together. The warps of a block take the steps of its piece of the line (schedule.cuh) in turn; each has its own ring of
// shared memory, filled ahead by asynchronous copies, and its own running softmax.
//
// Up to 4 columns (one narrow group): a query (rotated, scaled to 15 bits) is multiplied as two signed bytes with the
// bytes of the keys' levels, a probability (times its value's scale, 16 bits relative to the largest of the step) as two
// unsigned bytes with the bytes of the values' levels: integer tensor cores, exact sums, no conversion of levels. The
// bytes of a value word alternate between two dimensions, g and g + 8; they are regrouped (V_REGROUPED), or used as they are,
// once with probabilities in the even bytes and once in the odd ones. Formats without byte levels use halves in the same
// places.
//
// More columns (wide groups of 8): integer products become dear, and what is done for every score counts more than what
// is done for every level. Everything is in halves, and the output stays in the products' accumulators.
#include "decode/loader.cuh"
#include "decode/merge.cuh"
#include "decode/queries.cuh"

DEVICE float soft_cap(float s, float cap) {
  const float x = min_f32(max_f32(2.0f * LOG2E * (s / cap), -80.0f), 80.0f);
  const float e = exp2_approx(x);
  return cap * ((e - 1.0f) / (e + 1.0f));
}

DEVICE void key_bytes(const Codes<K_BITS, KS, false>& codes, int slice, Table table, u32& first, u32& second) {
  code_bytes<K_KIND, K_BITS>(codes.low(slice), codes.high(slice), table, first, second);
}

DEVICE void value_bytes(const Codes<V_BITS, VS, true>& codes, int slice, Table table, u32& first, u32& second) {
  code_bytes<V_KIND, V_BITS>(codes.low(slice), codes.high(slice), table, first, second);
}

KERNEL(32 * WARPS, MIN_BLOCKS) attend(GRID_CONSTANT DecodeArgs args) {
  SHARED_MEMORY(shared);
  const int warp = thread_index() / 32, lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
  pdl_wait();

  // -- this block's piece of the line
  int left;
  WorkRange range = first_range(args, lane, left);
  if (left <= 0) return;

  // -- tables. A permutation takes one operand of the kind that all lanes share; its table must not be one.
  u32* key_levels = (u32*)(shared + LEVELS_AT);
  u32* value_levels = key_levels + 32 * LEVELS_K;
  for (int i = thread_index(); i < 32 * LEVELS_K; i += 32 * WARPS) key_levels[i] = f32_to_f16(args.key_levels[i / 32]);
  for (int i = thread_index(); i < 32 * LEVELS_V; i += 32 * WARPS) value_levels[i] = f32_to_f16(args.value_levels[i / 32]);
  const u32 signs = in_register(0x80808080u, lane);
  const Table key_table = {in_register(args.key_table.low, lane), in_register(args.key_table.high, lane), signs};
  constexpr bool ONE_TABLE = K_KIND == V_KIND && K_BITS == V_BITS && KD == VD;
  const Table value_table = ONE_TABLE ? key_table
                                      : Table{in_register(args.value_table.low, lane),
                                              in_register(args.value_table.high, lane), signs};

  // -- loading ahead: the queries travel at the same time as the first pages
  u8* ring = shared + warp * STAGES * SLOT;
  Loader loader;
  loader.ring = ring;
  loader.lane = lane;
  int filled = 0;  // steps copied so far; slot = number % STAGES
  constexpr int QUERIES = (COLUMNS + WARPS - 1) / WARPS;
  float query[QUERIES][QN];
  auto begin_loading = [&](const WorkRange& p) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (warp + i * WARPS < COLUMNS) load_query(args, p, warp + i * WARPS, query[i], lane);
    loader.open(args, p);
    loader.look_up(min_i32(p.first + warp, p.last - 1));
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      const int step = p.first + warp + i * WARPS;
      if (step < p.last) loader.copy(step, filled % STAGES);
      cp_async_commit();
      filled++;
      loader.look_up(min_i32(step + WARPS, p.last - 1));
    }
  };
  begin_loading(range);

  while (true) {
    // -- the queries of this piece
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (warp + i * WARPS < COLUMNS)
        prepare_query(args, warp + i * WARPS, query[i], shared, (float*)(ring + (filled % STAGES) * SLOT), lane);
    sync_threads();
    constexpr int C = NG * OWN;  // columns of this lane: number c is column `own(c)` of the block
    auto own = [&](int c) { return c / OWN * GROUP + OWN * t + c % OWN; };
    u32 q[NG][Q_IN_SHARED ? 1 : QI][2];
    if (!Q_IN_SHARED)
#pragma unroll
      for (int n = 0; n < NG; n++)
#pragma unroll
        for (int i = 0; i < QI; i++) load_operand(shared, n, i, lane, q[n][i]);
    float unit[C], sum[C];
    int visible_end[C], visible_begin[C];
    const int first_query = range.chunk * (COLUMNS / args.group_size);
#pragma unroll
    for (int c = 0; c < C; c++) {
      const float* column = (const float*)(shared + COLUMN_AT) + 2 * own(c);
      unit[c] = column[0] * (args.scale < 0 ? -args.scale : args.scale);
      if (unit[c] < 1e-30f) unit[c] = 1e-30f;  // zero times minus infinity would not be a number
      sum[c] = column[1];
      const int position = range.s.length - range.s.queries + first_query + own(c) / args.group_size;
      visible_end[c] = args.causal ? min_i32(range.s.length, position + 1) : range.s.length;
      visible_begin[c] = WINDOW ? position - args.sliding_window + 1 : 0;
    }
    constexpr float KEY_OFFSET = K_BYTES ? (K_KIND == LLOYD ? 63.5f : 0.0f) : half_offset<K_KIND, K_BITS, false>();
    // What every query of the chunk sees needs no mask.
    const int last_query = min_i32(range.s.queries, first_query + COLUMNS / args.group_size) - 1;
    const int clear_end = args.causal ? range.s.length - range.s.queries + first_query + 1 : range.s.length;
    const int clear_begin = WINDOW ? range.s.length - range.s.queries + last_query - args.sliding_window + 1 : 0;

    // Narrow: out[n][i][r] is dimension 16 i + g + 8 r of column n. Wide: out[n][i][2 r + j], column 8 n + 2 t + j.
    // Narrow scores and their maximum are kept without the query's unit, which joins them inside the exponential.
    // Wide ones get it where they are used.
    constexpr bool LATE_UNIT = !SOFTCAP, MAX_WITHOUT_UNIT = !WIDE && LATE_UNIT;
    float out[NG][VS][2 * OWN], row_max[C], row_sum[C], shift[C];
    u32 largest_fields = 0;  // the largest fields, two at a time: 0xFFFF marks a token whose K or V was not a number
#pragma unroll
    for (int c = 0; c < C; c++) row_max[c] = MINUS_INFINITY, row_sum[c] = 0, shift[c] = 0;
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int i = 0; i < VS; i++)
#pragma unroll
        for (int j = 0; j < 2 * OWN; j++) out[n][i][j] = 0;

    int taken = filled - (STAGES - 1);
    for (int step = range.first + warp; step < range.last; step += WARPS) {
      cp_async_wait<STAGES - 2>();
      sync_warp();
      {
        const int ahead = step + (STAGES - 1) * WARPS;
        if (ahead < range.last) loader.copy(ahead, filled % STAGES);
        cp_async_commit();
        filled++;
        loader.look_up(min_i32(ahead + WARPS, range.last - 1));
      }
      const u8* slot = ring + (taken % STAGES) * SLOT;
      taken++;
      const int token0 = range.s.begin + step * STEP;
      const bool clear = token0 + STEP <= clear_end && token0 >= clear_begin;

      // -- scores of tokens g and g + 8 of each tile
      float s[C][NT][2];
      {
        Codes<K_BITS, KS, false> codes[NT];
#pragma unroll
        for (int x = 0; x < NT; x++) codes[x].load(slot + x * TILE, lane);
        if (K_BYTES) {
          i32 c[NT][NG][4];
#pragma unroll
          for (int i = 0; i < QI; i++) {
            if (Q_IN_SHARED)
#pragma unroll
              for (int n = 0; n < NG; n++) load_operand(shared, n, i, lane, q[n][0]);
#pragma unroll
            for (int x = 0; x < NT; x++) {
              u32 a0, a1, a2 = 0, a3 = 0;
              key_bytes(codes[x], 2 * i, key_table, a0, a1);
              if (2 * i + 1 < KS) key_bytes(codes[x], 2 * i + 1, key_table, a2, a3);
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
#pragma unroll
          for (int x = 0; x < NT; x++)
#pragma unroll
            for (int n = 0; n < NG; n++) c[x][n][0] = c[x][n][1] = c[x][n][2] = c[x][n][3] = 0;
#pragma unroll
          for (int i = 0; i < QI; i++) {
            if (Q_IN_SHARED)
#pragma unroll
              for (int n = 0; n < NG; n++) load_operand(shared, n, i, lane, q[n][0]);
#pragma unroll
            for (int x = 0; x < NT; x++) {
              u32 a[4];
              code_halves<K_KIND, K_BITS, false>(codes[x].low(i), codes[x].high(i), key_table,
                                                 key_levels, lane, a);
#pragma unroll
              for (int n = 0; n < NG; n++)
                mma_f16(c[x][n], a[0], a[1], a[2], a[3], q[n][Q_IN_SHARED ? 0 : i][0], q[n][Q_IN_SHARED ? 0 : i][1]);
            }
          }
#pragma unroll
          for (int x = 0; x < NT; x++)
#pragma unroll
            for (int n = 0; n < NG; n++)
#pragma unroll
              for (int r = 0; r < 2; r++)
#pragma unroll
                for (int j = 0; j < OWN; j++)
                  s[n * OWN + j][x][r] = WIDE ? c[x][n][2 * r + j] : c[x][n][2 * r] + c[x][n][2 * r + 1];
        }
      }
#pragma unroll
      for (int x = 0; x < NT; x++) {
        const u8* fields = slot + x * TILE + FIELDS_AT;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const u32 field = field_bits(fields, g + 8 * r);
          const float scale = small_scale_of(field);
          const float zero = K_KIND == UNIFORM ? small_zero_of(field_bits(fields + 32, g + 8 * r)) : 0;
#pragma unroll
          for (int c = 0; c < C; c++) {
            float score = (KEY_OFFSET != 0 ? s[c][x][r] - KEY_OFFSET * sum[c] : s[c][x][r]) * scale;
            if (K_KIND == UNIFORM) score += zero * sum[c];
            if (!LATE_UNIT) score *= unit[c];
            if (SOFTCAP) score = soft_cap(score, args.softcap);
            s[c][x][r] = score;
          }
        }
      }
      // Marked tokens. One branch for the whole step, so that the rest of it is a single run of instructions.
      if (clear) {
        constexpr int WORDS = 8 * (K_NUMBER_OF_FIELDS + V_NUMBER_OF_FIELDS);  // of a tile
#pragma unroll
        for (int i = 0; i < WORDS * NT; i += 32)
          if (i + 32 <= WORDS * NT || i + lane < WORDS * NT)
            largest_fields = max_u16x2(largest_fields, *(const u32*)(slot + (i + lane) / WORDS * TILE + FIELDS_AT + 4 * ((i + lane) % WORDS)));
      } else {
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
          const int x = i / 2, r = i & 1, token = token0 + 16 * x + g + 8 * r;
          const u8* fields = slot + x * TILE + FIELDS_AT;
          const bool bad = field_bits(fields, g + 8 * r) == INVALID_FIELD ||
                           field_bits(fields + 32 * K_NUMBER_OF_FIELDS, g + 8 * r) == INVALID_FIELD;
#pragma unroll
          for (int c = 0; c < C; c++) {
            const bool visible = token < visible_end[c] && token >= visible_begin[c];
            s[c][x][r] = !visible ? MINUS_INFINITY : bad ? NOT_A_NUMBER : s[c][x][r];
          }
        }
      }

      // -- the running maximum moves rarely. Wide: of the score and the logarithm of the value's scale, so that their
      // product stays within what halves hold. A field is about 1024 times that logarithm, plus 40.
      float magnitude[NT][2];
      if (WIDE)
#pragma unroll
        for (int x = 0; x < NT; x++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            magnitude[x][r] = (float)(i32)field_bits(slot + x * TILE + FIELDS_AT + 32 * K_NUMBER_OF_FIELDS, g + 8 * r);
      float highest[C];
      bool moves = false;
#pragma unroll
      for (int c = 0; c < C; c++) {
        highest[c] = MINUS_INFINITY;
#pragma unroll
        for (int x = 0; x < NT; x++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            highest[c] = max_f32(highest[c], WIDE ? fma_rn(s[c][x][r], LATE_UNIT ? 1024.0f * unit[c] : 1024.0f, magnitude[x][r]) : s[c][x][r]);
        if (WIDE) highest[c] = fma_rn(highest[c], 1.0f / 1024, -40.0f);
        moves = moves || highest[c] > row_max[c];
      }
      if (warp_any(moves)) {
#pragma unroll
        for (int c = 0; c < C; c++) {
          float higher = highest[c];
#pragma unroll
          for (int d = 4; d < 32; d <<= 1) higher = max_f32(higher, shfl_xor(higher, d));
          higher = max_f32(higher, row_max[c]);
          const float base = MAX_WITHOUT_UNIT ? unit[c] : 1.0f;
          const float factor = row_max[c] == MINUS_INFINITY ? 0.0f : exp2_approx((row_max[c] - higher) * base);
          row_max[c] = higher;
          row_sum[c] *= factor, shift[c] *= factor;
#pragma unroll
          for (int i = 0; i < VS; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) out[c / OWN][i][WIDE ? 2 * r + c % OWN : r] *= factor;
        }
      }

      // -- probabilities times their values' scales, as operands
      u32 p[NG][NT][2];
      float fold[NG];  // narrow: what makes products with them numbers again
      i32 start[NG];   // narrow: minus the levels' offset, 63.5, times the sum of the probabilities
#pragma unroll
      for (int c = 0; c < C; c++) {
        const float base = LATE_UNIT ? unit[c] : 1.0f;
        const float reference = row_max[c] == MINUS_INFINITY ? 0.0f : MAX_WITHOUT_UNIT ? row_max[c] * base : row_max[c];
#pragma unroll
        for (int x = 0; x < NT; x++) {
          const u8* fields = slot + x * TILE + FIELDS_AT + 32 * K_NUMBER_OF_FIELDS;
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float e = exp2_approx(fma_rn(s[c][x][r], base, -reference));
            const float scale = scale_of(field_bits(fields, g + 8 * r));
            row_sum[c] += e;
            s[c][x][r] = e * scale;
            if (V_KIND == UNIFORM) {
              const float zero = zero_of(field_bits(fields + 32, g + 8 * r));
              shift[c] += e > 0 ? e * (WIDE ? zero - half_offset<V_KIND, V_BITS, true>() * scale : zero) : 0;
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NG; n++) {
        if (WIDE) {
#pragma unroll
          for (int x = 0; x < NT; x++)
#pragma unroll
            for (int r = 0; r < 2; r++) p[n][x][r] = movmatrix_trans(pack_f16x2(s[n * OWN][x][r], s[n * OWN + OWN - 1][x][r]));
          continue;
        }
        float largest = 1e-30f;
#pragma unroll
        for (int x = 0; x < NT; x++) largest = max_f32(largest, max_f32(s[n][x][0], s[n][x][1]));
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) largest = max_f32(largest, shfl_xor(largest, d));
        const float up = (V_BYTES ? 65535.0f : 1.0f) * rcp_approx(largest);
        fold[n] = largest * (V_BYTES ? 1.0f / 65535.0f : 1.0f);
        u32 all = 0;
#pragma unroll
        for (int x = 0; x < NT; x++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            if (V_BYTES) {  // high byte, 0, low byte, 0
              const u32 bits = as_bits(s[n][x][r] * up + 8388608.0f);
              all += bits;
              p[n][x][r] = movmatrix_trans(prmt(bits, 0, 0x4041));
            } else {
              const float w = s[n][x][r] * up;
              const u32 high = f32_to_f16(w);
              p[n][x][r] = movmatrix_trans(high | f32_to_f16(w - f16_to_f32(high)) << 16);
            }
          }
        start[n] = 0;
        if (V_BYTES && V_KIND == LLOYD) {  // the levels' offset comes off in integers
          all -= 2 * NT * 0x4B000000u;     // what a float of 2^23 has above the integer
#pragma unroll
          for (int d = 4; d < 32; d <<= 1) all += shfl_xor(all, d);
          start[n] = -(i32)((127 * all) >> 1);
        }
      }

      // -- values
      Codes<V_BITS, VS, true> codes[NT];
#pragma unroll
      for (int x = 0; x < NT; x++) codes[x].load(slot + x * TILE + K_TILE, lane);
      if (V_BYTES && V_REGROUPED) {
        u32 b[NG][NT];
#pragma unroll
        for (int n = 0; n < NG; n++)
#pragma unroll
          for (int x = 0; x < NT; x++) b[n][x] = prmt(p[n][x][0], p[n][x][1], 0x6420);
#pragma unroll
        for (int i = 0; i < VS; i++) {
          i32 c[NG][4];
#pragma unroll
          for (int x = 0; x < NT; x += 2) {  // two tiles are one operand
            u32 first, second, a0, a1, a2 = 0, a3 = 0;
            value_bytes(codes[x], i, value_table, first, second);
            a0 = prmt(first, second, 0x6420), a1 = prmt(first, second, 0x7531);
            if (x + 1 < NT) {
              value_bytes(codes[x + 1 < NT ? x + 1 : x], i, value_table, first, second);
              a2 = prmt(first, second, 0x6420), a3 = prmt(first, second, 0x7531);
            }
#pragma unroll
            for (int n = 0; n < NG; n++) {
              const u32 b0 = b[n][x], b1 = x + 1 < NT ? b[n][x + 1 < NT ? x + 1 : x] : 0;
              if (x == 0) mma_u8_u8_from(c[n], a0, a1, a2, a3, b0, b1, 0, start[n], 0, start[n]);
              else mma_u8_u8(c[n], a0, a1, a2, a3, b0, b1);
            }
          }
#pragma unroll
          for (int n = 0; n < NG; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) out[n][i][j] += (float)(256 * c[n][2 * j] + c[n][2 * j + 1]) * fold[n];
        }
      } else if (V_BYTES) {
#pragma unroll
        for (int i = 0; i < VS; i += 2) {  // two slices are one operand
          i32 even[NG][4], odd[NG][4];     // dimensions g of both slices, dimensions g + 8
#pragma unroll
          for (int x = 0; x < NT; x++) {
            u32 a0, a1 = 0, a2, a3 = 0;
            value_bytes(codes[x], i, value_table, a0, a2);
            if (i + 1 < VS) value_bytes(codes[x], i + 1, value_table, a1, a3);
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
            for (int j = 0; j < 2; j++) {
              if (i + j >= VS) continue;
              out[n][i + j][0] += (float)(256 * even[n][2 * j] + even[n][2 * j + 1]) * fold[n];
              out[n][i + j][1] += (float)(256 * odd[n][2 * j] + odd[n][2 * j + 1]) * fold[n];
            }
        }
      } else {
#pragma unroll
        for (int i = 0; i < VS; i++) {
          float c[NG][4];
#pragma unroll
          for (int n = 0; n < NG; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) c[n][j] = WIDE ? out[n][i][j % (2 * OWN)] : 0;
#pragma unroll
          for (int x = 0; x < NT; x++) {
            u32 a[4];
            code_halves<V_KIND, V_BITS, true>(codes[x].low(i), codes[x].high(i), value_table,
                                              value_levels, lane, a);
#pragma unroll
            for (int n = 0; n < NG; n++) mma_f16(c[n], a[0], a[1], a[2], a[3], p[n][x][0], p[n][x][1]);
          }
#pragma unroll
          for (int n = 0; n < NG; n++)
#pragma unroll
            for (int j = 0; j < 2 * OWN; j++)
              out[n][i][j] = WIDE ? c[n][j] : out[n][i][j] + (c[n][2 * j % 4] + c[n][(2 * j + 1) % 4]) * fold[n];
        }
      }
      sync_warp();  // before this slot is filled again
    }
    cp_async_wait<0>();

    // -- what comes next is loaded while this piece is finished; slot 0 is kept free for its results
    left -= range.last - range.first;
    WorkRange next = range;
    filled = 1;
    if (left > 0) {
      next = next_range(args, range, left);
      begin_loading(next);
    }

    // -- the warps' results together: maxima and sums, then a group of columns at a time through the free slots
    float* states = (float*)(shared + STATE_AT);
    const bool marked = warp_any(largest_fields >> 16 == INVALID_FIELD || (largest_fields & 0xFFFF) == INVALID_FIELD);
#pragma unroll
    for (int c = 0; c < C; c++) {
      if (marked) row_sum[c] = NOT_A_NUMBER;
      if (MAX_WITHOUT_UNIT && row_max[c] != MINUS_INFINITY) row_max[c] *= unit[c];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) row_sum[c] += shfl_xor(row_sum[c], d), shift[c] += shfl_xor(shift[c], d);
      if (g == 0) states[2 * (warp * COLUMNS + own(c))] = row_max[c], states[2 * (warp * COLUMNS + own(c)) + 1] = row_sum[c];
    }
    sync_threads();
    const i64 part = (i64)range.item + block_index();
#pragma unroll
    for (int n = 0; n < NG; n++) {
#pragma unroll
      for (int j = 0; j < OWN; j++) {
        const int c = n * OWN + j;
        float highest = MINUS_INFINITY;
        for (int w = 0; w < WARPS; w++) highest = max_f32(highest, states[2 * (w * COLUMNS + own(c))]);
        const float factor = row_max[c] == MINUS_INFINITY ? 0.0f : exp2_approx(row_max[c] - highest);
        float* mine = (float*)ring + (OWN * t + j) * OUT_ROW;
#pragma unroll
        for (int i = 0; i < VS; i++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            mine[16 * i + g + 8 * r] = (out[n][i][WIDE ? 2 * r + j : r] * VALUE_UNIT + shift[c]) * factor;
      }
      sync_threads();
      for (int i = thread_index(); i < GROUP * VD; i += 32 * WARPS) {
        const int column = i / VD, d = i % VD;
        float x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += ((const float*)(shared + w * STAGES * SLOT))[column * OUT_ROW + d];
        args.parts[(part * COLUMNS + GROUP * n + column) * VD + d] = x;
      }
      if (thread_index() < GROUP) {
        const int column = GROUP * n + thread_index();
        float all_max = MINUS_INFINITY, all_sum = 0;
        for (int w = 0; w < WARPS; w++) all_max = max_f32(all_max, states[2 * (w * COLUMNS + column)]);
        for (int w = 0; w < WARPS; w++) {
          const float m = states[2 * (w * COLUMNS + column)], l = states[2 * (w * COLUMNS + column) + 1];
          all_sum += l * (m == MINUS_INFINITY ? (l == l ? 0.0f : 1.0f) : exp2_approx(m - all_max));
        }
        float* state = args.part_states + (part * COLUMNS + column) * 2;
        state[0] = all_max, state[1] = all_sum;
      }
      sync_threads();
    }
    if (left <= 0) return;
    range = next;
  }
}
HOST_TESTABLE(attend, DecodeArgs)
