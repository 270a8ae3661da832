// The warpgroup of values: the output.
#pragma once
#include "decode/states.cuh"
#include "decode/values.cuh"
#include "decode/verify_pair.cuh"

typedef Codes<V_BITS, VS, true, TEAM> PartCodes;  // those of a warp

// A warp's slices of the output: out[i][n][2 r + j] is dimension 16 i + g + 8 r, from OUT_SLICES times the warp's place on, of column 8 n + 2 t + j.
struct PairOutput {
  float out[OUT_SLICES][NG][4];
  // Of all groups: what a product of the warpgroup adds to.
  DEVICE_MEMBER float (&products(int i))[4 * NG] { return *(float (*)[4 * NG]) & out[i]; }
  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int i = 0; i < OUT_SLICES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) out[i][n][j] = 0;
  }
};

// This warp's part of the values of the pair's steps.
DEVICE void attend_values(const DecodeRange& range, const PairMemory& memory, const PairWarp& warp,
    const LevelTables& tables, int lane, PairLoader& loader, u32& taken, PairOutput& acc) {
  const int t = lane & 3;
  constexpr int WANTED = (NG > 4 ? 2 : 4) / OUT_SLICES,
                AT_ONCE = WANTED < 1 ? 1
      : WANTED > NT                  ? NT
                                     : WANTED;  // tiles; so many products, for registers
  // Tiles ahead; all where single bits are in token rows, which some warps take long to read.
  constexpr int LOADED = 2 * AT_ONCE < NT && !(V_BITS % 2 && VS % 4) ? 2 * AT_ONCE : NT;
  for (int step = range.first + warp.pair; step < range.last; step += RINGS, taken++) {
    const u8* slot = memory.slot(taken);
    memory.wait_for_copy(taken);
    PartCodes codes[NT];
    PartCodes::load_parts<LOADED>(codes, [&](int i) { return slot + values_of(i); }, lane, warp.member);
    // By a lane for all: what is known to be alike is made into descriptors once, not for every product.
    const u64 probabilities = smem_descriptor(shfl(shared_address(memory.probabilities_of(taken)), 0), 16);
#pragma unroll
    for (int first = 0; first < NT; first += AT_ONCE) {
      u32 a[AT_ONCE][OUT_SLICES][4];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
        for (int i = 0; i < OUT_SLICES; i++) value_halves(codes[first + k], i, tables, a[k][i]);
      const int ahead = first + LOADED;
      if (ahead < NT)
        PartCodes::load_parts<AT_ONCE>(
            codes + ahead, [&](int i) { return slot + values_of(ahead + i); }, lane, warp.member);
      if (first == 0) {
        memory.wait_until_published(taken);
        const float* factors = memory.factors_of(taken);
        if (factors[COLUMNS] != 0.0f)
#pragma unroll
          for (int c = 0; c < C; c++) {
            const float factor = factors[own_column(c, t)];
#pragma unroll
            for (int i = 0; i < OUT_SLICES; i++)
#pragma unroll
              for (int j = c % OWN; j < 4; j += OWN) acc.out[i][c / OWN][j] *= factor;
          }
#pragma unroll
        for (int i = 0; i < OUT_SLICES; i++) wgmma_fence_operand(acc.products(i));
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const int tile = first + k;
        const u64 operand = descriptor_behind(probabilities, tile / 4 * OPERAND_BYTES + 32 * (tile % 4));
#pragma unroll
        for (int i = 0; i < OUT_SLICES; i++)
          WarpgroupProduct::register_a(acc.products(i), a[k][i][0], a[k][i][1], a[k][i][2], a[k][i][3], operand);
      }
      wgmma_commit();
      if (first) wgmma_wait<1>();
    }
    if (warp.member == 0) {
      memory.wait_until_used(taken - 1);
      loader.copy_next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < OUT_SLICES; i++) wgmma_fence_operand(acc.products(i));
    sync_warp();
    if (lane == 0) mbarrier_arrive(memory.used + (taken & 1));
  }
  if (warp.member == 0) memory.wait_until_used(taken - 1);  // before rings are filled again
}

// The warp's part of the output, of all columns at once, when all states are there.
DEVICE void leave_results(const PairOutput& acc, const PairWarp& warp, u8* shared, int lane, bool adds) {
  const int g = lane >> 2, t = lane & 3, worker = warp.pair * TEAM + warp.member, place = worker % (TEAM * RESULT_SUMS);
  const float* states = (const float*)(shared + STATE_AT);
#pragma unroll
  for (int c = 0; c < C; c++) {
    const int column = own_column(c, t);
    float shift = 0, highest = MINUS_INFINITY;
    if (V_KIND == UNIFORM)  // of the tokens of the whole team
      for (int w = 0; w < TEAM; w++) shift += states[STATE_WORDS * ((warp.pair * TEAM + w) * COLUMNS + column) + 2];
#pragma unroll
    for (int w = 0; w < WORKERS; w += TEAM)
      highest = max_f32(highest, states[STATE_WORDS * (w * COLUMNS + column)]);  // a team has one
    const float row_max = states[STATE_WORDS * (worker * COLUMNS + column)];
    const float factor = row_max == MINUS_INFINITY ? 0.0f : exp2_approx(row_max - highest);
    float* mine = (float*)(shared + QUERY_AT) + (place * COLUMNS + column) * RESULT_ROW;
#pragma unroll
    for (int i = 0; i < OUT_SLICES; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float x = V_KIND == UNIFORM ? (acc.out[i][c / OWN][2 * r + c % OWN] * VALUE_UNIT + shift) * factor
                                          : acc.out[i][c / OWN][2 * r + c % OWN] * (VALUE_UNIT * factor);
        mine[16 * i + g + 8 * r] = adds ? mine[16 * i + g + 8 * r] + x : x;
      }
  }
}

// Rows of the range, a warp for each: the output of an item of which the block has had all keys, else a part of the workspace.
DEVICE void write_rows(const DecodeArgs& args, const DecodeRange& range, u8* shared, int warp, int lane) {
  const float *states = (const float*)(shared + STATE_AT), *results = (const float*)(shared + QUERY_AT);
  const i64 part = range.part(args);
  for (int column = warp; column < COLUMNS; column += WARPS) {
    const int per_chunk = args.queries_of_chunk, query = range.chunk * per_chunk + by_group(args, column);
    if (column >= per_chunk * args.group_size || query >= range.s.queries) continue;
    float all_max, all_sum, x[VN];
    sum_of_warps(states, column, all_max, all_sum);
#pragma unroll
    for (int j = 0; j < VN; j++) {
      const int d = lane + 32 * j;
      x[j] = 0;
#pragma unroll
      for (int w = 0; w < TEAM * RESULT_SUMS; w += TEAM)
        if (d < VD)
          x[j] += results[((w + d / (16 * OUT_SLICES)) * COLUMNS + column) * RESULT_ROW + d % (16 * OUT_SLICES)];
    }
    if (is_whole(args, range)) {
      write_row(args, range.s.start + query, range.head * args.group_size + in_group(args, column), all_max, all_sum, x,
          scratch_of_writer(shared, warp), lane);
      continue;
    }
    float* to = args.parts + (part * COLUMNS + column) * VD;
#pragma unroll
    for (int j = 0; j < VN; j++)
      if (lane + 32 * j < VD) to[lane + 32 * j] = x[j];
    if (lane < 2) args.part_states[(part * COLUMNS + column) * 2 + lane] = lane ? all_sum : all_max;
  }
}
