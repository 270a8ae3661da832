// The value warpgroup: the output.
#pragma once
#include "decode/values.cuh"
#include "decode/verify_output.cuh"
#include "decode/verify_pair.cuh"

// Multiplies this warp's slices of the values of the pair's steps by probabilities.
DEVICE void attend_values(const DecodeArgs& args, const DecodeRange& range, const PairMemory& memory,
    const TeamWarp& warp, const LevelTables& tables, int lane, const PairLoader& loader, u32& taken, TeamOutput& acc) {
  const int t = lane & 3;
  loader.open(args, range, taken);
  // Products in flight, limited by registers: slices of one tile or of several.
  constexpr int WANTED = NG > (VD > 128 ? 4 : 5) ? 2 : 4,
                PRODUCTS = WANTED >= OUT_SLICES ? WANTED / OUT_SLICES * OUT_SLICES
      : OUT_SLICES % WANTED                     ? OUT_SLICES
                                                : WANTED,
                AT_ONCE = PRODUCTS > OUT_SLICES ? PRODUCTS / OUT_SLICES : 1, ALL = NT * OUT_SLICES;
  // Tiles prefetched: all if 1-bit planes have token rows, which some warps take long to read.
  constexpr int LOADED = 2 * AT_ONCE < NT && !(V_BITS % 2 && VS % 4) ? 2 * AT_ONCE : NT;
  for (int step = range.first + warp.pair; step < range.last; step += RINGS, taken++) {
    loader.copy_ahead(memory, range, step, taken);
    const u8* slot = memory.slot(taken);
    memory.wait_for_copy(taken);
    PartCodes codes[NT];
    PartCodes::load_parts<LOADED>(codes, [&](int i) { return slot + values_of(i); }, lane, warp.member);
    // Broadcast from one lane: descriptors of a uniform value are made once, not for every product.
    const u64 probabilities = smem_descriptor(shfl(shared_address(memory.probabilities_of(taken)), 0), 16);
    UNROLL_FOR (int first = 0; first < ALL; first += PRODUCTS) {
      u32 a[PRODUCTS][4];
      UNROLL_FOR (int k = 0; k < PRODUCTS; k++)
        value_halves(codes[(first + k) / OUT_SLICES], (first + k) % OUT_SLICES, tables, a[k]);
      // If the compiler moved this computation past a branch, it would serialise the wgmmas.
      if (V_KIND == FP8)
        UNROLL_FOR (int k = 0; k < PRODUCTS; k++) wgmma_fence_operand(a[k]);
      const int unpacked = first + PRODUCTS, ahead = unpacked / OUT_SLICES - AT_ONCE + LOADED;
      if (unpacked % OUT_SLICES == 0 && ahead < NT)
        PartCodes::load_parts<AT_ONCE>(
            codes + ahead, [&](int i) { return slot + values_of(ahead + i); }, lane, warp.member);
      if (first == 0) {
        memory.wait_until_published(taken);
        const float* factors = memory.factors_of(taken);
        if (factors[COLUMNS] != 0.0f)
          UNROLL_FOR (int c = 0; c < C; c++) {
            const float factor = factors[own_column(c, t)];
            UNROLL_FOR (int i = 0; i < OUT_SLICES; i++)
              UNROLL_FOR (int j = c % OWN; j < 4; j += OWN) acc.out[i][c / OWN][j] *= factor;
          }
        UNROLL_FOR (int i = 0; i < OUT_SLICES; i++) wgmma_fence_operand(acc.products(i));
      }
      wgmma_fence();
      UNROLL_FOR (int k = 0; k < PRODUCTS; k++) {
        const int tile = (first + k) / OUT_SLICES;
        WarpgroupProduct::register_a(acc.products((first + k) % OUT_SLICES), a[k][0], a[k][1], a[k][2], a[k][3],
            advance_descriptor(probabilities, tile / 4 * OPERAND_BYTES + 32 * (tile % 4)));
      }
      wgmma_commit();
      if (first) wgmma_wait<1>();
    }
    wgmma_wait<0>();
    UNROLL_FOR (int i = 0; i < OUT_SLICES; i++) wgmma_fence_operand(acc.products(i));
    sync_warp();
    if (lane == 0) mbarrier_arrive(memory.used + (taken & 1));
  }
  if (warp.member == 0) memory.wait_until_used(taken - 1);  // before the ring is refilled
}
