// Compile-time parameters and the argument of the decode and verification kernels.
// Defines: BLOCK_SIZE, KD, VD, K_KIND, K_BITS, K_FIELDS, K_CORE, V_KIND, V_BITS, V_CODES, V_FIELDS, V_CORE (the pages;
// a core of 0: not rotated), COLUMNS, BLOCK_TOKENS, WARPS, STAGES, BULK, BLOCKS_PER_SM, SHARED (decode_config.py),
// EXACT (a row's result depends only on its own sequence; 0: no, 1: SPLITS, 2: and NARROW), Q_TYPE, OUT_TYPE
// (types.cuh), WINDOW, SOFTCAP (the options). Set by the kernels: VERIFY (several warps share a KV block: verify.cu,
// verify_warps.cu), WARPGROUPS (wgmma: verify.cu).
//
// A column is a query row: one query head of one query. A step is one KV block. Columns are processed in groups, the 8
// columns of an MMA. In a narrow group (COLUMNS <= 4, or NARROW, which gives more columns the results of 4), a query
// row takes two MMA columns, for its high and low bytes (or halves): lane 4 g + t has both of row t. A wide group has 8
// query rows in fp16: lane 4 g + t has rows 2 t and 2 t + 1.
#pragma once
#include "common/numbers.cuh"
#include "common/codes.cuh"
#include "common/rotation.cuh"

constexpr int KS = KD / 16, VS = VD / 16, STEP = BLOCK_TOKENS, NT = STEP / 16;
constexpr bool K_ROTATED = K_CORE > 0, V_ROTATED = V_CORE > 0;
constexpr bool SPLITS = EXACT > 0, NARROW = EXACT == 2;
constexpr bool WIDE = COLUMNS > 4 && !NARROW;
constexpr int NG = COLUMNS / (WIDE ? 8 : 4);
constexpr int OWN = WIDE ? 2 : 1;  // columns of a group that a lane has
constexpr int GROUP = 4 * OWN;
static_assert(COLUMNS == NG * GROUP, "whole groups");

// The warps that share a step: a warpgroup or all. Each has the scores of every TEAM-th tile and some output slices.
constexpr int TEAM = WARPGROUPS ? 4 : VERIFY ? WARPS : 1;
constexpr int RINGS = WARPGROUPS ? WARPS / 8 : WARPS / TEAM;  // steps that a thread block processes concurrently
constexpr int WORKERS = WARPGROUPS ? WARPS / 2 : WARPS;  // warps that compute scores
constexpr int OWN_TILES = NT / TEAM, TILES_APART = TEAM;  // tiles of a step that a warp scores
constexpr bool TILE_BY_TILE = WARPGROUPS && NG > 4;  // registers hold the scores of one tile
constexpr int SCORED_TILES = TILE_BY_TILE ? 1 : OWN_TILES;  // at a time

constexpr bool K_BYTES = !WIDE && in_bytes<K_KIND, K_BITS>(), V_BYTES = !WIDE && in_bytes<V_KIND, V_BITS>();
constexpr int K_TILE = 2 * KD * K_BITS, V_TILE = 2 * VD * V_BITS;
constexpr int K_NUMBER_OF_FIELDS = K_KIND == UNIFORM ? 2 : 1, V_NUMBER_OF_FIELDS = V_KIND == UNIFORM ? 2 : 1;
constexpr int PAGES = NT > BLOCK_SIZE / 16 ? NT / (BLOCK_SIZE / 16) : 1;  // that a step touches
// A step in the ring: key codes, value codes, then fields (scales and zeros), for all tiles or (BULK) page by page.
constexpr int PIECES = BULK ? PAGES : 1, PIECE_TILES = NT / PIECES;
constexpr int FIELDS = K_NUMBER_OF_FIELDS + V_NUMBER_OF_FIELDS, FIELD_STRIDE = 32 * PIECE_TILES;
constexpr int VALUES_AT = PIECE_TILES * K_TILE, FIELDS_AT = VALUES_AT + PIECE_TILES * V_TILE;
constexpr int PIECE = FIELDS_AT + FIELDS * FIELD_STRIDE, FIELDS_END = PIECES * PIECE;
static_assert(!BULK ||
        (PIECE_TILES == BLOCK_SIZE / 16 && V_CODES == VALUES_AT && K_FIELDS == FIELDS_AT &&
            V_FIELDS == FIELDS_AT + FIELD_STRIDE * K_NUMBER_OF_FIELDS),
    "a step is whole pages, in the ring as they are there");
// Offsets of tile x. These expressions are simple because they determine the compiler's register usage.
constexpr int keys_of(int x) { return PIECES == 1 ? x * K_TILE : x / PIECE_TILES * PIECE + x % PIECE_TILES * K_TILE; }
constexpr int values_of(int x) {
  return PIECES == 1 ? VALUES_AT + x * V_TILE : x / PIECE_TILES * PIECE + VALUES_AT + x % PIECE_TILES * V_TILE;
}
constexpr int fields_of(int x) {
  return PIECES == 1 ? FIELDS_AT + 32 * x : x / PIECE_TILES * PIECE + FIELDS_AT + 32 * (x % PIECE_TILES);
}

// The offset of field f in a page.
constexpr int field_offset(int f) {
  return f < K_NUMBER_OF_FIELDS ? K_FIELDS + 2 * BLOCK_SIZE * f : V_FIELDS + 2 * BLOCK_SIZE * (f - K_NUMBER_OF_FIELDS);
}

