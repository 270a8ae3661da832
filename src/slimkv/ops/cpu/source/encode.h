// Encodes vectors to codes and fields, bit for bit as codec.quantize defines them: only integers are summed, and
// every other operation rounds its own result. It must be compiled without fusing a * b + c.
#pragma once

#include "hadamard.h"

constexpr int FIXED_POINT_BITS = 21;
constexpr int SHORT_FIXED_POINT_BITS = 16;
constexpr int LARGEST_SHORT_DIM = 256;
constexpr int LEAST_EXPONENT = 67;
constexpr float ROUND_MAGIC = 12582912.0f;
constexpr float LEVEL_DENOMINATOR = 128.0f;
constexpr float WEIGHT_STEPS = 64.0f;

struct Encoded {
  alignas(64) u32 codes[MAX_DIM];
  u32 fields[2];
};

// Working memory of one vector.
struct EncodeScratch {
  alignas(64) float x[MAX_DIM];
  alignas(64) i32 fixed[MAX_DIM];
  alignas(64) i64 wide[MAX_DIM];
  alignas(64) float rotated[MAX_DIM];
  alignas(64) i32 sums[MAX_DIM];
};

static inline u32 largest_bits(const float* x, int dim) {
  u32 out = 0;
  for (int d = 0; d < dim; d++) {
    const u32 bits = bits_as<u32>(x[d]) & 0x7FFFFFFF;
    out = bits > out ? bits : out;
  }
  return out;
}

static inline float power_of_two(int biased_exponent) { return bits_as<float>((u32)biased_exponent << 23); }

// x as integers, and the factor that scales them back (`down`); returns whether x counts as zero.
static bool fixed_point(const float* x, int dim, u32 largest, int bits, i32* fixed, float* down) {
  int exponent = (int)(largest >> 23);
  const bool zero = exponent < LEAST_EXPONENT;
  exponent = exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent > 254 ? 254 : exponent;
  const float up = power_of_two(127 + bits + 126 - exponent);
  *down = power_of_two(exponent - bits + 1);
  if (zero)
    for (int d = 0; d < dim; d++) fixed[d] = 0;
  else
    for (int d = 0; d < dim; d++) fixed[d] = (i32)((x[d] * up + ROUND_MAGIC) - ROUND_MAGIC);
  return zero;
}

// Rotates integers: exact sums, each rounded once.
static void rotate_fixed(EncodeScratch& s, const Side& side) {
  const int dim = side.dim;
  if (dim <= 512) {  // sums of up to 512 integers of 21 bits fit 32 bits
    rotate(s.fixed, side);
    for (int d = 0; d < dim; d++) s.rotated[d] = (float)s.fixed[d];
  } else {
    for (int d = 0; d < dim; d++) s.wide[d] = s.fixed[d];
    rotate(s.wide, side);
    for (int d = 0; d < dim; d++) s.rotated[d] = (float)s.wide[d];
  }
}

