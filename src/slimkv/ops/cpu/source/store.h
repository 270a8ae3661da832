// K and V of new tokens to their slots.
#pragma once

#include "encode.h"
#include "parallel.h"

static inline i64 slot_at(const void* slots, bool wide, i64 i) {
  return wide ? ((const i64*)slots)[i] : (i64)((const i32*)slots)[i];
}

// OK if every slot is negative or within the pages.
static Status check_slots(const void* slots, bool wide, i64 tokens, const Pages& pages, int block_size, Fault& fault) {
  const i64 limit = pages.blocks * block_size;
  for (i64 i = 0; i < tokens; i++) {
    const i64 slot = slot_at(slots, wide, i);
    if (slot >= limit) {
      fault = {0, i, slot, limit};
      return BAD_SLOT;
    }
  }
  return OK;
}

// Codes and fields -> the side's bytes of a token's row.
static void pack_row(const Side& side, const Encoded& e, u8* row) {
  for (int p = 0; p < side.piece_count; p++) {
    const Piece& piece = side.pieces[p];
    const u32 mask = (1u << piece.width) - 1;
    for (int d = 0; d < side.dim; d++)
      row[piece.row_byte[d]] |= (u8)((e.codes[d] >> piece.low_bit & mask) << piece.shift[d]);
  }
}

struct StoreScratch {
  EncodeScratch encode;
  Encoded key, value;
  u8 row[2 * (MAX_DIM * 4 + 4)];
};

static void store_token(const StoreCall& call, i64 token, i64 slot, i64 head, StoreScratch& s) {
  const Layout& layout = *call.layout;
  const i64 key_dim = layout.key.dim;
  const i8* weights = call.query_aware == nullptr ? nullptr : call.query_aware + head * key_dim * key_dim;
  if (weights != nullptr && call.query_aware_index != nullptr) {
    const i64 asked = call.query_aware_index[token], last = call.matrices - 1;
    weights += (asked < 0 ? 0 : asked > last ? last : asked) * call.pages.heads * key_dim * key_dim;
  }
  encode(call.key, token, head, layout.key, weights, s.encode, s.key);
  encode(call.value, token, head, layout.value, nullptr, s.encode, s.value);
  memset(s.row, 0, (size_t)layout.row_bytes);
  pack_row(layout.key, s.key, s.row);
  pack_row(layout.value, s.value, s.row);
  u8* fields = s.row + layout.row_bytes - 2 * (layout.key.field_count + layout.value.field_count);
  for (int side = 0; side < 2; side++) {
    const Encoded& e = side ? s.value : s.key;
    for (int i = 0; i < (side ? layout.value : layout.key).field_count; i++) {
      *fields++ = (u8)e.fields[i];
      *fields++ = (u8)(e.fields[i] >> 8);
    }
  }
  u8* page = call.pages.data + slot / layout.block_size * call.pages.block_stride + head * call.pages.head_stride;
  const i32* offsets = layout.byte_offsets + slot % layout.block_size * layout.row_bytes;
  for (int i = 0; i < layout.row_bytes; i++) page[offsets[i]] = s.row[i];
}

static Status store(StoreCall& call) {
  const Layout& layout = *call.layout;
  const Status checked =
      check_slots(call.slots, call.wide_slots, call.tokens, call.pages, layout.block_size, call.fault);
  if (checked != OK) return checked;
  const i64 heads = call.pages.heads;
  const double work = (double)call.tokens * heads * (layout.key.dim + layout.value.dim) * 8;
  const i64 each = 8;  // tokens of one piece of work
  parallel_for((call.tokens + each - 1) / each * heads, call.threads, work, [&](i64 i) {
    StoreScratch scratch;
    const i64 head = i % heads, first = i / heads * each;
    for (i64 token = first; token < call.tokens && token < first + each; token++) {
      const i64 slot = slot_at(call.slots, call.wide_slots, token);
      if (slot >= 0) store_token(call, token, slot, head, scratch);
    }
  });
  return OK;
}
