// The layout of unpacked keys and values in device memory, shared by the prefill kernels. Defines: D (the head size of
// keys and values), STEP (tokens per tile), EIGHT_BIT, INTEGERS (with EIGHT_BIT: values are int8, not e4m3), KEYS_BYTES
// and VALUES_BYTES (per tile).
//
// A tile is STEP tokens of one KV head, keys or values, in fp16: for each 64 dimensions, STEP rows of 128 bytes in the
// swizzled layout of shared memory (hopper.cuh), so that loading a tile is one copy. Dimensions are permuted within a
// tile, in the order of the lanes that unpack them. The permutation only exchanges bits of the index, which commutes
// with a Hadamard transform:
//   keys: place 64 h + 32 j + 8 t + 4 b + 2 c + a is dimension 64 h + 32 j + 16 a + 8 b + 2 t + c   (h < D / 64, t < 4)
//   values: place 64 h + 8 g + 4 s + 2 b + a is dimension 64 h + 32 s + 16 a + 8 b + g              (h < D / 64, g < 8)
// Adjacent places come from two slices of a page, so that their codes are 16 bits apart, as are two halves of a word.
// FUSED: keys have place 64 h + 16 t + 8 j + 4 b + 2 c + a, which avoids bank conflicts.
// If D is not a multiple of 64, the remainder is padded with zeros to 32 or 64 places. With 32:
//   keys: place 8 t + 4 b + 2 c + a is dimension 16 a + 8 b + 2 t + c
//   values: place 4 g + 2 b + a is dimension 16 a + 8 b + g
//
// EIGHT_BIT: keys are twice their centroids, as bytes. A row of 128 bytes holds one token or, at head size 64, token n
// and token n + STEP / 2. One factor per token (enum TokenNumber), derived from its scale, follows the rows.
//   place 64 j + 16 t + 4 s + 2 a + b is dimension 64 j + 16 s + 8 a + 2 t + b              (j < D / 64, t < 4, s < 4)
// EIGHT_BIT: values are their centroids as e4m3. A row of 128 bytes holds one dimension (of the places above). Its
// tokens are in the order of pages, which is the order of a lane's scores if keys are in natural order:
//   place 16 w + 4 t + 2 m + b is token 16 w + 8 m + 2 t + b
// The factors have the same order. Eight further rows make the products also sum the probabilities: two digits
// of unit / scale of each token, where unit is 2^-4 times the power of two above the tile's largest scale. Quotients,
// 2^-4 to 2^8, are (row 2 i) + (row 2 i + 1) / 2^5 for tokens 4 n + i, and scales are chosen to make this exact. Tensor
// cores drop bits below 2^-13 of the largest term. With four pairs of rows, a token with a large probability hides only
// small terms of a quarter of its tile.
// INTEGERS: values are twice their centroids, like keys, and no rows follow. In tiles of 256 tokens, all dimensions of
// the first 128 tokens come before those of the last 128.
#pragma once
#include "common/intrinsics.cuh"

constexpr int HALF_TILE = 128 * STEP;
constexpr int PLACES = (D + 31) / 32 * 32, HALVES = (PLACES + 63) / 64, WHOLE_HALVES = PLACES / 64;
constexpr bool POWER_OF_TWO_D = (D & (D - 1)) == 0;
static_assert(D % 16 == 0 && D >= 64 && D <= 256 && STEP % 16 == 0, "shape");
static_assert(!EIGHT_BIT || (INTEGERS ? STEP <= 256 : STEP == 128 && D <= 128), "rows of bytes");

// EIGHT_BIT: the row, and the 16-byte unit in it, of a key's unit; a token's place; the offset of its factor `which`.
DEVICE int key_row(int token) { return D == 64 ? token % (STEP / 2) : token; }
DEVICE int key_unit(int token, int unit) { return D == 64 ? 4 * (token / (STEP / 2)) + unit : unit; }
DEVICE int token_place(int token) { return token / 16 * 16 + token % 8 / 2 * 4 + token % 16 / 8 * 2 + token % 2; }
DEVICE int token_number_at(int which, int place) { return STEP * D + 4 * (which * STEP + place); }
enum TokenNumber {
  KEY_SCALE,  // the factor of the integer product
  VALUE_SCALE,  // the factor of the value's numbers; INTEGERS: 255 times the scale over the tile's largest
};
constexpr float MOST_QUOTIENT = 256.0f;  // largest unit / scale
constexpr float UNEVEN = 0.25f;  // INTEGERS: a tile is uneven if its smallest scale over its largest is below this
// Added to a number below 2^22, it leaves the nearest integer in the lowest bits.
constexpr float MAGIC_FLOAT = 12582912.0f;

// The offset of the 16-byte unit `unit` of row `row` in the `half`-th 64 dimensions of a tile of `rows` rows.
DEVICE int unit_at(int half, int row, int unit, int rows) {
  return half * 128 * rows + row * 128 + ((unit ^ (row & 7)) << 4);
}

// How a tile was scaled into fp16: a key is `key` times its halves, a value 2^value times its halves; 1 and 0 for
// bytes. INTEGERS: `value` is the factor of products of probabilities and values, negative if the tile's scales are
// UNEVEN. value_inverse: the factor that turns the accumulated row sum into the sum of probabilities.
struct __attribute__((aligned(16))) TileScale { float key, value, value_inverse, unused; };

// A sequence; `rank` is the number of prefilled sequences before it.
struct PrefillSequence { int start, queries, length, rank; };

DEVICE PrefillSequence prefill_sequence_at(const i32* starts, const i32* lengths, int sequence) {
  const int start = ldg_i32(starts + sequence);
  return {start, ldg_i32(starts + sequence + 1) - start, ldg_i32(lengths + sequence), 0};
}
// The first token, and the first tile, that any query of the sequence sees. The workspace starts at that tile.
DEVICE int first_seen(const PrefillSequence& s, int window) { return max_i32(0, s.length - s.queries - window + 1); }
DEVICE int first_seen_tile(const PrefillSequence& s, int window) { return first_seen(s, window) / STEP; }
// The prefilled sequence of this rank, or -1 if there is none.
DEVICE int sequence_of_rank(const i32* starts, int sequences, int most_queries, int rank, int lane) {
  for (int first = 0; first < sequences; first += 32) {
    const int i = first + lane;
    const bool prefilled = i < sequences && ldg_i32(starts + i + 1) - ldg_i32(starts + i) > most_queries;
    const u32 found = warp_ballot(prefilled);
    const u32 at = warp_ballot(prefilled && bit_count(found & ((1u << lane) - 1)) == rank);
    if (at) return first + bit_count(at - 1);
    rank -= bit_count(found);
  }
  return -1;
}
