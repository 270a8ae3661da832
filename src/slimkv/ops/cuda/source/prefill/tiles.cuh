// What the prefill kernels share: the order of unpacked keys and values in device memory, and their sizes.
// Compile-time: D (the head size, of keys and values), STEP (tokens of a tile).
//
// A tile is STEP tokens of one KV head, keys or values, as halves: for each 64 dimensions STEP rows of 128 bytes, in the
// very order in which the tensor cores read shared memory (hopper.cuh), so that loading a tile is one copy. Dimensions are
// permuted within it, as they fall to the lanes that unpack them; only bits of their number change places, which a
// Hadamard transform does not notice:
//   keys: place 32 j + 8 t + 4 a + 2 b + c is dimension 32 j + 16 a + 8 b + 2 t + c        (j < D / 32, t < 4)
//   values: place 64 h + 8 g + 2 s + b is dimension 64 h + 16 s + 8 b + g                  (h < D / 64, g < 8, s < 4)
#pragma once
#include "common/intrinsics.cuh"

constexpr int TILE_BYTES = 2 * STEP * D, HALF_TILE = 128 * STEP;
static_assert((D == 64 || D == 128 || D == 256) && STEP % 16 == 0, "shape");

// Where row `row` of a tile of `rows` has unit `unit` (16 bytes) of its 64 dimensions `half`.
DEVICE int unit_at(int half, int row, int unit, int rows) {
  return half * 128 * rows + row * 128 + ((unit ^ (row & 7)) << 4);
}

// How a tile was scaled into fp16: a key is `key` times its halves, a value 2^value times them.
struct __attribute__((aligned(16))) TileScale { float key, value, value_inverse, unused; };

// A sequence, and how many before it are prefilled too.
struct PrefillSequence { int start, queries, length, rank; };

DEVICE PrefillSequence prefill_sequence_at(const i32* starts, const i32* lengths, int sequence, int most_queries, int lane) {
  PrefillSequence s;
  s.start = ldg_i32(starts + sequence);
  s.queries = ldg_i32(starts + sequence + 1) - s.start;
  s.length = ldg_i32(lengths + sequence);
  i32 before = 0;
  for (int i = lane; i < sequence; i += 32) before += ldg_i32(starts + i + 1) - ldg_i32(starts + i) > most_queries;
#pragma unroll
  for (int d = 16; d; d >>= 1) before += shfl_xor(before, d);
  s.rank = before;
  return s;
}
