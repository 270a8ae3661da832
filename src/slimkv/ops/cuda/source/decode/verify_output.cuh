// The output of a team, whose warps share the values.
#pragma once
#include "decode/states.cuh"
#include "decode/verify_team.cuh"

typedef Codes<V_BITS, VS, true, TEAM> PartCodes;  // a warp's slices

// A warp's slices of the output: out[i][n][2 r + j] is dimension g + 8 r of the warp's slice i, for column
// 8 n + 2 t + j. Warp m of a team has slices from OUT_SLICES m on.
struct TeamOutput {
  float out[OUT_SLICES][NG][4];
  // The accumulators of slice i for all groups, as wgmma takes them.
  DEVICE_MEMBER float (&products(int i))[4 * NG] { return *(float (*)[4 * NG]) & out[i]; }
  DEVICE_MEMBER void clear() {
    UNROLL_FOR (int n = 0; n < NG; n++)
      UNROLL_FOR (int i = 0; i < OUT_SLICES; i++)
        UNROLL_FOR (int j = 0; j < 4; j++) out[i][n][j] = 0;
  }
};

// Writes the warp's output, all columns at once, to shared memory, or adds it there. All states must be published.
DEVICE void store_results(const TeamOutput& acc, const TeamWarp& warp, u8* shared, int lane, bool adds) {
  const int g = lane >> 2, t = lane & 3, worker = warp.pair * TEAM + warp.member, place = worker % (TEAM * RESULT_SUMS);
  const float* states = (const float*)(shared + STATE_AT);
  UNROLL_FOR (int c = 0; c < C; c++) {
    const int column = own_column(c, t);
    float shift = 0, highest = MINUS_INFINITY;
    if (V_KIND == UNIFORM)  // summed over the team's tokens
      for (int w = 0; w < TEAM; w++) shift += states[STATE_WORDS * ((warp.pair * TEAM + w) * COLUMNS + column) + 2];
    UNROLL_FOR (int w = 0; w < WORKERS; w += TEAM)
      highest = max_f32(highest, states[STATE_WORDS * (w * COLUMNS + column)]);  // the same for the whole team
    const float row_max = states[STATE_WORDS * (worker * COLUMNS + column)];
    const float factor = row_max == MINUS_INFINITY ? 0.0f : exp2_approx(row_max - highest);
    float* mine = (float*)(shared + QUERY_AT) + (place * COLUMNS + column) * RESULT_ROW;
    UNROLL_FOR (int i = 0; i < OUT_SLICES; i++)
      UNROLL_FOR (int r = 0; r < 2; r++) {
        const float x = V_KIND == UNIFORM ? (acc.out[i][c / OWN][2 * r + c % OWN] * VALUE_UNIT + shift) * factor
                                          : acc.out[i][c / OWN][2 * r + c % OWN] * (VALUE_UNIT * factor);
        mine[16 * i + g + 8 * r] = adds ? mine[16 * i + g + 8 * r] + x : x;
      }
  }
}

// Writes the rows of the range, one warp per row: the output if the thread block processed all keys of the work tile,
// otherwise a partial result.
DEVICE void write_rows(const DecodeArgs& args, const DecodeRange& range, u8* shared, int warp, int lane) {
  const float *states = (const float*)(shared + STATE_AT), *results = (const float*)(shared + QUERY_AT);
  const i64 part = range.part(args);
  for (int column = warp; column < COLUMNS; column += WARPS) {
    const int per_chunk = args.queries_of_chunk, query = range.chunk * per_chunk + by_group(args, column);
    if (column >= per_chunk * args.group_size || query >= range.s.queries) continue;
    float all_max, all_sum, x[VN];
    sum_of_warps(states, column, all_max, all_sum);
    UNROLL_FOR (int j = 0; j < VN; j++) {
      const int d = lane + 32 * j;
      x[j] = 0;
      UNROLL_FOR (int w = 0; w < TEAM * RESULT_SUMS; w += TEAM)
        if (d < VD)
          x[j] += results[((w + d / (16 * OUT_SLICES)) * COLUMNS + column) * RESULT_ROW + d % (16 * OUT_SLICES)];
    }
    if (is_whole(args, range)) {
      write_row(args, range.s.start + query, range.head * args.group_size + in_group(args, column), all_max, all_sum, x,
          scratch_of_writer(shared, warp), lane);
      continue;
    }
    float* to = args.parts + (part * COLUMNS + column) * VD;
    UNROLL_FOR (int j = 0; j < VN; j++)
      if (lane + 32 * j < VD) to[lane + 32 * j] = x[j];
    if (lane < 2) args.part_states[(part * COLUMNS + column) * 2 + lane] = lane ? all_sum : all_max;
  }
}
