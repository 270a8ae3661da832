// The argument of the latent kernels.
#pragma once
#include "common/codes.cuh"

struct LatentArgs {
  const void* query;  // [queries, heads, LD], rotated like the latents; pairs of 16-bit numbers are word-aligned
  const void* rope;  // [queries, heads, RD], not rotated
  const u8* pages;
  const i32* block_table;
  const i32* seq_lens;
  const i32* cu_seqlens_q;
  const float* latent_levels;  // by code
  const float* rope_levels;
  void* out;
  float* lse;
  u16* parts;  // fp16 [partial result, ROWS, LD]: unnormalised output (results.cuh)
  i32* tiles;  // [work tile or thread block, 4]: see TileParts
  float* states;  // [partial result, ROWS, 2]: running maximum (base 2) and sum of probabilities
  i64 query_stride, query_head_stride, rope_stride, rope_head_stride;
  i64 page_stride, table_stride, out_stride, out_head_stride;
  float scale;  // softmax scale times log2(e)
  float rope_norm;  // makes the rope part's rotation orthonormal
  Table table;
  u32 rope_sign_bits[4];
  i32 num_heads;
  i32 row_tiles;  // work tiles of a sequence of max_query_len queries
  i32 num_seqs;
  i32 blocks;  // grid size of `attend`
  i32 merge_warps;  // warps that share the partial results of a row
  i32 merge_rounds;  // groups of rows per thread block of `merge`
  i32 direct;  // rows of `out` are evenly spaced and aligned, so that `attend` may write them
};
