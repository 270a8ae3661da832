// Combines the results of the warps. Writes the output if the thread block processed all keys of the work tile,
// otherwise a partial result in the workspace.
#pragma once
#include "decode/decode_softmax.cuh"
#include "decode/states.cuh"

// Exchanges maxima and sums first, then outputs, one group of columns at a time, through slot 0 of each warp's ring.
DEVICE void combine_warps(const DecodeArgs& args, const DecodeRange& range, const ColumnState& columns,
    Accumulator& acc, u8* shared, u8* ring, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float* states = (float*)(shared + STATE_AT);
  store_states(columns, acc, states, warp, lane);
  sync_threads();
  const i64 part = range.part(args);
  const bool whole = is_whole(args, range);
  UNROLL_FOR (int n = 0; n < NG; n++) {
    UNROLL_FOR (int j = 0; j < OWN; j++) {
      const int c = n * OWN + j;
      float highest = MINUS_INFINITY;
      for (int w = 0; w < WARPS; w++)
        highest = max_f32(highest, states[STATE_WORDS * (w * COLUMNS + own_column(c, t))]);
      const float factor = acc.row_max[c] == MINUS_INFINITY ? 0.0f : exp2_approx(acc.row_max[c] - highest);
      float* mine = (float*)ring + (OWN * t + j) * OUT_ROW;
      UNROLL_FOR (int i = 0; i < OUT_SLICES; i++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
          const float x = acc.number(n, i, r, j);
          mine[16 * i + g + 8 * r] =
              mul_rn(V_KIND == UNIFORM ? fma_rn(x, VALUE_UNIT, acc.shift[c]) : x * VALUE_UNIT, factor);
        }
    }
    sync_threads();
    auto sum_at = [&](int column, int d) {
      float x = 0;
      UNROLL_FOR (int w = 0; w < WARPS; w++)
        x += ((const float*)(shared + RINGS_AT + w * STAGES * SLOT))[column * OUT_ROW + d];
      return x;
    };
    if (whole) {
      for (int i = warp; warp < WRITERS && i < GROUP; i += WRITERS) {
        const int column = GROUP * n + i, per_chunk = args.queries_of_chunk,
                  query = range.chunk * per_chunk + by_group(args, column);
        if (column >= per_chunk * args.group_size || query >= range.s.queries) continue;
        float all_max, all_sum, x[VN];
        sum_of_warps(states, column, all_max, all_sum);
        UNROLL_FOR (int j = 0; j < VN; j++) x[j] = lane + 32 * j < VD ? sum_at(i, lane + 32 * j) : 0.0f;
        write_row(args, range.s.start + query, range.head * args.group_size + in_group(args, column), all_max, all_sum,
            x, scratch_of_writer(shared, warp), lane);
      }
    } else {
      for (int i = thread_index(); i < GROUP * VD; i += 32 * WARPS)
        args.parts[(part * COLUMNS + GROUP * n + i / VD) * VD + i % VD] = sum_at(i / VD, i % VD);
      if (thread_index() < GROUP) {
        const int column = GROUP * n + thread_index();
        float* state = args.part_states + (part * COLUMNS + column) * 2;
        sum_of_warps(states, column, state[0], state[1]);
      }
    }
    sync_threads();
  }
}
