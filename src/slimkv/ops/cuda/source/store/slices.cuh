// Few tokens with 22-bit integers: one warp per slice of a tile. Every thread computes the digits of eight values, and
// all warps read them from shared memory. Nothing is computed twice, because code that runs once takes longer to
// fetch than to execute. Warps of 64 registers fit beside a block of the decode kernel, which may start meanwhile.
#pragma once
#include "store/rotate.cuh"
#include "store/rows.cuh"

template <class F> struct SharedDigits {
  static constexpr int EIGHTS = F::D / 8, ROW = 8 * EIGHTS + 32,
                       PLANE = 16 * ROW;  // bytes; adjacent rows start in different banks
  static constexpr int BYTES = 3 * PLANE + 128;
  static_assert((EIGHTS & (EIGHTS - 1)) == 0 && EIGHTS <= 32, "lanes of a warp have whole tokens");
  u8* low;  // [16 tokens][ROW], followed by the same for middle and top digits
  float* squared;  // [16]: the tokens' sums of squares
  u32* exponents;  // [16]

  DEVICE_MEMBER SharedDigits(u8* memory)
      : low(memory), squared((float*)(memory + 3 * PLANE)), exponents((u32*)(squared + 16)) {}

  // Called by 32 threads per slice.
  DEVICE_MEMBER void fill(const SideArgs& side, int head, int first, int tokens, int thread) const {
    const int token = thread / EIGHTS, eight = thread % EIGHTS;
    u32 raw[F::RAW] = {};
    if (first + token < tokens)
      load_eight<F>(side.x + head * side.head_stride + (first + token) * side.stride + 8 * eight * F::ELEMENT, raw);
    if (!F::VALUES && side.offset) {
      OffsetEight offset;
      offset.load<F>(side, head, 8 * eight);
      offset.subtract_from<F>(raw);
    }
    u32 most = raw[0];
    UNROLL_FOR (int i = 1; i < F::RAW; i++) most = larger_word<F>(most, raw[i]);
    if constexpr (F::NARROW) most = larger_word<F>(most, prmt(most, most, 0x1032));
    UNROLL_FOR (int step = 1; step < EIGHTS; step *= 2) most = larger_word<F>(most, shfl_xor(most, step));
    const u32 exponent = F::DTYPE == FLOAT32 ? most >> 23
        : F::DTYPE == BFLOAT16               ? most >> 7 & 0xFF
                                             : as_bits(f16_to_f32(most & 0x7FFF)) >> 23;
    const float up = digits_up(exponent);
    u8* at = low + token * ROW + 8 * eight;
    u32 digits[3][2];
    SquareSums squares;
    UNROLL_FOR (int j = 0; j < 2; j++) {
      take_digits<F>(raw, 4 * j, up, digits[0][j], digits[1][j], digits[2][j]);
      squares.add(digits[0][j], digits[1][j], digits[2][j]);
    }
    UNROLL_FOR (int i = 0; i < 3; i++) *(Words2*)(at + i * PLANE) = {digits[i][0], digits[i][1]};
    i64 sum = squares.total<F>();
    UNROLL_FOR (int step = 1; step < EIGHTS; step *= 2) sum += shfl_xor(sum, step);
    if (eight == 0) squared[token] = i64_to_f32_rn(sum), exponents[token] = exponent;
  }

  // Loads one digit of tokens g and g + 8, dimensions 32 step + 8 t .. 32 step + 8 t + 7.
  DEVICE_MEMBER void load(int digit, int step, int lane, u32 (&d)[2][2]) const {
    UNROLL_FOR (int h = 0; h < 2; h++) {
      const Words2 words =
          *(const Words2*)(low + digit * PLANE + ((lane >> 2) + 8 * h) * ROW + 32 * step + 8 * (lane & 3));
      d[h][0] = words.x, d[h][1] = words.y;
    }
  }
};

// The matrix for a slice, in fragment order.
template <class F> struct SliceFragments {
  Words4 steps[F::STEPS];
  DEVICE_MEMBER SliceFragments(const SideArgs& side, int slice, int lane) {
    UNROLL_FOR (int k = 0; k < F::STEPS; k++)
      steps[k] = ldg_cached(side.fragments + lane * 16 + (slice * F::STEPS + k) * 512);
  }
};

// Computes a slice of the rotated tile, in the page's order. The products of the three digits are independent.
template <class F> DEVICE void rotate_slice(const SharedDigits<F>& digits, const SliceFragments<F>& matrix, int lane,
    i32 (&out)[8]) {
  i32 sums[3][2][4] = {};
  UNROLL_FOR (int k = 0; k < F::STEPS; k++)
    UNROLL_FOR (int i = 0; i < 3; i++) {
      u32 d[2][2];
      digits.load(i, k, lane, d);
      multiply<F>(sums[i], d, matrix.steps[k], i == 2 ? 0 : 1);
    }
  UNROLL_FOR (int i = 0; i < 8; i++)
    out[in_page<F>(i / 4, i % 4)] =
        (i32)((u32)sums[2][i / 4][i % 4] * TOP_UNIT<F> + (u32)sums[1][i / 4][i % 4] * 256 + (u32)sums[0][i / 4][i % 4]);
}
