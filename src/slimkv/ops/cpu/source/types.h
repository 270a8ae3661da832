// The arguments that Python passes: ops/cpu/structures.py reads these declarations.
#pragma once

#include <cstdint>

typedef int8_t i8;
typedef uint8_t u8;
typedef uint16_t u16;
typedef int32_t i32;
typedef uint32_t u32;
typedef int64_t i64;
typedef uint64_t u64;

constexpr int TILE = 16;       // tokens of a tile
constexpr int SLICE = 16;      // dimensions of a slice
constexpr int LANES = 32;      // lanes whose words a tile interleaves
constexpr int MAX_DIM = 1024;  // head size
constexpr u32 INVALID = 0xFFFF;

enum Kind : i32 { LLOYD = 0, UNIFORM = 1, FP8 = 2, RAW = 3 };
enum Dtype : i32 { F32 = 0, F16 = 1, BF16 = 2 };

// One bit plane in fragment order (spec.PlaneLayout).
struct Plane {
  i32 bits, low_bit;
  i32 offset;       // bytes from the start of a tile's codes
  i32 words;        // 32-bit words per lane
  i32 tail_slices;  // slices that are stored as token rows
};

// Up to 8 bits of a code that sit inside one byte (codec.pack.Piece).
struct Piece {
  i32 width, low_bit;
  const i32* row_byte;  // [dim]: which byte of the token's row
  const u8* shift;      // [dim]: where in that byte
  const i32* position;  // [block_size, dim]: which byte of the page
};

// K or V.
struct Side {
  i32 kind, bits, dim;
  i32 rotated, raw_dtype, field_count, block_size;
  i32 codes_offset, tile_bytes;
  i32 field_offset[2];  // of token 0: scale, zero
  i32 plane_count, piece_count;
  Plane planes[3];
  Piece pieces[4];
  i32 hadamard_block;  // the rotation is block-diagonal in blocks of this size
  i32 core;            // each block is a Kronecker product of Sylvester's matrix with a matrix of this order
  const i8* core_matrix;    // [core, core] of +-1
  const float* signs;       // [dim] of +-1
  const float* levels;      // [2 ** bits] by code
  const float* boundaries;  // [2 ** bits - 1], ascending
  float unit, orthonormal, error_steps;
};

struct Layout {
  Side key, value;
  i32 block_size, row_bytes;
  i64 page_bytes;
  const i32* byte_offsets;  // [block_size, row_bytes]: where the bytes of a token's row sit in its page
};

struct Pages {
  u8* data;
  i64 block_stride, head_stride;  // bytes
  i64 blocks;
  i32 heads, padding;
};

// [tokens, heads, dim] of any float dtype; strides in elements, the last axis contiguous.
struct Vectors {
  void* data;
  i64 token_stride, head_stride;
  i32 dtype, padding;
};

// The index and value that were out of range, for the error message.
struct Fault { i64 where, index, value, limit; };

// K and V of tokens, to their slots (store) or from them (gather).
struct TokensCall {
  const Layout* layout;
  Pages pages;
  Vectors key, value;
  const void* slots;
  i64 tokens;
  i32 wide_slots;  // slots are int64, not int32
  i32 threads;
  // Store: [matrices, heads, key_dim, key_dim] transposed, [j][i] corrects i for the error of j; or null.
  const i8* query_aware;
  const i32* query_aware_index;  // [tokens]: which of the matrices; or null for the first
  i64 matrices;
  i32 keep_rotated, padding;  // gather
  Fault fault;
};

struct AttendCall {
  const Layout* layout;
  Pages pages;
  Vectors query, out;
  Vectors fresh_key, fresh_value;  // data is null without fresh vectors
  const i32* block_table;
  i64 table_stride, table_width;
  const i32* seq_lens;
  const i32* cu_seqlens_q;
  i64 sequences, total_queries;
  i32 heads, causal;
  i64 window;  // 0: none
  float softmax_scale, softcap;
  const float* sinks;        // [heads], or [total_queries, heads] for centred keys; or null
  i64 sink_stride;           // from query to query: 0 or heads
  const float* score_shift;  // [total_queries, heads]: added to scores before the soft cap; or null
  float* lse;                // [total_queries, heads] or null
  i32 threads, padding;
  Fault fault;
};

enum Status : i32 { OK = 0, BAD_SLOT = 1, BAD_BLOCK = 2, BAD_LENGTH = 3, BAD_QUERY_START = 4, OUT_OF_MEMORY = 5 };
