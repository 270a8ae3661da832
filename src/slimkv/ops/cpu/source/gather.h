// Decodes pages to dense K and V.
#pragma once

#include "store.h"
#include "unpack.h"

static void gather_vector(const TokensCall& call, const Side& side, const Vectors& out, i64 token, i64 slot, i64 head,
    const float* table) {
  alignas(64) float x[MAX_DIM];
  if (slot < 0) {
    memset(x, 0, sizeof(float) * side.dim);
  } else {
    const int position = (int)(slot % side.block_size);
    const u8* page = page_of(call, slot, head);
    unpack_token(side, page, position, table, x);
    const auto field = [&](int i) { return load_u16(page + side.field_offset[i] + 2 * position); };
    if (side.field_count > 0) {
      const float scale = decode_unsigned(field(0));
      for (int d = 0; d < side.dim; d++) x[d] *= scale;
    }
    if (side.field_count > 1) {
      const float zero = decode_signed(field(1));
      for (int d = 0; d < side.dim; d++) x[d] += zero;
    }
    if (side.rotated && !call.keep_rotated) unrotate_normalised(x, side);
  }
  store_row(out, token, head, side.dim, x);
}

static Status gather(TokensCall& call) {
  const Layout& layout = *call.layout;
  float key_table[256], value_table[256];
  if (layout.key.kind != RAW) number_table(layout.key, 0, key_table);
  if (layout.value.kind != RAW) number_table(layout.value, 0, value_table);
  struct Nothing {};
  return for_tokens<Nothing>(call, 3, [&](i64 token, i64 slot, i64 head, Nothing&) {
    gather_vector(call, layout.key, call.key, token, slot, head, key_table);
    gather_vector(call, layout.value, call.value, token, slot, head, value_table);
  });
}
