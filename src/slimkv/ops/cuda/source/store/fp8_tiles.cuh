// e4m3 codes of tiles of 16 tokens.
#pragma once
#include "store/fp8.cuh"
#include "store/pages.cuh"
#include "store/rows.cuh"

// The tile as it is, value by value where the page wants it.
template <class F> DEVICE void load_in_page_order(const SideArgs& side, int head, int first, int tokens, int lane,
    float x[F::LOCAL][8]) {
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
        x[s][j * COUNT + i] = F::DTYPE == BFLOAT16 ? as_float(bits[i] << 16)
            : F::DTYPE == FLOAT16                  ? f16_to_f32(bits[i])
                                                   : as_float(bits[i]);
      if (!F::VALUES && side.offset)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
          float& y = x[s][j * COUNT + i];
          y = rounded<F::DTYPE>(
              sub_rn(y, as_float((u32)side.offset[head * F::D + 16 * s + dim_of<F>(lane, j * COUNT + i)] << 16)));
        }
    }
  }
}

template <class F, int PAGE_TOKENS> DEVICE void store_fp8_codes(CodePlanes<F>& codes, const u32 fields[F::TOKENS],
    const StoreArgs& args, int head, Slots slots, int lane) {
  u8* pages = args.pages + head * args.page_head_stride;
  bool writer = F::VALUES ? lane < 4 : (lane & 3) == 0;
#pragma unroll
  for (int j = 0; j < F::TOKENS; j++) {
    i64 slot = shfl(slots.slot, token_of<F>(lane, j));
    u8* at = page_of<PAGE_TOKENS>(pages, args.page_stride, slot) + F::FIELDS + 2 * ((u32)slot % PAGE_TOKENS);
    if (writer && slot >= 0) *(u16*)at = (u16)fields[j];
    if (fields[j] == INVALID_FIELD) codes.erase(j);
  }
  store_planes<F, PAGE_TOKENS, false>(codes, 0, pages, args.page_stride, slots, lane, 0);
}

template <class F> DEVICE void fp8_codes(const float x[F::LOCAL][8], u32 fields[F::TOKENS], CodePlanes<F>& codes) {
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
    fields[j] = scale.field, up[j] = scale.up;
  }
#pragma unroll
  for (int s = 0; s < F::LOCAL; s++) {
    u32 code[8];
#pragma unroll
    for (int n = 0; n < 8; n++) code[n] = fp8_code(x[s][n], up[token_number<F>(n)]);
    codes.put_bytes(s, code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24,
        code[4] | code[5] << 8 | code[6] << 16 | code[7] << 24);
  }
}

template <class F, int PAGE_TOKENS, class SLOT> DEVICE void store_fp8(const SideArgs& side, const StoreArgs& args,
    int head, int first) {
  int lane = thread_index() & 31;
  if (first >= args.tokens) return;
  Slots slots = load_slots<SLOT>(args.slots, first, args.tokens, lane);
  float x[F::LOCAL][8];
  u32 fields[F::TOKENS];
  CodePlanes<F> codes;
  load_in_page_order<F>(side, head, first, args.tokens, lane, x);
  fp8_codes<F>(x, fields, codes);
  store_fp8_codes<F, PAGE_TOKENS>(codes, fields, args, head, slots, lane);
}
