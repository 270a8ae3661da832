// Pages to dense K and V.
#pragma once

#include "store.h"
#include "unpack.h"

static void gather_vector(const GatherCall& call, const Side& side, const Vectors& out, i64 token, i64 slot, i64 head,
    const float* table) {
  alignas(64) float x[MAX_DIM];
  if (slot < 0) {
    memset(x, 0, sizeof(float) * side.dim);
  } else {
    const int block_size = side.block_size, position = (int)(slot % block_size);
    const u8* page = call.pages.data + slot / block_size * call.pages.block_stride + head * call.pages.head_stride;
    unpack_token(side, page, position, table, x);
    if (side.kind != RAW) {
      const Affine a = token_fields(side, page, position);
      for (int d = 0; d < side.dim; d++) x[d] = x[d] * a.scale;
      if (side.field_count > 1)
        for (int d = 0; d < side.dim; d++) x[d] += a.zero;
    }
    if (side.rotated && !call.keep_rotated) unrotate_normalised(x, side);
  }
  store_row(out, token, head, side.dim, x);
}

static Status gather(GatherCall& call) {
  const Layout& layout = *call.layout;
  const Status checked =
      check_slots(call.slots, call.wide_slots, call.tokens, call.pages, layout.block_size, call.fault);
  if (checked != OK) return checked;
  float key_table[256], value_table[256];
  if (layout.key.kind != RAW) number_table(layout.key, 0, key_table);
  if (layout.value.kind != RAW) number_table(layout.value, 0, value_table);
  const i64 heads = call.pages.heads, each = 16;
  const double work = (double)call.tokens * heads * (layout.key.dim + layout.value.dim) * 3;
  parallel_for((call.tokens + each - 1) / each, call.threads, work, [&](i64 i) {
    for (i64 token = i * each; token < call.tokens && token < (i + 1) * each; token++) {
      const i64 slot = slot_at(call.slots, call.wide_slots, token);
      for (i64 head = 0; head < heads; head++) {
        gather_vector(call, layout.key, call.key, token, slot, head, key_table);
        gather_vector(call, layout.value, call.value, token, slot, head, value_table);
      }
    }
  });
  return OK;
}
