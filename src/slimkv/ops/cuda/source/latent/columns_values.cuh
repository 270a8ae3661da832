// A value warpgroup of columns.cu: computes every other 64 dimensions of the output.
#pragma once
#include "latent/columns_shape.cuh"
#include "latent/results.cuh"
#include "latent/wide_tokens.cuh"

struct Multiplier : Place {
  // Issues the products of a KV block. A operand: dimensions x tokens 16 k .. 16 k + 15.
  DEVICE_MEMBER void start(Output& o, int number) const {
    const u64 values = smem_descriptor(stage(number % STAGES) + group * CHUNK, CHUNK);
    const u64 weights = smem_descriptor(probabilities(number % STAGES), 16);
    UNROLL_FOR (int c = 0; c < OWN_CHUNKS; c++) wgmma_fence_operand(o[c]);
    wgmma_fence();
    UNROLL_FOR (int c = 0; c < OWN_CHUNKS; c++) {
      UNROLL_FOR (int k = 0; k < KV_BLOCK / 16; k++)
        if (CHUNKS % 2 == 0 || 2 * c + group < CHUNKS)
          WgmmaNarrow<ROWS, false>::transposed_a(o[c], advance_descriptor(values, 2 * c * CHUNK + k * 2048),
              advance_descriptor(weights, k * 32));
      wgmma_commit();
    }
  }
  // Releases chunks from C on as their products finish.
  template <int C = 0> DEVICE_MEMBER void release(Output& o, int stage) const {
    if constexpr (C < OWN_CHUNKS) {
      wgmma_wait<OWN_CHUNKS - 1 - C>();
      if (lane == 0) mbarrier_arrive(empty(stage, C));
      release<C + 1>(o, stage);
    } else {
      UNROLL_FOR (int c = 0; c < OWN_CHUNKS; c++) wgmma_fence_operand(o[c]);
    }
  }
  DEVICE_MEMBER void rescale(Output& o, const float (&by)[ROWS]) const {
    UNROLL_FOR (int i = 0; i < ROWS / 2; i++) {
      const float own = by[i / 4 * 8 + 2 * (lane & 3) + i % 2];
      UNROLL_FOR (int c = 0; c < OWN_CHUNKS; c++) o[c][i] *= own;
    }
  }
  DEVICE_MEMBER void attend_range(Output& o, int count, int before) const {
    for (int number = before; number < before + count; number++) {
      const int stage = number % STAGES;
      mbarrier_wait(full(stage), (u32)(number / STAGES & 1));
      fence_proxy_async();  // orders the score warpgroups' stores, after the barrier, before wgmma
      if (shfl(columns().raised[stage], 0)) rescale(o, columns().by[stage]);
      start(o, number);
      release(o, stage);
    }
  }
  // Stores the output, 8 adjacent dimensions at a time, after the score warpgroups have stored the normalisers.
  DEVICE_MEMBER void store_output_rows(const Results& to, const Output& o) const {
    bar_sync(SUMS, 512);
    const int lane = read_laneid();  // keeps dependent computations after the products
    UNROLL_FOR (int i = 0; i < ROWS / 2; i++) {
      const int n = i / 4 * 8 + 2 * (lane & 3) + i % 2;
      if (n >= to.tile.count) continue;
      const i64 row = to.row(n);
      const float by = columns().unit(n);
      UNROLL_FOR (int c = 0; c < OWN_CHUNKS; c++)
        if (CHUNKS % 2 == 0 || 2 * c + group < CHUNKS)
          store_output(to.args, row + place_of(64 * (2 * c + group) + 16 * warp + lane / 4 + 8 * (i / 2 % 2)),
              o[c][i] * by);
    }
  }
  // Stores a partial result. Lanes g and g + 1 exchange numbers: each keeps one of two rows, in adjacent columns.
  DEVICE_MEMBER void store_part(const Results& to, const Output& o) const {
    const int lane = read_laneid();
    const u32 own_row = lane & 4 ? 0x3276 : 0x5410;
    const float by = LEVEL_UNIT * to.part_factor();
    UNROLL_FOR (int j = 0; j < ROWS / 8; j++) {
      const int n = 8 * j + 2 * (lane & 3) + lane / 4 % 2;
      const i64 at = to.row(n) + 16 * warp;
      UNROLL_FOR (int c = 0; c < OWN_CHUNKS; c++) {
        u32 words[2];
        UNROLL_FOR (int r = 0; r < 2; r++) {
          const u32 pair = pack_f16x2(o[c][4 * j + 2 * r] * by, o[c][4 * j + 2 * r + 1] * by);
          words[r] = prmt(pair, shfl_xor(pair, 4), own_row);
        }
        if (n < to.tile.count && (CHUNKS % 2 == 0 || 2 * c + group < CHUNKS))
          to.put_part(at + 64 * (2 * c + group), lane / 8, words[0], words[1]);
      }
    }
  }
};
