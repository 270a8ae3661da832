// The results of a block's warps together: the output of an item of which it has had all keys, else a part of the workspace.
#pragma once
#include "decode/output.cuh"
#include "decode/warp_state.cuh"

// The maximum and the sum of a column over the block's warps.
DEVICE void sum_of_warps(const float* states, int column, float& all_max, float& all_sum) {
  all_max = MINUS_INFINITY, all_sum = 0;
  for (int w = 0; w < WORKERS; w++) all_max = max_f32(all_max, states[STATE_WORDS * (w * COLUMNS + column)]);
  for (int w = 0; w < WORKERS; w++) {
    const float* state = states + STATE_WORDS * (w * COLUMNS + column);
    const float m = state[0], l = state[1];
    all_sum += l * (m == MINUS_INFINITY ? (l == l ? 0.0f : 1.0f) : exp2_approx(m - all_max));
  }
}

// What a block gives its cluster: sums of a group of columns, in the second slot of a ring, and maximum and sum of a column, in the
// place of what was known of it.
DEVICE float* cluster_sums(u8* shared, int n) { return (float*)(shared + RINGS_AT + (n * STAGES + 1) * SLOT); }
DEVICE float* cluster_state(u8* shared, int column) { return (float*)column_at(shared, column); }

// The rows of an item, of which each block of the cluster writes some.
DEVICE void combine_cluster(const DecodeArgs& args, const WorkRange& range, u8* shared, int warp, int lane) {
  cluster_sync();
  for (int column = cluster_rank() + CLUSTER * warp; column < COLUMNS; column += CLUSTER * WARPS) {
    const int of_chunk = by_group(args, column), per_chunk = args.queries_of_chunk, query = range.chunk * per_chunk + of_chunk;
    if (of_chunk >= per_chunk || query >= range.s.queries) continue;
    const float *state = cluster_state(shared, column), *sums = cluster_sums(shared, column / GROUP) + column % GROUP * VD;
    float m[CLUSTER], l[CLUSTER], v[CLUSTER][VN];
#pragma unroll
    for (int j = 0; j < CLUSTER; j++) {
      m[j] = ld_cluster(state, j), l[j] = ld_cluster(state + 1, j);
#pragma unroll
      for (int i = 0; i < VN; i++) v[j][i] = lane + 32 * i < VD ? ld_cluster(sums + lane + 32 * i, j) : 0.0f;
    }
    MergedState merged;
    merged.clear();
    merged.add(m, l, v);
    write_row(args, range.s.start + query, range.head * args.group_size + in_group(args, column), merged.highest, merged.row_sum,
              merged.x, nullptr, lane);
  }
  cluster_sync();  // nobody ends while another reads its shared memory
}

// Sums of the warps' results of a group of columns to `to`, four numbers at a time.
DEVICE void write_sums(float* to, const u8* shared) {
  for (int i = thread_index(); i < GROUP * VD / 4; i += 32 * WARPS) {
    const int column = i / (VD / 4), d = 4 * (i % (VD / 4)), of_part = d % (16 * OUT_SLICES);
    float x[4] = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < WARPS; w += TEAM) {
      const Words4 one = *(const Words4*)(shared + RINGS_AT + (w + d / (16 * OUT_SLICES)) * STAGES * SLOT + 4 * (column * OUT_ROW + of_part));
      x[0] += as_float(one.x), x[1] += as_float(one.y), x[2] += as_float(one.z), x[3] += as_float(one.w);
    }
    st_relaxed(to + 4 * i, written(x[0]), written(x[1]), written(x[2]), written(x[3]));
  }
}

// What a warp knows of its columns.
DEVICE void leave_states(const ColumnState& columns, Accumulator& acc, float* states, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const bool marked = warp_any(acc.largest_fields >> 16 == INVALID_FIELD || (acc.largest_fields & 0xFFFF) == INVALID_FIELD);
#pragma unroll
  for (int c = 0; c < C; c++) {
    if (marked) acc.row_sum[c] = NOT_A_NUMBER;
    if (MAX_WITHOUT_UNIT && acc.row_max[c] != MINUS_INFINITY) acc.row_max[c] *= columns.unit_of(c);
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) acc.row_sum[c] += shfl_xor(acc.row_sum[c], d), acc.shift[c] += shfl_xor(acc.shift[c], d);
    float* state = states + STATE_WORDS * (warp * COLUMNS + own_column(c, t));
    if (g == 0) {
      state[0] = acc.row_max[c], state[1] = acc.row_sum[c];
      if (TEAM > 1) state[2] = acc.shift[c];
    }
  }
}

