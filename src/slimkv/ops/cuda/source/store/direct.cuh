// Evenly spaced codes between a vector's smallest and largest coordinate, and e4m3 codes.
#pragma once
#include "store/fields.cuh"
#include "store/fp8.cuh"
#include "store/pages.cuh"
#include "store/rotate.cuh"
#include "store/rows.cuh"

// Over the lanes that hold a token: all of them get the result.
template <class F, class O> DEVICE void over_token(float x[F::TOKENS], O combine) {
#pragma unroll
  for (int j = 0; j < F::TOKENS; j++) {
    if constexpr (F::VALUES) {
      x[j] = combine(x[j], shfl_xor(x[j], 4));
      x[j] = combine(x[j], shfl_xor(x[j], 8));
      x[j] = combine(x[j], shfl_xor(x[j], 16));
    } else {
      x[j] = combine(x[j], shfl_xor(x[j], 1));
      x[j] = combine(x[j], shfl_xor(x[j], 2));
    }
  }
}
struct Larger { DEVICE_MEMBER float operator()(float a, float b) const { return max_f32(a, b); } };
struct Smaller { DEVICE_MEMBER float operator()(float a, float b) const { return min_f32(a, b); } };

// The tile as it is, value by value where the page wants it.
template <class F> DEVICE void load_in_page_order(const SideArgs& side, int head, int first, int tokens, int lane, float x[F::LOCAL][8]) {
#pragma unroll
  for (int j = 0; j < F::TOKENS; j++) {
    int token = first + token_of<F>(lane, j);
    const u8* row = side.x + head * side.head_stride + token * side.stride;
#pragma unroll
    for (int s = 0; s < F::LOCAL; s++) {
      constexpr int COUNT = 8 / F::TOKENS;
      u32 bits[COUNT] = {};
      if (token < tokens)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
          int at = 16 * s + dim_of<F>(lane, j * COUNT + i);
          if constexpr (!F::NARROW) bits[i] = ((const u32*)row)[at];
          else if constexpr (F::VALUES || !F::VECTORS) bits[i] = ((const u16*)row)[at];
          else if (i % 2 == 0) bits[i] = *(const u32*)(row + 2 * at);  // and the next one
          else bits[i] = bits[i - 1] >> 16, bits[i - 1] &= 0xFFFF;
        }
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        x[s][j * COUNT + i] = F::DTYPE == BFLOAT16 ? as_float(bits[i] << 16) : F::DTYPE == FLOAT16 ? f16_to_f32(bits[i]) : as_float(bits[i]);
      if (!F::VALUES && side.offset)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
          float& y = x[s][j * COUNT + i];
          y = rounded<F::DTYPE>(sub_rn(y, side.offset[head * F::D + 16 * s + dim_of<F>(lane, j * COUNT + i)]));
        }
    }
  }
}

template <class F, int PAGE_TOKENS> DEVICE void store_direct_codes(CodePlanes<F>& codes, const u32 fields[2][F::TOKENS], const StoreArgs& args, int head,
                                                            Slots slots, int lane) {
  u8* pages = args.pages + head * args.page_head_stride;
  bool writer = F::VALUES ? lane < 4 : (lane & 3) == 0;
#pragma unroll
  for (int j = 0; j < F::TOKENS; j++) {
    i64 slot = shfl(slots.slot, token_of<F>(lane, j));
    u8* at = page_of<PAGE_TOKENS>(pages, args.page_stride, slot) + F::FIELDS + 2 * ((u32)slot % PAGE_TOKENS);
    if (writer && slot >= 0) {
      *(u16*)at = (u16)fields[0][j];
      if constexpr (F::KIND == UNIFORM) *(u16*)(at + 2 * PAGE_TOKENS) = (u16)fields[1][j];
    }
    if (fields[0][j] == INVALID_FIELD) codes.erase(j);
  }
  store_planes<F, PAGE_TOKENS, false>(codes, 0, pages, args.page_stride, slots, lane, 0);
}

template <class F> DEVICE void put_codes(CodePlanes<F>& codes, int slice, const u32 code[8]) {
  u32 low = 0, high = 0;
#pragma unroll
  for (int n = 0; n < 8; n++) low |= (code[n] & 15) << (4 * n), high |= code[n] >> 4 << (4 * n);
  if constexpr (F::BITS < 8) codes.put(slice, low, high);
  else codes.put_bytes(slice, code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24, code[4] | code[5] << 8 | code[6] << 16 | code[7] << 24);
}

