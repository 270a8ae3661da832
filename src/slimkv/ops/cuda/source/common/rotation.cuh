// The rotation of one vector in the registers of a warp: lane l holds dimensions l, l + 32, ...
#pragma once
#include "common/numbers.cuh"

#define POWER_OF_TWO(n) (((n) & ((n) - 1)) == 0)

DEVICE float sign_at(const u16* signs, int i) { return as_float((u32)signs[i] << 16); }

// The Hadamard transform (Sylvester's matrix) of a power of two of at least 32.
template <int DIM> DEVICE void hadamard(float (&x)[(DIM + 31) / 32], int lane) {
  UNROLL_FOR (int d = 1; d < 32; d <<= 1)
    UNROLL_FOR (int i = 0; i < DIM / 32; i++) {
      const float other = shfl_xor(x[i], d);
      x[i] = lane & d ? other - x[i] : x[i] + other;
    }
  butterflies(x);
}

// The rotation by random signs and the Kronecker product of Sylvester's matrix and a core matrix of CORE dimensions:
// dimension CORE a + b is element b of the a-th vector that the core multiplies. `signs`: the whole matrix; its first
// rows and columns hold the core's entries (times the signs of the first CORE dimensions). BACK: by the transpose.
template <int DIM, int CORE, bool BACK>
DEVICE void multiply_by_core(float (&x)[(DIM + 31) / 32], const u32* bits, const u16* signs, float norm, float* scratch,
    int lane) {
  constexpr int N = (DIM + 31) / 32;
  const auto sign_of = [&](float y, int d) {  // the core's entries contain the sign of b, which cancels here
    const int b = d % CORE;
    return as_float(as_bits(y) ^ (bits[d / 32] >> (d % 32) ^ bits[b / 32] >> (b % 32)) << 31);
  };
  const auto publish = [&] {
    sync_warp();
    UNROLL_FOR (int i = 0; i < N; i++)
      if (lane + 32 * i < DIM) scratch[lane + 32 * i] = x[i];
    sync_warp();
  };
  UNROLL_FOR (int i = 0; i < N; i++) x[i] = lane + 32 * i < DIM ? x[i] * norm : 0.0f;
  if (!BACK)
    UNROLL_FOR (int i = 0; i < N; i++)
      if (lane + 32 * i < DIM) x[i] = sign_of(x[i], lane + 32 * i);
  publish();
  UNROLL_FOR (int i = 0; i < N; i++) {
    const int d = lane + 32 * i < DIM ? lane + 32 * i : 0, b = d % CORE;
    float sum = 0.0f;
#pragma unroll 12
    for (int j = 0; j < CORE; j++) sum += scratch[d - b + j] * sign_at(signs, BACK ? b * DIM + j : j * DIM + b);
    x[i] = sum;
  }
  UNROLL_FOR (int step = 1; step < DIM / CORE; step <<= 1) {
    publish();
    UNROLL_FOR (int i = 0; i < N; i++) {
      const int d = lane + 32 * i < DIM ? lane + 32 * i : 0;
      const bool upper = d / CORE & step;
      const float other = scratch[upper ? d - step * CORE : d + step * CORE];
      x[i] = upper ? other - x[i] : x[i] + other;
    }
  }
  if (BACK)
    UNROLL_FOR (int i = 0; i < N; i++)
      if (lane + 32 * i < DIM) x[i] = sign_of(x[i], lane + 32 * i);
  sync_warp();
}

// The same for a core of up to 32 dimensions: a lane holds one dimension of the core, for all vectors that the core
// multiplies or for half of them. A lane then needs one word of the core's entries, `core` (a set bit is -1), and
// Sylvester's matrix is applied by additions, mostly within the lane.
constexpr bool core_of_lanes(int core) { return core > 1 && core <= 32 && core % 4 == 0; }
template <int DIM, int CORE, bool BACK>
DEVICE void multiply_by_core_of_lanes(float (&x)[(DIM + 31) / 32], const u32* bits, const u32* core, float norm,
    float* scratch, int lane) {
  constexpr int N = (DIM + 31) / 32, VECTORS = DIM / CORE, SPLIT = 32 / CORE >= 2 && VECTORS > 1 ? 2 : 1,
                OWN = VECTORS / SPLIT;
  static_assert(DIM % CORE == 0 && VECTORS % SPLIT == 0, "vectors are doubled");
  const int b = lane < CORE ? lane : lane < SPLIT * CORE ? lane - CORE : 0, upper = lane >= CORE && lane < SPLIT * CORE;
  const u32 entries = core[b];
  UNROLL_FOR (int i = 0; i < N; i++)
    if (lane + 32 * i < DIM) scratch[lane + 32 * i] = BACK ? x[i] * norm : signed_by(x[i] * norm, bits[i], lane);
  sync_warp();
  float sum[OWN];
  UNROLL_FOR (int a = 0; a < OWN; a++) sum[a] = 0.0f;
  const float* vectors = scratch + upper * OWN * CORE;
#pragma unroll 1
  for (int j = 0; j < CORE; j += 4) {
    float sign[4];
    UNROLL_FOR (int k = 0; k < 4; k++)
      sign[k] = as_float(bit_select(0x80000000u, entries >> j << (31 - k), 0x3F800000u));
    UNROLL_FOR (int a = 0; a < OWN; a++) {
      const Words4 four = *(const Words4*)(vectors + a * CORE + j);
      sum[a] = fma_rn(as_float(four.x), sign[0], sum[a]), sum[a] = fma_rn(as_float(four.y), sign[1], sum[a]);
      sum[a] = fma_rn(as_float(four.z), sign[2], sum[a]), sum[a] = fma_rn(as_float(four.w), sign[3], sum[a]);
    }
  }
  butterflies(sum);
  if (SPLIT > 1)
    UNROLL_FOR (int a = 0; a < OWN; a++) {
      const float other = shfl(sum[a], upper ? b : b + CORE);
      sum[a] = upper ? other - sum[a] : sum[a] + other;
    }
  sync_warp();
  if (lane < SPLIT * CORE)
    UNROLL_FOR (int a = 0; a < OWN; a++) scratch[(upper * OWN + a) * CORE + b] = sum[a];
  sync_warp();
  UNROLL_FOR (int i = 0; i < N; i++)
    if (lane + 32 * i < DIM) x[i] = BACK ? signed_by(scratch[lane + 32 * i], bits[i], lane) : scratch[lane + 32 * i];
  sync_warp();
}

// x times the rotation or, BACK, its transpose. `bits`: the random signs. `core`: the core's columns (BACK: rows), up
// to 32. `signs`: the whole matrix. scratch: DIM floats for this warp, aligned to 16 bytes.
template <int DIM, int CORE, bool BACK = false>
DEVICE void rotate(float (&x)[(DIM + 31) / 32], const u32* bits, const u32* core, const u16* signs, float norm,
    float* scratch, int lane) {
  if (POWER_OF_TWO(DIM) && DIM >= 32) {
    if (BACK) hadamard<DIM>(x, lane);
    UNROLL_FOR (int i = 0; i < (DIM + 31) / 32; i++) x[i] = signed_by(x[i] * norm, bits[i], lane);
    if (!BACK) hadamard<DIM>(x, lane);
  } else if constexpr (core_of_lanes(CORE)) {
    multiply_by_core_of_lanes<DIM, CORE, BACK>(x, bits, core, norm, scratch, lane);
  } else {
    multiply_by_core<DIM, CORE, BACK>(x, bits, signs, norm, scratch, lane);
  }
}