constexpr int OUT_SLICES = (VS + TEAM - 1) / TEAM;  // per warp; for the last warps of a team, some may not exist
constexpr int OUT_ROW = 16 * OUT_SLICES + 8 / OWN;  // floats; keeps the columns of a warp's result in different banks
constexpr int RESULT_BYTES = 4 * GROUP * (16 * OUT_SLICES + 8),
              SLOT = FIELDS_END > RESULT_BYTES ? FIELDS_END : RESULT_BYTES;

// fp16 centroids come from LUTs in shared memory, up to 5 bits for pairs of codes. PERMUTED: 4-bit ones come from byte
// permutations, which balances logic and shared-memory load: for values, which need transposing anyway (pair_halves),
// for keys in verify_warps.cu, and for keys of the largest heads, unless many rows leave too few registers (verify.cu).
constexpr bool K_PERMUTED =
    WIDE && K_KIND == LLOYD && K_BITS == 4 && (WARPGROUPS ? KD == 256 && COLUMNS <= 40 : KD == 256 || VERIFY);
constexpr bool V_PERMUTED = WIDE && V_KIND == LLOYD && V_BITS == 4;
constexpr bool K_IN_PAIRS = K_KIND == LLOYD && K_BITS <= 5 && !K_BYTES && !K_PERMUTED;
constexpr bool V_IN_PAIRS = V_KIND == LLOYD && V_BITS <= 5 && !V_BYTES && !V_PERMUTED;
constexpr int LEVEL_ENTRIES_K = K_KIND != LLOYD || K_BYTES || K_PERMUTED ? 0 : K_IN_PAIRS ? PAIR_ENTRIES : 1 << K_BITS;
constexpr int LEVEL_ENTRIES_V = V_KIND != LLOYD || V_BYTES || V_PERMUTED ? 0 : V_IN_PAIRS ? PAIR_ENTRIES : 1 << V_BITS;
constexpr bool ONE_TABLE = K_KIND == V_KIND && K_BITS == V_BITS && KD == VD && K_PERMUTED == V_PERMUTED;
constexpr int LEVEL_BYTES = 128 * (LEVEL_ENTRIES_K + (ONE_TABLE ? 0 : LEVEL_ENTRIES_V));
constexpr float KEY_UNIT = FIELD_UNIT *
    (K_BYTES             ? 1.0f
            : K_PERMUTED ? DENORMAL_UNIT
                         : half_unit<K_KIND, K_BITS>());  // the fields of keys stay in FIELD_UNIT
constexpr float VALUE_UNIT = V_BYTES ? 1.0f : V_PERMUTED ? DENORMAL_UNIT : half_unit<V_KIND, V_BITS>();

constexpr int QI = K_BYTES ? (KS + 1) / 2 : KS;  // products of a tile
constexpr int STATE_WORDS = VERIFY ? 3 : 2;  // per column and warp: maximum, sum and, if warps share values, shift
constexpr int BARRIERS = STAGES > 1 ? STAGES : 2;  // per ring: one per slot, or one for keys and one for values
// Rotations other than butterflies in a warp's registers need shared memory.
constexpr bool QUERIES_TAKE_SCRATCH = !(POWER_OF_TWO(KD) && KD >= 32);
constexpr bool OUTPUT_TAKES_SCRATCH = V_ROTATED && !(POWER_OF_TWO(VD) && VD >= 32);
#if WARPGROUPS
#include "decode/verify_memory.cuh"
#elif VERIFY
#include "decode/verify_warps_memory.cuh"
#else
#include "decode/decode_memory.cuh"
#endif
static_assert(SHARED_BYTES == SHARED, "shared_memory.py counts as this file does");

struct DecodeArgs {
  const void* query;
  const u8* pages;
  const i32* block_table;
  const i32* seq_lens;
  const i32* cu_seqlens_q;
  const void* key_signs;  // bf16 [KD, KD], the rotation's entries +-1
  const void* value_signs;  // bf16 [VD, VD]
  const float* key_levels;  // by code
  const float* value_levels;
  const float* sinks;  // logits per query head (and output row, see sink_stride), or null
  const float* score_shift;  // SOFTCAP: per output row and query head, added to scores before the cap; or null
  void* out;
  float* lse;  // or null
  float* parts;  // [slots, COLUMNS, VD]
  float* part_states;  // [slots, COLUMNS, 2]: maximum (base 2), sum
  i64 query_stride, query_head_stride, page_stride, page_head_stride, table_stride, out_stride, out_head_stride;
  float scale;  // softmax scale times log2(e)
  float softcap;  // times log2(e)
  float key_norm, value_norm;  // factors that make the rotations orthonormal
  Table key_table, value_table;  // Table::signs is unused
  u32 key_sign_bits[8], value_sign_bits[8];  // the rotations' random signs, a set bit for -1
  u32 key_core[32], value_core[32];  // columns of the keys' core, rows of the values' core; a set bit for -1
  i32 num_seqs, num_kv_heads, group_size, max_decode_queries, causal, sliding_window;
  i32 blocks;  // grid size of `attend`; 0: one block per KV head of every sequence, and nothing to merge
  i32 split_steps;  // SPLITS: steps per split (schedule.cuh)
  i32 max_splits;  // SPLITS: per work tile
  i32 merge_split;  // warps of `merge` that share the partial results of a row
  i32 merge_places;  // rows per sequence that `merge` visits, one for each query; 0: it visits all rows
  i32 queries_of_chunk;  // queries per work tile: COLUMNS / group_size
  i32 group_inverse;  // 2^16 / group_size, rounded up
  i32 sink_stride;  // between the sinks of output rows: 0 or the number of query heads
};