// The exact sum of squares of integers below 2^26, rounded once: doubles hold every partial sum.
static inline float squared_norm(const i32* x, int dim) {
  double sums[8] = {};
  for (int d = 0; d < dim; d += 8)
    for (int i = 0; i < 8; i++) sums[i] += (double)x[d + i] * (double)x[d + i];
  return (float)(((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
}

// The number of boundaries below v: a value on a boundary takes the lower level.
static inline int level_index(float v, const float* boundaries, int bits) {
  int low = 0;
  for (int step = 1 << (bits - 1); step; step >>= 1) low += v > boundaries[low + step - 1] ? step : 0;
  return low;
}

static void level_indices(const float* v, int dim, const float* boundaries, int bits, i32* index) {
  if (bits > 4) {
    for (int d = 0; d < dim; d++) index[d] = level_index(v[d], boundaries, bits);
    return;
  }
  const int count = (1 << bits) - 1;
  for (int d = 0; d < dim; d += W) {
    const VF x = load_f(v + d);
    VI found = {};
    for (int b = 0; b < count; b++) found -= (VI)(x > splat(boundaries[b]));
    store_i(index + d, found);
  }
}

// Query-aware: coordinates from the last to the first, each corrected for the errors made so far (codec.query_aware).
static void query_aware_indices(const float* standard, const Side& side, const i8* weights, i32* sums, i32* index) {
  const int dim = side.dim, half = 1 << (side.bits - 1);
  const float step = 1.0f / (WEIGHT_STEPS * side.error_steps);
  for (int d = 0; d < dim; d++) sums[d] = 0;
  for (int j = dim - 1; j >= 0; j--) {
    const float target = standard[j] - (float)sums[j] * step;
    const int found = level_index(target, side.boundaries, side.bits);
    index[j] = found;
    const float level = side.levels[found >= half ? found : half - 1 - found];
    float error = (level - standard[j]) * side.error_steps;
    error = error < -127.0f ? -127.0f : error > 127.0f ? 127.0f : error;
    const i32 whole = (i32)((error + ROUND_MAGIC) - ROUND_MAGIC);
    const i8* column = weights + (i64)j * dim;
    for (int i = 0; i < j; i++) sums[i] += (i32)column[i] * whole;
  }
}

// The scale that gives the reconstruction the norm of the vector.
static float lloyd_scale(const Encoded& e, const Side& side, float norm) {
  double sum = 0;
  for (int d = 0; d < side.dim; d++) {
    const double level = side.levels[e.codes[d]] * LEVEL_DENOMINATOR;
    sum += level * level;
  }
  return norm / sqrtf((float)sum) * LEVEL_DENOMINATOR;
}

static void encode_lloyd(EncodeScratch& s, const Side& side, u32 largest, bool narrow, const i8* weights, Encoded& e) {
  const int dim = side.dim, half = 1 << (side.bits - 1);
  const bool short_integers = narrow && side.bits <= 4 && dim <= LARGEST_SHORT_DIM;
  float down;
  const int bits = short_integers ? SHORT_FIXED_POINT_BITS : FIXED_POINT_BITS;
  const bool zero = fixed_point(s.x, dim, largest, bits, s.fixed, &down);
  if (zero) {
    for (int d = 0; d < dim; d++) e.codes[d] = 0;
    e.fields[0] = 0;
    return;
  }
  float squared;
  if (short_integers) {
    for (int d = 0; d < dim; d++) s.sums[d] = (i32)(((float)s.fixed[d] / 256.0f + ROUND_MAGIC) - ROUND_MAGIC);
    squared = squared_norm(s.sums, dim) * 65536.0f;
  } else {
    squared = squared_norm(s.fixed, dim);
  }
  rotate_fixed(s, side);
  const float norm = sqrtf(squared), factor = side.unit / norm;
  float* standard = s.x;  // the input is no longer needed
  for (int d = 0; d < dim; d++) standard[d] = s.rotated[d] * factor;
  i32* index = s.fixed;
  if (weights != nullptr) {
    query_aware_indices(standard, side, weights, s.sums, index);
  } else {
    if (short_integers) {
      // Boundaries must be compared with the exact 48-bit product. So a product that was rounded down moves up by one
      // step, which crosses a boundary only if rounding had put the product onto it.
      for (int d = 0; d < dim; d++) {
        const double rest = (double)s.rotated[d] * (double)factor - (double)standard[d];
        const i32 bits_of = bits_as<i32>(standard[d]);
        if (rest > 0) standard[d] = bits_as<float>(bits_of >= 0 ? bits_of + 1 : bits_of - 1);
      }
    }
    level_indices(standard, dim, side.boundaries, side.bits, index);
  }
  for (int d = 0; d < dim; d++) e.codes[d] = (u32)(index[d] >= half ? index[d] : half - 1 - index[d]);
  e.fields[0] = encode_unsigned(lloyd_scale(e, side, norm) * down);
}

static void encode_uniform(EncodeScratch& s, const Side& side, u32 largest, Encoded& e) {
  const int dim = side.dim;
  if (side.rotated) {
    float down;
    fixed_point(s.x, dim, largest, FIXED_POINT_BITS, s.fixed, &down);
    rotate_fixed(s, side);
    for (int d = 0; d < dim; d++) s.x[d] = s.rotated[d] * side.orthonormal * down;
  }
  float low = s.x[0], high = s.x[0];
  for (int d = 1; d < dim; d++) {
    low = s.x[d] < low ? s.x[d] : low;
    high = s.x[d] > high ? s.x[d] : high;
  }
  const float top = (float)((1 << side.bits) - 1);
  e.fields[0] = encode_unsigned((high - low) / top);
  e.fields[1] = encode_signed(low);
  const float step = decode_unsigned(e.fields[0]), zero = decode_signed(e.fields[1]);
  for (int d = 0; d < dim; d++) {
    float position = step == 0.0f ? 0.0f : floorf((s.x[d] - zero) / step + 0.5f);
    position = position > 0.0f ? position : 0.0f;  // NaN becomes 0
    e.codes[d] = (u32)(position < top ? position : top);
  }
}

static void encode_fp8(EncodeScratch& s, const Side& side, u32 largest, Encoded& e) {
  int exponent = (int)(largest >> 23);
  exponent = exponent > 254 ? 254 : exponent;
  if (exponent < LEAST_EXPONENT) {  // a zero keeps no sign
    for (int d = 0; d < side.dim; d++) e.codes[d] = 0;
    e.fields[0] = 0;
    return;
  }
  const int over = (largest & 0x7FFFFF) > 0x600000;  // mantissa beyond 1.75, which is 448 / 256
  const float up = power_of_two(254 - (exponent - 8 + over));
  for (int d = 0; d < side.dim; d++) {
    float scaled = s.x[d] * up;
    scaled = scaled < -448.0f ? -448.0f : scaled > 448.0f ? 448.0f : scaled;
    e.codes[d] = float_to_e4m3(scaled);
  }
  e.fields[0] = encode_unsigned(power_of_two(exponent - 8 + over));
}

// Encodes row `token`, `head` of x into codes and fields; marks it invalid if it cannot be encoded. weights: the
// transposed matrix of query-aware rounding, [dim, dim]; null rounds to the nearest centroid.
static void encode(const Vectors& x, i64 token, i64 head, const Side& side, const i8* weights, EncodeScratch& s,
    Encoded& e) {
  const int dim = side.dim;
  if (side.kind == RAW) {
    const i64 first = token * x.token_stride + head * x.head_stride;
    if (side.bits == 32) memcpy(e.codes, (const u32*)x.data + first, sizeof(u32) * dim);
    else
      for (int d = 0; d < dim; d++) e.codes[d] = ((const u16*)x.data + first)[d];
    return;
  }
  load_row(x, token, head, dim, s.x);
  const u32 largest = largest_bits(s.x, dim);
  bool bad = !finite_bits(largest);
  if (!bad) {
    if (side.kind == LLOYD) encode_lloyd(s, side, largest, x.dtype != F32, weights, e);
    else if (side.kind == UNIFORM) encode_uniform(s, side, largest, e);
    else encode_fp8(s, side, largest, e);
    for (int i = 0; i < side.field_count; i++) bad |= e.fields[i] == INVALID;
  }
  if (bad) {
    for (int d = 0; d < dim; d++) e.codes[d] = 0;
    e.fields[0] = e.fields[1] = INVALID;
  }
}
