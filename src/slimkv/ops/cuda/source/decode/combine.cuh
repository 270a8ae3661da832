// The results of a block's warps together: the output of an item of which it has had all keys, else a part of the workspace.
#pragma once
#include "common/hopper.cuh"
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

// Is there such a column, of a query head of one of the item's queries?
DEVICE bool is_real(const DecodeArgs& args, const WorkRange& range, int column) {
  const int of_chunk = by_group(args, column), per_chunk = args.queries_of_chunk;
  return of_chunk < per_chunk && range.chunk * per_chunk + of_chunk < range.s.queries;
}

// What the blocks of a cluster send each other: of every column sums, maximum and sum, to the block that writes its row. They come
// without being asked for, so that nobody waits for a block that is not ready, and no block for what another reads.
struct ClusterInbox {
  static constexpr int ROW = VD + 4;  // floats: sums, then maximum and sum
  float* memory;
  u64* barriers;
  DEVICE_MEMBER ClusterInbox(u8* shared) : memory((float*)(shared + INBOX_AT)), barriers((u64*)(shared + INBOX_BARRIERS_AT)) {}
  // For all threads of the block; `cluster_wait` comes before the first message.
  DEVICE_MEMBER void open() const {
    if (thread_index() == 0)
      for (int i = 0; i < INBOX_COLUMNS; i++) {
        mbarrier_init(barriers + i, 1);
        mbarrier_arrive_expect_tx(barriers + i, 4 * CLUSTER * ROW);
      }
    fence_mbarrier_init();
    cluster_arrive();
  }
  // Of column `column`, from block `from`: where the block that has it finds it.
  DEVICE_MEMBER float* row(int column, int from) const { return memory + (column / CLUSTER * CLUSTER + from) * ROW; }
  DEVICE_MEMBER void send(int column, int at, float a, float b, float c, float d) const {
    st_cluster(row(column, cluster_rank()) + at, a, b, c, d, barriers + column / CLUSTER, column % CLUSTER);
  }
};

// The rows of an item, of which each block of the cluster writes some.
DEVICE void combine_cluster(const DecodeArgs& args, const WorkRange& range, u8* shared, int warp, int lane) {
  const ClusterInbox inbox(shared);
  for (int column = cluster_rank() + CLUSTER * warp; warp < WRITERS && column < COLUMNS; column += CLUSTER * WRITERS) {
    if (!is_real(args, range, column)) continue;
    mbarrier_wait(inbox.barriers + column / CLUSTER, 0);
    const int own = lane % CLUSTER_LANES;
    const float* state = inbox.row(column, min_i32(own, CLUSTER - 1)) + VD;
    float v[CLUSTER_LANES][VN];
#pragma unroll
    for (int j = 0; j < CLUSTER_LANES; j++)
#pragma unroll
      for (int i = 0; i < VN; i++) v[j][i] = j < CLUSTER && lane + 32 * i < VD ? inbox.row(column, j)[lane + 32 * i] : 0.0f;
    MergedState merged;
    merged.clear();
    merged.add_spread(own < CLUSTER ? state[0] : MINUS_INFINITY, own < CLUSTER ? state[1] : 0.0f, v);
    const int row = range.s.start + range.chunk * args.queries_of_chunk + by_group(args, column);
    write_row(args, row, range.head * args.group_size + in_group(args, column), merged.highest, merged.row_sum, merged.x,
              scratch_of_writer(shared, warp), lane);
  }
}

// Four numbers of a column, summed over the block's warps.
DEVICE void sum_four(const u8* shared, int column, int d, float (&x)[4]) {
  const int of_part = d % (16 * OUT_SLICES);
  x[0] = x[1] = x[2] = x[3] = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w += TEAM) {
    const Words4 one = *(const Words4*)(shared + RINGS_AT + (w + d / (16 * OUT_SLICES)) * STAGES * SLOT + 4 * (column * OUT_ROW + of_part));
    x[0] += as_float(one.x), x[1] += as_float(one.y), x[2] += as_float(one.z), x[3] += as_float(one.w);
  }
}

// Sums of the warps' results of a group of columns to `to`.
DEVICE void write_sums(float* to, const u8* shared) {
  for (int i = thread_index(); i < GROUP * VD / 4; i += 32 * WARPS) {
    float x[4];
    sum_four(shared, i / (VD / 4), 4 * (i % (VD / 4)), x);
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
          mine[dimension_of(i, g, r)] = V_KIND == UNIFORM ? (x * VALUE_UNIT + acc.shift[c]) * factor : x * (VALUE_UNIT * factor);
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
      if (n == 0) cluster_wait();  // for the others' barriers
      const ClusterInbox inbox(shared);
      for (int i = warp; i < GROUP; i += WARPS) {
        const int column = GROUP * n + i;
        if (!is_real(args, range, column)) continue;  // a block that waits for nothing may have ended
        for (int d = 4 * lane; d < VD; d += 128) {
          float x[4];
          sum_four(shared, i, d, x);
          inbox.send(column, d, x[0], x[1], x[2], x[3]);
        }
        float all_max, all_sum;
        sum_of_warps(states, column, all_max, all_sum);
        if (lane == 0) inbox.send(column, VD, all_max, all_sum, 0.0f, 0.0f);
      }
    } else if (whole) {
      for (int i = warp; warp < WRITERS && i < GROUP; i += WRITERS) {
        const int column = GROUP * n + i, per_chunk = args.queries_of_chunk, query = range.chunk * per_chunk + by_group(args, column);
        if (column >= per_chunk * args.group_size || query >= range.s.queries) continue;
        float all_max, all_sum, x[VN];
        sum_of_warps(states, column, all_max, all_sum);
#pragma unroll
        for (int j = 0; j < VN; j++) x[j] = lane + 32 * j < VD ? sum_at(i, lane + 32 * j) : 0.0f;
        write_row(args, range.s.start + query, range.head * args.group_size + in_group(args, column), all_max, all_sum, x,
                  scratch_of_writer(shared, warp), lane);
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