// Maxima and sums first, then a group of columns at a time through slot 0 of each warp's ring.
DEVICE void combine_warps(const DecodeArgs& args, const WorkRange& range, const ColumnState& columns, Accumulator& acc,
                          const Team& team, u8* shared, u8* ring, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float* states = (float*)(shared + STATE_AT);
  leave_states(columns, acc, states, warp, lane);
  sync_threads();
  if (TEAM > 1 && V_KIND == UNIFORM)
#pragma unroll
    for (int c = 0; c < C; c++) {  // of the tokens of the whole team
      acc.shift[c] = 0;
      for (int w = 0; w < TEAM; w++) acc.shift[c] += states[STATE_WORDS * ((team.number * TEAM + w) * COLUMNS + own_column(c, t)) + 2];
    }
  const i64 part = (i64)range.item + block_index();
  const bool whole = is_whole(args, range);
#pragma unroll
  for (int n = 0; n < NG; n++) {
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const int c = n * OWN + j;
      float highest = MINUS_INFINITY;
      for (int w = 0; w < WARPS; w++) highest = max_f32(highest, states[STATE_WORDS * (w * COLUMNS + own_column(c, t))]);
      const float factor = acc.row_max[c] == MINUS_INFINITY ? 0.0f : exp2_approx(acc.row_max[c] - highest);
      float* mine = (float*)ring + (OWN * t + j) * OUT_ROW;
#pragma unroll
      for (int i = 0; i < OUT_SLICES; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float x = acc.number(n, i, r, j);
          mine[16 * i + g + 8 * r] = V_KIND == UNIFORM ? (x * VALUE_UNIT + acc.shift[c]) * factor : x * (VALUE_UNIT * factor);
        }
    }
    sync_threads();
    auto sum_at = [&](int column, int d) {
      float x = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w += TEAM)
        x += ((const float*)(shared + RINGS_AT + (w + d / (16 * OUT_SLICES)) * STAGES * SLOT))[column * OUT_ROW + d % (16 * OUT_SLICES)];
      return x;
    };
    if constexpr (CLUSTER > 1) {
      float* sums = cluster_sums(shared, n);
      for (int i = thread_index(); i < GROUP * VD; i += 32 * WARPS) sums[i] = sum_at(i / VD, i % VD);
      if (thread_index() < GROUP) {
        const int column = GROUP * n + thread_index();
        sum_of_warps(states, column, cluster_state(shared, column)[0], cluster_state(shared, column)[1]);
      }
    } else if (whole) {
      for (int i = warp; i < GROUP; i += WARPS) {
        const int column = GROUP * n + i, per_chunk = args.queries_of_chunk, query = range.chunk * per_chunk + by_group(args, column);
        if (column >= per_chunk * args.group_size || query >= range.s.queries) continue;
        float all_max, all_sum, x[VN];
        sum_of_warps(states, column, all_max, all_sum);
#pragma unroll
        for (int j = 0; j < VN; j++) x[j] = lane + 32 * j < VD ? sum_at(i, lane + 32 * j) : 0.0f;
        write_row(args, range.s.start + query, range.head * args.group_size + in_group(args, column), all_max, all_sum, x, nullptr, lane);
      }
    } else {
      if constexpr (POLLED) write_sums(args.parts + (part * COLUMNS + GROUP * n) * VD, shared);
      else
        for (int i = thread_index(); i < GROUP * VD; i += 32 * WARPS) args.parts[(part * COLUMNS + GROUP * n + i / VD) * VD + i % VD] = sum_at(i / VD, i % VD);
      if (thread_index() < GROUP) {
        const int column = GROUP * n + thread_index();
        float* state = args.part_states + (part * COLUMNS + column) * 2;
        if constexpr (POLLED) {
          float all_max, all_sum;
          sum_of_warps(states, column, all_max, all_sum);
          write_part(state, all_max), write_part(state + 1, all_sum);
        } else sum_of_warps(states, column, state[0], state[1]);
      }
    }
    sync_threads();
  }
}
