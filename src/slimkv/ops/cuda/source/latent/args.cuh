// The kernels' argument.
#pragma once
#include "common/codes.cuh"

struct LatentArgs {
  const void* query;  // [queries, heads, LD], in the latent's stored space; two numbers begin a word
  const void* rope;   // [queries, heads, RD], not rotated
  const u8* pages;
  const i32* block_table;
  const i32* seq_lens;
  const i32* cu_seqlens_q;
  const float* latent_levels;  // by code
  const float* rope_levels;
  void* out;
  float* lse;
  float* parts;   // [part, ROWS, LD]: sums of values
  float* states;  // [part, ROWS, 2]: the reference of their weights and the sum of weights
  i64 query_stride, query_head_stride, rope_stride, rope_head_stride, page_stride, table_stride, out_stride, out_head_stride;
  float scale, rope_norm;  // of scores, in powers of two; of the rotation
  Table table;
  u32 rope_sign_bits[4];
  i32 heads, row_tiles, splits, sequences, blocks;
  i32 mergers;  // warps that merge a row
};
