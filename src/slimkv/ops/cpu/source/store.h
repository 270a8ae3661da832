// Stores K and V of new tokens in their slots.
#pragma once

#include "encode.h"
#include "parallel.h"

// Checks that every slot is negative or within the pages, then calls body(token, its slot, head, scratch) for all
// tokens and heads. `work`: an estimate in nanoseconds per number.
template <typename Scratch, typename Body>
static Status for_tokens(TokensCall& call, double work, const Body& body) {
  const i64 heads = call.pages.heads, limit = call.pages.blocks * call.layout->block_size;
  const auto slot_at = [&](i64 token) {
    return call.wide_slots ? ((const i64*)call.slots)[token] : (i64)((const i32*)call.slots)[token];
  };
  for (i64 i = 0; i < call.tokens; i++)
    if (slot_at(i) >= limit) {
      call.fault = {0, i, slot_at(i), limit};
      return BAD_SLOT;
    }
  const i64 each = 8;  // tokens per task
  work *= (double)call.tokens * heads * (call.layout->key.dim + call.layout->value.dim);
  parallel_for((call.tokens + each - 1) / each * heads, call.threads, work, [&](i64 i) {
    Scratch scratch;
    const i64 head = i % heads, first = i / heads * each;
    for (i64 token = first; token < call.tokens && token < first + each; token++)
      body(token, slot_at(token), head, scratch);
  });
  return OK;
}

static inline u8* page_of(const TokensCall& call, i64 slot, i64 head) {
  return call.pages.data + slot / call.layout->block_size * call.pages.block_stride + head * call.pages.head_stride;
}

// Packs the codes of a side into a token's row.
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

static void store_token(const TokensCall& call, i64 token, i64 slot, i64 head, StoreScratch& s) {
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
  u8* page = page_of(call, slot, head);
  const i32* offsets = layout.byte_offsets + slot % layout.block_size * layout.row_bytes;
  for (int i = 0; i < layout.row_bytes; i++) page[offsets[i]] = s.row[i];
}

static Status store(TokensCall& call) {
  return for_tokens<StoreScratch>(call, 8, [&](i64 token, i64 slot, i64 head, StoreScratch& scratch) {
    if (slot >= 0) store_token(call, token, slot, head, scratch);
  });
}
