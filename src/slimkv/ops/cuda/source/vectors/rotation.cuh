// The rotation of one vector in a warp, in exact integer sums.
//
// The factor of Sylvester's matrix in the rotation is applied as butterflies of pairs that are CORE 2^i apart.
#pragma once
#include "vectors/layout.cuh"

DEVICE void add_pair(i32& a, i32& b) {
  i32 difference = a - b;
  a += b, b = difference;
}
template <int COUNT> DEVICE void add_pairs(i32 (&x)[COUNT]) {
  UNROLL_FOR (int step = 1; step < COUNT; step *= 2)
    UNROLL_FOR (int i = 0; i < COUNT; i++)
      if (!(i & step)) add_pair(x[i], x[i + step]);
}

// The butterflies within a lane's eights.
template <int TURNS> DEVICE void add_eights(i32 (&x)[TURNS][8]) {
  UNROLL_FOR (int i = 0; i < TURNS; i++) add_pairs(x[i]);
  if constexpr (TURNS == 2)
    UNROLL_FOR (int n = 0; n < 8; n++) add_pair(x[0][n], x[1][n]);
}
// All other butterflies, of numbers in the order "apart".
template <int D> DEVICE void add_apart(i32 (&x)[D / 32], int lane) {
  add_pairs(x);
  UNROLL_FOR (int step = 8; step < (TURNS_OF<D> == 2 ? 16 : 32); step *= 2)
    UNROLL_FOR (int k = 0; k < D / 32; k++) {
      i32 other = shfl_xor(x[k], step);
      x[k] = (lane & step ? -x[k] : x[k]) + other;
    }
}

template <int D, int TURNS> DEVICE void put_eights(i32* numbers, const i32 (&x)[TURNS][8], int lane) {
  UNROLL_FOR (int i = 0; i < TURNS; i++)
    if (has_eight<D>(i, lane))
      UNROLL_FOR (int n = 0; n < 8; n += 2)
        *(Words2*)(numbers + number_index(8 * (32 * i + lane)) + n) = {(u32)x[i][n], (u32)x[i][n + 1]};
}
// The rotation, in shared memory, by a core and then Sylvester's matrix. core: the signs of each of its columns.
template <int D, int CORE> DEVICE void rotate_by_core(i32* numbers, const u32* core, int lane) {
  constexpr int POWER = D / CORE;
  static_assert(CORE <= 32 && POWER <= 32, "a lane for each");
  if (lane < POWER) {
    i32 x[CORE], sums[CORE];
    UNROLL_FOR (int i = 0; i < CORE; i++) x[i] = numbers[number_index(CORE * lane + i)];
    UNROLL_FOR (int c = 0; c < CORE; c++) {
      u32 negative = core[c];
      sums[c] = 0;
      UNROLL_FOR (int i = 0; i < CORE; i++) sums[c] += negative >> i & 1 ? -x[i] : x[i];
    }
    UNROLL_FOR (int c = 0; c < CORE; c++) numbers[number_index(CORE * lane + c)] = sums[c];
  }
  sync_warp();
  if (lane < CORE) {
    i32 x[POWER];
    UNROLL_FOR (int i = 0; i < POWER; i++) x[i] = numbers[number_index(CORE * i + lane)];
    add_pairs(x);
    UNROLL_FOR (int i = 0; i < POWER; i++) numbers[number_index(CORE * i + lane)] = x[i];
  }
  sync_warp();
}
