// The warpgroup of values: the output.
#pragma once
#include "decode/values.cuh"
#include "decode/verify_output.cuh"
#include "decode/verify_pair.cuh"

// This warp's part of the values of the pair's steps.
DEVICE void attend_values(const DecodeRange& range, const PairMemory& memory, const TeamWarp& warp,
    const LevelTables& tables, int lane, PairLoader& loader, u32& taken, TeamOutput& acc) {
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