template <class F> DEVICE void uniform_codes(const float x[F::LOCAL][8], const bool bad_input[F::TOKENS], u32 fields[2][F::TOKENS], CodePlanes<F>& codes) {
  constexpr int TOP = (1 << F::BITS) - 1;
  float low[F::TOKENS], high[F::TOKENS], step[F::TOKENS], zero[F::TOKENS], inverse[F::TOKENS];
#pragma unroll
  for (int j = 0; j < F::TOKENS; j++) low[j] = as_float(0x7F800000u), high[j] = as_float(0xFF800000u);
#pragma unroll
  for (int s = 0; s < F::LOCAL; s++)
#pragma unroll
    for (int n = 0; n < 8; n++) {
      int j = token_number<F>(n);
      low[j] = min_f32(low[j], x[s][n]);
      high[j] = max_f32(high[j], x[s][n]);
    }
  over_token<F>(low, Smaller());
  over_token<F>(high, Larger());
#pragma unroll
  for (int j = 0; j < F::TOKENS; j++) {
    fields[0][j] = encode_unsigned(div_rn(sub_rn(high[j], low[j]), (float)TOP));
    fields[1][j] = encode_signed(low[j]);
    bool bad = bad_input[j] || fields[0][j] == INVALID_FIELD || fields[1][j] == INVALID_FIELD;
    if (bad) fields[0][j] = fields[1][j] = INVALID_FIELD;
    step[j] = bad ? 0.0f : decode_unsigned(fields[0][j]);
    zero[j] = bad ? 0.0f : decode_signed(fields[1][j]);
    inverse[j] = step[j] == 0.0f ? 0.0f : div_rn(1.0f, step[j]);
  }
#pragma unroll
  for (int s = 0; s < F::LOCAL; s++) {
    u32 code[8];
#pragma unroll
    for (int n = 0; n < 8; n++) {
      int j = token_number<F>(n);
      // The quotient, correctly rounded: from a correctly rounded inverse two steps suffice, and what is so small or
      // large that they do not is cut to the ends in any case.
      float from = sub_rn(x[s][n], zero[j]), quotient = mul_rn(from, inverse[j]);
      quotient = fma_rn(fma_rn(-quotient, step[j], from), inverse[j], quotient);
      quotient = fma_rn(fma_rn(-quotient, step[j], from), inverse[j], quotient);
      code[n] = (u32)f32_to_i32_rz(min_f32(max_f32(add_rn(quotient, 0.5f), 0.0f), (float)TOP));
    }
    put_codes<F>(codes, s, code);
  }
}

template <class F> DEVICE void fp8_codes(const float x[F::LOCAL][8], u32 fields[2][F::TOKENS], CodePlanes<F>& codes) {
  u32 most[F::TOKENS] = {};
#pragma unroll
  for (int s = 0; s < F::LOCAL; s++)
#pragma unroll
    for (int n = 0; n < 8; n++) {
      int j = token_number<F>(n);
      u32 m = as_bits(x[s][n]) & 0x7FFFFFFFu;
      most[j] = most[j] > m ? most[j] : m;
    }
  float up[F::TOKENS];
#pragma unroll
  for (int j = 0; j < F::TOKENS; j++) {
#pragma unroll
    for (int step = F::VALUES ? 4 : 1; step < (F::VALUES ? 32 : 4); step *= 2) {
      u32 other = shfl_xor(most[j], step);
      most[j] = most[j] > other ? most[j] : other;
    }
    const Fp8Scale scale(most[j]);
    fields[0][j] = scale.field, up[j] = scale.up;
  }
#pragma unroll
  for (int s = 0; s < F::LOCAL; s++) {
    u32 code[8];
#pragma unroll
    for (int n = 0; n < 8; n++) code[n] = fp8_code(x[s][n], up[token_number<F>(n)]);
    put_codes<F>(codes, s, code);
  }
}

template <class F, int PAGE_TOKENS, class SLOT> DEVICE void store_direct(const SideArgs& side, const StoreArgs& args, int head, int first) {
  int lane = thread_index() & 31;
  if (first >= args.tokens) return;
  Slots slots = load_slots<SLOT>(args.slots, first, args.tokens, lane);
  float x[F::LOCAL][8];
  u32 fields[2][F::TOKENS];
  bool bad[F::TOKENS];
  CodePlanes<F> codes;
  if constexpr (F::ROTATED) {
    u32 raw[F::CHUNKS][2][F::RAW];
    load_rows<F>(side, head, first, args.tokens, lane, raw);
    Digits<F> digits;
    u32 exponent = fixed_point<F>(raw, lane, digits);
    TokenScalars scalars = scalars_of<F>(digits, exponent, 1.0f, lane);
    float down[F::TOKENS];
#pragma unroll
    for (int j = 0; j < F::TOKENS; j++) {
      int from = token_of<F>(lane, j);
      down[j] = shfl(scalars.down, from);
      bad[j] = shfl((u32)scalars.bad, from) != 0;
    }
#pragma unroll
    for (int i = 0; i < F::PER; i++) {
      typename Digits<F>::Sum exact[F::GROUPS][8];
      rotate_slices<F>(digits, side, i, lane, exact);
#pragma unroll
      for (int q = 0; q < F::GROUPS; q++)
#pragma unroll
        for (int n = 0; n < 8; n++)
          x[q * F::PER + i][n] = mul_rn(mul_rn(integer_of<F>(exact[q][n]), side.orthonormal), down[token_number<F>(n)]);
    }
  } else {
    load_in_page_order<F>(side, head, first, args.tokens, lane, x);
    float nothing[F::TOKENS] = {};
#pragma unroll
    for (int s = 0; s < F::LOCAL; s++)
#pragma unroll
      for (int n = 0; n < 8; n++)  // zero times anything but a finite number is NaN
        nothing[token_number<F>(n)] = fma_rn(x[s][n], 0.0f, nothing[token_number<F>(n)]);
#pragma unroll
    for (int j = 0; j < F::TOKENS; j++) bad[j] = nothing[j] != 0.0f;
  }
  if constexpr (F::KIND == UNIFORM) {
    float any[F::TOKENS];
#pragma unroll
    for (int j = 0; j < F::TOKENS; j++) any[j] = bad[j] ? 1.0f : 0.0f;
    over_token<F>(any, Larger());
#pragma unroll
    for (int j = 0; j < F::TOKENS; j++) bad[j] = any[j] != 0.0f;
    uniform_codes<F>(x, bad, fields, codes);
  } else {
    fp8_codes<F>(x, fields, codes);
  }
  store_direct_codes<F, PAGE_TOKENS>(codes, fields, args, head, slots, lane);
}
